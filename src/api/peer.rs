//! Peers: other organisations with which services are exchanged.

use serde::{Deserialize, Serialize};

use super::network::Gateway;

/// A peer with the state of its links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// Our name for it.
    pub name: String,
    /// The SPIFFE ID of its gateways; absent until it is enrolled.
    pub identity: Option<String>,
    /// Our name for its trust domain; absent until it is enrolled.
    pub trust_alias: Option<String>,
    /// `live`, `suspect`, `down`, `stale`, `demoted`, `expired` or `not enrolled`.
    pub state: String,
    /// The time at which it entered its state.
    pub since: Option<String>,
    /// When it last gave a change or a listing.
    pub changed: Option<String>,
    /// The number of services of ours that it may reach.
    pub exported: usize,
    /// The number of its services that are known here.
    pub imported: usize,
    /// The links with its gateways, and the attempts to make one.
    pub links: Vec<Link>,
    /// The gateways through which its services are reached.
    pub gateways: Vec<Gateway>,
    /// Services that one of the rules names and that are not exchanged, a sentence each; the first ones.
    pub left_out: Vec<String>,
    /// Why it is not live.
    pub problem: Option<String>,
}

impl Peer {
    /// Returns the shortest round trip of its links, in milliseconds.
    pub fn round_trip_ms(&self) -> Option<f64> {
        self.links.iter().filter_map(|link| link.round_trip_ms).min_by(f64::total_cmp)
    }
}

/// A link with one process of a peer, or the attempts to make one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// The process at the other end; empty while there is none.
    pub instance: String,
    /// The address of the other end.
    pub address: String,
    /// True if this gateway dials.
    pub dialled: bool,
    /// `live`, `suspect` or `down`.
    pub state: String,
    /// The time at which it entered its state.
    pub since: Option<String>,
    /// The program at the other end.
    pub software: String,
    /// The time between the last heartbeat and its answer, in milliseconds.
    pub round_trip_ms: Option<f64>,
    /// The peer's clock less this gateway's, in milliseconds, when the link came about.
    pub clock_skew_ms: Option<i64>,
    /// Services that the peer was given.
    pub given: usize,
    /// Services that the peer has given.
    pub taken: usize,
    /// Why there is no link, or what is wrong with it.
    pub problem: Option<String>,
}

/// The token of an invitation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Token {
    /// The token; a secret.
    pub token: String,
    /// Where the other side redeems it.
    pub addresses: Vec<String>,
    /// How long it can be redeemed, in seconds.
    pub valid_seconds: u64,
}

/// The last invitation of a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Invitation {
    /// `open`, `redeemed` or `expired`.
    pub state: String,
    /// The link, if it is to be printed and the token was redeemed.
    pub link: Option<WrittenLink>,
}

/// The link with a peer, as an operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrittenLink {
    /// Our name for the peer.
    pub peer: String,
    /// The SPIFFE ID of its gateways.
    pub identity: String,
    /// The keys of the config.
    pub config: String,
    /// The file of the roots that the config names.
    pub file: String,
    /// The roots, as PEM.
    pub roots: String,
}

/// A peer with the services that are exchanged with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerDetail {
    /// Our name for it.
    pub name: String,
    /// The SPIFFE ID of its gateways; absent until it is enrolled.
    pub identity: Option<String>,
    /// Source addresses of its clients that call by SNI.
    pub from: Vec<String>,
    /// The services of ours that it may reach, by the names under which it knows them.
    pub exported: Vec<Exchanged>,
    /// Its services that are known here.
    pub imported: Vec<Exchanged>,
    /// The names that are asked of it, as the import rules have them.
    pub asked: Vec<String>,
    /// Services of ours that the rules offer and that it cannot reach, a sentence each.
    pub conflicts: Vec<String>,
}

/// A service that is exchanged with a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exchanged {
    /// The name under which its owner exports it: what callers send.
    pub exported_name: String,
    /// The name that the service has here.
    pub service: String,
    /// The namespace of its owner that it is in.
    pub namespace: String,
    /// Its ports, each with its protocol: `443/TLS`.
    pub ports: Vec<String>,
}
