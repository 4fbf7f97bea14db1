//! A name that several organisations serve: an Envoy of east calls `fees.global`, which east has itself, and which it joins with the
//! services of its peers west and north. Each organisation has its own certificate authority, trust domain and gateway.

use std::net::SocketAddr;
use std::time::Instant;

use serde_json::Value;

use crate::horizon_envoy::envoy;
use crate::problems::run;
use crate::support::backend::Backend;
use crate::support::client::{call, connect};
use crate::support::envoy::Envoy;
use crate::support::eventually;
use crate::support::federated::{WEB, client_of, loopback, workload_of};
use crate::support::gateway::{Gateway, with_common};
use crate::support::organisation::{Organisation, free_port, start};
use crate::support::pki::Pki;

const NAME: &str = "fees.global";
const EAST: &str = "spiffe://east.example/ns/pay/sa/fees";
const WEST: &str = "spiffe://west.example/ns/pay/sa/fees";
const NORTH: &str = "spiffe://north.example/ns/pay/sa/fees";

struct World {
    east: Organisation,
    west: Organisation,
    north: Organisation,
    ports: [u16; 3],
}

impl World {
    fn new() -> Self {
        Self {
            east: Organisation::new("east", "east.example"),
            west: Organisation::new("west", "west.example"),
            north: Organisation::new("north", "north.example"),
            ports: [free_port(), free_port(), free_port()],
        }
    }

    /// Returns the config of a peer of east, which exports these services, each as `NAME.pay.PEER.global`.
    fn peer_config(&self, peer: &Organisation, port: u16, services: &str) -> String {
        let rules = format!(
            "    from: [127.0.0.0/8]\n    export: [{{services: [\"*.pay.svc.cluster.local\"], as: \"{{service}}.{{namespace}}.{}.global\"}}]\n",
            peer.name
        );
        format!(
            "{}networks: {{net-{}: {{gateways: [{{address: 127.0.0.1, sniPort: {port}, hbonePort: {port}}}]}}}}\npeers:\n{}services:\n{services}",
            peer.base(port),
            peer.name,
            self.east.as_peer("accept: true", &rules),
        )
    }

    /// Starts west and north with a service `fees` at each of these workloads.
    fn start_peers(&self, west: &Backend, north: (&Backend, &str)) -> [Gateway; 2] {
        let of = |organisation: &Organisation, port, services: &str| {
            start(organisation.folder(&[&self.east]), &self.peer_config(organisation, port, services))
        };
        let west = of(&self.west, self.ports[1], &service("fees.pay.svc.cluster.local", west.address, WEST));
        let north =
            of(&self.north, self.ports[2], &service("fees.pay.svc.cluster.local", north.0.address, north.1));
        [west, north]
    }

    /// Returns east's config with these services, and these keys in the import rules of west and north.
    fn east_config(&self, services: &str, west: &str, north: &str) -> String {
        let peer = |organisation: &Organisation, port: u16, more: &str| {
            let rules = format!(
                "    import: [{{services: [\"*.pay.{}.global\"], as: \"{{service}}.global\"{more}}}]\n    staleAfter: 1s\n",
                organisation.name
            );
            organisation.as_peer(&format!("dial: \"127.0.0.1:{port}\""), &rules)
        };
        format!(
            "{}xds: {{bind: \"127.0.0.1:0\"}}\ndnsServer: {{bind: \"127.0.0.1:0\", zones: [global]}}\npeers:\n{}{}services:\n{services}",
            self.east.base(self.ports[0]),
            peer(&self.west, self.ports[1], west),
            peer(&self.north, self.ports[2], north),
        )
    }

    fn start_east(&self, config: &str) -> Gateway {
        start(self.east.folder(&[&self.west, &self.north]), config)
    }

    fn workload(&self, name: &'static str, authority: &Pki, identity: &str) -> Backend {
        workload_of(name, authority, identity, &self.east.pki)
    }
}

/// Returns a service with one endpoint, at a port of loopback.
fn service(hostname: &str, at: SocketAddr, identity: &str) -> String {
    format!(
        "  - hostname: {hostname}\n    namespace: pay\n    ports: [{{name: tcp, port: 80, targetPort: {}}}]\n    \
         endpoints: [{{address: 127.0.0.1, identity: \"{identity}\"}}]\n",
        at.port()
    )
}

const MERGE: &str = ", merge: true";

