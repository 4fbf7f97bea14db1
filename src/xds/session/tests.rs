//! The responses of a session to requests and snapshots.

use std::collections::BTreeMap;

use super::draft::RESPONSE_NAMES;
use super::*;
use crate::hub::LISTENERS_MAX;
use isthmus_ads::budget::Budget;
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::protocol::{Acknowledgement, NAME_BYTES_MAX, Request, Response};
use isthmus_document::services::read_registry;
use isthmus_model::import::Import;
use isthmus_model::name::{HostName, NamePattern};
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::Service;
use isthmus_registry::shard::Shard;
use isthmus_settings::policy::Policy;
use isthmus_settings::scope::RegistryScope;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build;
use isthmus_snapshot::delta::Delta;
use isthmus_snapshot::inputs::Inputs;
use isthmus_snapshot::routes::Resolved;
use isthmus_snapshot::testing::policy_of;
use isthmus_snapshot::unread::{Unread, UnreadRegistry};
use isthmus_snapshot::virtual_addresses::{Ranges, VirtualAddresses};
use isthmus_world::Publisher;

mod wide;

const BOTH: [Protocol; 2] = [Protocol::Delta, Protocol::StateOfTheWorld];

/// A hub whose snapshot can be replaced.
pub(crate) struct Stage {
    pub(crate) policy: Arc<Policy>,
    pub(crate) publisher: Publisher,
    pub(crate) hub: Arc<Hub>,
}

impl Stage {
    /// Makes services by name, each with the hosts of its endpoints. Endpoints with hosts from 100 on have identities.
    pub(crate) fn new(services: &[(&str, &[u8])]) -> Self {
        let policy = Arc::new(policy_of("east", "east"));
        let (publisher, reader) = Publisher::new(snapshot(&policy, 1, services));
        Self { policy, publisher, hub: Hub::new(reader) }
    }

    pub(crate) fn becomes(&mut self, services: &[(&str, &[u8])]) {
        let generation = self.publisher.current().generation + 1;
        self.publish(snapshot(&self.policy, generation, services));
    }

    fn publish(&mut self, world: Snapshot) {
        let delta = Delta { generation: world.generation, everything: true, ..Delta::default() };
        self.publish_with(world, delta);
    }

    /// Replaces the snapshot by one in which only this service differs.
    fn changes_alone(&mut self, name: &str, services: &[(&str, &[u8])]) {
        let generation = self.publisher.current().generation + 1;
        let world = snapshot(&self.policy, generation, services);
        let services = [HostName::parse(name).expect("legal")].into();
        self.publish_with(world, Delta { generation, services, ..Delta::default() });
    }

    fn publish_with(&mut self, world: Snapshot, delta: Delta) {
        let seen = self.publisher.current();
        self.publisher.publish(world, delta);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(self.hub.step(&seen, &self.publisher.current()));
    }

    /// Restarts the process without a registry that may have these services (empty: any service).
    pub(crate) fn restarts_without(&mut self, services: &[&str], world: &[(&str, &[u8])]) {
        let pattern = |name: &&str| NamePattern::parse(name).expect("legal");
        let services = services.iter().map(pattern).collect();
        let unread = vec![UnreadRegistry { name: "lost.yaml".into(), services, is_peer: false }];
        let unread = Arc::new(Unread::default().with_registries(unread));
        let (publisher, reader) = Publisher::new(snapshot(&self.policy, 1, world).with_unread(unread));
        self.publisher = publisher;
        self.hub = Hub::new(reader);
    }

    /// Changes a service through a registry in use, while another registry stays unread.
    fn changes(&mut self, name: &str, world: &[(&str, &[u8])]) {
        let seen = self.publisher.current();
        let mut unread = (*seen.unread).clone();
        unread.note_change(&HostName::parse(name).expect("legal"));
        self.publish(snapshot(&self.policy, seen.generation + 1, world).with_unread(Arc::new(unread)));
    }

