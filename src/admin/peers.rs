//! The peers and the services exchanged with them, in the form of the API.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::{self, Path};
use axum::http::StatusCode;
use axum::response::Response;

use super::response::{error, json_response};
use super::routes::Routes;
use super::{Sources, networks};
use isthmus_aggregator::liveness::probed::State;
use isthmus_aggregator::status::{RegistryState, RegistryStatus, Status as AggregatorStatus};
use isthmus_api as api;
use isthmus_api::peer::{Exchanged, PeerDetail};
use isthmus_api::requests;
use isthmus_api::text::milliseconds;
use isthmus_dataplane::carriers::pool::{Carriers, OfPeer};
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_model::service::Service;
use isthmus_peer::addresses::of_gateways;
use isthmus_peer::imports::registry::NO_GATEWAY;
use isthmus_peer::status::{LinkState, LinkStatus, LinkTable};
use isthmus_settings::network::Gateway;
use isthmus_settings::peer::{Carry, Peer, is_place_of_peer, place_of};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::exported::Exported;
use isthmus_snapshot::networks::{GatewayEntry, NetworkEntry};
use isthmus_snapshot::service_view::ServiceView;
use isthmus_telemetry::clock::rfc3339;

/// The largest number of lines in `left_out`, which lists the services that are not exchanged with a peer; further lines are
/// omitted.
const LEFT_OUT_MAX: usize = 100;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes.value(&requests::PEERS, peers).with(&requests::PEER, one)
}

async fn one(extract::State(sources): extract::State<Sources>, Path(name): Path<String>) -> Response {
    let snapshot = sources.reader.latest();
    match snapshot.policy.peers.iter().find(|peer| *peer.name == *name) {
        Some(peer) => {
            let roots = peer.who.as_ref().map(|who| sources.identities.roots_of(&who.alias));
            json_response(&PeerDetail { roots: roots.unwrap_or_default(), ..detail(&snapshot, peer) })
        }
        None => error(StatusCode::NOT_FOUND, "the config has no peer of this name"),
    }
}

/// The state of a peer: the state of its links, or if there is no link, the state of its services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    /// A link is live.
    Live,
    /// A link exists, but its heartbeats are not answered.
    Suspect,
    /// There is no link, and no service of the peer is known.
    Down,
    /// There is no link; the services of the peer stay in use.
    Stale,
    /// The link has been missing for longer than in the state `Stale`. An endpoint of the peer is used only for a service port
    /// that has no ready endpoint in any other registry.
    Demoted,
    /// The link has been missing for so long that no endpoint of the peer is used.
    Expired,
    /// The identity and the roots of the peer are unknown.
    NotEnrolled,
}

impl PeerState {
    /// Returns the state of a peer from the states of its links and of its registry.
    pub(super) fn of(peer: &Peer, links: &[LinkStatus], registry: Option<&RegistryStatus>) -> Self {
        let has = |state: LinkState| links.iter().any(|link| link.state == state);
        if peer.who.is_none() {
            return Self::NotEnrolled;
        }
        match registry.map(|registry| registry.state) {
            _ if has(LinkState::Live) => Self::Live,
            _ if has(LinkState::Suspect) => Self::Suspect,
            Some(_) if registry.is_some_and(|registry| registry.items.services == 0) => Self::Down,
            Some(RegistryState::Live | RegistryState::Held | RegistryState::Stale) => Self::Stale,
            Some(RegistryState::Demoted) => Self::Demoted,
            Some(RegistryState::Expired) => Self::Expired,
            Some(RegistryState::Missing) | None => Self::Down,
        }
    }

    /// Returns the value as the API shows it.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Suspect => "suspect",
            Self::Down => "down",
            Self::Stale => "stale",
            Self::Demoted => "demoted",
            Self::Expired => "expired",
            Self::NotEnrolled => "not enrolled",
        }
    }
}

/// One peer with its links and its registry.
pub(super) struct Linked {
    pub(super) peer: Arc<Peer>,
    pub(super) state: PeerState,
    pub(super) links: Vec<LinkStatus>,
    registry: Option<RegistryStatus>,
}

