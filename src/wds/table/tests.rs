//! Tests of tables: made step by step and at once, they are the same.

use isthmus_decisions::view::Tunnel;
use isthmus_model::ambient::ClusterFacts;
use isthmus_model::endpoint::{Encapsulation, Endpoint, EndpointTemplate};
use isthmus_model::identity::Identity;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{PortProtocol, Service, Waypoint};
use isthmus_registry::change::{Dirty, Item, Key};
use isthmus_registry::shard::Shard;
use isthmus_settings::network::Gateway;
use isthmus_snapshot::build;
use isthmus_snapshot::testing::{Mesh, endpoint, gateway, network, port, service as plain_service, shard};

use super::*;

fn viewer() -> Viewer {
    Viewer {
        network: Network::new("n1"),
        cluster: ClusterId::new("a"),
        tunnel: Tunnel::Hbone,
        ..Viewer::default()
    }
}

fn identity(account: &str) -> Identity {
    Identity::parse(&format!("spiffe://cluster.local/ns/shop/sa/{account}")).expect("legal")
}

fn hbone(host: &str, account: &str) -> Endpoint {
    let template = EndpointTemplate {
        encapsulation: Encapsulation::Hbone,
        identity: Some(identity(account)),
        ..EndpointTemplate::default()
    };
    Endpoint { template: template.into(), ..endpoint(host, 1) }
}

fn service_of(name: &str, hosts: &[&str]) -> Service {
    let endpoints = hosts.iter().map(|host| hbone(host, "x")).collect();
    plain_service(name, vec![port(80, PortProtocol::Tcp)], endpoints)
}

fn pod(name: &str, ips: &[&str], account: &str, is_on_host_network: bool) -> Item {
    Item::Workload(Arc::new(Workload {
        uid: format!("a//Pod/shop/{name}").into(),
        name: name.into(),
        namespace: "shop".into(),
        addresses: ips.iter().map(|ip| ip.parse().expect("an address")).collect(),
        node: "node-1".into(),
        network: None,
        locality: Default::default(),
        identity: Some(identity(account)),
        encapsulation: Encapsulation::Hbone,
        has_native_tunnel: false,
        is_on_host_network,
        policies: Vec::new(),
        waypoint: None,
        names: Arc::default(),
    }))
}

fn mesh() -> Mesh {
    let eastwest =
        Gateway { hbone_port: Some(15_008), identity: Some(identity("gw")), ..gateway("192.0.2.1", 1) };
    let near = vec![service_of("a.mesh", &["10.0.0.1"]), service_of("b.mesh", &["10.0.0.1", "10.0.0.2"])];
    let far = vec![service_of("a.mesh", &["10.0.1.1"])];
    Mesh::new(vec![network("n2", vec![eastwest])], vec![shard("a", "n1", near), shard("b", "n2", far)])
}

/// A mesh that changes, and the tables that follow it step by step.
struct Followed {
    mesh: Mesh,
    snapshot: Arc<Snapshot>,
    builder: Builder,
}

impl Followed {
    fn new() -> Self {
        let mesh = mesh();
        let snapshot = Arc::new(mesh.snapshot());
        let mut builder = Builder::new(viewer(), false);
        table(&mut builder, &snapshot, Since::Everything);
        Self { mesh, snapshot, builder }
    }

    /// Changes a shard, and returns the next table, after it was compared with one that is made at once.
    fn change(&mut self, at: usize, change: impl FnOnce(&mut Shard, &mut Dirty)) -> Table {
        let mut dirty = Dirty::default();
        change(Arc::make_mut(&mut self.mesh.shards[at]), &mut dirty);
        let (next, delta) = build::next(&self.snapshot, self.mesh.world(), &dirty);
        self.snapshot = Arc::new(next);
        let stepped = table(&mut self.builder, &self.snapshot, Since::Deltas(vec![Arc::new(delta)]));
        let whole = table(&mut Builder::new(viewer(), false), &self.snapshot, Since::Everything);
        assert_eq!(shown(&stepped), shown(&whole), "step by step and at once");
        stepped
    }

    fn put(&mut self, at: usize, item: Item) -> Table {
        self.change(at, |shard, dirty| shard.put(item, dirty))
    }

    fn remove(&mut self, at: usize, key: &Key) -> Table {
        self.change(at, |shard, dirty| shard.remove(key, dirty))
    }
}

fn table(builder: &mut Builder, snapshot: &Arc<Snapshot>, since: Since) -> Table {
    let mut work = builder.begin(snapshot, since);
    for hostname in work.services.clone() {
        builder.render(&hostname, &mut work);
    }
    builder.finish(work)
}

/// Returns everything that clients can see of a table.
fn shown(table: &Table) -> Vec<String> {
    let resources = table.addresses.sorted().into_iter();
    let resources = resources.map(|(name, resource)| format!("{name} {}", resource.version.text()));
    let index = |index: &Index| -> Vec<String> {
        index.sorted().into_iter().map(|(key, names)| format!("{key}: {names:?}")).collect()
    };
    let nodes = table.nodes.sorted().into_iter().map(|(key, names)| format!("{key}: {names:?}"));
    resources.chain(index(&table.aliases)).chain(nodes).chain(index(&table.groups)).collect()
}

fn names(table: &Table) -> Vec<String> {
    table.addresses.sorted().into_iter().map(|(name, _)| name.to_string()).collect()
}