    fn client(&self, protocol: Protocol) -> Client {
        self.client_with(|resources| resources, protocol)
    }

    fn client_with(&self, set: fn(ClientResources) -> ClientResources, protocol: Protocol) -> Client {
        let viewer = Viewer { network: Network::new("east"), ..Viewer::default() };
        let account = Budget::new(usize::MAX).account([127, 0, 0, 1].into(), usize::MAX);
        let resources = set(ClientResources::new(self.hub.clone(), viewer, protocol));
        let session = Session::new(resources, protocol, account);
        Client { session, names: BTreeMap::new(), nonces: BTreeMap::new(), has: BTreeMap::new() }
    }
}

pub(crate) fn snapshot(policy: &Arc<Policy>, generation: u64, services: &[(&str, &[u8])]) -> Snapshot {
    let endpoint = |host: &u8| match host {
        0..100 => format!("{{address: 10.0.0.{host}}}"),
        100.. => format!("{{address: 10.0.0.{host}, identity: \"spiffe://cluster.local/ns/n/sa/s{host}\"}}"),
    };
    let service = |(name, hosts): &(&str, &[u8])| {
        let endpoints: Vec<_> = hosts.iter().map(endpoint).collect();
        format!(
            "{{hostname: {name}, namespace: n, ports: [{{name: p, port: 80}}], endpoints: [{}]}}",
            endpoints.join(", ")
        )
    };
    let services: Vec<_> = services.iter().map(service).collect();
    let text = format!("services: [{}]", services.join(", "));
    let (cluster, network) = (ClusterId::new("east"), Network::new("east"));
    let shard = read_registry("x.yaml".as_ref(), &text, &cluster, &network).expect("good");
    let scope = RegistryScope { networks: None, ..RegistryScope::default() };
    let shards = [Arc::new(Shard::of(shard, &scope))];
    build::all(
        Inputs {
            trust_roots: &Default::default(),
            policy_generation: 1,
            policy,
            shards: &shards,
            resolved: &Resolved::default(),
            virtual_addresses: None,
            probes: None,
            drains: &Arc::default(),
            recent: None,
            remembered: None,
        },
        generation,
    )
}

/// A client that acknowledges every response.
struct Client {
    session: Session,
    names: BTreeMap<Kind, Vec<String>>,
    nonces: BTreeMap<Kind, String>,
    has: BTreeMap<Kind, Vec<(String, String)>>,
}

impl Client {
    /// Sends a request with these names: for delta, additional names; for state of the world, all names.
    fn ask(&mut self, kind: Kind, names: &[&str]) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        self.names.insert(kind, names.clone());
        let nonce = match self.session.protocol() {
            Protocol::Delta => String::new(),
            Protocol::StateOfTheWorld => self.nonces.get(&kind).cloned().unwrap_or_default(),
        };
        let has = self.has.get(&kind).cloned().unwrap_or_default();
        self.session.request(kind, Request { names, nonce, has, ..Request::default() }).expect("taken");
    }

    /// Returns all responses, each as `type: names -removed !missing`.
    fn hears(&mut self) -> Vec<String> {
        let mut heard = Vec::new();
        while let Some(response) = self.next() {
            let kind = Kind::of_type_url(&response.type_url).expect("a type");
            let names = response.resources.iter().map(|resource| resource.name.to_string());
            let removed = response.removed.iter().map(|name| format!("-{name}"));
            let missing = response.missing.iter().map(|name| format!("!{name}"));
            let text: Vec<_> = names.chain(removed).chain(missing).collect();
            heard.push(format!("{kind}: {}", text.join(" ")).replace("outbound|80||", ""));
            assert!(heard.len() < 100, "there is no end to it: {heard:?}");
            self.nonces.insert(kind, response.nonce.clone());
            let names = match self.session.protocol() {
                Protocol::Delta => Vec::new(),
                Protocol::StateOfTheWorld => self.names[&kind].clone(),
            };
            let has = self.has.entry(kind).or_default();
            has.extend(response.resources.iter().map(|one| (one.name.to_string(), one.version.text())));
            let answer = Request { names, nonce: response.nonce, ..Request::default() };
            self.session.request(kind, answer).expect("taken");
        }
        heard
    }

    fn next(&mut self) -> Option<Response> {
        self.session.resources().subscriptions.hub.settle();
        loop {
            let response = self.session.response();
            if response.is_some() || !self.session.is_unfinished() {
                return response;
            }
        }
    }
}

