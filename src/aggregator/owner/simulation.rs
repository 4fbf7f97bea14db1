//! Simulates registries that flap, reorder, stall and return, clients that join, leave, refuse and reconnect, and a process
//! that restarts while registries are missing. The owner, the hub and the sessions are the real ones, without sockets and in
//! virtual time. A failure prints its seed.
//!
//! The clients are written from the protocol documentation alone, as simply as possible. [`Client::keeps`] decides which
//! resources a client keeps while a registry is missing; it is written from
//! `docs/registries.md, "When a registry cannot be read"` alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::SystemTime;

use prost::Message as _;

use super::*;
use crate::registry::{Changes as Outlet, Registry};
use crate::spec::RegistryKind;
use crate::status::RegistryState;
use isthmus_ads::budget::Budget;
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::protocol::{Protocol, Request, Response};
use isthmus_ads::resource::Version;
use isthmus_decisions::view::{ClientKind, Families, Tunnel, Viewer};
use isthmus_document::services::read_registry;
use isthmus_model::name::NamePattern;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_model::service::{Service, ServiceKey};
use isthmus_net::lookup::{Answer, Resolution};
use isthmus_proto::envoy::config::endpoint::v3::ClusterLoadAssignment;
use isthmus_registry::change::{Item, Key};
use isthmus_settings::network::Gateway;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::routes::Resolved;
use isthmus_snapshot::testing::{gateway, network as network_of, policy_of, rule};
use isthmus_telemetry::recorder::Recorder;
use isthmus_xds::history::ClusterHistory;
use isthmus_xds::hub::Hub;
use isthmus_xds::kind::Kind;
use isthmus_xds::render;
use isthmus_xds::session::{ClientResources, Session};

const STEPS: usize = 10_000;
const REGISTRIES: usize = 4;
const SERVICES: u64 = 12;
const CLIENTS_MAX: usize = 8;
const EXPIRES: Duration = Duration::from_secs(600);

/// A SplitMix64 generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("an index")
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }
}

fn network(at: usize) -> Network {
    Network::new(["east", "west", "north"][at % 3])
}

fn policy() -> Arc<Policy> {
    let of_cluster = |gateway: Gateway| Gateway { cluster: ClusterId::new("c1"), ..gateway };
    let networks = vec![
        network_of("east", vec![gateway("192.168.0.1", 1)]),
        network_of("west", vec![of_cluster(gateway("192.168.1.1", 1)), gateway("192.168.1.2", 2)]),
        network_of("north", vec![gateway("gateway.north", 1)]),
    ];
    Arc::new(Policy { networks, exports: vec![rule("*")], ..policy_of("c0", "east") })
}

/// Returns the scope of a registry: all services for registries 0 and 1, one half of the services each for registries 2 and 3.
fn scope(at: usize) -> RegistryScope {
    let half = SERVICES / 2;
    let services = match at {
        2 => 0..half,
        3 => half..SERVICES,
        _ => 0..0,
    };
    let services = services.map(|service| NamePattern::parse(&format!("s{service}.mesh")).expect("legal"));
    RegistryScope { services: services.collect(), ..RegistryScope::default() }
}

/// The registries that were not read since the process started, and the services that the other registries have changed.
#[derive(Debug, Default)]
struct MissingRegistries {
    registries: BTreeSet<usize>,
    /// Services that another registry has certainly changed.
    changed: BTreeSet<HostName>,
    /// Services that another registry has changed, or whose change is held back as a mass withdrawal.
    perhaps: BTreeSet<HostName>,
}

impl MissingRegistries {
    /// Returns true if a missing registry may have the service of a name.
    fn may_have(&self, kind: Kind, name: &str) -> bool {
        let hostname = kind.read(name).expect("a name of ours").hostname;
        let has = |at: &usize| {
            let services = scope(*at).services;
            services.is_empty() || services.iter().any(|one| one.matches(hostname.as_str()))
        };
        self.registries.iter().any(has)
    }
}

