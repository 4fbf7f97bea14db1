//! Small meshes, written by hand, for the tests of this crate and others.

#![expect(missing_docs, reason = "each function makes what its name says")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Snapshot;
use super::build::all;
pub use super::candidates::{Candidate, Candidates, Distance, EndpointKey};
use super::drains::{ActiveDrain, DrainSource, Drains};
use super::inputs::{Inputs, Probes};
use super::routes::Resolved;
use super::trust_roots::TrustRoots;
use isthmus_model::address::{Bind, Host};
use isthmus_model::drain::{Drain, DrainTarget, STEP};
use isthmus_model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, Health, Labels, TlsMode, Weight,
};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::import::Import;
use isthmus_model::load_balancing::{LoadBalancing, Mode, Scope, ServiceFamilies};
use isthmus_model::name::{HostName, NamePattern};
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_model::service::{PortProtocol, Service, ServiceKey, ServicePort};
use isthmus_registry::change::{Export, Item, Mark, MarkKey, MarkKind};
use isthmus_registry::listing::Listing;
use isthmus_registry::shard::Shard;
use isthmus_settings::export::{ExportRule, ExportScope};
use isthmus_settings::export_tls::TlsSource;
use isthmus_settings::limits::{HboneLimits, Limits, Timeouts};
use isthmus_settings::listener::{Listener, ListenerProtocol};
use isthmus_settings::network::{Access, Egress, Gateway, GatewayProbes, NetworkPolicy};
use isthmus_settings::peer::{NameTemplate, Peer, PeerExport, PeerIdentity, PeerImport, PeerLimits};
use isthmus_settings::policy::{Mesh as MeshNames, Node, Policy};
use isthmus_settings::route::Route;
use isthmus_settings::scope::RegistryScope;
use isthmus_settings::steering::Steering;
use isthmus_settings::tuning::{LocalityMode, ServiceTuning, Tuning};

/// The networks of these meshes, beside those that services name. The config may not name all of them.
pub const NETWORKS: [&str; 5] = ["", "n1", "n2", "n3", "n4"];

/// All inputs of a snapshot, owned.
#[derive(Clone, Debug)]
pub struct Mesh {
    pub policy: Arc<Policy>,
    pub shards: Vec<Arc<Shard>>,
    pub resolved: Resolved,
    pub trust_roots: Arc<TrustRoots>,
    pub probes: Arc<Probes>,
    pub drains: Arc<Drains>,
}

impl Mesh {
    pub fn new(networks: Vec<NetworkPolicy>, shards: Vec<Listing>) -> Self {
        let shards = shards.into_iter().map(scoped).collect();
        let exports = vec![rule("*")];
        Self {
            policy: policy(networks, exports, Vec::new()).into(),
            shards,
            resolved: Resolved::default(),
            trust_roots: Arc::default(),
            probes: Arc::default(),
            drains: Arc::default(),
        }
    }

    pub fn world(&self) -> Inputs<'_> {
        Inputs {
            trust_roots: &self.trust_roots,
            policy_generation: 1,
            policy: &self.policy,
            shards: &self.shards,
            resolved: &self.resolved,
            virtual_addresses: None,
            probes: Some(&self.probes),
            drains: &self.drains,
            recent: None,
            remembered: None,
        }
    }

    pub fn snapshot(&self) -> Snapshot {
        all(self.world(), 1)
    }
}

/// Returns an operator's drain of a target that has this number of steps left.
pub fn drained(kind: &str, name: &str, left: u16) -> ActiveDrain {
    let target = DrainTarget::parse(kind, name).expect("a target");
    let (over, reason) = (Duration::ZERO, "".into());
    let (until, close_after) = (None, None);
    let drain = Drain { target, since: 0, over, to_percent: 0, raises: false, until, close_after, reason };
    ActiveDrain { drain: drain.into(), source: DrainSource::Operator, left: left * STEP }
}

/// Returns a shard whose scope allows everything.
pub fn scoped(shard: Listing) -> Arc<Shard> {
    shard_with(shard, TlsSource::Written)
}

/// Returns a shard whose scope allows everything, of a registry that infers TLS modes.
pub fn inferred(shard: Listing) -> Arc<Shard> {
    shard_with(shard, TlsSource::Inferred { system: ["kube-system".into(), "mesh-system".into()].into() })
}

fn shard_with(shard: Listing, tls: TlsSource) -> Arc<Shard> {
    let mut networks: Vec<Network> = NETWORKS.iter().map(|name| Network::new(name)).collect();
    networks.extend(shard.services.values().flat_map(|service| {
        service.endpoints.iter().filter_map(|endpoint| endpoint.template.network.clone()).collect::<Vec<_>>()
    }));
    Shard::of(shard, &RegistryScope { networks: Some(networks), tls, ..RegistryScope::default() }).into()
}

