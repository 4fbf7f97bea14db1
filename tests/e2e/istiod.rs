//! A registry that is read from an istiod. `tests/interop/istiod_peer.py` is the istiod, with grpcio, the official messages of xDS,
//! and messages of WDS that it writes by their field numbers.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::backend::Backend;
use crate::support::client::{call, tls};
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;
use crate::support::python::{self, Peer};
use crate::support::wds::{Who, Ztunnel};
use crate::support::{eventually, skip};

const NAME: &str = "reviews.shop.svc.cluster.local";
const KEY: &str = "shop/reviews.shop.svc.cluster.local";
const POD: &str = "c1//Pod/shop/reviews-1";
const POD_2: &str = "c1//Pod/shop/reviews-2";
const TOKEN: &str = "0123456789abcdef-of-the-gateway";
/// Keys of a registry that allow the addresses of the tests.
pub(crate) const LOOPBACK: &str = "  allow: {addresses: [127.0.0.0/8]}\n";
/// Protocol TLS.
const TLS: u16 = 5;

/// An istiod, and a gateway that reads it.
pub(crate) struct World {
    istiod: Peer,
    pub(crate) gateway: Gateway,
}

impl World {
    /// Starts an istiod that is told this, and a gateway with these further keys of its config and of its registry.
    pub(crate) fn start(told: &Value, config: &str, registry: &str) -> Option<Self> {
        Self::start_exporting("{services: [\"*\"], tls: own}", told, config, registry)
    }

    /// Starts them with this export rule.
    fn start_exporting(rule: &str, told: &Value, config: &str, registry: &str) -> Option<Self> {
        let Some(python) = python::with_authorities() else {
            skip(
                "interop: there is no Python with the official messages of xDS and what signs (tests/run installs it)",
            );
            return None;
        };
        let folder = tempfile::tempdir().expect("a folder");
        let issued = PKI.issue(&["isthmus.test"], None);
        let files = [
            ("token", TOKEN),
            ("cert.pem", &issued.certificate_pem),
            ("key.pem", &issued.key_pem),
            ("west.yaml", "services: []\n"),
            ("tokens", "fedcba9876543210-of-a-ztunnel spiffe://cluster.local/ns/istio-system/sa/ztunnel\n"),
        ];
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        let mut istiod = Peer::start(python, "istiod_peer.py", &[folder.path().as_os_str()]);
        istiod.tell(told);
        istiod.tell(&json!({"serve": true, "token": TOKEN}));
        let config = format!(
            "listen: \"127.0.0.1:0\"\nnode: {{cluster: c1, network: east, namespace: istio-system, name: gw-1}}\n\
             exports: [{rule}]\nregistries:\n- istiod: {{address: \"https://localhost:{}\", cluster: c1, \
             network: east, token: token, roots: tls-roots.pem}}\n{registry}{config}",
            istiod.port()
        );
        let gateway = Gateway::start_in(folder, &config, &[]);
        Some(Self { istiod, gateway })
    }

    pub(crate) fn tell(&mut self, what: &Value) {
        self.istiod.tell(what);
    }

    fn status(&self) -> Value {
        self.gateway.json("/api/v1/status")["registries"][0].clone()
    }

    #[track_caller]
    pub(crate) fn becomes(&self, state: &str) -> Value {
        eventually(state, || Some(self.status()).filter(|status| status["state"] == state))
    }

    /// Waits until a problem of the registry contains this text.
    #[track_caller]
    pub(crate) fn complains(&self, text: &str) {
        let has = |status: &Value| status.to_string().contains(text);
        eventually(text, || has(&self.gateway.json("/api/v1/registries")).then_some(()));
    }

    /// Returns the ports of the endpoints to which the name leads.
    pub(crate) fn ports(&self) -> Vec<u64> {
        self.ports_by(&format!("sni={NAME}"))
    }

    /// Returns the ports of the endpoints to which a name leads, which is a parameter of `explain`.
    fn ports_by(&self, name: &str) -> Vec<u64> {
        let explained = self.gateway.json(&format!("/api/v1/explain?{name}"));
        let candidates = explained["candidates"].as_array().cloned().unwrap_or_default();
        let address = |candidate: &Value| candidate["address"].as_str().expect("an address").to_owned();
        let port = |address: String| address.rsplit(':').next().and_then(|port| port.parse().ok());
        let mut ports: Vec<u64> = candidates.iter().map(address).filter_map(port).collect();
        ports.sort_unstable();
        ports
    }

