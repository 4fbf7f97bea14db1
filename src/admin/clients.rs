//! The clients of the xDS server, as JSON values.

use serde_json::{Map, Value, json};

use crate::discovery::xds::kind::Kind;
use crate::discovery::xds::session::Protocol;
use crate::discovery::xds::status::{ClientStatus, Clients, TypeStatus};
use crate::snapshot::view::{ClientKind, Families};
use crate::telemetry::clock::rfc3339;

/// Returns one object for each stream, oldest first.
pub fn clients(clients: &Clients) -> Value {
    clients.list().iter().map(client).collect()
}

fn client(status: &ClientStatus) -> Value {
    let who = status.node_info.clone().unwrap_or_default();
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
            ClientKind::Envoy => "envoy",
            ClientKind::Grpc => "grpc",
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
        "unacknowledged_seconds": status.types.values().filter_map(unacknowledged).max(),
        "held_back": status.types.values().map(|of| of.overview.held_back).sum::<usize>(),
        "last_ack": status.types.values().filter_map(|of| of.acked).max().map(rfc3339),
        "nacks": status.types.values().map(|of| of.nacks).sum::<u64>(),
        "last_nack": status.types.values().filter_map(|of| of.nacked.as_ref()).max().map(|(_, text)| text),
        "types": types,
    })
}

/// Returns how long the last response has been unacknowledged, in seconds.
fn unacknowledged(of: &TypeStatus) -> Option<u64> {
    let sent = of.overview.in_flight?;
    Some(sent.elapsed().map_or(0, |elapsed| elapsed.as_secs()))
}

/// Returns the clients that were refused, newest first.
pub fn refused(clients: &Clients) -> Value {
    let (total, recent) = clients.refused();
    let recent = recent.iter().map(|client| {
        json!({
            "who": client.who,
            "node": client.node,
            "network": client.network,
            "cluster": client.cluster,
            "why": client.why,
            "first": rfc3339(client.first),
            "last": rfc3339(client.last),
            "count": client.count,
        })
    });
    json!({"total": total, "recent": recent.collect::<Vec<_>>()})
}

/// Returns a subscription as text, such as `eds 12` or `cds *`.
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
        "in_flight": of.overview.in_flight.is_some(),
        "unacknowledged_seconds": unacknowledged(of),
        "held_back": of.overview.held_back,
        "last_ack": of.acked.map(rfc3339),
        "nacks": of.nacks,
        "last_nack": of.nacked.as_ref().map(|(when, text)| json!({"time": rfc3339(*when), "text": text})),
    })
}
