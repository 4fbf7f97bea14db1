//! Registries that flap, reorder, stall and return, over clients that join, leave, refuse and come back: the owner, the
//! hub and sessions as they run, without sockets and in virtual time. A failure prints its seed.
//!
//! The clients here are written from the protocol documentation alone, as simply as can be.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::*;
use crate::aggregator::file_registry::Reading;
use crate::discovery::xds::hub::Hub;
use crate::discovery::xds::kind::Kind;
use crate::discovery::xds::peers::Told;
use crate::discovery::xds::render;
use crate::discovery::xds::resource::Version;
use crate::discovery::xds::session::{Protocol, Request, Response, Session};
use crate::document::services::read_registry;
use crate::model::place::{ClusterId, Network};
use crate::snapshot::Snapshot;
use crate::snapshot::policy::Gateway;
use crate::snapshot::tests::{gateway, network as network_of, policy_of, rule};
use crate::snapshot::view::{Client as ClientKind, Families, Passage, Viewer};
use crate::telemetry::recorder::Recorder;

const STEPS: usize = 10_000;
const REGISTRIES: usize = 4;
const SERVICES: u64 = 12;
const CLIENTS_MAX: usize = 8;

/// SplitMix64.
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

/// A registry's next word: some services with some endpoints.
fn reading(at: usize, random: &mut Random) -> Reading {
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
    let shard = read_registry("r.yaml".as_ref(), &text, &cluster, &network).expect("a good registry");
    Reading { shard: ScopedShard::new(shard, &RegistryScope::default()), texts: Vec::new() }
}

/// A client, as the protocol documentation has it.
struct Client {
    viewer: Viewer,
    protocol: Protocol,
    session: Session,
    /// What the server said and this client has not read.
    inbox: VecDeque<Response>,
    has: BTreeMap<(Kind, Arc<str>), Version>,
    /// What it has refused, and keeps the older one of.
    refused: BTreeMap<(Kind, Arc<str>), Version>,
    /// What it keeps as it has refused the removal.
    kept: BTreeSet<(Kind, Arc<str>)>,
    /// Names of assignments that it wants.
    wants: BTreeSet<String>,
    nonces: BTreeMap<Kind, String>,
}