impl Client {
    /// Returns the same client connected to another process. The client sends the versions that it has.
    fn comes_back(&self, stage: &Stage) -> Self {
        let mut client = stage.client(self.session.protocol());
        client.has = self.has.clone();
        for (kind, names) in &self.names {
            let has = self.has.get(kind).cloned().unwrap_or_default();
            let (names, returns) = (names.clone(), !has.is_empty());
            client.names.insert(*kind, names.clone());
            let request = Request { names, has, returns, ..Request::default() };
            client.session.request(*kind, request).expect("taken");
        }
        client
    }
}

const A: &str = "outbound|80||a";
const B: &str = "outbound|80||b";

#[test]
fn a_wildcard_is_answered_once() {
    for protocol in BOTH {
        let mut stage = Stage::new(&[("a", &[1])]);
        let mut client = stage.client(protocol);
        client.ask(Kind::Listener, &[]);
        client.ask(Kind::Cluster, &[]);
        assert_eq!(client.hears(), ["cds: a", "lds: "], "{protocol:?}");
        client.ask(Kind::Assignment, &[A]);
        assert_eq!(client.hears(), ["eds: a"], "{protocol:?}");
        stage.becomes(&[("a", &[2])]);
        assert_eq!(client.hears(), ["eds: a"], "{protocol:?}");
    }
}

#[test]
fn no_names_after_an_explicit_wildcard_are_no_names() {
    let mut stage = Stage::new(&[("a", &[1])]);
    let mut client = stage.client(Protocol::StateOfTheWorld);
    client.ask(Kind::Cluster, &["*"]);
    assert_eq!(client.hears(), ["cds: a"]);
    client.ask(Kind::Cluster, &[]);
    stage.becomes(&[("a", &[1]), ("b", &[1])]);
    assert!(client.hears().is_empty());
    client.ask(Kind::Cluster, &["*"]);
    assert_eq!(client.hears(), ["cds: a b"]);
}

#[test]
fn an_assignment_follows_the_cluster_that_changed() {
    for protocol in BOTH {
        let mut stage = Stage::new(&[("a", &[101])]);
        let mut client = stage.client(protocol);
        client.ask(Kind::Assignment, &[A]);
        assert_eq!(client.hears(), ["eds: a"], "{protocol:?}");
        client.ask(Kind::Cluster, &[]);
        assert_eq!(client.hears(), ["cds: a", "eds: a"], "{protocol:?}");
        // The identity changes.
        stage.becomes(&[("a", &[102])]);
        assert_eq!(client.hears(), ["cds: a", "eds: a"], "{protocol:?}");
        assert!(client.hears().is_empty());
    }
}

#[test]
fn a_cluster_is_emptied_before_it_is_removed() {
    for (protocol, by_name, removed) in [
        (Protocol::Delta, &[][..], "cds: -a"),
        (Protocol::Delta, &[A, B][..], "cds: -a"),
        (Protocol::StateOfTheWorld, &[][..], "cds: b"),
    ] {
        let mut stage = Stage::new(&[("a", &[1]), ("b", &[1])]);
        let mut client = stage.client(protocol);
        client.ask(Kind::Cluster, by_name);
        client.ask(Kind::Assignment, &[A, B]);
        client.hears();
        client.hears();
        stage.becomes(&[("b", &[1])]);
        assert_eq!(client.hears(), ["eds: a", removed], "{protocol:?} {by_name:?}");
        stage.becomes(&[("a", &[1]), ("b", &[1])]);
        let back = if protocol == Protocol::Delta { "cds: a" } else { "cds: a b" };
        assert_eq!(client.hears(), [back, "eds: a"], "{protocol:?} {by_name:?}");
    }
}

