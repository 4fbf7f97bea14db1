//! The overview that the dashboard and `isthmus top` show. The list of all services with their traffic is expensive in a large
//! mesh, so it is made at most once a second, for all requests together, on a thread of low priority. Each request gets one
//! bounded page of the list.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Mutex;

use super::selection::{self, Ask, PER_PAGE};
use super::{Sources, clients, networks, peers, status};
use isthmus_api::connection::Connection;
use isthmus_api::listed::{Part, Past, Service, states};
use isthmus_api::network::{Gateway, Network};
use isthmus_api::overview::{Overview, Refusal, Services, Traffic};
use isthmus_api::peer::Peer;
use isthmus_api::selection::Selection;
use isthmus_api::status::Status;
use isthmus_dataplane::endpoint_state::State;
use isthmus_model::endpoint::Health;
use isthmus_model::reason::Reason;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::route::RouteTarget;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::{Candidate, Candidates, EndpointKey, service_of};
use isthmus_tasks::background;
use isthmus_telemetry::clock::rfc3339;
use isthmus_telemetry::recorder::{Recorder, label};

/// The time for which a list of services is reused.
const FRESH: Duration = Duration::from_secs(1);
/// The largest numbers of items in the other lists of the overview; the overview omits further items.
const NETWORKS_MAX: usize = 40;
const GATEWAYS_MAX: usize = 100;
const PEERS_MAX: usize = 50;
const CLIENTS_MAX: usize = 50;
const CERTIFICATES_MAX: usize = 50;
const FAILURES_MAX: usize = 20;
const LINES_MAX: usize = 20;
/// The longest search text in bytes; longer texts are cut.
const QUERY_MAX: usize = 253;
/// The age up to which failures count as recent.
const RECENT: Duration = Duration::from_secs(300);

/// The last list of services, kept for the requests of the next second.
#[derive(Default)]
pub struct Cache(Mutex<Option<(Instant, Arc<Board>)>>);

/// All services and routes, in the order of the pages, and the sums of their counters.
#[derive(Default)]
struct Board {
    services: Vec<Service>,
    troubled: usize,
    traffic: Traffic,
    /// The numbers of ended connections, by reason.
    ended: BTreeMap<String, u64>,
    networks: Vec<Network>,
    gateways: Vec<Gateway>,
    peers: Vec<Peer>,
}

impl Cache {
    /// Returns the last board if it was made within the last second; otherwise makes a new one. Requests that arrive meanwhile
    /// wait for the new board.
    async fn board(&self, sources: &Sources) -> Arc<Board> {
        let mut last = self.0.lock().await;
        if let Some((_, board)) = last.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
            return board.clone();
        }
        let of = sources.clone();
        // If the thread panics, this request shows an empty list.
        let made = background::run(move || board(&of)).await;
        let board = Arc::new(made.unwrap_or_default());
        *last = Some((Instant::now(), board.clone()));
        board
    }
}

impl Board {
    /// Adds the chosen network and service to what the request opens.
    fn complete(&self, selection: &mut Selection) {
        let of = |service: &String| self.services.iter().find(|one| one.name == *service).cloned();
        selection.about_service = selection.service.as_ref().and_then(of);
        if let Some(name) = &selection.network {
            selection.about_network = self.networks.iter().find(|network| network.name == *name).cloned();
            let gateways = self.gateways.iter().filter(|gateway| gateway.network == *name);
            if selection.service.is_none() {
                selection.gateways = Part::of(gateways.cloned().collect(), PER_PAGE);
            }
        }
    }

    fn page(&self, ask: &Ask) -> Services {
        let mut end = ask.query.len().min(QUERY_MAX);
        while !ask.query.is_char_boundary(end) {
            end -= 1;
        }
        let query = ask.query[..end].trim().to_ascii_lowercase();
        let matching: Vec<&Service> =
            self.services.iter().filter(|service| service.name.contains(&query)).collect();
        let pages = matching.len().div_ceil(PER_PAGE).max(1);
        let page = ask.page.clamp(1, pages);
        let shown = matching.iter().skip((page - 1) * PER_PAGE).take(PER_PAGE);
        Services {
            total: self.services.len(),
            troubled: self.troubled,
            matching: matching.len(),
            query,
            page,
            pages,
            shown: shown.map(|service| (*service).clone()).collect(),
        }
    }
}