impl Linked {
    /// Returns the peers of the config, in the order of the file.
    pub(super) fn all(snapshot: &Snapshot, links: &LinkTable, aggregator: &AggregatorStatus) -> Vec<Self> {
        let mut all = links.all();
        let one = |peer: &Arc<Peer>| {
            let links: Vec<LinkStatus> = all.extract_if(.., |link| link.peer == peer.name).collect();
            let place = place_of(&peer.name);
            let registry = aggregator.registries.iter().find(|registry| *registry.name == *place).cloned();
            let state = PeerState::of(peer, &links, registry.as_ref());
            Self { peer: peer.clone(), state, links, registry }
        };
        snapshot.policy.peers.iter().map(one).collect()
    }

    /// Returns the time since which the peer has been in its state.
    fn since(&self) -> Option<SystemTime> {
        let of_state = |state| {
            let links = self.links.iter().filter(move |link| link.state == state);
            links.filter_map(|link| link.since).min()
        };
        match self.state {
            PeerState::Live => of_state(LinkState::Live),
            PeerState::Suspect => of_state(LinkState::Suspect),
            PeerState::NotEnrolled => None,
            PeerState::Down | PeerState::Stale | PeerState::Demoted | PeerState::Expired => {
                self.registry.as_ref().map(|registry| registry.since)
            }
        }
    }

    /// Returns the reason why the peer is not live.
    pub(super) fn why_not_live(&self, snapshot: &Snapshot) -> Option<String> {
        let of_link = || self.links.iter().find_map(|link| link.problem.clone());
        let of_registry = || self.registry.as_ref().and_then(|registry| registry.problems.first().cloned());
        match self.state {
            PeerState::Live => None,
            PeerState::NotEnrolled => Some(match &self.peer.unused_link {
                None => format!(
                    "run `isthmus peer invite --name {}` here, and `isthmus peer join` with the printed token on the other side, \
                     or vice versa",
                    self.peer.name
                ),
                Some(fault) => format!(
                    "the link that its enrolment has stored is not used: {fault}; mend that, or run `isthmus peer invite --name {} \
                     --replace` here, and `isthmus peer join` with the printed token on the other side",
                    self.peer.name
                ),
            }),
            PeerState::Down => of_link().or_else(|| Some(not_connected(snapshot))),
            _ => of_link().or_else(of_registry).or_else(|| Some(not_connected(snapshot))),
        }
    }

    /// Returns the services that one of the two meshes offers and that the other cannot call, one sentence for each direction.
    pub(super) fn unreachable(
        &self,
        snapshot: &Snapshot,
        states: &networks::States,
        carriers: &Carriers,
    ) -> Vec<String> {
        if self.state == PeerState::NotEnrolled {
            return Vec::new();
        }
        let name = &self.peer.name;
        let report = self.registry.as_ref().and_then(|registry| registry.report.as_deref());
        let theirs = report.and_then(|report| {
            let count = report.left_out_because(NO_GATEWAY)?;
            let why = report.problems.first().map_or(String::new(), |first| format!("; {first}"));
            Some(format!(
                "{count} services of the peer {name} cannot be called, because no gateway leads to them{why}"
            ))
        });
        let imported = || snapshot.services().iter().filter(|service| is_of(service, &self.peer)).count();
        let silent = match self.peer.carries(Carry::ToPeer) {
            true if carriers.has(name) => None,
            true => Some(
                "cannot be called: no gateway of the peer has opened a carrier to this one (`peers[].carry` on both sides)".to_owned(),
            ),
            false => self.silent_gateway(snapshot, states).map(|why| {
                format!(
                    "can probably not be called: its gateway {why} (if the peer takes no connections, let its gateways open carriers: \
                     `carry: [toPeer]` at the peer here, `carry: [fromPeer]` there)"
                )
            }),
        };
        let silent = silent.and_then(|why| {
            let imported = imported();
            (imported > 0).then(|| format!("{imported} services of the peer {name} {why}"))
        });
        let ours = |(network, _): &(&Network, &NetworkEntry)| !is_place_of_peer(network.as_str());
        let gateways = || snapshot.networks().iter().filter(ours).flat_map(|(_, entry)| &entry.gateways);
        let is_way = |gateway: &Gateway| gateway.hbone_port.is_some() || !self.peer.from.is_empty();
        let why = match gateways().next() {
            None => Some(
                "this gateway knows no gateway of its own networks (`networks[].gateways`; if nobody can connect to one, let this gateway \
                 open carriers: `carry: [fromPeer]` at the peer here, `carry: [toPeer]` there)",
            ),
            Some(_) if gateways().any(|known| is_way(&known.gateway)) => None,
            Some(_) => Some(
                "no gateway of this mesh has an `hbonePort`, and callers by SNI are known only by their address: list the addresses \
                 of the peer's callers in `peers[].from`",
            ),
        };
        let why = why.filter(|_| !self.peer.carries(Carry::FromPeer));
        let offered = if why.is_some() { snapshot.exports_to(name).len() } else { 0 };
        let ours = why.filter(|_| offered > 0).map(|why| {
            format!("the peer {name} cannot call the {offered} services that it is offered, because {why}")
        });
        theirs.into_iter().chain(silent).chain(ours).collect()
    }