#[test]
fn a_cluster_that_waits_for_its_removal_holds_up_no_other() {
    let mut stage = Stage::new(&[("a", &[1])]);
    let mut client = stage.client(Protocol::StateOfTheWorld);
    client.ask(Kind::Cluster, &[]);
    client.ask(Kind::Assignment, &[A]);
    client.hears();
    stage.becomes(&[("a", &[2])]);
    // The assignment is not acknowledged, so that the empty assignment has to wait.
    let assignment = client.session.response().expect("the assignment");
    stage.becomes(&[("b", &[1])]);
    assert_eq!(client.hears(), ["cds: a b"]);
    let answer = Request { names: vec![A.into()], nonce: assignment.nonce, ..Request::default() };
    client.session.request(Kind::Assignment, answer).expect("taken");
    assert_eq!(client.hears(), ["eds: a", "cds: b"]);
}

#[test]
fn who_comes_back_is_told_of_what_went_and_not_of_what_is_there() {
    let stage = Stage::new(&[("a", &[1])]);
    let mut before = stage.client(Protocol::Delta);
    before.ask(Kind::Cluster, &["*", "outbound_.80_._.a"]);
    assert_eq!(before.hears(), ["cds: a outbound_.80_._.a"]);
    let mut client = stage.client(Protocol::Delta);
    client.has = before.has.clone();
    client.has.entry(Kind::Cluster).or_default().push((B.into(), "0".into()));
    client.has.insert(Kind::Listener, vec![("x".into(), "0".into())]);
    client.ask(Kind::Cluster, &["*", "outbound_.80_._.a"]);
    client.ask(Kind::Listener, &[]);
    assert_eq!(client.hears(), ["cds: -b", "lds: -x"]);
}

#[test]
fn what_an_unread_registry_may_have_is_kept_until_it_is_read() {
    let whole: &[(&str, &[u8])] = &[("a", &[101, 102]), ("b", &[103]), ("c", &[104])];
    // Without the registry, `a` has one endpoint less, `b` has no endpoints, and `c` does not exist.
    let rest: &[(&str, &[u8])] = &[("a", &[101]), ("b", &[])];
    for protocol in BOTH {
        let mut stage = Stage::new(whole);
        let mut before = stage.client(protocol);
        before.ask(Kind::Cluster, &[]);
        before.ask(Kind::Assignment, &[A, B, "outbound|80||c"]);
        before.hears();
        stage.restarts_without(&[], rest);
        let mut client = before.comes_back(&stage);
        // A delta client with a wildcard gets an empty response. A state-of-the-world response is complete and would remove
        // what the unread registry may have, so it waits.
        let answered: &[&str] = if protocol == Protocol::Delta { &["cds: "] } else { &[] };
        assert_eq!(client.hears(), answered, "{protocol:?}");
        assert!(client.session.held_back() > 0, "{protocol:?}");
        // A client without resources gets the resources of the registries that were read.
        let mut fresh = stage.client(protocol);
        fresh.ask(Kind::Cluster, &[]);
        fresh.ask(Kind::Assignment, &["outbound|80||c"]);
        assert_eq!(fresh.hears(), ["cds: a b", "eds: c"], "{protocol:?}");
        // A registry in use changes `a`, and the change is sent. State-of-the-world clients get no clusters, because their
        // complete response is still held back.
        let changed: &[(&str, &[u8])] = &[("a", &[105]), ("b", &[])];
        stage.changes("a", changed);
        let heard = client.hears();
        match protocol {
            Protocol::Delta => assert_eq!(heard, ["cds: a", "eds: a"]),
            Protocol::StateOfTheWorld => assert_eq!(heard, ["eds: a"]),
        }
        // After the registry was read, the client has its resources again, except `c`, which was removed.
        stage.becomes(&[("a", &[102, 105]), ("b", &[103])]);
        let heard = client.hears();
        match protocol {
            Protocol::Delta => assert_eq!(heard, ["cds: a", "eds: a c", "cds: -c"]),
            Protocol::StateOfTheWorld => {
                assert_eq!(heard.first().map(String::as_str), Some("cds: a b"), "{heard:?}")
            }
        }
        assert_eq!(client.session.held_back(), 0, "{protocol:?}");
    }
}