/// Returns the overview with one page of the services.
pub async fn overview(sources: &Sources, ask: &Ask) -> Overview {
    let board = sources.overviews.board(sources).await;
    let failures = failures(sources);
    let selection = selection::selection(sources, ask, &failures).await.map(|mut selection| {
        board.complete(&mut selection);
        selection
    });
    let mut clients = clients::clients(&sources.clients);
    // Clients with rejected or late updates come first.
    clients.sort_by_key(|client| {
        let waits = std::cmp::Reverse(client.unacknowledged_seconds.unwrap_or_default());
        (client.nacks == 0, waits, client.id)
    });
    let mut peers = board.peers.clone();
    peers.sort_by_key(|peer| peer.state == "live");
    for peer in &mut peers {
        lines(&mut peer.left_out);
        peer.links.truncate(LINES_MAX);
        peer.gateways.truncate(LINES_MAX);
    }
    Overview {
        time: rfc3339(SystemTime::now()),
        status: cut(status::status(sources)),
        traffic: Traffic { active: sources.dataplane.connections_active(), ..board.traffic },
        past: sources.past.all(),
        services: board.page(ask),
        refusals: refusals(&board.ended, &failures),
        failures: failures.into_iter().take(FAILURES_MAX).collect(),
        networks: Part {
            total: board.networks.len(),
            shown: board.networks.iter().take(NETWORKS_MAX).cloned().collect(),
        },
        gateways: Part {
            total: board.gateways.len(),
            shown: board.gateways.iter().take(GATEWAYS_MAX).cloned().collect(),
        },
        peers: Part::of(peers, PEERS_MAX),
        clients: Part::of(clients, CLIENTS_MAX),
        certificates: Part::of(sources.identities.certificates(), CERTIFICATES_MAX),
        selection,
    }
}

/// Shortens a list, and adds a line with the number of lines that are left out.
fn lines(lines: &mut Vec<String>) {
    let more = lines.len().saturating_sub(LINES_MAX);
    lines.truncate(LINES_MAX);
    lines.extend((more > 0).then(|| format!("and {more} more")));
}

/// Shortens the lists of a status that a registry can make long.
fn cut(mut status: Status) -> Status {
    lines(&mut status.conflicts);
    lines(&mut status.unresolved);
    lines(&mut status.config.rejected);
    lines(&mut status.config.warnings);
    status.listeners.truncate(GATEWAYS_MAX);
    status.registries.truncate(GATEWAYS_MAX);
    status.registries.iter_mut().for_each(|registry| lines(&mut registry.problems));
    status.xds.refused.recent.truncate(LINES_MAX);
    status
}

/// Returns the last connections that were refused or failed, newest first.
pub(super) fn failures(sources: &Sources) -> Vec<Connection> {
    let gateway = sources.telemetry.gateway.load();
    let records = sources.telemetry.failures.list();
    records.iter().map(|record| Connection::of(record, &gateway)).collect()
}

/// Returns the reasons for which connections ended, except `ok`. The reason with the most recent failures comes first, then the
/// one with the largest total.
fn refusals(ended: &BTreeMap<String, u64>, failures: &[Connection]) -> Vec<Refusal> {
    let since = rfc3339(SystemTime::now() - RECENT);
    let of = |reason: &Reason| {
        let total = ended.get(reason.text()).copied().unwrap_or_default();
        let same = || failures.iter().filter(|failure| failure.reason.as_deref() == Some(reason.text()));
        let last = same().next();
        let recent = same().filter(|failure| failure.time >= since).count() as u64;
        (total > 0 || last.is_some()).then(|| Refusal {
            reason: reason.text().to_owned(),
            meaning: reason.meaning().to_owned(),
            look_at: reason.look_at().to_owned(),
            // The list of failures is newer than the counters, so it may contain more failures.
            total: total.max(recent),
            recent,
            last_name: last.and_then(Connection::name).map(str::to_owned),
            last_time: last.map(|failure| failure.time.clone()),
        })
    };
    let mut all: Vec<Refusal> =
        Reason::ALL.iter().filter(|reason| **reason != Reason::Ok).filter_map(of).collect();
    all.sort_by(|one, other| {
        (other.recent, other.total, &one.reason).cmp(&(one.recent, one.total, &other.reason))
    });
    all
}