/// Returns a policy with this node and defaults otherwise.
pub fn policy_of(cluster: &str, network: &str) -> Policy {
    Policy {
        node: Node { cluster: ClusterId::new(cluster), network: Network::new(network), ..Node::default() },
        mesh: MeshNames {
            cluster_domain: host_name("cluster.local"),
            trust_domain: TrustDomain::parse("cluster.local").expect("legal"),
        },
        listeners: Vec::new(),
        routes: Vec::new(),
        exports: Vec::new(),
        tuning: ServiceTuning { default: tuning().into(), policies: Vec::new() },
        steering: Steering::default(),
        networks: Vec::new(),
        peers: Vec::new(),
        drains: Vec::new(),
        hbone: HboneLimits::default(),
        limits: Limits::default(),
        timeouts: Timeouts::default(),
    }
}

pub fn policy(
    networks: Vec<NetworkPolicy>,
    exports: Vec<Arc<ExportRule>>,
    routes: Vec<Arc<Route>>,
) -> Policy {
    let own = |timeout: Duration| Arc::new(Tuning { connect_timeout: timeout, ..tuning() });
    let mut policy = Policy { networks, exports, routes, ..policy_of("a", "n1") };
    policy.node.locality = place("r/1");
    let listener = Listener::sni("hbone".into(), Bind::Any { port: 15_008 });
    policy.listeners = vec![Arc::new(Listener { protocol: ListenerProtocol::Hbone, ..listener })];
    policy.tuning.policies.push((pattern("s1.shop.mesh"), own(Duration::from_secs(1))));
    policy
}

pub fn tuning() -> Tuning {
    Tuning::for_services(&Timeouts::default())
}

/// Returns a rule that exports all services of these names to every caller.
pub fn rule(services: &str) -> Arc<ExportRule> {
    Arc::new(ExportRule {
        name: format!("exports[{services}]").into(),
        services: vec![pattern(services)],
        except: Vec::new(),
        ports: Vec::new(),
        clusters: Vec::new(),
        marked: None,
        listeners: Vec::new(),
        to: ExportScope::default(),
        tls: None,
    })
}

pub fn pattern(text: &str) -> NamePattern {
    NamePattern::parse(text).expect("legal")
}

pub fn host_name(text: &str) -> HostName {
    HostName::parse(text).expect("legal")
}

pub fn place(text: &str) -> Locality {
    Locality::parse(text).expect("legal")
}

pub fn weight(value: u32) -> Weight {
    Weight::new(value).expect("not 0")
}

pub fn network(name: &str, gateways: Vec<Gateway>) -> NetworkPolicy {
    NetworkPolicy {
        name: Network::new(name),
        access: Access::Gateway,
        egress: Egress::Direct,
        cidrs: Vec::new(),
        gateways,
        probes: GatewayProbes::default(),
        distance: BTreeMap::new(),
        cost: BTreeMap::new(),
        visitors_percent: None,
    }
}

/// Returns a gateway without a cluster, on SNI port 15443.
pub fn gateway(host: &str, weight_value: u32) -> Gateway {
    Gateway {
        host: Host::parse(host).expect("legal"),
        sni_port: Some(15443),
        hbone_port: None,
        cluster: ClusterId::default(),
        locality: Locality::default(),
        weight: weight(weight_value),
        identity: None,
        instances: Arc::default(),
        drained: 0,
    }
}

/// Returns a ready endpoint.
pub fn endpoint(host: &str, weight_value: u32) -> Endpoint {
    Endpoint {
        host: Host::parse(host).expect("legal"),
        locality: Locality::default(),
        weight: weight(weight_value),
        health: Health::Healthy,
        template: Arc::default(),
    }
}

pub fn port(number: u16, protocol: PortProtocol) -> ServicePort {
    ServicePort {
        name: format!("p{number}").into(),
        port: number,
        target_port: 8080,
        is_target_named: false,
        protocol,
    }
}

pub fn service(name: &str, ports: Vec<ServicePort>, endpoints: Vec<Endpoint>) -> Service {
    let key = ServiceKey { namespace: "shop".into(), hostname: host_name(name) };
    Service {
        key,
        addresses: Vec::new(),
        ports,
        subsets: BTreeMap::new(),
        waypoint: None,
        endpoints: endpoints.into(),
        exported_as: None,
        import: None,
        load_balancing: None,
        families: ServiceFamilies::Automatic,
        identities: Box::default(),
        demand: Box::default(),
        withheld: Box::default(),
    }
}

/// Returns the properties of an export that was created at this time.
pub fn export(created: &str) -> Export {
    Export {
        created: created.into(),
        is_headless: false,
        session_affinity: "None".into(),
        session_seconds: 0,
        labels: Labels::default(),
        annotations: Labels::default(),
        traffic_distribution: "".into(),
        ip_families: "IPv4".into(),
        ports: Box::default(),
    }
}

