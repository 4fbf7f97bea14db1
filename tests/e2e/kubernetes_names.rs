//! The names that export rules open where a Kubernetes registry says the TLS modes of pods.

use serde_json::{Value, json};

use crate::kubernetes_hostile::{pod, slice};
use crate::support::backend::Backend;
use crate::support::client::{call, tls};
use crate::support::eventually;
use crate::support::fake_kube::FakeKube;
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;

const DASH: &str = "dash.shop.svc.cluster.local";

/// Puts a service with a port of this name and `appProtocol`, and a pod of this number, which has a sidecar or is outside the mesh.
fn with_pod(
    fake: &FakeKube,
    key: &str,
    (port, protocol): (&str, Option<&str>),
    number: usize,
    is_meshed: bool,
) {
    let (namespace, name) = key.split_once('/').expect("a namespace");
    let mut ports = json!({"name": port, "port": 443, "targetPort": 8443, "protocol": "TCP"});
    if let Some(protocol) = protocol {
        ports["appProtocol"] = protocol.into();
    }
    fake.put(&json!({
        "kind": "Service", "metadata": {"namespace": namespace, "name": name, "uid": format!("svc-{number}")},
        "spec": {"type": "ClusterIP", "clusterIP": format!("10.96.1.{number}"),
                 "clusterIPs": [format!("10.96.1.{number}")], "ports": [ports]}
    }));
    let address = format!("10.244.1.{number}");
    let (mut slice, mut pod) = (slice(name, 8443, &[(&address, number)]), pod(number, &address));
    slice["metadata"]["namespace"] = namespace.into();
    slice["ports"][0]["name"] = port.into();
    slice["endpoints"][0]["targetRef"]["namespace"] = namespace.into();
    pod["metadata"]["namespace"] = namespace.into();
    if is_meshed {
        pod["metadata"]["labels"] = json!({"security.istio.io/tlsMode": "istio"});
    }
    fake.put(&slice);
    fake.put(&pod);
}

/// Starts an API server with pods in the mesh and outside, in a namespace of a team and in those of the system.
fn world() -> FakeKube {
    let fake = FakeKube::start();
    for namespace in ["shop", "kube-system", "istio-system"] {
        fake.put(&json!({"kind": "Namespace", "metadata": {"name": namespace}}));
    }
    fake.put(&json!({"kind": "Node", "metadata": {"name": "n1"}}));
    let outside = [("https", None), ("tls-x", None), ("web", Some("https")), ("http", None)];
    for (at, port) in outside.into_iter().enumerate() {
        with_pod(&fake, &format!("shop/outside-{at}"), port, 10 + at, false);
        with_pod(&fake, &format!("shop/meshed-{at}"), port, 20 + at, true);
    }
    with_pod(&fake, "kube-system/metrics-server", ("https", None), 30, false);
    with_pod(&fake, "kube-system/meshed", ("https", None), 31, true);
    with_pod(&fake, "istio-system/istiod", ("https", None), 32, false);
    with_pod(&fake, "istio-system/meshed", ("https", None), 33, true);
    fake
}

fn config(exports: &str) -> String {
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: net}}\nexports: [{exports}]\n\
         registries: [{{kubernetes: {{cluster: east, kubeconfig: east.kubeconfig, network: net, namespaces: {{except: []}}}}, \
         allow: {{addresses: [127.0.0.0/8, 10.0.0.0/8]}}}}]\n"
    )
}

fn start(fake: &FakeKube, exports: &str) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("east.kubeconfig"), fake.kubeconfig()).expect("written");
    Gateway::start_in(folder, &config(exports), &[])
}

/// Returns the exposed names, sorted, each with its TLS modes.
fn exposed(gateway: &Gateway) -> Vec<String> {
    let all = gateway.json("/api/v1/exposed");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let row = |row: &Value| format!("{} {}", text(&row["name"]), row["tls"]);
    let mut names: Vec<String> = all.as_array().expect("a list").iter().map(row).collect();
    names.sort();
    names
}

fn admits(gateway: &Gateway, name: &str) -> bool {
    gateway.json(&format!("/api/v1/explain?sni={name}"))["reason"] == "ok"
}

#[test]
fn a_rule_for_all_names_opens_no_pod_outside_the_mesh_and_no_system_namespace() {
    let fake = world();
    let gateway = start(&fake, "{services: [\"*.local\"]}");
    let open: Vec<String> =
        (0..4).map(|at| format!("outbound_.443_._.meshed-{at}.shop.svc.cluster.local [\"mesh\"]")).collect();
    eventually("the names of pods in the mesh", || (exposed(&gateway) == open).then_some(()));
    let shut = [
        "outside-0.shop",
        "outside-1.shop",
        "outside-2.shop",
        "outside-3.shop",
        "metrics-server.kube-system",
        "meshed.kube-system",
        "istiod.istio-system",
        "meshed.istio-system",
    ];
    for name in shut {
        let host = format!("{name}.svc.cluster.local");
        assert!(!admits(&gateway, &host) && !admits(&gateway, &format!("outbound_.443_._.{host}")), "{host}");
    }
    assert!(!admits(&gateway, "meshed-0.shop.svc.cluster.local"), "a plain host name");
    let problems = gateway.json("/api/v1/status")["problems"].to_string();
    assert!(
        problems.contains("export_narrowed") && problems.contains("`tls: own` in exports[0]"),
        "{problems}"
    );

    gateway.reload(&config("{services: [\"*.local\"], tls: mesh}"));
    assert_eq!(exposed(&gateway), open);
    assert!(!gateway.json("/api/v1/status")["problems"].to_string().contains("export_narrowed"));

    gateway.reload(&config(
        "{services: [\"*.local\"], tls: own}, {services: [\"*.kube-system.svc.cluster.local\"]}",
    ));
    for name in shut.iter().filter(|name| name.starts_with("outside-") && !name.starts_with("outside-3")) {
        let host = format!("{name}.svc.cluster.local");
        assert!(admits(&gateway, &host) && admits(&gateway, &format!("outbound_.443_._.{host}")), "{host}");
    }
    assert!(admits(&gateway, "meshed-0.shop.svc.cluster.local"));
    assert!(
        admits(&gateway, "outbound_.443_._.meshed.kube-system.svc.cluster.local"),
        "the rule names the namespace"
    );
    for host in ["metrics-server.kube-system", "istiod.istio-system", "meshed.istio-system"] {
        assert!(!admits(&gateway, &format!("outbound_.443_._.{host}.svc.cluster.local")), "{host}");
    }
}