fn board(sources: &Sources) -> Board {
    let snapshot = sources.reader.latest();
    let Counts { services: mut counts, ended, networks: _ } = counts(&sources.telemetry.recorder);
    let upstreams = sources.dataplane.upstreams();
    // This set has the endpoints that get no connections or that fail. Some of them may not be in the snapshot any more.
    let mut troubled: HashSet<EndpointKey> = HashSet::new();
    upstreams.visit(|key, in_flight| {
        if in_flight > 0 {
            counts.entry(service_of(&key.group).to_owned()).or_default().active += in_flight as usize;
        }
    });
    upstreams.visit_troubled(|key, state| {
        if state.state() != State::Healthy {
            troubled.insert(key.clone());
        }
    });
    let is_troubled = |key: &EndpointKey| troubled.contains(key) || upstreams.withdrawals().of(key).is_some();
    let mut traffic = Traffic::default();
    #[expect(clippy::disallowed_methods, reason = "a sum has no order")]
    for of in counts.values() {
        traffic.opened += of.opened;
        traffic.bytes_up += of.bytes_up;
        traffic.bytes_down += of.bytes_down;
        traffic.failed += of.failed;
    }
    let mut services = rows(&snapshot, &counts, &is_troubled);
    sources.past.add_to(&mut services);
    services.sort_by_cached_key(|service| {
        let moved = service.bytes_up.saturating_add(service.bytes_down);
        let most = std::cmp::Reverse((service.active, moved, service.opened, service.failed));
        (rank(&service.state), !service.reachable, most, service.name.clone())
    });
    let troubled = services.iter().filter(|service| rank(&service.state) < HEALTHY).count();
    let own = snapshot.policy.node.network.to_string();
    let mut networks = networks::of(sources);
    networks.sort_by_key(|network| {
        (network.name != own, std::cmp::Reverse(network.endpoints), network.name.clone())
    });
    let mut gateways = networks::gateways(&snapshot, &sources.liveness.states());
    let shown =
        |gateway: &Gateway| networks.iter().take(NETWORKS_MAX).any(|network| network.name == gateway.network);
    gateways.sort_by_key(|gateway| (!shown(gateway), gateway.usable, gateway.network.clone()));
    let peers = peers::peers(sources);
    Board { services, troubled, traffic, ended, networks, gateways, peers }
}

/// The sort key of a service in a healthy state; services with problems have smaller keys, and come first.
const HEALTHY: usize = 2;

fn rank(state: &str) -> usize {
    match state {
        states::DOWN => 0,
        states::DEGRADED => 1,
        _ => HEALTHY,
    }
}

/// The counters of connections.
#[derive(Default)]
pub(super) struct Counts {
    /// The traffic by service or route.
    pub(super) services: HashMap<String, Traffic>,
    /// The number of ended connections by reason.
    pub(super) ended: BTreeMap<String, u64>,
    /// The ended connections by the client's network: all in `opened`, and those that failed.
    pub(super) networks: HashMap<String, Traffic>,
}