impl Client {
    fn join(hub: &Arc<Hub>, random: &mut Random) -> Self {
        let viewer = Viewer {
            passage: Passage::Sni,
            network: if random.percent(10) { Network::default() } else { network(random.index(3)) },
            cluster: ClusterId::new(&format!("c{}", random.below(4))),
            families: Families::Both,
            client: ClientKind::Envoy,
            sees: Arc::default(),
        };
        let protocol = if random.percent(50) { Protocol::Delta } else { Protocol::StateOfTheWorld };
        let session = Session::new(hub.clone(), viewer.clone(), protocol);
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
        };
        client.ask(Kind::Cluster, Request::default());
        client
    }

    fn ask(&mut self, kind: Kind, request: Request) {
        self.session.request(kind, request).expect("few names");
    }

    /// Connects anew, perhaps telling what it has.
    fn come_back(&mut self, hub: &Arc<Hub>, random: &mut Random) {
        self.session = Session::new(hub.clone(), self.viewer.clone(), self.protocol);
        self.inbox.clear();
        self.nonces.clear();
        // What was refused is not held, so that it is sent again.
        self.refused.clear();
        self.kept.clear();
        let tells = random.percent(70) && self.protocol == Protocol::Delta;
        if !tells {
            self.has.clear();
        }
        let versions = |kind: Kind| {
            let own = self.has.iter().filter(|((of, _), _)| *of == kind);
            own.map(|((_, name), version)| (name.to_string(), version.text())).collect::<Vec<_>>()
        };
        let (clusters, assignments) = (versions(Kind::Cluster), versions(Kind::Assignment));
        self.ask(Kind::Cluster, Request { has: clusters, ..Request::default() });
        if !self.wants.is_empty() {
            let names = self.wants.iter().cloned().collect();
            self.ask(Kind::Assignment, Request { names, has: assignments, ..Request::default() });
        }
    }

    /// Wants other assignments than before.
    fn want(&mut self, random: &mut Random) {
        let name = match random.below(3) {
            0 => format!("outbound|80||s{}.mesh", random.below(SERVICES)),
            1 => format!("outbound|443|v1|s{}.mesh", random.below(SERVICES)),
            _ => format!("outbound_.80_._.s{}.mesh", random.below(SERVICES + 2)),
        };
        let added = self.wants.insert(name.clone());
        if !added {
            self.wants.remove(&name);
            self.has.remove(&(Kind::Assignment, name.as_str().into()));
            self.refused.remove(&(Kind::Assignment, name.as_str().into()));
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

    /// Lets the server say what it has to say.
    fn receive(&mut self, worlds: &[&Snapshot; 2]) {
        while let Some(response) = self.session.response() {
            for name in &response.removed {
                let kind = Kind::of_type_url(&response.type_url).expect("a type we asked for");
                let target = kind.read(name).expect("a name of ours");
                let has = |world: &&Snapshot| {
                    let service = world.service(target.hostname.as_str());
                    service.is_some_and(|service| service.port(target.port).is_some())
                };
                assert!(!worlds.iter().all(has), "{name} was removed, and registries tell of it");
            }
            self.inbox.push_back(response);
        }
        assert!(self.inbox.len() <= Kind::ALL.len(), "one response of a type is in flight at most");
    }

    /// Reads one response, and takes or refuses it.
    fn read(&mut self, refuses: bool) {
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
            self.kept.remove(&key);
            if refuses {
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
            if refuses {
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
        let error = refuses.then(|| "no".to_owned());
        self.ask(kind, Request { names, nonce: response.nonce, error, ..Request::default() });
    }

    /// Whether it holds what the world says, but for what it has refused.
    fn check(&self, hub: &Hub, truth: &Snapshot) {
        let mut expected: BTreeMap<(Kind, Arc<str>), Version> = BTreeMap::new();
        for (_, clusters) in hub.all_clusters().iter() {
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
            let (kind, target) = (Kind::Assignment, Kind::Assignment.read(&name));
            let made = render::resource(truth, kind, &name, target.as_ref(), &self.viewer, &Told::default());
            expected.insert((kind, name), made.expect("there is one of each name").version);
        }
        for (key, version) in &expected {
            let held = self.has.get(key) == Some(version) || self.refused.get(key) == Some(version);
            assert!(held, "{:?}: {key:?} is not as the world has it", self.protocol);
        }
        let more: Vec<_> = self.has.keys().filter(|key| !expected.contains_key(*key)).collect();
        assert!(more.iter().all(|key| self.kept.contains(*key)), "held and gone: {more:?}");
    }
}

struct Story {
    owner: Owner,
    reader: Reader,
    hub: Arc<Hub>,
    seen: Arc<Snapshot>,
    now: Instant,
    clients: Vec<Client>,
    random: Random,
}

impl Story {
    fn new(seed: u64, scope: &Scope) -> Self {
        let registries = (0..REGISTRIES).map(|at| FileRegistry {
            name: format!("r{at}").into(),
            path: "/nowhere".into(),
            cluster: ClusterId::new(&format!("c{at}")),
            network: network(at),
            scope: RegistryScope::default(),
        });
        let options = Options { expire_after: Some(Duration::from_secs(600)), ..Options::default() };
        let sources = Sources {
            policy: policy(),
            services: Shard::default(),
            registries: registries.collect(),
            options,
        };
        let telemetry = Arc::new(Control::new(&Recorder::default()));
        let (owner, _, _, reader) = Owner::new(sources, &telemetry, scope);
        let hub = Hub::new(reader.clone());
        let (seen, now, random) = (reader.latest(), Instant::now(), Random(seed));
        let mut world = Self { owner, reader, hub, seen, now, clients: Vec::new(), random };
        // Clients are served from when every registry has answered.
        (0..REGISTRIES).for_each(|at| world.good_word(at));
        world
    }

    fn good_word(&mut self, at: usize) {
        let reading = reading(at, &mut self.random);
        self.owner.hear(&format!("r{at}").into(), Word::Good(reading), self.now);
    }

    fn dispatch(&mut self) {
        let next = self.reader.latest();
        // Of the owner's own tasks none runs meanwhile: this drives the future alone.
        tokio::runtime::Handle::current().block_on(self.hub.step(&self.seen, &next));
        self.seen = next;
    }

    fn step(&mut self) {
        let at = self.random.index(REGISTRIES);
        match self.random.below(20) {
            0..5 => self.good_word(at),
            5 => {
                let word = Word::Bad { problems: vec!["half written".into()], copy: None };
                self.owner.hear(&format!("r{at}").into(), word, self.now);
            }
            6 => {
                self.now += Duration::from_secs(self.random.below(300));
                self.owner.sweep(self.now);
            }
            7 => {
                let name = HostName::parse("gateway.north").expect("a name");
                let answer = match self.random.below(3) {
                    0 => Answer::Failed("timed out".into()),
                    1 => Answer::Addresses(Arc::new([])),
                    _ => {
                        let last = u8::try_from(self.random.below(3)).expect("small");
                        Answer::Addresses([std::net::IpAddr::from([192, 168, 2, last])].into())
                    }
                };
                self.owner.resolve(std::iter::once((name, answer)));
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
            }
            11..14 if !self.clients.is_empty() => {
                let at = self.random.index(self.clients.len());
                self.clients[at].want(&mut self.random);
            }
            14 | 15 => self.dispatch(),
            _ if !self.clients.is_empty() => {
                let at = self.random.index(self.clients.len());
                let refuses = self.random.percent(10);
                let latest = self.reader.latest();
                // What the hub has rendered is of one of the two.
                self.clients[at].receive(&[&self.seen, &latest]);
                self.clients[at].read(refuses);
            }
            _ => {}
        }
    }

    /// Lets everybody hear everything.
    fn quiet(&mut self) {
        self.dispatch();
        let truth = self.reader.latest();
        for client in &mut self.clients {
            loop {
                client.receive(&[&truth, &truth]);
                if client.inbox.is_empty() {
                    break;
                }
                client.read(false);
            }
        }
        self.clients.iter().for_each(|client| client.check(&self.hub, &truth));
    }
}

fn simulate(seed: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _context = runtime.enter();
    let scope = Scope::default();
    let mut world = Story::new(seed, &scope);
    for step in 0..STEPS {
        world.step();
        if step % 100 == 99 {
            world.quiet();
        }
    }
    world.clients.clear();
    assert_eq!(world.hub.renderings(), 0, "nothing is kept for clients that have gone");
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