    #[track_caller]
    fn leads_to(&self, ports: &[u16]) {
        let mut expected: Vec<u64> = ports.iter().map(|port| u64::from(*port)).collect();
        expected.sort_unstable();
        eventually(&format!("{NAME} at {ports:?}"), || (self.ports() == expected).then_some(()));
    }

    /// Returns the requests for workloads so far.
    fn asked(&self) -> Vec<Value> {
        self.istiod.of("asked").into_iter().filter(|asked| asked["type"] == "Address").collect()
    }
}

fn service() -> Value {
    json!({"service": {
        "name": "reviews", "namespace": "shop", "hostname": NAME, "addresses": ["east/10.96.0.1"], "ports": [[443, 0, TLS]],
    }})
}

fn pod(uid: &str, port: u16) -> Value {
    json!({"workload": {
        "uid": uid, "name": uid, "namespace": "shop", "addresses": ["127.0.0.1"], "network": "east", "cluster": "c1",
        "account": "reviews", "node": "node-1", "services": {KEY: [[443, port, TLS]]},
    }})
}

pub(crate) fn one_pod() -> Value {
    json!({"put": {KEY: service(), POD: pod(POD, 7001)}})
}

#[test]
fn a_rule_without_tls_own_leads_to_workloads_of_an_istiod_in_the_mesh_alone() {
    let mut meshed = pod(POD_2, 7002);
    // mTLS of a sidecar.
    meshed["workload"]["tunnel"] = json!(2);
    let told = json!({"put": {KEY: service(), POD: pod(POD, 7001), POD_2: meshed}});
    let names = [format!("sni={NAME}"), format!("sni=outbound_.443_._.{NAME}")];
    let ports = |world: &World| names.each_ref().map(|name| world.ports_by(name));
    let Some(default) = World::start_exporting("{services: [\"*.local\"]}", &told, "", LOOPBACK) else {
        return;
    };
    eventually("the workload in the mesh by mesh name", || {
        (ports(&default) == [vec![], vec![7002]]).then_some(())
    });
    let problems = default.gateway.json("/api/v1/status")["problems"].to_string();
    assert!(
        problems.contains("export_narrowed") && problems.contains("write `tls: own` in exports[0]"),
        "{problems}"
    );
    let Some(own) = World::start_exporting("{services: [\"*.local\"], tls: own}", &told, "", LOOPBACK) else {
        return;
    };
    eventually("the workload outside the mesh by host name", || {
        (ports(&own) == [vec![7001], vec![7002]]).then_some(())
    });
}

#[test]
fn services_and_endpoints_of_an_istiod_are_served_and_follow_it() {
    let one = Backend::tls_echo(PKI.server(NAME), "one ");
    let port = one.address.port();
    let Some(mut world) = World::start(&json!({"put": {KEY: service(), POD: pod(POD, port)}}), "", LOOPBACK)
    else {
        return;
    };
    world.becomes("live");
    let mut stream = tls(world.gateway.listener("default"), NAME).expect("a handshake");
    assert_eq!(call(&mut stream, "x").expect("an answer"), "one x");

    let asked = eventually("the request", || world.asked().first().cloned());
    assert_eq!(asked["node"], "ztunnel~1.1.1.1~gw-1.istio-system~istio-system.svc.cluster.local");
    assert_eq!((&asked["cluster"], &asked["known"]), (&json!("c1"), &json!({})));

    world.tell(&json!({"put": {POD_2: pod(POD_2, 7002)}}));
    world.leads_to(&[port, 7002]);
    world.tell(&json!({"remove": [POD]}));
    world.leads_to(&[7002]);
    world.tell(&json!({"remove": [KEY]}));
    world.leads_to(&[]);
    world.tell(&json!({"put": {KEY: service()}}));
    world.leads_to(&[7002]);
}