#[test]
fn a_service_that_no_unread_registry_may_have_is_taken() {
    for protocol in BOTH {
        let mut stage = Stage::new(&[("a", &[1]), ("b", &[1])]);
        let mut before = stage.client(protocol);
        before.ask(Kind::Assignment, &[A, B]);
        before.hears();
        stage.restarts_without(&["b"], &[]);
        let mut client = before.comes_back(&stage);
        assert_eq!(client.hears(), ["eds: a"], "{protocol:?}");
    }
}

#[test]
fn names_are_bounded_in_bytes() {
    let stage = Stage::new(&[("a", &[1])]);
    let budget = Budget::new(1 << 20);
    let account = || budget.account([127, 0, 0, 1].into(), 2 * (NAME_COST + A.len()));
    for protocol in BOTH {
        let resources = ClientResources::new(stage.hub.clone(), Viewer::default(), protocol);
        let mut session = Session::new(resources, protocol, account());
        let ask = |session: &mut Session, names: &[&str], unsubscribe: &[&str]| {
            let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let request =
                Request { names: list(names), unsubscribe: list(unsubscribe), ..Request::default() };
            session.request(Kind::Assignment, request)
        };
        assert_eq!(ask(&mut session, &[&"x".repeat(NAME_BYTES_MAX + 1)], &[]), Err(Refusal::TooLongName));
        assert_eq!(ask(&mut session, &[A, B], &[]), Ok(Acknowledgement::None));
        assert_eq!(budget.bytes(), 2 * (NAME_COST + A.len()));
        let more = ask(&mut session, &[A, B, "outbound|80||c"], &[]);
        assert!(matches!(more, Err(Refusal::TooManyBytes(_))), "{more:?}");
        drop(session);
        assert_eq!(budget.bytes(), 0);
    }
}

#[test]
fn the_last_of_very_many_names_is_looked_at() {
    let mut stage = Stage::new(&[("z", &[1])]);
    let names: Vec<String> = (0..RESPONSE_NAMES * 3).map(|number| format!("{number:06}")).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    names.push("outbound|80||z");
    let mut before = stage.client(Protocol::Delta);
    before.ask(Kind::Assignment, &names);
    before.hears();
    stage.becomes(&[("z", &[2])]);
    let mut client = stage.client(Protocol::Delta);
    client.has = before.has.clone();
    client.ask(Kind::Assignment, &names);
    assert_eq!(client.hears(), ["eds: z"]);
}