/// Returns the next state of a registry: some services with some endpoints.
fn services(at: usize, random: &mut Random) -> Services {
    let mut text = String::from("services:\n");
    let mut any = false;
    for service in 0..SERVICES {
        if random.percent(30) {
            continue;
        }
        any = true;
        let port = if service == 0 && random.percent(20) { 81 } else { 80 };
        text += &format!(
            "- hostname: s{service}.mesh\n  namespace: n\n  ports: [{{name: http, port: {port}}}, \
             {{name: tls, port: 443, protocol: TLS}}]\n  subsets: {{v1: {{version: v1}}}}\n  endpoints:\n"
        );
        let endpoints = random.below(4);
        if endpoints == 0 {
            text = text.trim_end_matches("  endpoints:\n").to_owned() + "  endpoints: []\n";
        }
        for endpoint in 0..endpoints {
            let health = ["healthy", "healthy", "healthy", "unhealthy", "draining"][random.index(5)];
            let (host, weight, identity) = (random.below(6), 1 + random.below(3), random.below(2));
            text += &format!(
                "  - {{address: 10.{at}.{endpoint}.{host}, weight: {weight}, health: {health}, labels: {{version: \
                 v{endpoint}}}, locality: r/z{endpoint}, identity: \"spiffe://cluster.local/ns/n/sa/{identity}\"}}\n"
            );
        }
    }
    if !any {
        text = "services: []\n".into();
    }
    let (cluster, network) = (ClusterId::new(&format!("c{at}")), network(at));
    let listing = read_registry("r.yaml".as_ref(), &text, &cluster, &network).expect("a good registry");
    listing.services
}

type Services = BTreeMap<ServiceKey, Arc<Service>>;

/// Returns the changes of a listing.
fn listing(services: &Services) -> Vec<Change> {
    let puts = services.values().map(|service| Change::Put(Item::Service(service.clone())));
    std::iter::once(Change::Begin).chain(puts).chain([Change::Complete]).collect()
}

/// Returns the changes from one state to another.
fn difference(before: &Services, after: &Services) -> Vec<Change> {
    let puts = after.iter().filter(|(key, service)| before.get(*key) != Some(*service));
    let puts = puts.map(|(_, service)| Change::Put(Item::Service(service.clone())));
    let gone = before.keys().filter(|key| !after.contains_key(*key));
    puts.chain(gone.cloned().map(|key| Change::Remove(Key::Service(key)))).collect()
}

/// A registry whose changes the simulation sends.
struct Silent(RegistrySpec);

impl Registry for Silent {
    fn spec(&self) -> &RegistrySpec {
        &self.0
    }

    fn run(self: Box<Self>, _: Outlet) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::pending())
    }
}

/// The reply of a client to a response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reply {
    Accept,
    Refuse,
}

/// A client as the protocol documentation describes it.
struct Client {
    viewer: Viewer,
    protocol: Protocol,
    session: Session,
    /// Responses that the client has not read yet.
    inbox: VecDeque<Response>,
    has: BTreeMap<(Kind, Arc<str>), Version>,
    /// Resources whose newest version the client has refused; it keeps the older version.
    refused: BTreeMap<(Kind, Arc<str>), Version>,
    /// Resources that the client keeps because it has refused their removal.
    kept: BTreeSet<(Kind, Arc<str>)>,
    /// The names of the assignments that the client subscribes to.
    wants: BTreeSet<String>,
    nonces: BTreeMap<Kind, String>,
    /// The resources that the client reported when it last reconnected.
    brought: BTreeMap<(Kind, Arc<str>), Version>,
    /// The assignments that the client subscribed to when it last reconnected; empty if it reported that it had none.
    wanted: BTreeSet<String>,
    /// Assignments in `brought` whose version equals that of a snapshot which was current at some time since the client
    /// reconnected.
    exact: BTreeSet<Arc<str>>,
    /// The number of endpoints of every assignment that the client has received, by version.
    endpoints: BTreeMap<Version, usize>,
}

/// Returns a session whose names have no limit.
fn session(hub: &Arc<Hub>, viewer: &Viewer, protocol: Protocol) -> Session {
    let account = Budget::new(usize::MAX).account([127, 0, 0, 1].into(), usize::MAX);
    Session::new(ClientResources::new(hub.clone(), viewer.clone(), protocol), protocol, account)
}

