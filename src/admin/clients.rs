//! The clients of the xDS server, as JSON values.

use serde_json::{Map, Value, json};

use crate::discovery::xds::kind::Kind;
use crate::discovery::xds::session::Protocol;
use crate::discovery::xds::status::{ClientStatus, Clients, TypeStatus};
use crate::snapshot::view::{Client, Families};
use crate::telemetry::clock::rfc3339;

/// One object for each stream, oldest first.
pub fn clients(clients: &Clients) -> Value {
    clients.list().iter().map(client).collect()
}

fn client(status: &ClientStatus) -> Value {
    let who = status.introduction.clone().unwrap_or_default();
    let types: Map<String, Value> =
        status.types.iter().map(|(kind, of)| (kind.text().to_owned(), of_type(of))).collect();
    json!({
        "id": status.id,
        "peer": status.caller.peer.to_string(),
        "identity": status.caller.identity.as_ref().map(ToString::to_string),
        "since": rfc3339(status.since),
        "protocol": match status.protocol {
            Protocol::Delta => "delta",
            Protocol::StateOfTheWorld => "sotw",
        },
        "node": who.id,
        "user_agent": who.user_agent,
        "client": match who.viewer.client {
            Client::Envoy => "envoy",
            Client::Grpc => "grpc",
        },
        "network": who.viewer.network.as_str(),
        "cluster": who.viewer.cluster.as_str(),
        "view": {
            "network": who.viewer.network.as_str(),
            "cluster": who.viewer.cluster.as_str(),
            "families": match who.viewer.families {
                Families::V4 => json!([4]),
                Families::V6 => json!([6]),
                Families::Both => json!([4, 6]),
            },
            "sees": who.viewer.sees.iter().map(ToString::to_string).collect::<Vec<_>>(),
        },
        "subscriptions": status.types.iter().map(|(kind, of)| subscription(*kind, of)).collect::<Vec<_>>(),
        "last_ack": status.types.values().filter_map(|of| of.acked).max().map(rfc3339),
        "nacks": status.types.values().map(|of| of.nacks).sum::<u64>(),
        "last_nack": status.types.values().filter_map(|of| of.nacked.as_ref()).max().map(|(_, text)| text),
        "types": types,
    })
}

/// As `eds 12` or `cds *`.
fn subscription(kind: Kind, of: &TypeStatus) -> String {
    match (of.overview.wildcard, of.overview.names) {
        (true, 0) => format!("{kind} *"),
        (true, names) => format!("{kind} * and {names}"),
        (false, names) => format!("{kind} {names}"),
    }
}

fn of_type(of: &TypeStatus) -> Value {
    json!({
        "wildcard": of.overview.wildcard,
        "names": of.overview.names,
        "sent": of.overview.sent,
        "in_flight": of.overview.in_flight,
        "last_ack": of.acked.map(rfc3339),
        "nacks": of.nacks,
        "last_nack": of.nacked.as_ref().map(|(when, text)| json!({"time": rfc3339(*when), "text": text})),
    })
}