#[test]
fn bytes_reach_a_pod_outside_the_mesh_only_under_a_rule_with_tls_own() {
    let backend = Backend::tls_echo(PKI.server(DASH), "");
    let port = backend.address.port();
    let fake = FakeKube::start();
    fake.put(&json!({"kind": "Namespace", "metadata": {"name": "shop"}}));
    fake.put(&json!({"kind": "Node", "metadata": {"name": "n1"}}));
    fake.put(&crate::kubernetes_hostile::service("dash", port));
    fake.put(&slice("dash", port, &[("127.0.0.1", 1)]));
    fake.put(&pod(1, "127.0.0.1"));
    let gateway = start(&fake, "{services: [\"*.local\"]}");
    let name = format!("outbound_.443_._.{DASH}");
    eventually("a registry that was read", || {
        let found = gateway.json(&format!("/api/v1/explain?sni={name}"));
        found["omitted"].to_string().contains("outside the mesh").then_some(())
    });
    for shut in [&*name, DASH] {
        assert!(tls(gateway.listener("default"), shut).is_err(), "{shut} is shut by the default");
    }
    gateway.reload(&config("{services: [\"*.local\"], tls: own}"));
    let mut session = tls(gateway.listener("default"), DASH).expect("a handshake");
    assert_eq!(call(&mut session, "hello").expect("an answer"), "hello");
}

#[test]
fn a_port_whose_mutual_tls_an_object_turns_off_is_outside_the_mesh_and_explain_names_the_kind_of_object() {
    let fake = FakeKube::start();
    fake.change(|world| world.installed.extend(["destinationrules", "peerauthentications"]));
    for namespace in ["shop", "istio-system"] {
        fake.put(&json!({"kind": "Namespace", "metadata": {"name": namespace}}));
    }
    fake.put(&json!({"kind": "Node", "metadata": {"name": "n1"}}));
    for (number, name) in [(1, "plain"), (2, "ruled"), (3, "accepting")] {
        with_pod(&fake, &format!("shop/{name}"), ("http", None), number, true);
    }
    let rule = json!({
        "kind": "DestinationRule", "metadata": {"namespace": "shop", "name": "ruled"},
        "spec": {"host": "ruled", "trafficPolicy": {"tls": {"mode": "SIMPLE"}}}
    });
    let off = |namespace: &str, mode: &str| {
        json!({"kind": "PeerAuthentication", "metadata": {"namespace": namespace, "name": "all"},
               "spec": {"mtls": {"mode": mode}}})
    };
    fake.put(&rule);
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("east.kubeconfig"), fake.kubeconfig()).expect("written");
    let config = config("{services: [\"*.local\"], tls: mesh}")
        .replace("namespaces:", "destinationRules: true, namespaces:")
        .replace("node:", "networks: {far: {}}\nnode:");
    let gateway = Gateway::start_in(folder, &config, &[]);
    let name = |service: &str| format!("outbound_.443_._.{service}.shop.svc.cluster.local");
    let opens = |wanted: &[&str]| {
        let wanted: Vec<String> = wanted.iter().map(|one| format!("{} [\"mesh\"]", name(one))).collect();
        eventually("the open names", || (exposed(&gateway) == wanted).then_some(()));
    };
    let why = |service: &str| {
        let explained = gateway.json(&format!("/api/v1/explain?sni={}", name(service)));
        format!("{} {}", explained["reason"], explained["omitted"][0]["why"])
    };
    opens(&["accepting", "plain"]);
    assert_eq!(why("ruled"), "\"no_endpoints\" \"mTLS off by DestinationRule\"");

    // A client on the pod's network gets the pod nevertheless, and one on another network gets no gateway.
    let view = |network: &str, service: &str| {
        let path = format!(
            "/api/v1/horizon?network={network}&cluster=east&service={service}.shop.svc.cluster.local&port=443"
        );
        let found = gateway.json(&path);
        format!("{} {}", found["entries"][0]["address"], found["missing"][0]["why"])
    };
    assert_eq!(view("net", "ruled"), "\"10.244.1.2:8443\" null");
    assert_eq!(view("far", "plain"), "null \"no usable gateway\"");
    assert_eq!(view("far", "ruled"), "null \"mTLS off by DestinationRule\"");

    fake.put(&off("istio-system", "DISABLE"));
    opens(&[]);
    assert_eq!(why("plain"), "\"no_endpoints\" \"mTLS off by PeerAuthentication\"");
    fake.put(&off("shop", "STRICT"));
    opens(&["accepting", "plain"]);
    fake.delete("peerauthentications", "shop/all");
    opens(&[]);
    fake.delete("peerauthentications", "istio-system/all");
    fake.delete("destinationrules", "shop/ruled");
    opens(&["accepting", "plain", "ruled"]);
}