#[test]
fn a_loopback_address_is_an_endpoint_only_if_it_is_allowed() {
    let Some(world) = World::start(&one_pod(), "", "") else { return };
    let status = world.becomes("live");
    assert_eq!((&status["services"], &status["denied_addresses"]), (&json!(1), &json!(1)));
    assert_eq!(world.ports(), [0; 0]);
}

#[test]
fn a_stream_that_ends_is_resumed_without_what_is_known() {
    let told = json!({"put": {KEY: service(), POD: pod(POD, 7001), POD_2: pod(POD_2, 7002)}});
    let Some(mut world) = World::start(&told, "", LOOPBACK) else { return };
    world.leads_to(&[7001, 7002]);
    // A workload that was removed while nobody was connected is gone.
    world.tell(&json!({"forget": [POD], "drop": true}));
    world.leads_to(&[7002]);
    eventually("a second stream", || (world.asked().len() >= 2).then_some(()));
    assert_eq!(world.asked().len(), 2);
    let known = world.asked()[1]["known"].as_object().expect("versions").len();
    assert_eq!(known, 3);
    // An istiod without versions sends all again, which changes nothing.
    world.tell(&json!({"versions": false, "drop": true}));
    eventually("a third stream", || (world.asked().len() == 3).then_some(()));
    world.tell(&json!({"put": {POD: pod(POD, 7003)}}));
    world.leads_to(&[7002, 7003]);
    assert_eq!(world.status()["problems"], json!([]));
}

#[test]
fn endpoints_stay_while_an_istiod_is_gone_and_the_token_is_read_anew() {
    let Some(mut world) = World::start(&one_pod(), "", LOOPBACK) else { return };
    world.leads_to(&[7001]);
    world.tell(&json!({"serve": false}));
    world.complains("istiod at https://localhost");
    assert_eq!(world.ports(), [7001]);
    // The token has expired meanwhile.
    world.tell(&json!({"token": "another-token", "serve": true}));
    world.complains("the token is not known");
    assert_eq!(world.ports(), [7001]);
    std::fs::write(world.gateway.folder().join("token"), "another-token").expect("written");
    world.becomes("live");
    world.tell(&json!({"put": {POD_2: pod(POD_2, 7002)}}));
    world.leads_to(&[7001, 7002]);
}

#[test]
fn a_resource_that_cannot_be_read_is_refused_by_name_and_costs_no_other() {
    let Some(mut world) = World::start(&one_pod(), "", LOOPBACK) else { return };
    world.leads_to(&[7001]);
    world.tell(&json!({"raw": {POD: "ffff"}}));
    world.tell(&json!({"put": {POD_2: pod(POD_2, 7002)}}));
    world.leads_to(&[7001, 7002]);
    let refused = eventually("a NACK", || world.istiod.of("refused").pop());
    assert!(refused.as_str().is_some_and(|text| text.starts_with(&format!("{POD}: "))), "{refused}");
    world.complains(&format!("{POD}: "));
    world.tell(&json!({"put": {POD: pod(POD, 7003)}}));
    world.leads_to(&[7002, 7003]);
    eventually("no problem", || {
        (!world.gateway.json("/api/v1/registries").to_string().contains(POD)).then_some(())
    });
}

#[test]
fn what_stands_behind_a_gateway_is_taken_only_if_it_is_allowed() {
    let gateway = json!({"workload": {
        "uid": "NetworkGateway/west/192.0.2.9/0", "name": "gw", "namespace": "istio-system", "account": "eastwest",
        "addresses": ["192.0.2.9"], "network": "west",
    }});
    let behind = json!({"workload": {
        "uid": "SplitHorizonWorkload/west", "name": "x", "namespace": "shop", "network": "west", "tunnel": 1,
        "gateway": "west/192.0.2.9", "capacity": 3, "services": {KEY: [[443, 0, TLS]]},
    }});
    let told = json!({"put": {
        KEY: service(), POD: pod(POD, 7001), "NetworkGateway/west/192.0.2.9/0": gateway, "SplitHorizonWorkload/west": behind,
    }});
    // The number of gateways of the other network, and the weight of what stands behind them.
    let west = |world: &World| {
        let networks = world.gateway.json("/api/v1/networks");
        let west =
            networks.as_array().expect("a list").iter().find(|network| network["name"] == "west").cloned();
        west.map(|west| (west["gateways"].as_u64(), west["ready_weight"].as_u64()))
    };
    let Some(world) = World::start(&told, "", LOOPBACK) else { return };
    world.leads_to(&[7001]);
    assert_eq!(west(&world), None);
    let allow = "  allow: {networks: [east, west], addresses: [127.0.0.0/8, 192.0.2.0/24]}\n";
    let Some(world) = World::start(&told, "", allow) else { return };
    eventually("the gateway", || (west(&world) == Some((Some(1), Some(3)))).then_some(()));
    // Another registry reads the network itself.
    let other = "- file: {path: west.yaml, cluster: c2, network: west}\n";
    let Some(world) = World::start(&told, "", &format!("{allow}{other}")) else { return };
    world.leads_to(&[7001]);
    let report = world.gateway.json("/api/v1/registries")[0]["report"]["left_out"].clone();
    assert_eq!(report, json!({"read by another registry": 2}));
}