/// Returns the counters.
pub(super) fn counts(recorder: &Recorder) -> Counts {
    let Counts { services: mut counts, mut ended, mut networks } = Counts::default();
    let by_name = [
        ("istio_tcp_connections_opened_total", "destination_service"),
        ("istio_tcp_received_bytes_total", "destination_service"),
        ("istio_tcp_sent_bytes_total", "destination_service"),
        ("isthmus_connections_total", "service"),
        (NETWORK, "network"),
    ];
    recorder.each_counter(|key, count| {
        let Some((metric, of)) = by_name.iter().find(|(name, _)| *name == key.name()) else { return };
        let name = label(key, of);
        let all = if *metric == NETWORK { &mut networks } else { &mut counts };
        if !all.contains_key(name) {
            all.insert(name.to_owned(), Traffic::default());
        }
        let Some(traffic) = all.get_mut(name) else { return };
        match *metric {
            "istio_tcp_connections_opened_total" => traffic.opened += count,
            "istio_tcp_received_bytes_total" => traffic.bytes_up += count,
            "istio_tcp_sent_bytes_total" => traffic.bytes_down += count,
            NETWORK => {
                traffic.opened += count;
                traffic.failed += if label(key, "reason") == Reason::Ok.text() { 0 } else { count };
            }
            _ => {
                let reason = label(key, "reason");
                if reason != Reason::Ok.text() {
                    traffic.failed += count;
                }
                *ended.entry(reason.to_owned()).or_default() += count;
            }
        }
    });
    Counts { services: counts, ended, networks }
}

/// The metric of connections by the client's network.
const NETWORK: &str = "isthmus_network_connections_total";

/// Returns all services and routes.
fn rows(
    snapshot: &Snapshot,
    counts: &HashMap<String, Traffic>,
    is_troubled: &dyn Fn(&EndpointKey) -> bool,
) -> Vec<Service> {
    // Returns the number of all endpoints, and the number of ready ones.
    let health = |of: &Candidates| {
        let all = of.endpoints();
        let is_ready = |one: &&Candidate| one.health == Health::Healthy && !is_troubled(&one.key);
        (all.len(), all.iter().filter(is_ready).count())
    };
    let row = |name: &str, kind: &str, reachable: bool, (endpoints, ready): (usize, usize)| {
        let traffic = counts.get(name).copied().unwrap_or_default();
        let state = match (endpoints, ready) {
            (0, _) if kind == SERVICE => states::ELSEWHERE,
            (_, 0) => states::DOWN,
            (endpoints, ready) if ready < endpoints => states::DEGRADED,
            _ => states::OK,
        };
        Service {
            name: name.to_owned(),
            kind: kind.to_owned(),
            state: state.to_owned(),
            reachable,
            endpoints,
            ready,
            active: traffic.active as u64,
            opened: traffic.opened,
            bytes_up: traffic.bytes_up,
            bytes_down: traffic.bytes_down,
            failed: traffic.failed,
            past: Past::default(),
        }
    };
    let services = snapshot.services().into_iter().map(|service| {
        let ports = service.ports.iter().filter_map(|port| port.candidates("", AskedBy::MeshName));
        // A service is listed with the numbers of endpoints of a single port: the port with the most endpoints that are not
        // ready.
        let worst = ports.map(|of| health(of)).max_by_key(|(all, ready)| (all - ready, *all));
        let reachable = service.is_offered(snapshot.networks());
        row(&service.name, SERVICE, reachable, worst.unwrap_or_default())
    });
    let routes = snapshot.policy.routes.iter().map(|route| {
        let candidates = match &route.to {
            RouteTarget::Service { hostname, port, subset } => {
                let port = snapshot.service(hostname.as_str()).and_then(|service| service.port(*port));
                port.and_then(|port| port.candidates(subset, AskedBy::Hostname))
            }
            RouteTarget::Endpoints { .. } | RouteTarget::Backends(_) => {
                snapshot.routes().named(&route.name).and_then(|entry| entry.candidates.as_ref())
            }
        };
        row(&route.name, ROUTE, true, candidates.map_or((0, 0), |of| health(of)))
    });
    services.chain(routes).collect()
}

