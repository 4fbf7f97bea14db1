//! Peers: other organisations with which services are exchanged.

use serde::{Deserialize, Serialize};

use super::network::Gateway;

/// A peer with the state of its links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// Our name for the peer.
    pub name: String,
    /// The SPIFFE ID of the peer's gateways; absent until the peer is enrolled.
    pub identity: Option<String>,
    /// Our name for the peer's trust domain; absent until the peer is enrolled.
    pub trust_alias: Option<String>,
    /// The peer's state: `live`, `suspect`, `down`, `stale`, `demoted`, `expired` or `not enrolled`.
    pub state: String,
    /// The time at which the peer entered its state.
    pub since: Option<String>,
    /// The time at which the peer last sent a change or a full listing.
    pub changed: Option<String>,
    /// The number of our services that the peer may reach.
    pub exported: usize,
    /// The number of the peer's services that are imported here.
    pub imported: usize,
    /// The links with the peer's gateways, and the attempts to open one.
    pub links: Vec<Link>,
    /// The carriers with the peer's gateways, by direction; empty if the config allows none.
    pub carriers: Vec<Carriers>,
    /// The gateways through which the peer's services are reached.
    pub gateways: Vec<Gateway>,
    /// The number of services that a rule names but that are not exchanged.
    pub left_out_count: usize,
    /// The first services that a rule names but that are not exchanged, each as a sentence.
    pub left_out: Vec<String>,
    /// The reason why the peer is not live, or why its services cannot be called although it is.
    pub problem: Option<String>,
}

impl Peer {
    /// Returns the shortest round trip of the peer's links, in milliseconds.
    pub fn round_trip_ms(&self) -> Option<f64> {
        self.links.iter().filter_map(|link| link.round_trip_ms).min_by(f64::total_cmp)
    }
}

/// The carriers with the gateways of a peer, on which calls cross in one direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Carriers {
    /// The direction of the calls: `fromPeer` or `toPeer`.
    pub direction: String,
    /// The number of open carriers.
    pub open: usize,
    /// The number of calls at present.
    pub calls: usize,
    /// The number of calls since this gateway started.
    pub total: u64,
    /// The shortest round-trip time of the carriers, in milliseconds.
    pub round_trip_ms: Option<f64>,
    /// Why carriers that this gateway opens are not open, each as a sentence.
    pub problems: Vec<String>,
}

/// A link with one process of a peer, or the attempts to open one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// The ID of the peer's process; empty while there is no link.
    pub instance: String,
    /// The address of the peer's gateway.
    pub address: String,
    /// True if this gateway opened the link; false if the peer did.
    pub dialled: bool,
    /// The link's state: `live`, `suspect` or `down`.
    pub state: String,
    /// The time at which the link entered its state.
    pub since: Option<String>,
    /// The name and version of the peer's program.
    pub software: String,
    /// The time between the last heartbeat and its answer, in milliseconds.
    pub round_trip_ms: Option<f64>,
    /// The peer's clock minus this gateway's clock when the link was opened, in milliseconds.
    pub clock_skew_ms: Option<i64>,
    /// The number of services that this gateway has sent to the peer.
    pub given: usize,
    /// The number of services that the peer has sent to this gateway.
    pub taken: usize,
    /// The answer of the peer's replica to the newest roots of this mesh: `taken`, `waiting` or `refused`.
    pub own_roots: String,
    /// The reason why there is no link, or the fault of the link.
    pub problem: Option<String>,
}

/// The token of an invitation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Token {
    /// The token, which is a secret.
    pub token: String,
    /// The addresses at which the peer redeems the token.
    pub addresses: Vec<String>,
    /// The time for which the token can be redeemed, in seconds.
    pub valid_seconds: u64,
}

/// The last invitation of a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Invitation {
    /// The invitation's state: `open`, `redeemed` or `expired`.
    pub state: String,
    /// The link that the peer's use of the token created. It is present only if the operator asked the gateway to print the
    /// link.
    pub link: Option<WrittenLink>,
}

/// The link with a peer, in the form that an operator can write into the config.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrittenLink {
    /// Our name for the peer.
    pub peer: String,
    /// The SPIFFE ID of the peer's gateways.
    pub identity: String,
    /// The peer's entry for the config file, as YAML.
    pub config: String,
    /// The path of the file of roots that this entry names.
    pub file: String,
    /// The contents of the file of roots, as PEM.
    pub roots: String,
}

/// A peer with the services that are exchanged with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerDetail {
    /// Our name for the peer.
    pub name: String,
    /// The SPIFFE ID of the peer's gateways; absent until the peer is enrolled.
    pub identity: Option<String>,
    /// The source addresses of the peer's clients that connect by SNI.
    pub from: Vec<String>,
    /// Our services that the peer may reach, by the names under which they are exported.
    pub exported: Vec<Exchanged>,
    /// The peer's services that are imported here.
    pub imported: Vec<Exchanged>,
    /// The peer's services that clients cannot reach, because other services have their names.
    pub left_out: Vec<Exchanged>,
    /// The names that the import rules request from the peer.
    pub asked: Vec<String>,
    /// The directions in which the config allows calls on carriers: `fromPeer`, `toPeer`.
    pub carry: Vec<String>,
    /// Our services that the rules offer but that the peer cannot reach, each as a sentence.
    pub conflicts: Vec<String>,
    /// The roots by which this gateway verifies the peer, as PEM; empty until the peer is enrolled.
    pub roots: String,
}

/// A service that is exchanged with a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exchanged {
    /// The name under which the owner exports the service, and which callers send.
    pub exported_name: String,
    /// The name of the service in this mesh.
    pub service: String,
    /// The namespace of the service in the owner's mesh.
    pub namespace: String,
    /// The ports of the service, each with its protocol: `443/TLS`.
    pub ports: Vec<String>,
    /// `tls` of the rule that exports the service; absent for services of the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<String>,
    /// True if a service of the peer is joined with one of this mesh, or of a peer before it; absent otherwise.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub joined: bool,
}