impl Client {
    fn join(hub: &Arc<Hub>, random: &mut Random) -> Self {
        let viewer = Viewer {
            tunnel: Tunnel::Sni,
            network: if random.percent(10) { Network::default() } else { network(random.index(3)) },
            cluster: ClusterId::new(&format!("c{}", random.below(4))),
            families: Families::Both,
            client: ClientKind::Envoy,
            sees: Arc::default(),
            zone: Locality::default(),
        };
        let protocol = if random.percent(50) { Protocol::Delta } else { Protocol::StateOfTheWorld };
        let session = session(hub, &viewer, protocol);
        let mut client = Self {
            viewer,
            protocol,
            session,
            inbox: VecDeque::new(),
            has: BTreeMap::new(),
            refused: BTreeMap::new(),
            kept: BTreeSet::new(),
            wants: BTreeSet::new(),
            nonces: BTreeMap::new(),
            brought: BTreeMap::new(),
            wanted: BTreeSet::new(),
            exact: BTreeSet::new(),
            endpoints: BTreeMap::new(),
        };
        client.ask(Kind::Cluster, Request::default());
        client
    }

    fn ask(&mut self, kind: Kind, request: Request) {
        self.session.request(kind, request).expect("few names");
    }

    /// Reconnects, sometimes reporting the resources that it has.
    fn come_back(&mut self, hub: &Arc<Hub>, random: &mut Random) {
        self.session = session(hub, &self.viewer, self.protocol);
        self.inbox.clear();
        self.nonces.clear();
        // The client does not have a refused resource, so the resource is sent again.
        self.refused.clear();
        self.kept.clear();
        let tells = random.percent(80);
        if !tells {
            self.has.clear();
        }
        self.brought = self.has.clone();
        self.exact.clear();
        let has_any = |kind: Kind| self.brought.keys().any(|(of, _)| *of == kind);
        let (has_clusters, has_assignments) = (has_any(Kind::Cluster), has_any(Kind::Assignment));
        self.wanted = if has_assignments { self.wants.clone() } else { BTreeSet::new() };
        let versions = |kind: Kind| {
            let own = self.has.iter().filter(|((of, _), _)| *of == kind);
            own.map(|((_, name), version)| (name.to_string(), version.text())).collect::<Vec<_>>()
        };
        let (clusters, assignments) = (versions(Kind::Cluster), versions(Kind::Assignment));
        self.ask(Kind::Cluster, Request { has: clusters, returns: has_clusters, ..Request::default() });
        if !self.wants.is_empty() {
            let names = self.wants.iter().cloned().collect();
            let returns = has_assignments;
            self.ask(Kind::Assignment, Request { names, has: assignments, returns, ..Request::default() });
        }
    }

    /// Changes the subscriptions.
    fn want(&mut self, random: &mut Random) {
        let name = match random.below(3) {
            0 => format!("outbound|80||s{}.mesh", random.below(SERVICES)),
            1 => format!("outbound|443|v1|s{}.mesh", random.below(SERVICES)),
            _ => format!("outbound_.80_._.s{}.mesh", random.below(SERVICES + 2)),
        };
        let added = self.wants.insert(name.clone());
        if !added {
            self.wants.remove(&name);
            let key = (Kind::Assignment, name.as_str().into());
            self.has.remove(&key);
            self.refused.remove(&key);
            self.brought.remove(&key);
            self.wanted.remove(&name);
        }
        let nonce = self.nonces.get(&Kind::Assignment).cloned().unwrap_or_default();
        let request = match (self.protocol, added) {
            (Protocol::Delta, true) => Request { names: vec![name], ..Request::default() },
            (Protocol::Delta, false) => Request { unsubscribe: vec![name], ..Request::default() },
            (Protocol::StateOfTheWorld, _) => {
                Request { names: self.wants.iter().cloned().collect(), nonce, ..Request::default() }
            }
        };
        self.ask(Kind::Assignment, request);
    }

