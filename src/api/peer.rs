//! Peers: other organisations with which services are exchanged.

use serde::{Deserialize, Serialize};

/// A peer in the list of peers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// Our name for it.
    pub name: String,
    /// The SPIFFE ID of its gateways; absent until it is enrolled.
    pub identity: Option<String>,
    /// Our name for its trust domain; absent until it is enrolled.
    pub trust_alias: Option<String>,
    /// The number of services of ours that it may reach.
    pub exported: usize,
    /// The number of its services that are known here.
    pub imported: usize,
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