fn fees_client(binary: &std::ffi::OsString, world: &World, east: &Gateway) -> Envoy {
    client_of(binary, &world.east, east.listener("xds"), &[("fees", NAME)], "DELTA_GRPC")
}

/// Returns who answers a call.
fn answer(envoy: &Envoy) -> String {
    let line = call(&mut connect(envoy.listener("fees")), "hello").unwrap_or_default();
    line.strip_suffix(WEB).unwrap_or(&line).trim().to_owned()
}

#[track_caller]
fn answers(envoy: &Envoy, who: &str) {
    eventually(&format!("twenty answers of {who} in a row"), || {
        (0..20).all(|_| answer(envoy) == who).then_some(())
    });
}

/// Returns the networks of the endpoints that a client on east's network gets, each with its priority.
fn networks(east: &Gateway, client: &str) -> Option<Vec<(String, u64)>> {
    let (status, body) =
        east.get(&format!("/api/v1/horizon?network=net-east&cluster=east&service={NAME}{client}"));
    let value: Value = serde_json::from_str(&body).ok()?;
    let one = |entry: &Value| {
        (
            entry["network"].as_str().unwrap_or_default().to_owned(),
            entry["priority"].as_u64().unwrap_or_default(),
        )
    };
    let mut all: Vec<_> = value["entries"].as_array().into_iter().flatten().map(one).collect();
    all.sort_by(|one, other| (one.1, &one.0).cmp(&(other.1, &other.0)));
    (status == 200).then_some(all)
}

/// Returns the plan of a changed config.
fn plan(east: &Gateway, config: &str) -> String {
    let path = east.folder().join("new.yaml");
    std::fs::write(&path, with_common(config)).expect("written");
    run(east, &["peer", "plan", "-c", &path.display().to_string()])
}

#[track_caller]
fn sees(east: &Gateway, wanted: &[(&str, u64)]) {
    eventually(&format!("the networks {wanted:?}"), || {
        let found = networks(east, "")?;
        let found: Vec<(&str, u64)> =
            found.iter().map(|(network, priority)| (&**network, *priority)).collect();
        (found == wanted).then_some(())
    });
}

#[test]
fn a_peer_serves_a_joined_name_while_the_own_service_is_dead_and_then_no_longer() {
    let Some(binary) = envoy() else { return };
    let world = World::new();
    let own = world.workload("own", &world.east.pki, EAST);
    let (west, north) =
        (world.workload("west", &world.west.pki, WEST), world.workload("north", &world.north.pki, NORTH));
    let [of_west, _of_north] = world.start_peers(&west, (&north, NORTH));
    let config = |own: &str| world.east_config(own, MERGE, MERGE);
    let dead = service(NAME, loopback(free_port()), EAST);
    let alive = service(NAME, own.address, EAST);
    let east = world.start_east(&config(&alive));
    sees(&east, &[("net-east", 0), ("peer/north/net-north", 1), ("peer/west/net-west", 1)]);
    let envoy = fees_client(&binary, &world, &east);
    answers(&envoy, "own");
    // The own endpoint dies, and only Envoy notices.
    east.reload(&config(&dead));
    let before = (west.accepted(), north.accepted());
    eventually("answers of both peers", || {
        answer(&envoy);
        (west.accepted() > before.0 + 3 && north.accepted() > before.1 + 3).then_some(())
    });
    let lost = Instant::now();
    let failed = (0..60).filter(|_| answer(&envoy).is_empty()).count();
    assert!(failed <= 3, "{failed} of 60 calls in {:?} after the first second", lost.elapsed());
    // It comes back.
    east.reload(&config(&alive));
    answers(&envoy, "own");
    // The registry says that it is not ready, and then that it has left.
    let unready = alive.replace("127.0.0.1, identity", "127.0.0.1, health: unhealthy, identity");
    for gone in [unready, alive.replace("endpoints: [{", "endpoints: [] # [{")] {
        east.reload(&config(&gone));
        eventually("an answer of a peer", || ["west", "north"].contains(&&*answer(&envoy)).then_some(()));
        let of_peers = |envoy: &Envoy| ["west", "north"].contains(&&*answer(envoy));
        eventually("thirty answers of peers in a row", || (0..30).all(|_| of_peers(&envoy)).then_some(()));
        east.reload(&config(&alive));
        answers(&envoy, "own");
    }
    // Clients with one set of roots get the own endpoint alone, and say why.
    for client in ["&client=grpc", "&tunnel=hbone"] {
        let all = networks(&east, client).expect("known");
        assert_eq!(all, [("net-east".to_owned(), 0)], "{client}");
        let path = format!("/api/v1/horizon?network=net-east&cluster=east&service={NAME}{client}");
        let missing = east.json(&path)["missing"].to_string();
        assert_eq!(missing.matches("not verifiable").count(), 2, "{missing}");
    }
    // The name has one virtual address, whoever serves it.
    let addresses =
        |gateway: &Gateway| gateway.json(&format!("/api/v1/services/{NAME}"))["addresses"].clone();
    let both = addresses(&east);
    assert_eq!(both.as_array().map(Vec::len), Some(2), "{both}");
    let sni = format!("/api/v1/explain?sni=outbound_.80_._.{NAME}");
    let explained = east.json(&sni)["steps"].to_string();
    let joined = "fees.global is joined with fees.pay.west.global of the peer west and fees.pay.north.global of the peer north";
    assert!(explained.contains(joined) && explained.contains("Envoy by SNI: 2 gateways"), "{explained}");
    let theirs = of_west.json("/api/v1/explain?sni=outbound_.80_._.fees.pay.west.global&from=127.0.0.1");
    assert_eq!(theirs["reason"], "ok", "{theirs}");
    let planned = plan(&east, &world.east_config(&alive, "", MERGE));
    assert!(
        planned.starts_with("peer west\n  - import fees.pay.west.global (here fees.global)\n  warning:")
            && !planned.contains("north"),
        "{planned}"
    );
    east.reload(&config("  []\n"));
    sees(&east, &[("peer/north/net-north", 0), ("peer/west/net-west", 0)]);
    assert_eq!(addresses(&east), both, "the same addresses without the own service");
}