#[test]
fn ztunnels_get_the_workloads_and_policies_of_an_istiod() {
    let wds = "xds:\n  bind: \"127.0.0.1:0\"\n  wds:\n    bind: \"127.0.0.1:0\"\n    \
               tls: {certificate: cert.pem, key: key.pem}\n    tokens: {file: tokens}\n    clients:\n    \
               - {identities: ['spiffe://cluster.local/ns/istio-system/sa/ztunnel'], networks: [east], clusters: [c1]}\n";
    let mut told = one_pod();
    told["put"][KEY]["service"]["balancing"] = json!([2, [6, 1, 2, 3, 4], 1]);
    told["put"][KEY]["service"]["families"] = json!(1);
    for (key, value) in [("owner", "reviews-v1"), ("canonical", "reviews"), ("revision", "v1")] {
        told["put"][POD]["workload"][key] = json!(value);
    }
    told["put"][POD]["workload"]["kind"] = json!(1);
    let Some(mut world) = World::start(&told, wds, LOOPBACK) else { return };
    world.leads_to(&[7001]);
    let who = Who {
        token: "fedcba9876543210-of-a-ztunnel".into(),
        cluster: "c1".into(),
        metadata: vec![("NETWORK", "east".into()), ("NODE_NAME", "node-1".into())],
    };
    world.tell(&json!({"policies": ["shop/deny-all", "istio-system/one"]}));
    eventually("both policies", || {
        (world.gateway.json("/api/v1/registries")[0]["report"]["objects"]["policies"] == 2).then_some(())
    });
    let mut client = Ztunnel::open(world.gateway.listener("wds"), &PKI.client(&["h2"]), &who);
    client.begin(&[]);
    let (addresses, policies) = client.first();
    assert_eq!(policies.names(), ["istio-system/one", "shop/deny-all"]);
    assert!(addresses.names().contains(&POD), "{:?}", addresses.names());
    // The fields of services and workloads that the istiod sends are passed on.
    let (service, pod) = (addresses.service(KEY), addresses.workload(POD));
    let choice = service.message(8);
    assert_eq!((choice.number(2), choice.numbers(1), choice.number(3)), (2, vec![6, 1, 2, 3, 4], 1));
    assert_eq!((service.number(9), pod.number(12)), (1, 1));
    assert_eq!([13, 10, 11].map(|field| pod.text(field)), ["reviews-v1", "reviews", "v1"]);
    world.tell(&json!({"policies": ["shop/deny-all"]}));
    let changed = client.within(Duration::from_secs(60));
    let text = format!("{changed:?}");
    assert!(text.contains("istio-system/one"), "{text}");

    // A cluster whose policies are not known is not served.
    let mut told = one_pod();
    told["policies"] = Value::Null;
    let Some(world) = World::start(&told, wds, LOOPBACK) else { return };
    world.leads_to(&[7001]);
    let mut client = Ztunnel::open(world.gateway.listener("wds"), &PKI.client(&["h2"]), &who);
    client.begin(&[]);
    let (code, text) = client.ended();
    assert!(code == 9 && text.contains("xds.wds.withoutPolicies"), "{code} {text}");
    let problems = world.gateway.json("/api/v1/status")["problems"].to_string();
    assert!(problems.contains("istiod has not sent its policies yet"), "{problems}");
}
