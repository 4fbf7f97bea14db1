//! Clients of the xDS server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One stream of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Client {
    /// A number that is unique in the process.
    pub id: u64,
    /// The client's address.
    pub peer: String,
    /// The SPIFFE ID of its certificate.
    pub identity: Option<String>,
    /// When the stream was opened.
    pub since: String,
    /// `delta` or `sotw`.
    pub protocol: String,
    /// The node id.
    pub node: String,
    /// The client's name for its own program.
    pub user_agent: String,
    /// `envoy` or `grpc`.
    pub client: String,
    /// The network that it claims.
    pub network: String,
    /// The cluster that it claims.
    pub cluster: String,
    /// The viewer that it is taken for.
    pub view: View,
    /// Its subscriptions, such as `eds 12` or `cds *`.
    pub subscriptions: Vec<String>,
    /// How long the oldest unacknowledged response has waited, in seconds.
    pub unacknowledged_seconds: Option<u64>,
    /// The number of names that are kept for it because a registry has not been read.
    pub held_back: usize,
    /// When it last acknowledged a response.
    pub last_ack: Option<String>,
    /// The number of responses that it rejected.
    pub nacks: u64,
    /// The text of its last rejection.
    pub last_nack: Option<String>,
    /// The state of each type that it has asked for, by short name.
    pub types: BTreeMap<String, TypeState>,
}

/// The place from which a client sees the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct View {
    /// The network.
    pub network: String,
    /// The cluster.
    pub cluster: String,
    /// The address families that it can use: 4, 6.
    pub families: Vec<u8>,
    /// The networks that it asked for; empty: all.
    pub sees: Vec<String>,
}

/// The state of one type of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TypeState {
    /// True if the client wants all resources of the type.
    pub wildcard: bool,
    /// The number of names that it wants.
    pub names: usize,
    /// The number of responses that it was sent.
    pub sent: u64,
    /// True if a response is not acknowledged yet.
    pub in_flight: bool,
    /// How long that response has waited, in seconds.
    pub unacknowledged_seconds: Option<u64>,
    /// The number of names that are kept because a registry has not been read.
    pub held_back: usize,
    /// When the client last acknowledged a response.
    pub last_ack: Option<String>,
    /// The number of responses that it rejected.
    pub nacks: u64,
    /// Its last rejection.
    pub last_nack: Option<Nack>,
}

/// A rejected response.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nack {
    /// When it was rejected.
    pub time: String,
    /// The client's words.
    pub text: String,
}

/// Clients that were refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RefusedClients {
    /// The number of refusals since the start.
    pub total: u64,
    /// The last refused clients, newest first.
    pub recent: Vec<RefusedClient>,
}

/// A client that no rule of `xds.clients` allows what it claims.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RefusedClient {
    /// Its identity, or its address.
    pub who: String,
    /// The node id.
    pub node: String,
    /// The network that it claims.
    pub network: String,
    /// The cluster that it claims.
    pub cluster: String,
    /// The error that it got.
    pub why: String,
    /// When it was first refused.
    pub first: String,
    /// When it was last refused.
    pub last: String,
    /// How often it was refused.
    pub count: u64,
}