const SERVICE: &str = "service";
const ROUTE: &str = "route";

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::service::PortProtocol;
    use isthmus_settings::policy::Policy;
    use isthmus_settings::route::{Route, RouteName};
    use isthmus_snapshot::testing::{Mesh, endpoint, host_name, pattern, port, service, shard};

    fn board(count: usize) -> Board {
        let service = |index: usize| Service { name: format!("s{index}.test"), ..Service::default() };
        Board { services: (0..count).map(service).collect(), ..Board::default() }
    }

    #[test]
    fn only_troubled_endpoints_that_are_there_are_missing_from_those_that_are_ready() {
        let endpoints = ["10.0.0.1", "10.0.0.2"].map(|host| endpoint(host, 1)).to_vec();
        let of = service("a.mesh", vec![port(443, PortProtocol::Tls)], endpoints);
        let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", vec![of])]);
        let to = RouteTarget::Service { hostname: host_name("a.mesh"), port: 443, subset: "".into() };
        let route = Route::new(RouteName::Name(pattern("b.test")), to);
        mesh.policy = Policy { routes: vec![route.into()], ..(*mesh.policy).clone() }.into();
        let ready = |troubled: &str| {
            let is_troubled = |key: &EndpointKey| key.address.ip().to_string() == troubled;
            let rows = rows(&mesh.snapshot(), &HashMap::new(), &is_troubled);
            let seen = |row: &Service| (row.endpoints, row.ready, row.state.clone());
            assert_eq!((rows.len(), seen(&rows[1])), (2, seen(&rows[0])), "the route leads to the service");
            seen(&rows[0])
        };
        assert_eq!(ready("10.0.0.2"), (2, 1, states::DEGRADED.to_owned()));
        // The gateway keeps the state of a replaced pod for a while, but that state does not affect the service.
        assert_eq!(ready("10.0.0.9"), (2, 2, states::OK.to_owned()));
    }

    #[test]
    fn pages_are_bounded_and_every_service_is_on_one() {
        let board = board(101);
        let page = |page| board.page(&Ask { page, ..Ask::default() });
        let names =
            |page: &Services| page.shown.iter().map(|service| service.name.clone()).collect::<Vec<_>>();
        let all: Vec<String> = [1, 2, 3].into_iter().flat_map(|number| names(&page(number))).collect();
        assert_eq!(all.len(), 101);
        assert_eq!((page(0).page, page(usize::MAX).page, page(1).pages), (1, 3, 3));
        let found = board.page(&Ask { query: " S100 ".to_owned(), page: 7, ..Ask::default() });
        assert_eq!((found.matching, found.page, found.pages, found.total), (1, 1, 1, 101));
        assert_eq!(names(&found), ["s100.test"]);
        let long = board.page(&Ask { query: "é".repeat(1000), page: 1, ..Ask::default() });
        assert!(long.query.len() <= QUERY_MAX && long.shown.is_empty() && long.pages == 1);
    }

    #[test]
    fn reasons_that_happen_now_come_first() {
        let failure = |reason: Reason, time: SystemTime, sni: &str| Connection {
            reason: Some(reason.text().to_owned()),
            time: rfc3339(time),
            sni: Some(sni.to_owned()),
            ..Connection::default()
        };
        let now = SystemTime::now();
        let failures = [
            failure(Reason::NotTls, now, "new"),
            failure(Reason::NotTls, now - 2 * RECENT, "old"),
            failure(Reason::SniUnknown, now - 2 * RECENT, "older"),
        ];
        let ended = BTreeMap::from([
            ("sni_unknown".to_owned(), 900),
            ("not_tls".to_owned(), 2),
            ("ok".to_owned(), 5),
            ("no_sni".to_owned(), 4),
        ]);
        let all = refusals(&ended, &failures);
        let short: Vec<_> = all
            .iter()
            .map(|one| (one.reason.as_str(), one.total, one.recent, one.last_name.as_deref()))
            .collect();
        let expected =
            [("not_tls", 2, 1, Some("new")), ("sni_unknown", 900, 0, Some("older")), ("no_sni", 4, 0, None)];
        assert_eq!(short, expected);
    }
}
