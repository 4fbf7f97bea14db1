//! The WDS server against a client that is written from the protocol of ztunnels alone. Each case is one rule of that protocol.

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConfig;

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;
use crate::support::wds::{ADDRESS, AUTHORIZATION, Ask, Next, Who, Ztunnel};

const TOKEN: &str = "0123456789abcdef-ztunnel";
const NODE_TOKEN: &str = "0123456789abcdef-of-node-1";
const OTHER_TOKEN: &str = "0123456789abcdef-somebody";

const GATEWAY: &str = "NetworkGateway/west/192.0.2.2:15008";
const SECOND: &str = "NetworkGateway/west/192.0.2.3:15008";
const BEHIND: &str = "SplitHorizon/west/192.0.2.2:15008/shop/a.mesh";
const BEHIND_SECOND: &str = "SplitHorizon/west/192.0.2.3:15008/shop/a.mesh";
const NEAR: &str = "Endpoint/east/10.0.0.1";
const SERVICE: &str = "shop/a.mesh";
const VIP: &str = "east/240.0.0.1";

/// Two networks: `a.mesh` has one endpoint on `east`, and three on `west`; `b.mesh` has the first of `east` too.
const EAST: &str = "services:\n\
    - {hostname: a.mesh, namespace: shop, addresses: [240.0.0.1], ports: [{name: p, port: 80, targetPort: 8080, protocol: HTTP}], \
    endpoints: [{address: 10.0.0.1, tunnel: hbone, identity: 'spiffe://cluster.local/ns/shop/sa/a', locality: r/z}]}\n\
    - {hostname: b.mesh, namespace: shop, ports: [{name: q, port: 81}], \
    endpoints: [{address: 10.0.0.1, tunnel: hbone, identity: 'spiffe://cluster.local/ns/shop/sa/a'}]}\n";

fn west(count: usize) -> String {
    let endpoints = (1..=count).map(|last| {
        format!("{{address: 10.0.1.{last}, tunnel: hbone, identity: 'spiffe://cluster.local/ns/shop/sa/far{last}'}}")
    });
    let endpoints: Vec<_> = endpoints.collect();
    format!(
        "services:\n- {{hostname: a.mesh, namespace: shop, ports: [{{name: p, port: 80, targetPort: 8080, protocol: HTTP}}], \
         endpoints: [{}]}}\n",
        endpoints.join(", ")
    )
}

pub(crate) struct World {
    pub(crate) gateway: Gateway,
    tls: Arc<ClientConfig>,
}

impl World {
    pub(crate) fn start() -> Self {
        Self::with("withoutPolicies: [east, lost]", "")
    }

    /// Starts a world whose gateway has this memory budget.
    pub(crate) fn within(memory: &str) -> Self {
        Self::with("withoutPolicies: [east, lost]", &format!("limits: {{memory: {memory}}}\n"))
    }

    fn with(more: &str, steering: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        let issued = PKI.issue(&["isthmus.test"], None);
        for (name, text) in [
            ("cert.pem", issued.certificate_pem.as_str()),
            ("key.pem", &issued.key_pem),
            ("east.yaml", EAST),
            ("west.yaml", &west(3)),
            (
                "tokens",
                &format!(
                    "{TOKEN} spiffe://cluster.local/ns/istio-system/sa/ztunnel\n\
                     {NODE_TOKEN} spiffe://cluster.local/ns/istio-system/sa/ztunnel node-1\n\
                     {OTHER_TOKEN} spiffe://cluster.local/ns/shop/sa/a\n"
                ),
            ),
        ] {
            fs::write(path.join(name), text).expect("written");
        }
        let gateway = Gateway::start_in(folder, &config(more, steering), &[]);
        Self { gateway, tls: PKI.client(&["h2"]) }
    }

    fn address(&self) -> SocketAddr {
        self.gateway.listener("wds")
    }

    pub(crate) fn open(&self, who: &Who) -> Ztunnel {
        Ztunnel::open(self.address(), &self.tls, who)
    }

    /// Returns a client of network `east` that wants everything, and the names that it got.
    fn everything(&self) -> Ztunnel {
        let mut client = self.open(&who());
        client.begin(&[]);
        client
    }