    /// Returns the fault of the first of the peer's gateways, if there are gateways and none of them is known to answer.
    fn silent_gateway(&self, snapshot: &Snapshot, states: &networks::States) -> Option<String> {
        let place = place_of(&self.peer.name);
        let networks = snapshot.networks().iter().filter(|(network, _)| is_in(network.as_str(), &place));
        let gateways: Vec<&GatewayEntry> = networks.flat_map(|(_, entry)| &entry.gateways).collect();
        let addresses: Vec<SocketAddr> = gateways.iter().flat_map(|gateway| gateway.entrances()).collect();
        let Some(first) = addresses.first() else {
            let host = &gateways.first()?.gateway.host;
            return Some(format!(
                "{host} has a host name that does not resolve, or to no address that `peers[].addresses` allows"
            ));
        };
        let answers = |address: &SocketAddr| matches!(states.get(address), Some(State::Answers { .. }));
        if addresses.iter().any(answers) {
            return None;
        }
        match states.get(first)? {
            State::NeverAnswered { .. } => Some(format!("{first} has never answered this one")),
            _ => Some(format!("{first} does not answer")),
        }
    }

    /// Returns the largest clock skew of the peer's links in milliseconds.
    pub(super) fn clock_skew_ms(&self) -> Option<i64> {
        self.links.iter().filter_map(|link| link.clock_skew_ms).max_by_key(|skew| skew.unsigned_abs())
    }

    /// Returns the shortest round-trip time of the peer's links.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        let live = self.links.iter().filter(|link| link.state != LinkState::Down);
        live.filter_map(|link| link.round_trip).min()
    }

    /// Returns the number of services of the peer's registry.
    pub(super) fn services_in(&self) -> usize {
        self.registry.as_ref().map_or(0, |registry| registry.items.services)
    }

    /// Returns the number of services that one of the two meshes offers and the other refuses, and the first
    /// [`LEFT_OUT_MAX`] of them, one sentence each.
    pub(super) fn refused(&self) -> (usize, Vec<String>) {
        let name = &self.peer.name;
        // The links of several replicas report the same items.
        let theirs: BTreeMap<_, _> = self.links.iter().flat_map(|link| link.refused.iter()).collect();
        let ours: BTreeMap<_, _> = self.links.iter().flat_map(|link| link.left_out.iter()).collect();
        let further = self.links.iter().map(|link| link.refused.further()).max().unwrap_or(0);
        let count = theirs.len() + ours.len() + further;
        let theirs =
            theirs.into_iter().map(|(item, why)| format!("the peer {name} does not take {item}: {why}"));
        let ours = ours
            .into_iter()
            .map(|(item, why)| format!("this gateway does not take {item} of the peer {name}: {why}"));
        (count, theirs.chain(ours).take(LEFT_OUT_MAX).collect())
    }
}