#[test]
fn a_response_need_not_hold_all_assignments() {
    let stage = Stage::new(&[]);
    let names: Vec<String> = (0..RESPONSE_NAMES + 1).map(|number| format!("{number}")).collect();
    for protocol in BOTH {
        let mut client = stage.client(protocol);
        client.ask(Kind::Assignment, &names.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(client.hears().len(), 2, "{protocol:?}");
        assert_eq!(client.has[&Kind::Assignment].len(), names.len(), "{protocol:?}");
    }
}

#[test]
fn of_an_empty_name_there_is_nothing() {
    let stage = Stage::new(&[("a", &[1])]);
    for (protocol, heard) in [(Protocol::Delta, "eds: -"), (Protocol::StateOfTheWorld, "eds: !")] {
        let mut client = stage.client(protocol);
        client.ask(Kind::Assignment, &[""]);
        assert_eq!(client.hears(), [heard], "{protocol:?}");
    }
}

/// Returns a snapshot whose services are all imported and have virtual addresses.
fn imported(policy: &Arc<Policy>, generation: u64, names: &[String]) -> Snapshot {
    let services = names.iter().map(|name| {
        format!("{{hostname: {name}, namespace: n, ports: [{{name: p, port: 80}}, {{name: q, port: 443}}]}}")
    });
    let text = format!("services: [{}]", services.collect::<Vec<_>>().join(", "));
    let (cluster, network) = (ClusterId::new("east"), Network::new("east"));
    let mut listing = read_registry("x.yaml".as_ref(), &text, &cluster, &network).expect("good");
    let mut addresses = VirtualAddresses::new(Ranges::default());
    for (key, service) in &mut listing.services {
        let import = Import { peer: "west".into(), exported_name: key.hostname.clone(), exported_at: 7 };
        addresses.renew(&key.hostname, Some(&import), 7);
        *service = Arc::new(Service { import: Some(Arc::new(import)), ..(**service).clone() });
    }
    let shards = [Arc::new(Shard::of(listing, &RegistryScope::default()))];
    let trust_roots = Arc::default();
    let inputs = Inputs {
        trust_roots: &trust_roots,
        policy_generation: 1,
        policy,
        shards: &shards,
        resolved: &Resolved::default(),
        virtual_addresses: Some(&addresses),
        probes: None,
        drains: &Arc::default(),
        recent: None,
        remembered: None,
    };
    build::all(inputs, generation)
}

#[test]
fn clients_that_take_listeners_get_one_for_each_port_of_an_imported_service() {
    for protocol in BOTH {
        let mut stage = Stage::new(&[("own", &[1])]);
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        stage.publish(imported(&stage.policy, 2, &names(&["a.global"])));
        let mut client = stage.client_with(|resources| resources.with_listeners(true), protocol);
        client.ask(Kind::Listener, &["*"]);
        assert_eq!(client.hears(), ["lds: a.global:80 a.global:443"]);
        let mut other = stage.client(protocol);
        other.ask(Kind::Listener, &["*"]);
        assert_eq!(other.hears(), ["lds: "], "a client that does not ask for listeners");
        stage.publish(imported(&stage.policy, 3, &names(&["a.global", "b.global"])));
        stage.publish(imported(&stage.policy, 4, &names(&["b.global"])));
        let heard = client.hears();
        let expected = match protocol {
            Protocol::Delta => "lds: b.global:80 b.global:443 -a.global:443 -a.global:80",
            Protocol::StateOfTheWorld => "lds: b.global:80 b.global:443",
        };
        assert_eq!(heard, [expected]);
        stage.publish(imported(&stage.policy, 5, &[]));
        assert_eq!(client.hears().len(), 1);
        assert_eq!(stage.hub.all_of(Kind::Listener).len(), 0);
    }
}

#[test]
fn listeners_on_virtual_addresses_are_bounded() {
    let mut stage = Stage::new(&[]);
    let names: Vec<String> = (0..LISTENERS_MAX).map(|at| format!("s{at}.global")).collect();
    stage.publish(imported(&stage.policy, 2, &names));
    let mut client = stage.client_with(|resources| resources.with_listeners(true), Protocol::Delta);
    client.ask(Kind::Listener, &["*"]);
    client.hears();
    let count = |stage: &Stage| {
        let all = stage.hub.all_of(Kind::Listener);
        all.iter().map(|(_, listeners)| listeners.len()).sum::<usize>()
    };
    assert_eq!(count(&stage), LISTENERS_MAX);
    stage.publish(imported(&stage.policy, 3, &names[..10]));
    assert_eq!(count(&stage), 20);
}