    /// Moves the responses of the session to the inbox, and checks the resources that they remove.
    fn receive(&mut self, worlds: &[&Snapshot; 2], missing: &MissingRegistries) {
        while let Some(response) = self.session.response() {
            for name in &response.removed {
                let kind = Kind::of_type_url(&response.type_url).expect("a type we asked for");
                let target = kind.read(name).expect("a name of ours");
                let has = |world: &&Snapshot| {
                    let service = world.service(target.hostname.as_str());
                    service.is_some_and(|service| service.port(target.port).is_some())
                };
                assert!(!worlds.iter().all(has), "{name} was removed, and registries tell of it");
                let brought = self.brought.contains_key(&(kind, name.clone()));
                assert!(
                    !brought || !missing.may_have(kind, name),
                    "{name} was taken from a client that came back"
                );
            }
            self.inbox.push_back(response);
        }
        assert!(self.inbox.len() <= Kind::ALL.len(), "one response of a type is in flight at most");
    }

    /// Reads one response, and accepts or refuses it.
    fn read(&mut self, reply: Reply) {
        let Some(response) = self.inbox.pop_front() else { return };
        let kind = Kind::of_type_url(&response.type_url).expect("a type we asked for");
        let told: BTreeSet<&Arc<str>> = response.resources.iter().map(|resource| &resource.name).collect();
        assert_eq!(told.len(), response.resources.len(), "a name twice in one response");
        assert!(response.removed.iter().all(|name| !told.contains(name)), "told of and removed at once");
        if kind == Kind::Assignment {
            assert!(
                response.removed.is_empty(),
                "assignments are emptied, never removed: {:?}",
                response.removed
            );
        }
        for resource in &response.resources {
            if kind == Kind::Assignment && !self.wants.contains(&*resource.name) {
                continue;
            }
            let key = (kind, resource.name.clone());
            if kind == Kind::Assignment {
                let any = prost_types::Any::decode(resource.any()).expect("an Any");
                let told = ClusterLoadAssignment::decode(&*any.value).expect("an assignment");
                let count = told.endpoints.iter().map(|locality| locality.lb_endpoints.len()).sum();
                self.endpoints.insert(resource.version, count);
            }
            self.kept.remove(&key);
            if reply == Reply::Refuse {
                self.refused.insert(key, resource.version);
            } else {
                self.refused.remove(&key);
                self.has.insert(key, resource.version);
            }
        }
        let mut gone: BTreeSet<(Kind, Arc<str>)> =
            response.removed.iter().map(|name| (kind, name.clone())).collect();
        if self.protocol == Protocol::StateOfTheWorld && kind == Kind::Cluster {
            gone.extend(self.has.keys().filter(|(of, name)| *of == kind && !told.contains(name)).cloned());
        }
        for key in gone {
            if reply == Reply::Refuse {
                self.kept.insert(key);
            } else {
                self.has.remove(&key);
            }
        }
        self.nonces.insert(kind, response.nonce.clone());
        let names = match (self.protocol, kind) {
            (Protocol::StateOfTheWorld, Kind::Assignment) => self.wants.iter().cloned().collect(),
            _ => Vec::new(),
        };
        let error = (reply == Reply::Refuse).then(|| "no".to_owned());
        self.ask(kind, Request { names, nonce: response.nonce, error, ..Request::default() });
    }

    /// Returns the version of an assignment in a snapshot.
    fn version_in(&self, world: &Snapshot, name: &str) -> Version {
        let (kind, name): (Kind, Arc<str>) = (Kind::Assignment, name.into());
        let target = kind.read(&name);
        let history = &ClusterHistory::default();
        let inputs = render::Inputs { snapshot: world, history, now: Instant::now() };
        let made = render::resource(inputs, kind, &name, target.as_ref(), &self.viewer);
        made.expect("there is one of each name").version
    }

    /// Adds to `exact` the assignments in `brought` that equal those of a snapshot.
    fn compare(&mut self, world: &Snapshot) {
        let of_assignments = self.brought.iter().filter(|((kind, _), _)| *kind == Kind::Assignment);
        let same = of_assignments.filter(|((_, name), version)| self.version_in(world, name) == **version);
        let same: Vec<Arc<str>> = same.map(|((_, name), _)| name.clone()).collect();
        self.exact.extend(same);
    }