/// Returns the mark by which a cluster exports a service to the cluster set.
pub fn service_export(service: &Service) -> Item {
    let export = export("2026-01-01T00:00:00Z");
    let key = MarkKey { service: service.key.clone(), object: "ServiceExport".into() };
    let (kind, labels) = (MarkKind::ServiceExport, Labels::default());
    Item::Mark(Mark { key, kind, labels, export: Some(export.into()) })
}

/// Returns the choice of a service whose callers prefer endpoints in their zone.
pub fn near_first() -> Option<Box<LoadBalancing>> {
    Some(LoadBalancing::by(Mode::Failover, &[Scope::Network, Scope::Region, Scope::Zone]).into())
}

pub fn shard(cluster: &str, network: &str, services: Vec<Service>) -> Listing {
    Listing {
        cluster: ClusterId::new(cluster),
        network: Network::new(network),
        services: services.into_iter().map(|service| (service.key.clone(), service.into())).collect(),
    }
}

/// Returns a candidate at 10.0.0.1 with this port.
pub fn candidate(port: u16, weight: u32, health: Health, distance: Distance) -> Candidate {
    Candidate {
        left: isthmus_model::drain::PARTS,
        key: EndpointKey { group: "g".into(), address: SocketAddr::from(([10, 0, 0, 1], port)) },
        others: None,
        is_backup: false,
        connections_max: None,
        weight: Weight::new(weight).expect("not 0"),
        health,
        cluster: ClusterId::default(),
        locality: Locality::default(),
        distance,
        encapsulation: Encapsulation::None,
    }
}

/// Returns the candidates of a route.
pub fn candidates(mode: LocalityMode, endpoints: Vec<Candidate>) -> Candidates {
    let tuning = Tuning { locality: mode, ..Tuning::for_routes(&Timeouts::default()) };
    Candidates::new("g".into(), tuning.into(), endpoints)
}

/// Returns a peer that may reach services. Each rule has a pattern of service names, and perhaps a template of the names under
/// which the peer knows these services.
pub fn peer(name: &str, rules: &[(&str, Option<&str>)]) -> Peer {
    let exports = rules.iter().enumerate().map(|(at, (services, rename))| PeerExport {
        rule: format!("peers[{name}].export[{at}]").into(),
        services: vec![pattern(services)],
        except: Vec::new(),
        rename: rename.map(|text| NameTemplate::parse(text).expect("legal")),
        tls: None,
    });
    let domain = TrustDomain::parse(name).expect("legal");
    let gateway = Identity::parse(&format!("spiffe://{name}/ns/isthmus/sa/gateway")).expect("legal");
    Peer {
        name: name.into(),
        who: Some(PeerIdentity { gateway, trust_domain: domain.clone(), alias: domain }),
        unused_link: None,
        from: Vec::new(),
        exports: exports.collect(),
        imports: Vec::new(),
        carry: Vec::new(),
        limits: PeerLimits::default(),
    }
}

/// Returns a peer that imports services, and consents that they are joined with equal names if `merge` is true.
pub fn importing(name: &str, merge: bool) -> Peer {
    let imports = PeerImport {
        rule: "peers[0].import[0]".into(),
        services: vec![pattern("*")],
        rename: None,
        limit: None,
        merge,
    };
    Peer { imports: vec![imports], ..peer(name, &[]) }
}

/// Returns the shard of a peer with this service, which the peer exports under another name. Its endpoints have the mesh's mutual TLS,
/// and are on the network `n` of the peer.
pub fn of_peer(peer: &str, exported: &str, service: Service) -> Listing {
    let place = format!("peer/{peer}");
    let there = |one: &Endpoint| {
        let template = EndpointTemplate {
            network: Some(Network::new(&format!("{place}/n"))),
            identity: Some(Identity::parse(&format!("spiffe://{peer}/ns/pay/sa/pay")).expect("legal")),
            tls: Some(DeclaredTls::Mode(TlsMode::Mesh)),
            ..(*one.template).clone()
        };
        Endpoint { host: Host::Ips(Arc::default()), template: template.into(), ..one.clone() }
    };
    let import = Import { peer: peer.into(), exported_name: host_name(exported), exported_at: 0 };
    let key = ServiceKey { namespace: format!("{peer}/pay").into(), ..service.key.clone() };
    let endpoints: Vec<Endpoint> = service.endpoints.iter().map(there).collect();
    shard(
        &place,
        &place,
        vec![Service { key, endpoints: endpoints.into(), import: Some(import.into()), ..service }],
    )
}

/// Returns the services by network and by address, in order, which readers see only by key.
pub fn indexes(snapshot: &Snapshot) -> String {
    let behind: Vec<_> = snapshot
        .behind
        .iter()
        .map(|(network, services)| {
            (network, services.sorted().into_iter().map(|(name, ())| name).collect::<Vec<_>>())
        })
        .collect();
    format!("{behind:?}\n{:?}", snapshot.addresses.sorted())
}