/// Returns the peers in the order of the config file.
pub fn peers(sources: &Sources) -> Vec<api::peer::Peer> {
    let snapshot = &*sources.reader.latest();
    let services = snapshot.services();
    let states = sources.liveness.states();
    let gateways = networks::gateways(snapshot, &states);
    let one = |linked: Linked| {
        let peer = &linked.peer;
        let (place, name) = (place_of(&peer.name), peer.name.to_string());
        let conflicts = services.iter().flat_map(|service| &service.conflicts);
        let shadowed =
            conflicts.filter(|conflict| *conflict.cluster.as_str() == *place).map(ToString::to_string);
        let (refused, lines) = linked.refused();
        let others: Vec<String> = snapshot.export_conflicts(&name).into_iter().chain(shadowed).collect();
        let is_its = |gateway: &&api::network::Gateway| is_in(&gateway.network, &place);
        let read = linked.registry.as_ref().and_then(|registry| registry.read);
        let changed = linked.links.iter().filter_map(|link| link.changed).max().or(read);
        api::peer::Peer {
            identity: peer.who.as_ref().map(|who| who.gateway.to_string()),
            trust_alias: peer.who.as_ref().map(|who| who.alias.to_string()),
            state: linked.state.text().to_owned(),
            since: linked.since().map(rfc3339),
            changed: changed.map(rfc3339),
            exported: snapshot.exports_to(&name).len(),
            imported: services.iter().filter(|service| is_of(service, peer)).count(),
            links: linked.links.iter().map(link).collect(),
            carriers: peer.carry.iter().map(|direction| carriers(sources, peer, *direction)).collect(),
            gateways: gateways.iter().filter(is_its).cloned().collect(),
            left_out_count: refused + others.len(),
            left_out: lines.into_iter().chain(others).take(LEFT_OUT_MAX).collect(),
            problem: linked.why_not_live(snapshot).or_else(|| {
                linked.unreachable(snapshot, &states, sources.dataplane.carriers()).into_iter().next()
            }),
            name,
        }
    };
    Linked::all(snapshot, &sources.links, &sources.aggregator.status.borrow()).into_iter().map(one).collect()
}

/// Returns why there may be no link with a peer that connects to us.
fn not_connected(snapshot: &Snapshot) -> String {
    let announced = of_gateways(snapshot);
    let ours = match announced.is_empty() {
        true => {
            "this mesh announces none, as `networks` has no gateways of this gateway's network".to_owned()
        }
        false => format!("this mesh announces {}", announced.join(", ")),
    };
    format!(
        "the peer has not connected to this replica; it connects to the addresses in its `dial`, and to those that it is told: {ours}"
    )
}

/// Returns true if the network is one of the peer with this place.
fn is_in(network: &str, place: &str) -> bool {
    network.strip_prefix(place).is_some_and(|rest| rest.starts_with('/'))
}

fn carriers(sources: &Sources, peer: &Peer, direction: Carry) -> api::peer::Carriers {
    let OfPeer { carriers, streams, calls, round_trip } =
        sources.dataplane.carriers().of_peer(&peer.name, direction);
    let problems = match direction {
        Carry::FromPeer => sources.links.carrier_problems(&peer.name).into_iter().collect(),
        Carry::ToPeer => Vec::new(),
    };
    api::peer::Carriers {
        direction: direction.text().to_owned(),
        open: carriers,
        calls: streams,
        total: calls,
        round_trip_ms: round_trip.map(milliseconds),
        problems,
    }
}

fn link(link: &LinkStatus) -> api::peer::Link {
    api::peer::Link {
        instance: link.instance.to_string(),
        address: link.address.clone(),
        dialled: link.dialled,
        state: link.state.text().to_owned(),
        since: link.since.map(rfc3339),
        software: link.software.clone(),
        round_trip_ms: link.round_trip.map(milliseconds),
        clock_skew_ms: link.clock_skew_ms,
        given: link.services.0,
        taken: link.services.1,
        own_roots: link.own_roots.text().to_owned(),
        problem: link.problem.clone(),
    }
}

