//! The waypoints of Kubernetes services behind the gateway, over real sockets: which callers meet the waypoint, and which the pods.

use std::io::{BufRead, BufReader, Write};

use serde_json::{Value, json};

use crate::hbone::{CALLER, caller, folder};
use crate::hbone_life::{Running, called, peer, workload_folder};
use crate::support::backend::Backend;
use crate::support::eventually;
use crate::support::fake_kube::{FakeKube, Reply};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::kube_world::{Asked, status};
use crate::support::pki::PKI;

const AUTHORITY: &str = "web.shop.svc.cluster.local:80";
/// The identity of the pods of the waypoint `gate`.
const GATE: &str = "spiffe://cluster.local/ns/shop/sa/gate";

/// Returns a pod in ambient mode, and the Service and EndpointSlice that it is the only endpoint of. Pods accept HBONE only on one
/// port; no other test uses these addresses.
fn backed(name: &str, vip: &str, ip: &str, port: u16, meta: &Value) -> [Value; 3] {
    let uid = format!("{:0>32}", ip.replace('.', ""));
    let mut metadata = json!({"name": name, "namespace": "shop"});
    metadata.as_object_mut().expect("a map").extend(meta.as_object().expect("a map").clone());
    [
        json!({"kind": "Pod",
            "metadata": {"name": format!("{name}-1"), "namespace": "shop", "uid": uid,
                "annotations": {"ambient.istio.io/redirection": "enabled"}},
            "spec": {"serviceAccountName": name, "nodeName": "node-1"},
            "status": {"phase": "Running", "podIPs": [{"ip": ip}]}}),
        json!({"kind": "Service", "metadata": metadata,
            "spec": {"clusterIP": vip, "clusterIPs": [vip], "ports": [{"name": "p", "port": port, "targetPort": 15008}]}}),
        json!({"kind": "EndpointSlice", "metadata": {"name": format!("{name}-{ip}"), "namespace": "shop",
                "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4", "ports": [{"name": "p", "port": 15008, "protocol": "TCP"}],
            "endpoints": [{"addresses": [ip], "conditions": {"ready": true},
                "targetRef": {"kind": "Pod", "uid": format!("{:0>32}", ip.replace('.', ""))}}]}),
    ]
}

fn gateway_object(name: &str) -> Value {
    json!({"kind": "Gateway", "metadata": {"namespace": "shop", "name": name},
        "spec": {"gatewayClassName": "istio-waypoint", "listeners": [{"name": "mesh", "port": 15008, "protocol": "HBONE"}]},
        "status": {"addresses": [{"type": "Hostname", "value": format!("{name}.shop.svc.cluster.local")}]}})
}

fn web(ip: &str, labels: &Value, annotations: &Value) -> [Value; 3] {
    backed("web", "10.96.0.9", ip, 80, &json!({"labels": labels, "annotations": annotations}))
}

/// Starts a cluster with the service `web`, whose waypoint is `gate`, and a gateway for HBONE callers.
fn start(net: &str, prepare: impl FnOnce(&FakeKube)) -> (FakeKube, Gateway) {
    let fake = FakeKube::start();
    fake.change(|world| world.installed.insert("gateways"));
    fake.put(&json!({"kind": "Namespace", "metadata": {"name": "istio-system", "labels": {"topology.istio.io/network": "east"}}}));
    fake.put(&json!({"kind": "Namespace", "metadata": {"name": "shop", "labels": {"istio.io/use-waypoint": "gate"}}}));
    web(&format!("{net}.1"), &json!({}), &json!({})).iter().for_each(|object| fake.put(object));
    let none = json!({"labels": {"gateway.istio.io/managed": "istio.io-mesh-controller"}});
    for object in backed("gate", "10.96.0.10", &format!("{net}.5"), 15008, &none) {
        fake.put(&object);
    }
    fake.put(&gateway_object("gate"));
    prepare(&fake);
    let folder = folder();
    std::fs::write(folder.path().join("east.kubeconfig"), fake.kubeconfig()).expect("written");
    let config = "node: {namespace: istio-system, serviceAccount: eastwest, network: east, cluster: c1}\n\
        listeners: [{name: hbone, bind: \"127.0.0.1:0\", protocol: hbone}]\n\
        identity: {files: {certificate: cert.pem, key: key.pem}}\ntrust: [{trustDomain: cluster.local, roots: roots.pem}]\n\
        exports: [{services: [web.shop.svc.cluster.local]}]\n\
        registries: [{kubernetes: {cluster: c1, kubeconfig: east.kubeconfig}, allow: {addresses: [127.0.0.0/8, 10.0.0.0/8]}}]\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    (fake, gateway)
}

/// Starts a backend at a pod's address for HBONE that says its name.
fn saying(ip: &str, name: &'static [u8; 4]) -> Backend {
    let address = format!("{ip}:15008").parse().expect("legal");
    Backend::start_at(address, move |mut stream| drop(stream.write_all(name)))
}

/// Returns what the backend of a call says, or the reason of its refusal.
fn met(hbone: &Hbone, source: &str) -> String {
    let request = http::Request::connect(AUTHORITY);
    let request = if source.is_empty() { request } else { request.header("x-istio-source", source) };
    match hbone.ask(request.body(()).expect("a request")) {
        Ok(mut stream) => String::from_utf8(stream.read(4).expect("a name")).expect("text"),
        Err((_, reason)) => reason,
    }
}

fn problem(gateway: &Gateway) -> Option<String> {
    let problems = gateway.json("/api/v1/status")["problems"].clone();
    let found = problems.as_array()?.iter().find(|problem| problem["code"] == "waypoint_ignored")?;
    Some(found["text"].as_str()?.to_owned())
}

#[test]
fn calls_through_the_gateway_go_to_the_waypoint_that_the_labels_name() {
    const NET: &str = "127.0.83";
    let (fake, gateway) = start(NET, |_| {});
    let _pod = saying(&format!("{NET}.1"), b"web\n");
    let gate = saying(&format!("{NET}.5"), b"gate");
    let address = gateway.listener("hbone");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    let itself = Hbone::connect(address, client(Some(PKI.issue(&[], Some(GATE))), &["h2"])).expect("let in");
    for (caller, source, expected) in [
        (&hbone, "", "gate"),
        (&hbone, "sidecar", "gate"),
        (&hbone, "waypoint", "web\n"),
        (&hbone, "gateway", "web\n"),
        (&itself, "", "web\n"),
    ] {
        assert_eq!(met(caller, source), expected, "{source:?}");
    }
    // `explain` says so, by the same decision.
    let explained = gateway.json(&format!("/api/v1/explain?authority={AUTHORITY}&identity={CALLER}"));
    let text = explained.to_string();
    assert!(text.contains("the service has the waypoint shop/gate.shop.svc.cluster.local"), "{text}");
    assert_eq!(explained["candidates"][0]["address"], format!("{NET}.5:15008"));
    assert_eq!(problem(&gateway), None);
    // Calls of ingress gateways go to it where a label says so.
    let [_, service, _] =
        web(&format!("{NET}.1"), &json!({"istio.io/ingress-use-waypoint": "true"}), &json!({}));
    fake.put(&service);
    eventually("ingress to meet the waypoint", || (met(&hbone, "gateway") == "gate").then_some(()));
    // All of its pods take calls.
    let second = saying(&format!("{NET}.6"), b"gate");
    let [pod, _, slice] = backed("gate", "10.96.0.10", &format!("{NET}.6"), 15008, &json!({}));
    [pod, slice].iter().for_each(|object| fake.put(object));
    eventually("the second pod to take calls", || {
        assert_eq!(met(&hbone, ""), "gate");
        (second.accepted() > 0).then_some(())
    });
    // Without a pod it is not passed by.
    fake.delete("endpointslices", &format!("shop/gate-{NET}.5"));
    fake.delete("endpointslices", &format!("shop/gate-{NET}.6"));
    eventually("the refusal", || (met(&hbone, "") == "no_endpoints").then_some(()));
    // A service that uses none, and one whose waypoint is not there: as inside the cluster.
    let [_, service, _] = web(&format!("{NET}.1"), &json!({"istio.io/use-waypoint": "none"}), &json!({}));
    fake.put(&service);
    eventually("the pod to be met", || (met(&hbone, "") == "web\n").then_some(()));
    assert_eq!(problem(&gateway), None);
    let [_, service, _] = web(&format!("{NET}.1"), &json!({"istio.io/use-waypoint": "absent"}), &json!({}));
    fake.put(&service);
    let told = eventually("the problem", || problem(&gateway));
    assert!(told.contains("Service shop/web") && told.contains("pass the waypoint shop/absent by"), "{told}");
    assert_eq!(met(&hbone, ""), "web\n");
    assert!(gate.accepted() > 0);
}

#[test]
fn a_canary_waypoint_takes_its_share_of_the_calls() {
    const NET: &str = "127.0.84";
    let (_fake, gateway) = start(NET, |fake| {
        let labels = json!({"istio.io/use-waypoint": "gate", "istio.io/use-waypoint-canary": "next"});
        let annotations = json!({"istio.io/use-waypoint-canary-weight": "50"});
        let [_, service, _] = web(&format!("{NET}.1"), &labels, &annotations);
        fake.put(&service);
        let none = json!({"labels": {"gateway.istio.io/managed": "istio.io-mesh-controller"}});
        backed("next", "10.96.0.11", &format!("{NET}.7"), 15008, &none)
            .iter()
            .for_each(|object| fake.put(object));
        fake.put(&gateway_object("next"));
    });
    let _backends = [("1", b"web\n"), ("5", b"gate"), ("7", b"next")]
        .map(|(last, name)| saying(&format!("{NET}.{last}"), name));
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut counts = [0; 2];
    for _ in 0..200 {
        match met(&hbone, "").as_str() {
            "gate" => counts[0] += 1,
            "next" => counts[1] += 1,
            other => panic!("{other}"),
        }
    }
    assert!(counts.iter().all(|count| *count > 60), "{counts:?}");
}

/// Without the right to list Gateways the gateway cannot know the waypoints.
#[test]
fn a_waypoint_that_cannot_be_read_is_not_passed_by() {
    const NET: &str = "127.0.85";
    let (fake, gateway) = start(NET, |fake| {
        fake.rule(|asked: &Asked| {
            asked
                .path
                .starts_with("/apis/gateway.networking.k8s.io/")
                .then(|| Reply::json(403, &status(403, "Forbidden", "gateways is forbidden", None)))
        });
    });
    let _pod = saying(&format!("{NET}.1"), b"web\n");
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    assert_eq!(met(&hbone, ""), "no_endpoints");
    assert_eq!(met(&hbone, "waypoint"), "web\n", "its policies were applied");
    let told = eventually("the problem", || problem(&gateway));
    assert!(told.contains("HBONE callers are refused") && told.contains("gateways"), "{told}");
    fake.behave();
    let _gate = saying(&format!("{NET}.5"), b"gate");
    eventually("the waypoint to be known", || (met(&hbone, "") == "gate").then_some(()));
    eventually("the end of the problem", || problem(&gateway).is_none().then_some(()));
}

/// A ztunnel of another network opens a tunnel inside the tunnel, in which it meets the waypoint.
#[test]
fn the_inner_tunnel_ends_at_the_waypoint() {
    const NET: &str = "127.0.86";
    let (at_gate, who) = (workload_folder(GATE), workload_folder(CALLER));
    let node = format!("{NET}.5:15008");
    let Some(server) = peer(&["workload", &node, at_gate.path().to_str().expect("text")]) else { return };
    let mut server = Running(server);
    let mut lines = BufReader::new(server.0.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "listening");
    let (_fake, gateway) = start(NET, |_| {});
    let (address, folder) = (gateway.listener("hbone").to_string(), who.path().to_str().expect("text"));
    let (told, output) = called(&["double", &address, AUTHORITY, folder], b"some").expect("installed");
    assert_eq!(told["workload"], json!([GATE]), "{told}");
    assert_eq!(output, b"some");
}
