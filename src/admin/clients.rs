//! The clients of the xDS server, in the form of the API.

use super::routes::Routes;
use isthmus_ads::protocol::Protocol;
use isthmus_ads::status::{ClientStatus, Clients, TypeStatus};
use isthmus_api::client::{Client, Nack, RefusedClient, RefusedClients, TypeState, View};
use isthmus_api::requests;
use isthmus_decisions::view::ClientKind;
use isthmus_telemetry::clock::rfc3339;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes.value(&requests::CLIENTS, |sources| clients(&sources.clients))
}

/// Returns one object for each stream, oldest first.
pub(crate) fn clients(clients: &Clients) -> Vec<Client> {
    clients.list().iter().map(client).collect()
}

fn client(status: &ClientStatus) -> Client {
    let who = status.node_info.clone().unwrap_or_default();
    let protocol = match status.protocol {
        Protocol::Delta => "delta",
        Protocol::StateOfTheWorld => "sotw",
    };
    let kind = match who.viewer.client {
        ClientKind::Envoy => "envoy",
        ClientKind::Grpc => "grpc",
    };
    let last_nack = status.types.values().filter_map(|of| of.nacked.as_ref()).max();
    Client {
        id: status.id,
        peer: status.caller.peer.to_string(),
        identity: status.caller.identity.as_ref().map(ToString::to_string),
        since: rfc3339(status.since),
        protocol: protocol.to_owned(),
        node: who.id,
        user_agent: who.user_agent,
        client: kind.to_owned(),
        network: who.viewer.network.to_string(),
        cluster: who.viewer.cluster.to_string(),
        view: View {
            network: who.viewer.network.to_string(),
            cluster: who.viewer.cluster.to_string(),
            families: who.viewer.families.numbers().to_vec(),
            sees: who.viewer.sees.iter().map(ToString::to_string).collect(),
        },
        subscriptions: status.types.iter().map(|(kind, of)| subscription(kind, of)).collect(),
        unacknowledged_seconds: status.types.values().filter_map(unacknowledged).max(),
        held_back: status.types.values().map(|of| of.overview.held_back).sum(),
        last_ack: status.types.values().filter_map(|of| of.acked).max().map(rfc3339),
        nacks: status.types.values().map(|of| of.nacks).sum(),
        last_nack: last_nack.map(|(_, text)| text.to_string()),
        types: status.types.iter().map(|(kind, of)| ((*kind).to_owned(), of_type(of))).collect(),
    }
}

/// Returns the age of the last response in seconds if it is unacknowledged; else `None`.
fn unacknowledged(of: &TypeStatus) -> Option<u64> {
    let sent = of.overview.in_flight?;
    Some(sent.elapsed().map_or(0, |elapsed| elapsed.as_secs()))
}

/// Returns the clients that the xDS server refused, newest first.
pub(crate) fn refused(clients: &Clients) -> RefusedClients {
    let (total, recent) = clients.refused();
    let recent = recent.iter().map(|client| RefusedClient {
        who: client.who.clone(),
        node: client.node.clone(),
        network: client.network.clone(),
        cluster: client.cluster.clone(),
        why: client.why.clone(),
        first: rfc3339(client.first),
        last: rfc3339(client.last),
        count: client.count,
    });
    RefusedClients { total, recent: recent.collect() }
}

/// Returns a subscription as text, such as `eds 12` or `cds *`.
fn subscription(kind: &str, of: &TypeStatus) -> String {
    match (of.overview.wildcard, of.overview.names) {
        (true, 0) => format!("{kind} *"),
        (true, names) => format!("{kind} * and {names}"),
        (false, names) => format!("{kind} {names}"),
    }
}

fn of_type(of: &TypeStatus) -> TypeState {
    let nack = |(when, text): &(_, _)| Nack { time: rfc3339(*when), text: ToString::to_string(text) };
    TypeState {
        wildcard: of.overview.wildcard,
        names: of.overview.names,
        sent: of.overview.sent,
        in_flight: of.overview.in_flight.is_some(),
        unacknowledged_seconds: unacknowledged(of),
        held_back: of.overview.held_back,
        last_ack: of.acked.map(rfc3339),
        nacks: of.nacks,
        last_nack: of.nacked.as_ref().map(nack),
    }
}