/// Returns a peer with its services and without its roots.
pub fn detail(snapshot: &Snapshot, peer: &Peer) -> PeerDetail {
    let rules = peer.imports.iter().flat_map(|rule| &rule.services);
    PeerDetail {
        name: peer.name.to_string(),
        identity: peer.who.as_ref().map(|who| who.gateway.to_string()),
        from: peer.from.iter().map(ToString::to_string).collect(),
        exported: exported(snapshot, &peer.name),
        imported: imported(snapshot, peer),
        left_out: left_out(snapshot, peer),
        asked: rules.map(ToString::to_string).collect(),
        carry: peer.carry.iter().map(|direction| direction.text().to_owned()).collect(),
        conflicts: snapshot.export_conflicts(&peer.name),
        roots: String::new(),
    }
}

/// Returns the services of this mesh that a peer may reach, in order of exported name.
fn exported(snapshot: &Snapshot, peer: &str) -> Vec<Exchanged> {
    let all = snapshot.exports_to(peer).into_iter();
    let one = |export: Exported<'_>| Exchanged {
        tls: Some(export.rule.tls().text().to_owned()),
        ..exchanged(export.name, export.service, &export.service.namespace)
    };
    all.map(one).collect()
}

/// Returns the services of a peer, in order of their names here.
fn imported(snapshot: &Snapshot, peer: &Peer) -> Vec<Exchanged> {
    let owned = |service: &ServiceView| {
        let import = service.import.as_ref().filter(|import| import.peer == peer.name)?;
        Some(exchanged(&import.exported_name, service, peer.namespace_of(&service.namespace)))
    };
    let joined = |service: &ServiceView| {
        let mut parts = service.joined.iter().filter_map(|part| of_peer(&part.service, peer));
        Some(Exchanged { joined: true, ..parts.next()? })
    };
    let services = snapshot.services().into_iter();
    services.filter_map(|service| owned(service).or_else(|| joined(service))).collect()
}

/// Returns the services of a peer that clients cannot reach, because other services have their names.
fn left_out(snapshot: &Snapshot, peer: &Peer) -> Vec<Exchanged> {
    let services = snapshot.services().into_iter();
    let conflicts = services.flat_map(|service| service.conflicts.clone());
    conflicts.filter_map(|conflict| of_peer(conflict.left_out.as_deref()?, peer)).collect()
}

/// Returns a service as the peer exports it; `None` if it is not the peer's.
fn of_peer(service: &Service, peer: &Peer) -> Option<Exchanged> {
    let import = service.import.as_ref().filter(|import| import.peer == peer.name)?;
    let ports = service.ports.iter().map(|port| format!("{}/{}", port.port, port.protocol.text()));
    Some(Exchanged {
        exported_name: import.exported_name.to_string(),
        service: service.key.hostname.to_string(),
        namespace: peer.namespace_of(&service.key.namespace).to_owned(),
        ports: ports.collect(),
        ..Exchanged::default()
    })
}

fn is_of(service: &ServiceView, peer: &Peer) -> bool {
    service.import_from(&peer.name).is_some()
}