    /// Returns true if the client rightly has another version of a resource than the snapshot, because a registry is missing.
    fn keeps(&self, key: &(Kind, Arc<str>), current: Option<Version>, missing: &MissingRegistries) -> bool {
        let (kind, name) = key;
        let (brought, has) = (self.brought.get(key), self.has.get(key));
        if missing.registries.is_empty() {
            return false;
        }
        if *kind == Kind::Cluster {
            let returned = self.brought.keys().any(|(of, _)| of == kind);
            return match self.protocol {
                // A state-of-the-world response names all clusters of xDS, so it waits for the missing registries.
                Protocol::StateOfTheWorld => returned && has == brought,
                // The client keeps a resource that it brought, or that the snapshot does not have.
                Protocol::Delta => {
                    let kept = has.is_some() && (brought.is_some() || current.is_none());
                    returned && missing.may_have(*kind, name) && kept
                }
            };
        }
        // A state-of-the-world client does not report for which of its names it has a resource.
        let may_have_brought =
            brought.is_some() || self.protocol == Protocol::StateOfTheWorld && self.wanted.contains(&**name);
        if !may_have_brought || !missing.may_have(*kind, name) {
            return false;
        }
        let hostname = kind.read(name).expect("a name of ours").hostname;
        let is_empty = |version: &Version| self.endpoints.get(version) == Some(&0);
        if has == brought && !missing.changed.contains(&hostname) {
            // No registry has changed the service: the client keeps its resource.
            return true;
        }
        // A registry has changed the service, so the client gets the new resource, unless the new one would empty the client's.
        let would_be_emptied = current.is_none_or(|version| version == self.empty_version(name));
        would_be_emptied && has.is_none_or(|version| !is_empty(version))
    }

    fn empty_version(&self, name: &str) -> Version {
        self.version_in(
            &build::all(
                Inputs {
                    trust_roots: &Default::default(),
                    policy: &policy(),
                    policy_generation: 1,
                    shards: &[],
                    resolved: &Resolved::default(),
                    virtual_addresses: None,
                    probes: None,
                    drains: &Arc::default(),
                    recent: None,
                    remembered: None,
                },
                1,
            ),
            name,
        )
    }

    /// Asserts that the client has lost nothing that a missing registry may have.
    fn check_kept(&self, missing: &MissingRegistries) {
        for (key, brought) in &self.brought {
            let (kind, name) = key;
            if !missing.may_have(*kind, name) {
                continue;
            }
            let has = self.has.get(key);
            assert!(has.is_some(), "{:?}: {key:?} was taken from it", self.protocol);
            let hostname = kind.read(name).expect("a name of ours").hostname;
            if *kind == Kind::Assignment {
                let count = |version: &Version| self.endpoints.get(version).copied();
                assert!(
                    count(brought) == Some(0) || has.and_then(count) != Some(0),
                    "{:?}: {key:?} was emptied",
                    self.protocol
                );
                let changed = missing.perhaps.contains(&hostname) || self.exact.contains(name);
                assert!(changed || has == Some(brought), "{:?}: {key:?} was changed for it", self.protocol);
            }
        }
    }

    /// Asserts that the client has the resources of the snapshot. A resource may differ if the client has refused an update, or
    /// keeps the resource because of a missing registry.
    fn check(&self, hub: &Hub, truth: &Snapshot, missing: &MissingRegistries) {
        self.check_kept(missing);
        let mut expected: BTreeMap<(Kind, Arc<str>), Version> = BTreeMap::new();
        for (_, clusters) in hub.all_of(Kind::Cluster).iter() {
            for cluster in clusters.iter() {
                expected.insert((Kind::Cluster, cluster.name.clone()), cluster.version);
            }
        }
        for service in truth.services() {
            for port in &service.ports {
                let name: Arc<str> = format!("outbound|{}||{}", port.port, service.name).into();
                assert!(expected.contains_key(&(Kind::Cluster, name.clone())), "no cluster {name}");
            }
        }
        for name in &self.wants {
            let name: Arc<str> = name.as_str().into();
            let version = self.version_in(truth, &name);
            expected.insert((Kind::Assignment, name), version);
        }
        for (key, version) in &expected {
            let held = self.has.get(key) == Some(version) || self.refused.get(key) == Some(version);
            let right = held || self.keeps(key, Some(*version), missing);
            assert!(
                right,
                "{:?}: {key:?} is not as the world has it: {version:?}, has {:?}, brought {:?}, {missing:?}, {:?}, held back {}",
                self.protocol,
                self.has.get(key),
                self.brought.get(key),
                self.session.overview(key.0),
                self.session.held_back(),
            );
        }
        let more: Vec<_> = self.has.keys().filter(|key| !expected.contains_key(*key)).collect();
        let right = |key: &&&(Kind, Arc<str>)| self.kept.contains(**key) || self.keeps(key, None, missing);
        assert!(
            more.iter().all(|key| right(&key)),
            "{:?}: held and gone: {more:?}, {missing:?}, {:?}",
            self.protocol,
            self.session.overview(Kind::Cluster),
        );
    }
}

