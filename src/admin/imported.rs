//! How clients reach a service of a peer: not through this gateway, but through the gateways of the peer. The same holds for the
//! endpoints of a peer that are joined with a name.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use isthmus_decisions::view::{Assignment, ClientKind, Entry, Tunnel, Viewer, view};
use isthmus_model::endpoint::Health;
use isthmus_model::import::Import;
use isthmus_settings::peer::peer_of;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::ServiceView;

/// The kinds of clients, with their names in messages.
const CLIENTS: [(&str, ClientKind, Tunnel); 3] = [
    ("Envoy by SNI", ClientKind::Envoy, Tunnel::Sni),
    ("gRPC", ClientKind::Grpc, Tunnel::Sni),
    ("HBONE", ClientKind::Envoy, Tunnel::Hbone),
];

/// The way to a service of a peer.
pub(super) struct Imported {
    /// A sentence for operators.
    pub(super) text: String,
    /// True if clients of any kind get endpoints.
    pub(super) is_reachable: bool,
}

/// Returns the way to a service that is imported from a peer; `None` for other services. `name` may be the host name of a
/// service, an authority, or `outbound_.<port>_.<subset>_.<hostname>`.
pub(super) fn imported(snapshot: &Snapshot, name: &str) -> Option<Imported> {
    let host = name.rsplit_once("_.").map_or(name, |(_, host)| host);
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    let service = snapshot.service(host)?;
    if service.import.is_none() {
        return joined(snapshot, service);
    }
    let Import { peer, exported_name, .. } = service.import.as_deref()?;
    let addresses: Vec<String> = service.addresses.iter().map(ToString::to_string).collect();
    let addresses = match addresses.is_empty() {
        true => "the service has no virtual address".to_owned(),
        false => format!("the virtual addresses of the service are {}", addresses.join(" and ")),
    };
    let ways = Ways::of(snapshot, service, |_| true);
    let through = if snapshot.is_carried(service) {
        "the gateways of their own network, which pass calls on over carriers of the peer"
    } else if snapshot.is_passed_on(service) {
        "the gateways of their own network, which pass calls on to those of the peer"
    } else {
        "the peer's gateways, not through this one"
    };
    let others = match service.joined.is_empty() {
        true => String::new(),
        false => format!("; it is joined with {}", peers(service)),
    };
    Some(Imported {
        text: format!(
            "{host} is a service of the peer {peer}, which exports it as {exported_name}; clients reach it through {through} \
             ({ways}); {addresses}{others}"
        ),
        is_reachable: ways.any(),
    })
}

/// Returns the way to the endpoints of peers that are joined with a service of this mesh; `None` if there are none.
fn joined(snapshot: &Snapshot, service: &ServiceView) -> Option<Imported> {
    if service.joined.is_empty() {
        return None;
    }
    let ways = Ways::of(snapshot, service, |entry| peer_of(&entry.network).is_some());
    let text = format!(
        "{} is joined with {}; behind the endpoints of this mesh, clients get those of the peers, not through this gateway ({ways})",
        service.name,
        peers(service)
    );
    // What this caller gets is not the peers' service, whatever other clients get.
    Some(Imported { text, is_reachable: false })
}

/// Returns the peers whose services are joined with a name, each with the name under which it exports its service.
fn peers(service: &ServiceView) -> String {
    let one = |import: &Arc<Import>| format!("{} of the peer {}", import.exported_name, import.peer);
    service.joined_imports().map(one).collect::<Vec<_>>().join(" and ")
}

/// The endpoints that each kind of client on this gateway's network gets.
struct Ways([(&'static str, Way); CLIENTS.len()]);

impl Ways {
    /// Counts the entries that `counts`.
    fn of(snapshot: &Snapshot, service: &ServiceView, counts: fn(&Entry) -> bool) -> Self {
        let way = |(client, kind, tunnel)| (client, Way::of(snapshot, service, (kind, tunnel), counts));
        Self(CLIENTS.map(way))
    }

    fn any(&self) -> bool {
        self.0.iter().any(|(_, way)| way.gateways > 0)
    }
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = self.0.iter().map(|(client, way)| format!("{client}: {}", way.text()));
        f.write_str(&texts.collect::<Vec<_>>().join(", "))
    }
}

/// The endpoints that one kind of client on this gateway's network gets.
#[derive(Default)]
struct Way {
    /// The largest number of gateway addresses that a port has.
    gateways: usize,
    /// The reasons why endpoints are left out.
    excluded: BTreeSet<&'static str>,
}

impl Way {
    fn of(
        snapshot: &Snapshot,
        service: &ServiceView,
        (client, tunnel): (ClientKind, Tunnel),
        counts: fn(&Entry) -> bool,
    ) -> Self {
        let node = &snapshot.policy.node;
        let (network, cluster) = (node.network.clone(), node.cluster.clone());
        let viewer = Viewer { network, cluster, client, tunnel, ..Viewer::default() };
        let mut way = Self::default();
        for port in &service.ports {
            let Some(Assignment { entries, excluded, .. }) = view(snapshot, service, port, "", &viewer)
            else {
                continue;
            };
            let ready = entries.iter().filter(|entry| entry.health == Health::Healthy && counts(entry));
            way.gateways = way.gateways.max(ready.count());
            way.excluded.extend(excluded.iter().map(|excluded| excluded.reason.text()));
        }
        way
    }

    fn text(&self) -> String {
        let excluded: Vec<&str> = self.excluded.iter().copied().collect();
        match (self.gateways, excluded.is_empty()) {
            (0, true) => "no endpoints".to_owned(),
            (0, false) => format!("none, {}", excluded.join(", ")),
            (1, _) => "1 gateway".to_owned(),
            (count, _) => format!("{count} gateways"),
        }
    }
}