    /// Returns a client that has nothing, because it is on a node without workloads.
    fn on_demand(&self) -> Ztunnel {
        let mut client = self.open(&who().with("NODE_NAME", "node-9"));
        client.begin_on_demand(&[]);
        let (addresses, _) = client.first();
        assert!(addresses.resources.is_empty() && addresses.removed.is_empty());
        client
    }

    fn write(&self, file: &str, text: &str) {
        let next = self.gateway.folder().join(".next");
        fs::write(&next, text).expect("written");
        fs::rename(next, self.gateway.folder().join(file)).expect("renamed");
    }
}

fn config(more: &str, steering: &str) -> String {
    let gateway = |last: u8| {
        format!(
            "{{address: 192.0.2.{last}, hbonePort: 15008, identity: 'spiffe://cluster.local/ns/istio-system/sa/eastwest'}}"
        )
    };
    let nameless = "{address: 192.0.2.9, hbonePort: 15008}";
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: east}}\nregistries:\n\
         - file: {{path: east.yaml, cluster: east, network: east}}\n\
         - file: {{path: west.yaml, cluster: west, network: west}}\n\
         networks: {{west: {{probe: off, gateways: [{}, {}, {nameless}]}}}}\n{steering}\
         exports: [{{services: [\"*.mesh\"]}}]\n\
         xds:\n  bind: \"127.0.0.1:0\"\n  wds:\n    bind: \"127.0.0.1:0\"\n    tls: {{certificate: cert.pem, key: key.pem}}\n    \
         tokens: {{file: tokens}}\n    clients:\n    \
         - {{identities: ['spiffe://cluster.local/ns/istio-system/sa/ztunnel'], networks: [east], clusters: [east, lost, dark]}}\n    \
         {more}\n",
        gateway(2),
        gateway(3),
    )
}

pub(crate) fn who() -> Who {
    Who { token: TOKEN.into(), cluster: "east".into(), metadata: vec![("NETWORK", "east".into())] }
}

/// A rule of the protocol, and its test.
type Case = (&'static str, fn(&World));

/// The cases that a running server answers without a change of the mesh.
const CASES: [Case; 30] = [
    ("a client without a token is refused", |world| {
        let mut client = world.open(&Who { token: String::new(), ..who() });
        client.begin(&[]);
        let (code, text) = client.ended();
        assert_eq!(code, 16, "{text}");
    }),
    ("a client with a wrong token is refused", |world| {
        let mut client = world.open(&Who { token: "0123456789abcdef-nobody".into(), ..who() });
        assert_eq!(client.ended(), (16, "the token is not accepted: it is not in the file of tokens".into()));
    }),
    ("a client that names no cluster is refused", |world| {
        assert_eq!(world.open(&Who { cluster: String::new(), ..who() }).ended().0, 3);
    }),
    ("an identity that no rule names is refused", |world| {
        let mut client = world.open(&Who { token: OTHER_TOKEN.into(), ..who() });
        client.begin(&[]);
        let (code, text) = client.ended();
        assert!(code == 7 && text.contains("no rule of xds.wds.clients allows it"), "{code} {text}");
    }),
    ("a network that no rule names is refused", |world| {
        let mut client = world.open(&who().with("NETWORK", "west"));
        client.begin(&[]);
        assert_eq!(client.ended().0, 7);
    }),
    ("a cluster that no rule names is refused", |world| {
        let mut client = world.open(&Who { cluster: "west".into(), ..who() });
        client.begin(&[]);
        assert_eq!(client.ended().0, 7);
    }),
    ("a cluster whose policies are unknown is refused, and told what to do", |world| {
        let mut client = world.open(&Who { cluster: "dark".into(), ..who() });
        client.begin(&[]);
        let (code, text) = client.ended();
        assert!(code == 9 && text.contains("xds.wds.withoutPolicies"), "{code} {text}");
    }),
    ("metadata and header must name one cluster", |world| {
        let mut client = world.open(&who().with("CLUSTER_ID", "lost"));
        client.begin(&[]);
        assert_eq!(client.ended().0, 3);
    }),
    ("a token of a node is of no other node", |world| {
        let of_node = |name: &str| {
            let mut client = world.open(&Who { token: NODE_TOKEN.into(), ..who() }.with("NODE_NAME", name));
            client.begin(&[]);
            client
        };
        assert_eq!(of_node("node-2").ended().0, 7);
        of_node("node-1").first();
    }),
    ("another type ends the stream with its name", |world| {
        let mut client = world.open(&who());
        client.ask("type.googleapis.com/envoy.config.cluster.v3.Cluster", &Ask::default());
        let (code, text) = client.ended();
        assert!(code == 12 && text.contains("istio.workload.Address"), "{code} {text}");
    }),
    ("both first messages are answered, policies by an empty response", |world| {
        let (addresses, policies) = {
            let mut client = world.everything();
            client.first()
        };
        assert!(policies.resources.is_empty() && policies.removed.is_empty());
        assert_eq!(addresses.names(), [NEAR, GATEWAY, SECOND, BEHIND, BEHIND_SECOND, SERVICE, "shop/b.mesh"]);
    }),
    ("policies alone are answered", |world| {
        let mut client = world.open(&who());
        client.ask(AUTHORIZATION, &Ask::default());
        assert!(client.told(AUTHORIZATION).resources.is_empty());
        client.gets_nothing();
    }),
    ("policies by name are refused", |world| {
        let mut client = world.open(&who());
        client.ask(AUTHORIZATION, &Ask { subscribe: &["a/b"], ..Ask::default() });
        assert_eq!(client.ended().0, 3);
    }),
    ("a star is everything too", |world| {
        let mut client = world.open(&who());
        client.ask(ADDRESS, &Ask { subscribe: &["*"], ..Ask::default() });
        assert_eq!(client.told(ADDRESS).resources.len(), 7);
    }),
    ("a neighbour is one workload of all its services", |world| {
        let near = world.everything().first().0.workload(NEAR);
        assert_eq!(
            (near.text(20), near.text(4), near.all(3)),
            (NEAR.into(), "east".into(), vec![vec![10, 0, 0, 1]])
        );
        assert_eq!((near.text(2), near.text(7), near.has(6)), ("shop".into(), "a".into(), false));
        assert_eq!((near.number(5), near.number(17)), (1, 0), "HBONE, healthy");
        assert!(!near.has(19), "no gateway");
        let services: Vec<_> = near.messages(22).iter().map(|entry| entry.text(1)).collect();
        assert_eq!(services, [SERVICE, "shop/b.mesh"]);
        let port = near.messages(22)[0].message(2).message(1);
        assert_eq!((port.number(1), port.number(2)), (80, 8080));
        assert_eq!(near.message(24).text(1), "r");
    }),
    ("a workload behind a gateway has no address, but the gateway's", |world| {
        let behind = world.everything().first().0.workload(BEHIND);
        assert!(!behind.has(3) && !behind.has(21), "neither address nor host name");
        assert_eq!((behind.text(4), behind.number(5)), ("west".into(), 1));
        let gateway = behind.message(19);
        assert_eq!((gateway.number(3), gateway.message(2).bytes(2)), (15_008, vec![192, 0, 2, 2]));
        assert_eq!(gateway.message(2).text(1), "west");
    }),
    ("capacities divide calls as the endpoints are", |world| {
        let all = world.everything().first().0;
        let capacity = |name: &str| all.workload(name).message(27).number(1);
        // One neighbour, and three endpoints behind two gateways: a third gateway cannot be verified.
        assert_eq!((capacity(NEAR), capacity(BEHIND), capacity(BEHIND_SECOND)), (60, 90, 90));
    }),
    ("a gateway is a workload with its identity on its network", |world| {
        let gateway = world.everything().first().0.workload(GATEWAY);
        assert_eq!((gateway.text(4), gateway.all(3)), ("west".into(), vec![vec![192, 0, 2, 2]]));
        assert_eq!((gateway.text(2), gateway.text(7)), ("istio-system".into(), "eastwest".into()));
        assert_eq!((gateway.has(6), gateway.number(5)), (false, 0), "the default trust domain is not sent");
    }),
    ("a service has the identities of all members, near and far", |world| {
        let service = world.everything().first().0.service(SERVICE);
        assert_eq!((service.text(2), service.text(3)), ("shop".into(), "a.mesh".into()));
        let of = |account: &str| format!("spiffe://cluster.local/ns/shop/sa/{account}");
        assert_eq!(service.texts(6), ["a", "far1", "far2", "far3"].map(of));
        let address = service.message(4);
        assert_eq!((address.text(1), address.bytes(2)), ("east".into(), vec![240, 0, 0, 1]));
        let port = service.message(5);
        assert_eq!((port.number(1), port.number(2), port.number(3)), (80, 8080, 1), "HTTP/1.1");
    }),
    (
        "on demand, the first response has the own node's workloads, and the services that they serve",
        |world| {
            let mut client = world.open(&who());
            client.begin_on_demand(&[]);
            let all = [NEAR, GATEWAY, SECOND, BEHIND, BEHIND_SECOND, SERVICE, "shop/b.mesh"];
            assert_eq!(client.first().0.names(), all);
        },
    ),
    ("on demand, the workloads of another node do not come unasked", |world| drop(world.on_demand())),
    ("a virtual address gives the service, its workloads and gateways, and itself as removed", |world| {
        let mut client = world.on_demand();
        client.ask(ADDRESS, &Ask { subscribe: &[VIP], ..Ask::default() });
        let told = client.told(ADDRESS);
        assert_eq!(told.names(), [NEAR, GATEWAY, SECOND, BEHIND, BEHIND_SECOND, SERVICE]);
        assert_eq!(told.removed, [VIP]);
    }),
    ("a service by name has its very name", |world| {
        let mut client = world.on_demand();
        client.ask(ADDRESS, &Ask { subscribe: &[SERVICE], ..Ask::default() });
        let told = client.told(ADDRESS);
        assert!(told.resources.contains_key(SERVICE) && told.resources.contains_key(GATEWAY));
        assert!(told.removed.is_empty());
    }),
    ("an address of a workload gives the workload", |world| {
        let mut client = world.on_demand();
        client.ask(ADDRESS, &Ask { subscribe: &["east/10.0.0.1"], ..Ask::default() });
        let told = client.told(ADDRESS);
        assert_eq!((told.names(), &*told.removed[0]), (vec![NEAR], "east/10.0.0.1"));
    }),
    ("a key of a workload gives the workload again, although the client has it", |world| {
        let mut client = world.on_demand();
        for _ in 0..2 {
            client.ask(ADDRESS, &Ask { subscribe: &[NEAR], ..Ask::default() });
            assert_eq!(client.told(ADDRESS).names(), [NEAR]);
        }
    }),
    ("an unknown name is answered at once, as removed", |world| {
        let mut client = world.on_demand();
        for name in ["east/192.0.2.77", "shop/none.mesh", "nothing"] {
            client.ask(ADDRESS, &Ask { subscribe: &[name], ..Ask::default() });
            let told = client.told(ADDRESS);
            assert!(told.resources.is_empty() && told.removed == [name], "{told:?}");
        }
    }),
    ("a client that returns gets only what differs, and the removals", |world| {
        let mut held = world.everything().first().0.held();
        held.retain(|(name, _)| name != GATEWAY);
        held.iter_mut().filter(|(name, _)| name == SERVICE).for_each(|(_, version)| *version = "old".into());
        held.push(("Endpoint/east/10.9.9.9".into(), "0123456789abcdef".into()));
        let mut client = world.open(&who());
        client.begin(&held);
        let told = client.first().0;
        assert_eq!(
            (told.names(), told.removed.clone()),
            (vec![GATEWAY, SERVICE], vec!["Endpoint/east/10.9.9.9".to_owned()])
        );
    }),
    ("a client that has everything gets an empty response", |world| {
        let held = world.everything().first().0.held();
        let mut client = world.open(&who());
        client.begin(&held);
        let told = client.first().0;
        assert!(told.resources.is_empty() && told.removed.is_empty(), "{told:?}");
    }),
    ("a refused response is not sent again", |world| {
        let mut client = world.open(&who());
        client.ask(ADDRESS, &Ask::default());
        let Next::Told(told) = client.next() else { panic!("no response") };
        client.ask(ADDRESS, &Ask { nonce: &told.nonce, error: "shop/a.mesh: bad", ..Ask::default() });
        client.gets_nothing();
        eventually("a NACK is counted", || {
            (world.gateway.metric("isthmus_xds_rejects_total", &["type=\"address\""]) >= 1.0).then_some(())
        });
    }),
    ("a name that is too long ends the stream", |world| {
        let mut client = world.on_demand();
        client.ask(ADDRESS, &Ask { subscribe: &[&"x".repeat(600)], ..Ask::default() });
        assert_eq!(client.ended().0, 3);
    }),
];

#[test]
fn the_server_keeps_to_the_protocol_of_ztunnels() {
    let world = World::start();
    for (name, case) in CASES {
        eprintln!("{name}");
        case(&world);
    }
    assert!(world.gateway.metric("isthmus_xds_refused_total", &[]) >= 8.0);
    let recent = world.gateway.json("/api/v1/status")["xds"]["refused"].clone();
    assert!(recent.to_string().contains("xds.wds.clients"), "{recent}");
}

#[test]
fn changes_reach_clients_in_one_response_each() {
    let world = World::start();
    let (mut all, mut some) = (world.everything(), world.on_demand());
    all.first();
    some.ask(ADDRESS, &Ask { subscribe: &[VIP], ..Ask::default() });
    some.told(ADDRESS);
    // More endpoints behind the gateways: their workloads and the identities of the service, and nothing else.
    world.write("west.yaml", &west(6));
    for client in [&mut all, &mut some] {
        let told = client.told(ADDRESS);
        assert_eq!(told.names(), [BEHIND, BEHIND_SECOND, SERVICE]);
        assert_eq!(told.workload(BEHIND).message(27).number(1), 180);
    }
    // None: the gateways go with the workloads, in the same response.
    world.write("west.yaml", "services: []\n");
    for client in [&mut all, &mut some] {
        let told = client.told(ADDRESS);
        // The service keeps the identities for some minutes: a gateway that reads the file late connects callers to the endpoints.
        assert_eq!(told.names(), Vec::<&str>::new());
        assert_eq!(told.removed, [GATEWAY, SECOND, BEHIND, BEHIND_SECOND]);
    }
    // They come back to the client that asked for the virtual address once.
    world.write("west.yaml", &west(3));
    for client in [&mut all, &mut some] {
        assert_eq!(client.told(ADDRESS).names(), [GATEWAY, SECOND, BEHIND, BEHIND_SECOND]);
    }
    // An endpoint that is not ready stays as a workload.
    world.write("east.yaml", &EAST.replace("locality: r/z}", "locality: r/z, health: unhealthy}"));
    let told = all.told(ADDRESS);
    let near = told.workload(NEAR);
    let services: Vec<_> = near.messages(22).iter().map(|entry| entry.text(1)).collect();
    assert_eq!(
        (near.number(17), services),
        (0, vec!["shop/b.mesh".to_owned()]),
        "it serves the other service"
    );
}

#[test]
fn clients_know_a_new_identity_before_the_gateway_uses_its_endpoint() {
    let world = World::start();
    let mut client = world.everything();
    client.first();
    // At the start, the identities of the registry that was read last are new to the service for a second.
    std::thread::sleep(Duration::from_secs(2));
    let odds = || {
        let explained = world.gateway.json("/api/v1/explain?sni=outbound_.80_._.a.mesh");
        let all = explained["candidates"].as_array().cloned().unwrap_or_default();
        let of_new =
            all.iter().find(|one| one["address"].as_str().is_some_and(|at| at.starts_with("10.0.0.2:")));
        of_new.map(|one| one["odds"].as_f64().expect("a number"))
    };
    let second = "locality: r/z}, {address: 10.0.0.2, tunnel: hbone, identity: 'spiffe://cluster.local/ns/shop/sa/new', locality: r/z}";
    let begun = Instant::now();
    world.write("east.yaml", &EAST.replacen("locality: r/z}", second, 1));
    let told = client.told(ADDRESS).service(SERVICE).texts(6);
    assert!(told.iter().any(|identity| identity.ends_with("/sa/new")), "{told:?}");
    let unused = odds();
    // On a machine that is very busy, the second may be over.
    assert!(unused == Some(0.0) || begun.elapsed() >= Duration::from_secs(1), "{unused:?}");
    eventually("its half of the connections", || (odds() == Some(0.5)).then_some(()));
}

/// A ztunnel that removes a service forgets its address for all services of the namespace, also for one that it has just got.
#[test]
fn a_service_that_takes_over_an_address_is_sent_again() {
    let world = World::start();
    let (mut all, mut some) = (world.everything(), world.on_demand());
    let held = all.first().0.held();
    some.ask(ADDRESS, &Ask { subscribe: &[VIP], ..Ask::default() });
    some.told(ADDRESS);
    world.write("west.yaml", "services: []\n");
    for client in [&mut all, &mut some] {
        client.told(ADDRESS);
    }
    world.write("east.yaml", &EAST.replace("a.mesh", "renamed.mesh"));
    for client in [&mut all, &mut some] {
        let told = client.told(ADDRESS);
        assert!(told.resources.contains_key("shop/renamed.mesh"), "{:?}", told.names());
        assert_eq!(told.removed, [SERVICE]);
        let told = client.told(ADDRESS);
        assert_eq!((told.names(), told.removed.len()), (vec!["shop/renamed.mesh"], 0));
        assert_eq!(told.service("shop/renamed.mesh").message(4).bytes(2), [240, 0, 0, 1]);
    }
    // Also over a new stream, on which the server does not know what addresses the services of the client have.
    let mut client = world.open(&who());
    client.begin(&held);
    let told = client.first().0;
    assert!(told.removed.contains(&SERVICE.to_owned()), "{:?}", told.removed);
    assert_eq!(client.told(ADDRESS).names(), ["shop/renamed.mesh"]);
    client.gets_nothing();
    let mut held = all_of(&world);
    held.iter_mut()
        .filter(|(name, _)| name == "shop/b.mesh")
        .for_each(|(_, version)| *version = "old".into());
    let mut client = world.open(&who());
    client.begin(&held);
    assert_eq!(client.first().0.names(), ["shop/b.mesh"]);
    assert_eq!(client.told(ADDRESS).names(), ["shop/renamed.mesh"], "it may have the address of `b.mesh`");
    client.gets_nothing();
}

/// Returns what a client has that has everything.
fn all_of(world: &World) -> Vec<(String, String)> {
    world.everything().first().0.held()
}

/// A ztunnel does not ask for a service that it has, so that the service must be whole.
#[test]
fn a_service_that_came_unasked_stays_whole() {
    let world = World::start();
    let mut client = world.open(&who());
    client.begin_on_demand(&[]);
    let held = client.first().0.held();
    let more =
        "10.0.0.2, tunnel: hbone, identity: 'spiffe://cluster.local/ns/shop/sa/a'}, {address: 10.0.0.1,";
    world.write("east.yaml", &EAST.replacen("10.0.0.1,", more, 1));
    let told = client.told(ADDRESS);
    assert!(told.resources.contains_key("Endpoint/east/10.0.0.2"), "{:?}", told.names());
    drop(client);
    // Also over a new stream.
    let mut client = world.open(&who());
    client.begin_on_demand(&held);
    let told = client.first().0;
    assert!(told.resources.contains_key("Endpoint/east/10.0.0.2"), "{:?}", told.names());
}

#[test]
fn a_name_that_was_unknown_is_sent_once_it_exists() {
    let world = World::start();
    let mut client = world.on_demand();
    client.ask(ADDRESS, &Ask { subscribe: &["shop/c.mesh", "east/240.0.0.7"], ..Ask::default() });
    assert_eq!(client.told(ADDRESS).removed.len(), 2);
    let more = "- {hostname: c.mesh, namespace: shop, addresses: [240.0.0.7], ports: [{name: p, port: 80}], \
                endpoints: [{address: 10.0.0.7}]}\n";
    world.write("east.yaml", &format!("{EAST}{more}"));
    assert_eq!(client.told(ADDRESS).names(), ["Endpoint/east/10.0.0.7", "shop/c.mesh"]);
}

#[test]
fn a_client_on_demand_that_returns_keeps_its_names() {
    let world = World::start();
    let mut first = world.open(&who().with("NODE_NAME", "node-9"));
    first.begin_on_demand(&[]);
    first.first();
    first.ask(ADDRESS, &Ask { subscribe: &[SERVICE], ..Ask::default() });
    let mut held = first.told(ADDRESS).held();
    drop(first);
    held.push(("shop/gone.mesh".into(), "0123456789abcdef".into()));
    let mut client = world.open(&who().with("NODE_NAME", "node-9"));
    client.begin_on_demand(&held);
    let told = client.first().0;
    assert_eq!((told.names().len(), told.removed.clone()), (0, vec!["shop/gone.mesh".to_owned()]));
    assert_eq!(client.told(ADDRESS).names(), [SERVICE], "the client may have forgotten its address");
    world.write("west.yaml", &west(6));
    assert_eq!(client.told(ADDRESS).names(), [BEHIND, BEHIND_SECOND, SERVICE], "without asking again");
}

#[test]
fn while_a_response_is_in_flight_the_changes_gather() {
    let world = World::start();
    let mut client = world.open(&who());
    client.ask(ADDRESS, &Ask::default());
    let Next::Told(first) = client.next() else { panic!("no response") };
    // Another client of the same view acknowledges what it gets, so it shows that a change has come so far.
    let mut other = world.everything();
    other.first();
    for (endpoints, capacity) in [(6, 180), (1, 30)] {
        world.write("west.yaml", &west(endpoints));
        assert_eq!(other.told(ADDRESS).workload(BEHIND).message(27).number(1), capacity);
        client.gets_nothing();
    }
    client.ask(ADDRESS, &Ask { nonce: &first.nonce, ..Ask::default() });
    let told = client.told(ADDRESS);
    assert_eq!(told.names(), [BEHIND, BEHIND_SECOND, SERVICE]);
    assert_eq!(told.workload(BEHIND).message(27).number(1), 30, "the newest state");
}

#[test]
fn clients_are_shown_and_counted() {
    let world = World::start();
    let mut client = world.everything();
    client.first();
    let shown = eventually("an acknowledged client", || {
        let all = world.gateway.json("/api/v1/clients");
        let one = all.as_array()?.first()?.clone();
        (one["types"]["authorization"]["last_ack"].is_string()).then_some(one)
    });
    assert_eq!(shown["identity"], "spiffe://cluster.local/ns/istio-system/sa/ztunnel");
    assert_eq!((&shown["network"], &shown["cluster"]), (&"east".into(), &"east".into()));
    assert_eq!(shown["subscriptions"], serde_json::json!(["address *", "authorization *"]));
    assert!(world.gateway.metric("isthmus_xds_pushes_total", &["type=\"address\""]) >= 1.0);
    drop(client);
    eventually("no client", || (world.gateway.metric("isthmus_xds_clients", &[]) == 0.0).then_some(()));
}

/// After any other status, a ztunnel waits before it connects again, each time twice as long as the last time.
#[test]
fn a_stream_ends_without_an_error_when_a_new_process_takes_over() {
    let world = World::with("withoutPolicies: [east, lost]", "state: {dir: state}\ndrain: {timeout: 5s}\n");
    let address = world.address();
    let mut client = world.everything();
    let held = client.first().0.held();
    let World { gateway, tls } = world;
    let line = crate::upgrade::Line(gateway);
    line.upgrade();
    assert_eq!(client.ended(), (0, String::new()));
    let mut client = Ztunnel::open(address, &tls, &who());
    client.begin(&held);
    assert!(client.first().0.resources.is_empty());
}

#[test]
fn a_renewed_certificate_is_presented_without_a_restart() {
    let world = World::start();
    let pki = crate::support::pki::Pki::new("another CA");
    let issued = pki.issue(&["isthmus.test"], None);
    world.write("key.pem", &issued.key_pem);
    world.write("cert.pem", &issued.certificate_pem);
    let tls = pki.client(&["h2"]);
    eventually("the new certificate", || {
        let socket = crate::support::client::tls_with(tls.clone(), world.address(), "isthmus.test");
        socket.ok().map(drop)
    });
    world.gateway.log();
}