struct Run {
    owner: Owner,
    reader: Reader,
    hub: Arc<Hub>,
    seen: Arc<Snapshot>,
    now: Instant,
    clients: Vec<Client>,
    random: Random,
    /// The last state of each registry.
    said: BTreeMap<usize, Services>,
    /// Registries that have listed since the process started.
    listed: BTreeSet<usize>,
    missing: MissingRegistries,
    scope: Scope,
    restarts: usize,
    /// The number of names that sessions held back, summed over all checks.
    held_back: usize,
    started: Instant,
    /// Registries of which an update was delayed as a mass withdrawal since the process started.
    ever_held: BTreeSet<usize>,
}

/// Starts a process in which no registry was read.
pub(super) fn process(scope: &Scope) -> (Owner, Reader) {
    let registries = (0..REGISTRIES).map(|at| RegistrySpec {
        name: format!("r{at}").into(),
        cluster: ClusterId::new(&format!("c{at}")),
        network: network(at),
        scope: self::scope(at),
        kind: RegistryKind::File { path: "/nowhere".into() },
    });
    let options = Options { expire_after: Some(EXPIRES), ..Options::default() };
    let services = Listing::default();
    let sources = Sources { policy: policy(), services, registries: registries.collect(), options };
    let telemetry = Arc::new(Control::new(&Recorder::default()));
    let (owner, _, _, reader) = Owner::new(
        sources,
        Arc::new(|spec| Box::new(Silent(spec.clone()))),
        &telemetry,
        scope,
        (CopyStore::default(), Recalled::default()),
    );
    (owner, reader)
}

impl Run {
    fn new(seed: u64, scope: &Scope) -> Self {
        let (owner, reader) = process(scope);
        let hub = Hub::new(reader.clone());
        let mut world = Self {
            owner,
            hub,
            seen: reader.latest(),
            reader,
            now: Instant::now(),
            clients: Vec::new(),
            random: Random(seed),
            said: BTreeMap::new(),
            listed: BTreeSet::new(),
            missing: MissingRegistries {
                registries: (0..REGISTRIES).collect(),
                ..MissingRegistries::default()
            },
            scope: scope.clone(),
            restarts: 0,
            held_back: 0,
            started: Instant::now(),
            ever_held: BTreeSet::new(),
        };
        // Clients are served after every registry has answered.
        (0..REGISTRIES).for_each(|at| world.good_word(at));
        world
    }

    fn good_word(&mut self, at: usize) {
        let services = services(at, &mut self.random);
        self.say(at, services);
    }