#[test]
fn a_table_is_the_same_step_by_step_and_at_once() {
    let mut followed = Followed::new();
    let a = |hosts: &[&str]| Item::Service(Arc::new(service_of("a.mesh", hosts)));
    followed.put(0, a(&["10.0.0.1", "10.0.0.3"]));
    followed.put(1, a(&["10.0.1.1", "10.0.1.2"]));
    // Pods come: one that serves two services, one that serves none, two on the network of their node.
    followed.put(0, pod("p1", &["10.0.0.1"], "x", false));
    followed.put(0, pod("p9", &["10.0.0.9", "2001:db8::9"], "y", false));
    followed.put(0, pod("h1", &["10.0.0.2"], "x", true));
    followed.put(0, pod("h2", &["10.0.0.2"], "other", true));
    followed.put(0, a(&["10.0.0.2", "10.0.0.9"]));
    followed.put(0, pod("p9", &["10.0.0.8", "2001:db8::9"], "y", false));
    followed.remove(0, &Key::Workload("a//Pod/shop/p1".into()));
    followed.remove(0, &Key::Workload("a//Pod/shop/h1".into()));
    let key = service_of("b.mesh", &[]).key;
    followed.remove(0, &Key::Service(key));
    followed.put(1, a(&[]));
    let table = followed.put(0, a(&[]));
    assert_eq!(names(&table), ["a//Pod/shop/h2", "a//Pod/shop/p9", "shop/a.mesh"]);
}

/// Services have identities of the waypoints behind gateways, so they change with them.
#[test]
fn a_table_follows_the_waypoints_of_its_services() {
    let mut followed = Followed::new();
    let gate = |account: &str| Service {
        endpoints: vec![hbone("10.0.1.9", account)].into(),
        ..plain_service("gate.mesh", vec![port(15_008, PortProtocol::Tcp)], Vec::new())
    };
    let services = vec![(gate("x").key, 1)];
    let waypoint = Some(Arc::new(Waypoint::Services { services, takes_ingress: false }));
    let far = Service { waypoint, ..service_of("a.mesh", &["10.0.1.1"]) };
    let version = |table: &Table| table.addresses.get("shop/a.mesh").expect("a service").version;
    let before = version(&followed.put(1, Item::Service(Arc::new(far))));
    let with_gate = version(&followed.put(1, Item::Service(Arc::new(gate("gate")))));
    let renamed = version(&followed.put(1, Item::Service(Arc::new(gate("other")))));
    assert!(before != with_gate && with_gate != renamed);
    followed.put(1, Item::Service(Arc::new(service_of("a.mesh", &["10.0.1.1"]))));
    followed.remove(1, &Key::Service(gate("x").key));
}

#[test]
fn a_pod_takes_the_place_of_its_address() {
    let mut followed = Followed::new();
    let table = followed.put(0, pod("p1", &["10.0.0.1"], "x", false));
    assert!(!table.addresses.contains_key("Endpoint/n1/10.0.0.1"));
    let found: Vec<_> = table.resolve("n1/10.0.0.1").into_iter().collect();
    assert_eq!(found, ["a//Pod/shop/p1".into()]);
    let group = table.groups.get("shop/b.mesh").expect("a group");
    assert!(group.contains(&"a//Pod/shop/p1".into()), "{group:?}");
    assert_eq!(table.nodes.get("a/node-1").expect("a node").len(), 1);
    let table = followed.remove(0, &Key::Workload("a//Pod/shop/p1".into()));
    assert!(table.addresses.contains_key("Endpoint/n1/10.0.0.1") && table.nodes.get("a/node-1").is_none());
}

#[test]
fn on_the_network_of_a_node_the_identity_says_which_pod_serves() {
    let mut followed = Followed::new();
    followed.put(0, pod("h1", &["10.0.0.2"], "x", true));
    let table = followed.put(0, pod("h2", &["10.0.0.2"], "other", true));
    let group = table.groups.get("shop/b.mesh").expect("a group");
    assert!(group.contains(&"a//Pod/shop/h1".into()) && !group.contains(&"a//Pod/shop/h2".into()));
    assert!(table.resolve("n1/10.0.0.2").is_empty(), "an address of several is of none");
}

#[test]
fn pods_of_other_networks_are_no_neighbours() {
    let mut followed = Followed::new();
    let table = followed.put(1, pod("far", &["10.0.1.1"], "x", false));
    assert!(!table.addresses.contains_key("a//Pod/shop/far"));
}

#[test]
fn the_policies_are_those_of_the_viewers_cluster_and_unknown_at_first() {
    let mut followed = Followed::new();
    let facts = |names: &[&str]| {
        let authorizations = names.iter().map(|name| ((*name).into(), vec![10, 1, b'p'])).collect();
        Item::Cluster(Arc::new(ClusterFacts { authorizations, ..ClusterFacts::default() }))
    };
    let at_first = followed.put(1, facts(&["x/of-another-cluster"]));
    assert!(at_first.policies.is_none());
    let first = followed.put(0, facts(&["a/p", "a/q"])).policies.expect("known");
    let second = followed.put(0, facts(&["a/q", "a/r"])).policies.expect("known");
    assert_eq!(second.sorted().into_iter().map(|(name, _)| &**name).collect::<Vec<_>>(), ["a/q", "a/r"]);
    let same = |one: &Arc<Resource>, other: &Arc<Resource>| Arc::ptr_eq(one, other);
    assert_eq!(second.changed_since(&first, same), ["a/p".into(), "a/r".into()]);
    assert!(followed.remove(0, &Key::Cluster).policies.is_none());
    // The operator's word counts while no registry knows better.
    let mut builder = Builder::new(viewer(), true);
    let without = table(&mut builder, &followed.snapshot, Since::Everything);
    assert!(without.policies.is_some_and(|policies| policies.is_empty()));
}