#[test]
fn a_peer_that_lies_about_a_joined_name_reaches_nothing_of_ours() {
    let Some(binary) = envoy() else { return };
    let world = World::new();
    let west = world.workload("west", &world.west.pki, WEST);
    // North's workload shows an identity of east, and later one of west, both issued by north's own authority.
    let as_east = world.workload("as east", &world.north.pki, EAST);
    let as_west = world.workload("as west", &world.north.pki, WEST);
    let [_of_west, of_north] = world.start_peers(&west, (&as_east, NORTH));
    let gone = service(NAME, loopback(1), EAST).replace("endpoints: [{", "endpoints: [] # [{");
    let alone = |merge_west: &str| world.east_config(&gone, merge_west, MERGE);
    let east = world.start_east(&alone(""));
    sees(&east, &[("peer/north/net-north", 0)]);
    let envoy = fees_client(&binary, &world, &east);
    let is_refused = |backend: &Backend| {
        let before = backend.accepted();
        eventually("a call that reaches the liar", || {
            assert_eq!(answer(&envoy), "", "its certificate is not accepted");
            (backend.accepted() > before + 1).then_some(())
        });
    };
    is_refused(&as_east);
    let north = |at: &Backend, identity: &str, hostname: &str| {
        of_north.reload(&world.peer_config(
            &world.north,
            world.ports[2],
            &service(hostname, at.address, identity),
        ));
    };
    north(&as_west, NORTH, "fees.pay.svc.cluster.local");
    is_refused(&as_west);
    // West is joined, and north's endpoint is still not accepted.
    east.reload(&alone(MERGE));
    answers(&envoy, "west");
    for _ in 0..40 {
        assert!(["west", ""].contains(&&*answer(&envoy)));
    }
    // North says in its record that its endpoint has an identity of east: the record is refused.
    north(&as_east, EAST, "fees.pay.svc.cluster.local");
    sees(&east, &[("peer/west/net-west", 0)]);
    eventually("the refusal in north's list", || {
        of_north
            .json("/api/v1/peers")
            .to_string()
            .contains("not in the trust domain north.example")
            .then_some(())
    });
    for _ in 0..20 {
        assert_eq!(answer(&envoy), "west");
    }
    // Without `merge`, the name is the own service's alone, and the sentence says so.
    let own = world.workload("own", &world.east.pki, EAST);
    east.reload(&world.east_config(&service(NAME, own.address, EAST), "", ""));
    sees(&east, &[("net-east", 0)]);
    answers(&envoy, "own");
    let peers = east.json("/api/v1/peers").to_string();
    assert!(peers.contains("`merge: true` in the import rules"), "{peers}");
    let planned = plan(&east, &world.east_config(&service(NAME, own.address, EAST), MERGE, ""));
    assert_eq!(planned, "peer west\n  + import fees.pay.west.global (joined with fees.global)\n");
}