    /// Simulates a successful read of a registry with this state.
    fn say(&mut self, at: usize, services: Services) {
        let before = self.said.insert(at, services.clone());
        let known = !self.missing.registries.remove(&at);
        let listed = self.listed.insert(at);
        // A registry that has listed sends changes or lists again, in one batch or in several.
        let mut changes = match before.as_ref().filter(|_| !listed && self.random.percent(70)) {
            Some(before) => difference(before, &services),
            None => listing(&services),
        };
        if self.random.percent(20) {
            let rest = changes.split_off(self.random.index(changes.len() + 1));
            self.send(at, changes);
            changes = rest;
        }
        self.send(at, changes);
        if known && !self.missing.registries.is_empty() {
            let before = before.expect("it was read");
            let changed = difference(&before, &services).into_iter().map(|change| match change {
                Change::Put(Item::Service(service)) => service.key.hostname.clone(),
                Change::Remove(Key::Service(key)) => key.hostname,
                other => panic!("not sent here: {other:?}"),
            });
            let taken = scope(at).services;
            let takes =
                |name: &HostName| taken.is_empty() || taken.iter().any(|one| one.matches(name.as_str()));
            let changed: Vec<HostName> = changed.filter(takes).collect();
            let held = self.owner.registries[at].life.state() == RegistryState::Held;
            self.missing.perhaps.extend(changed.iter().cloned());
            if !held && !self.ever_held.contains(&at) {
                self.missing.changed.extend(changed);
            }
            if held {
                self.ever_held.insert(at);
            }
        }
        self.forget_changes();
    }

    /// Sends a batch to the owner, and sometimes a batch of another epoch, which the owner must drop.
    fn send(&mut self, at: usize, batch: Vec<Change>) {
        let epoch = self.owner.registries[at].life.epoch;
        let mut messages = vec![Message::Changes(epoch, batch)];
        if self.random.percent(5) {
            let old = vec![Change::Begin, Change::Complete];
            messages.push(Message::Changes(Epoch(epoch.0 + 1_000), old));
        }
        self.owner.take(messages, self.now);
    }

    /// Forgets the recorded changes if no registry is missing.
    fn forget_changes(&mut self) {
        if self.missing.registries.is_empty() {
            self.missing = MissingRegistries::default();
        }
    }

    /// Ends the process and starts another one, which can read only some of the registries; the clients
    /// reconnect.
    fn restart(&mut self) {
        self.restarts += 1;
        (self.owner, self.reader) = process(&self.scope);
        self.hub = Hub::new(self.reader.clone());
        self.seen = self.reader.latest();
        // The time for which a registry is missing counts from the start of the process.
        self.now = Instant::now();
        self.started = self.now;
        self.ever_held.clear();
        self.listed.clear();
        self.missing =
            MissingRegistries { registries: (0..REGISTRIES).collect(), ..MissingRegistries::default() };
        for at in 0..REGISTRIES {
            if self.random.percent(60) {
                match self.said.get(&at).cloned().filter(|_| self.random.percent(70)) {
                    Some(same) => self.say(at, same),
                    None => self.good_word(at),
                }
            }
        }
        self.dispatch();
        let (hub, latest) = (self.hub.clone(), self.reader.latest());
        for client in &mut self.clients {
            client.come_back(&hub, &mut self.random);
            client.compare(&latest);
        }
    }

    fn dispatch(&mut self) {
        let next = self.reader.latest();
        // No task of the owner runs meanwhile: this call drives the future alone.
        tokio::runtime::Handle::current().block_on(self.hub.step(&self.seen, &next));
        self.clients.iter_mut().for_each(|client| client.compare(&next));
        self.seen = next;
    }

