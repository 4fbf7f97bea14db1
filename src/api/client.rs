//! Clients of the xDS server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::table::{Column, Listed, list, optional, text};

/// One xDS stream of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Client {
    /// The number of the stream, unique in the process.
    pub id: u64,
    /// The client's address.
    pub peer: String,
    /// The SPIFFE ID of the client's certificate.
    pub identity: Option<String>,
    /// The time at which the stream was opened.
    pub since: String,
    /// The protocol variant: `delta` or `sotw`.
    pub protocol: String,
    /// The id in the client's node.
    pub node: String,
    /// The name that the client gives its program.
    pub user_agent: String,
    /// The kind of client: `envoy` or `grpc`.
    pub client: String,
    /// The network that the client claims.
    pub network: String,
    /// The cluster that the client claims.
    pub cluster: String,
    /// The viewer for which the client's endpoints are computed.
    pub view: View,
    /// The client's subscriptions, such as `eds 12` or `cds *`.
    pub subscriptions: Vec<String>,
    /// The time for which the oldest unacknowledged response has waited, in seconds.
    pub unacknowledged_seconds: Option<u64>,
    /// The number of names whose resources the server does not update yet for this client. A registry that has not been read
    /// since the start may have more endpoints of these names, so the client keeps the resources that it has.
    pub held_back: usize,
    /// The time at which the client last acknowledged a response.
    pub last_ack: Option<String>,
    /// The number of responses that the client rejected.
    pub nacks: u64,
    /// The text of the client's last rejection.
    pub last_nack: Option<String>,
    /// The state of each type that the client has requested, by the type's short name.
    pub types: BTreeMap<String, TypeState>,
}

/// The properties of a client that decide which endpoints it gets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct View {
    /// The network of the client.
    pub network: String,
    /// The cluster of the client.
    pub cluster: String,
    /// The address families that the client can use: 4, 6.
    pub families: Vec<u8>,
    /// The networks that the client asks to see; empty: all.
    pub sees: Vec<String>,
}

/// The state of one type of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TypeState {
    /// True if the client subscribes to all resources of the type.
    pub wildcard: bool,
    /// The number of names that the client subscribes to.
    pub names: usize,
    /// The number of responses that were sent to the client.
    pub sent: u64,
    /// True if a response is not acknowledged yet.
    pub in_flight: bool,
    /// The time for which the unacknowledged response has waited, in seconds.
    pub unacknowledged_seconds: Option<u64>,
    /// The number of names whose resources the server does not update yet for this client. A registry that has not been read
    /// since the start may have more endpoints of these names, so the client keeps the resources that it has.
    pub held_back: usize,
    /// The time at which the client last acknowledged a response.
    pub last_ack: Option<String>,
    /// The number of responses that the client rejected.
    pub nacks: u64,
    /// The client's last rejection.
    pub last_nack: Option<Nack>,
}

/// A rejected response.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Nack {
    /// The time of the rejection.
    pub time: String,
    /// The error text that the client sent.
    pub text: String,
}

/// The clients that were refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RefusedClients {
    /// The number of refusals since the start.
    pub total: u64,
    /// The last refused clients, newest first.
    pub recent: Vec<RefusedClient>,
}

/// A client whose claims no rule of `xds.clients` allows, or that was refused in the TLS handshake. The latter has no node,
/// network and cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RefusedClient {
    /// The client's identity, or its address if it has no identity.
    pub who: String,
    /// The id in the client's node.
    pub node: String,
    /// The network that the client claims.
    pub network: String,
    /// The cluster that the client claims.
    pub cluster: String,
    /// The reason of the last refusal.
    pub why: String,
    /// The time of the first refusal.
    pub first: String,
    /// The time of the last refusal.
    pub last: String,
    /// The number of refusals of this client.
    pub count: u64,
}

impl Listed for Client {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NODE", |client| text(&client.node)),
        ("PEER", |client| text(&client.peer)),
        ("CLIENT", |client| text(&client.client)),
        ("PROTOCOL", |client| text(&client.protocol)),
        ("NETWORK", |client| text(&client.network)),
        ("CLUSTER", |client| text(&client.cluster)),
        ("SUBSCRIPTIONS", |client| list(&client.subscriptions)),
        ("HELD BACK", |client| client.held_back.to_string()),
        ("LAST ACK", |client| optional(client.last_ack.as_ref())),
        ("NACKS", |client| client.nacks.to_string()),
        ("LAST NACK", |client| optional(client.last_nack.as_ref())),
    ];
}