fn exchanged(name: &HostName, service: &ServiceView, namespace: &str) -> Exchanged {
    let ports = service.ports.iter().map(|port| format!("{}/{}", port.port, port.protocol.text()));
    Exchanged {
        exported_name: name.to_string(),
        service: service.name.to_string(),
        namespace: namespace.to_owned(),
        ports: ports.collect(),
        ..Exchanged::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_registry::shard::Counts;
    use isthmus_snapshot::testing::{Mesh, peer};

    fn registry(state: RegistryState) -> RegistryStatus {
        RegistryStatus {
            is_peer: true,
            problems: vec!["the link with the peer is lost: it broke".to_owned()],
            copy_problem: Some("the copy cannot be written".to_owned()),
            items: Counts { services: 1, ..Counts::default() },
            ..RegistryStatus::of("peer/west", state)
        }
    }

    fn link(state: LinkState) -> LinkStatus {
        LinkStatus { peer: "west".into(), state, ..LinkStatus::default() }
    }

    #[test]
    fn the_best_link_decides_and_without_one_the_registry() {
        let mut west = peer("west", &[]);
        let state = |west: &Peer, links: &[LinkState], of: RegistryState| {
            let links: Vec<LinkStatus> = links.iter().map(|state| link(*state)).collect();
            PeerState::of(west, &links, Some(&registry(of))).text()
        };
        for (links, registry, wanted) in [
            (&[LinkState::Down, LinkState::Live][..], RegistryState::Live, "live"),
            (&[LinkState::Suspect, LinkState::Down], RegistryState::Live, "suspect"),
            (&[LinkState::Live], RegistryState::Held, "live"),
            (&[LinkState::Down], RegistryState::Stale, "stale"),
            (&[], RegistryState::Demoted, "demoted"),
            (&[], RegistryState::Expired, "expired"),
            (&[], RegistryState::Missing, "down"),
        ] {
            assert_eq!(state(&west, links, registry), wanted);
        }
        let empty = RegistryStatus { items: Counts::default(), ..registry(RegistryState::Stale) };
        assert_eq!(PeerState::of(&west, &[], Some(&empty)).text(), "down", "its services are forgotten");
        west.who = None;
        assert_eq!(state(&west, &[], RegistryState::Missing), "not enrolled");
    }

    #[test]
    fn a_lost_peer_says_why_and_a_live_one_has_the_shortest_round_trip() {
        let snapshot = Mesh::new(Vec::new(), Vec::new()).snapshot();
        let peer = Arc::new(peer("west", &[]));
        let slow = LinkStatus {
            round_trip: Some(Duration::from_millis(9)),
            clock_skew_ms: Some(-400_000),
            ..link(LinkState::Live)
        };
        let fast = LinkStatus {
            round_trip: Some(Duration::from_millis(2)),
            clock_skew_ms: Some(3),
            ..link(LinkState::Live)
        };
        let mut linked = Linked {
            peer,
            state: PeerState::Live,
            links: vec![slow, fast],
            registry: Some(registry(RegistryState::Stale)),
        };
        assert_eq!(linked.round_trip(), Some(Duration::from_millis(2)));
        assert_eq!((linked.clock_skew_ms(), linked.why_not_live(&snapshot)), (Some(-400_000), None));
        (linked.state, linked.links) = (PeerState::Stale, Vec::new());
        assert_eq!(
            linked.why_not_live(&snapshot).as_deref(),
            Some("the link with the peer is lost: it broke")
        );
        let unheard = RegistryStatus { problems: Vec::new(), ..registry(RegistryState::Missing) };
        let unheard = Linked {
            peer: linked.peer.clone(),
            state: PeerState::Down,
            links: Vec::new(),
            registry: Some(unheard),
        };
        let problem = unheard.why_not_live(&snapshot);
        let problem = problem.expect("a copy is no cause");
        assert!(problem.starts_with("the peer has not connected to this replica"), "{problem}");
        linked
            .links
            .push(LinkStatus { problem: Some("127.0.0.1:1: refused".to_owned()), ..link(LinkState::Down) });
        assert_eq!(
            linked.why_not_live(&snapshot).as_deref(),
            Some("127.0.0.1:1: refused"),
            "what the dialling says is nearer"
        );
        linked.state = PeerState::NotEnrolled;
        assert!(
            linked
                .why_not_live(&snapshot)
                .is_some_and(|problem| problem.starts_with("run `isthmus peer invite --name west` here"))
        );
        linked.peer =
            Arc::new(Peer { unused_link: Some("x.pem: damaged".into()), ..Peer::clone(&linked.peer) });
        let problem = linked.why_not_live(&snapshot).expect("it is not enrolled");
        assert!(
            problem.contains("is not used: x.pem: damaged") && problem.contains("--replace"),
            "{problem}"
        );
    }
}