    fn step(&mut self) {
        let at = self.random.index(REGISTRIES);
        match self.random.below(20) {
            // A missing registry often stays missing for a long time.
            0..5 if self.missing.registries.contains(&at) && self.random.percent(90) => {}
            0..5 => self.good_word(at),
            5 => {
                self.send(at, vec![Change::Failed(vec!["half written".into()])]);
                if let Some(copy) = self.said.get(&at).filter(|_| self.random.percent(10)).cloned() {
                    self.missing.registries.remove(&at);
                    self.forget_changes();
                    let items = copy.into_values().map(Item::Service).collect();
                    let name = format!("r{at}").into();
                    let news = CopyEvent::Read(name, Ok(Some((items, SystemTime::now()))));
                    self.owner.take(vec![Message::Copy(news)], self.now);
                }
            }
            6 => {
                self.now += Duration::from_secs(self.random.below(300));
                if self.now.duration_since(self.started) >= EXPIRES {
                    self.missing = MissingRegistries::default();
                }
                self.owner.take(vec![Message::Sweep], self.now);
            }
            7 => {
                let name = HostName::parse("gateway.north").expect("a name");
                let ipv4 = match self.random.below(3) {
                    0 => Answer::Failed("timed out".into()),
                    1 => Answer::Addresses(Vec::new()),
                    _ => {
                        let last = u8::try_from(self.random.below(3)).expect("small");
                        Answer::Addresses(vec![std::net::IpAddr::from([192, 168, 2, last])])
                    }
                };
                let answer = Resolution { ipv4, ipv6: Answer::Addresses(Vec::new()) };
                self.owner.take(vec![Message::Resolution(name, answer.into())], self.now);
            }
            8 if self.clients.len() < CLIENTS_MAX => {
                self.clients.push(Client::join(&self.hub, &mut self.random));
            }
            9 if !self.clients.is_empty() && self.random.percent(30) => {
                let leaves = self.random.index(self.clients.len());
                self.clients.swap_remove(leaves);
            }
            10 if !self.clients.is_empty() && self.random.percent(40) => {
                let at = self.random.index(self.clients.len());
                self.clients[at].come_back(&self.hub, &mut self.random);
                self.clients[at].compare(&self.reader.latest());
            }
            11..14 if !self.clients.is_empty() => {
                let at = self.random.index(self.clients.len());
                self.clients[at].want(&mut self.random);
            }
            14 if self.random.percent(4) => self.restart(),
            14 | 15 => self.dispatch(),
            _ if !self.clients.is_empty() => {
                let at = self.random.index(self.clients.len());
                let reply = if self.random.percent(10) { Reply::Refuse } else { Reply::Accept };
                let latest = self.reader.latest();
                // The hub has rendered from one of the two snapshots.
                self.clients[at].receive(&[&self.seen, &latest], &self.missing);
                self.clients[at].read(reply);
            }
            _ => {}
        }
    }

    /// Asserts that the items in use of each live registry equal the items that the registry sent last.
    fn check_registries(&self) {
        for (at, services) in &self.said {
            let life = &self.owner.registries[*at].life;
            if life.state() != RegistryState::Live || !self.listed.contains(at) {
                continue;
            }
            let listing = Listing {
                cluster: ClusterId::new(&format!("c{at}")),
                network: network(*at),
                services: services.clone(),
            };
            let said = Shard::of(listing, &scope(*at));
            let names: BTreeSet<&HostName> = said.hostnames().chain(life.shard.hostnames()).collect();
            for name in names {
                assert!(
                    life.shard.says_the_same(&said, name.as_str()),
                    "registry {at} says something else of {name}"
                );
            }
        }
    }

    /// Runs until every message is delivered.
    fn quiet(&mut self) {
        self.check_registries();
        self.dispatch();
        let truth = self.reader.latest();
        // A client may wait for a turn until a later client has answered.
        let mut has_delivered = true;
        while std::mem::take(&mut has_delivered) {
            for client in &mut self.clients {
                loop {
                    client.receive(&[&truth, &truth], &self.missing);
                    if client.inbox.is_empty() {
                        break;
                    }
                    client.read(Reply::Accept);
                    has_delivered = true;
                }
            }
        }
        self.held_back += self.clients.iter().map(|client| client.session.held_back()).sum::<usize>();
        self.clients.iter().for_each(|client| client.check(&self.hub, &truth, &self.missing));
    }
}

fn simulate(seed: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _context = runtime.enter();
    let scope = Scope::default();
    let mut world = Run::new(seed, &scope);
    for step in 0..STEPS {
        world.step();
        if step % 100 == 99 {
            world.quiet();
        }
    }
    world.clients.clear();
    assert_eq!(world.hub.renderings(), 0, "nothing is kept for clients that have gone");
    assert!(world.restarts > 10 && world.held_back > 100, "{} restarts, {}", world.restarts, world.held_back);
}

#[test]
fn after_quiet_every_client_holds_what_the_world_says() {
    let seeds = match std::env::var("ISTHMUS_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => vec![1, 2, 3],
    };
    for seed in seeds {
        let run = std::panic::catch_unwind(|| simulate(seed));
        if let Err(panic) = run {
            eprintln!("the simulation failed with ISTHMUS_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
