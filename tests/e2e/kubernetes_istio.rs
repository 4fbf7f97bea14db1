//! The labels, annotations and objects of Istio that decide which services and pods a gateway of Istio would serve, on real API
//! servers.

use serde_json::{Value, json};

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes};

const MCS: &str = "multicluster.x-k8s.io/v1beta1";

fn start(name: &str) -> Option<Cluster> {
    let cluster = Cluster::start(&kube::installed()?, name, &Options::default());
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": format!("net-{name}")}));
    cluster.namespace("shop", &json!({}));
    Some(cluster)
}

/// Starts a gateway that runs in the namespace `istio-system` of the first cluster and reads these clusters. `rule` is further
/// keys of its export rule, and `more` further keys of each registry, each with a comma before it.
fn gateway(clusters: &[&Cluster], rule: &str, more: &str) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let registries = kube::registries(folder.path(), clusters, more);
    let own = &clusters[0].name;
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: {own}, network: net-{own}, namespace: istio-system}}\n\
         networks: {{net-west: {{gateways: [{{address: 192.0.2.2, sniPort: 15443}}], probe: off}}}}\n\
         exports: [{{services: [\"*.local\"]{rule}}}]\n{registries}"
    );
    Gateway::start_in(folder, &config, &[])
}

fn annotate(cluster: &Cluster, service: &str, annotation: &str, value: &Value) {
    let patch = json!({"metadata": {"annotations": {annotation: value}}});
    cluster.admin().patch(&at("v1", "services", service), &patch);
}

fn explain(gateway: &Gateway, name: &str, subset: &str) -> Value {
    gateway.json(&format!("/api/v1/explain?sni=outbound_.80_.{subset}_.{name}.shop.svc.cluster.local"))
}

/// Waits until a name leads to exactly these addresses of this gateway's own network.
#[track_caller]
fn leads_to(gateway: &Gateway, name: &str, subset: &str, addresses: &[&str]) {
    eventually(&format!("{name} {subset:?} leads to {addresses:?}"), || {
        let candidates = explain(gateway, name, subset)["candidates"].as_array().cloned().unwrap_or_default();
        let found: Vec<&str> = candidates.iter().filter_map(|one| one["address"].as_str()).collect();
        (found == addresses).then_some(())
    });
}

#[test]
fn a_service_is_exported_only_where_its_export_to_makes_it_visible_to_the_gateway() {
    let Some(cluster) = start("east") else { return };
    cluster.install_crds();
    const EXPORT_TO: &str = "networking.istio.io/exportTo";
    let services =
        [("tilde", "~"), ("dot", "."), ("pay", "pay"), ("listed", "pay, istio-system"), ("all", "~,*")];
    for (at, (name, export_to)) in services.iter().enumerate() {
        let https = json!({"ports": [{"name": "https", "port": 80, "targetPort": 8080}]});
        cluster.service(&format!("shop/{name}"), &json!({}), &https);
        annotate(&cluster, &format!("shop/{name}"), EXPORT_TO, &json!(export_to));
        let (key, address) = (format!("shop/{name}-0"), format!("10.244.1.{}", at + 1));
        let mut pod = Pod::new(&key, &address);
        pod.labels = json!({"app": name});
        cluster.pod(&pod);
    }
    // By name alone: services that are not visible in the gateway's namespace are not exported, as for a gateway of Istio.
    let by_name = gateway(&[&cluster], "", "");
    leads_to(&by_name, "listed", "", &["10.244.1.4:8080"]);
    leads_to(&by_name, "all", "", &["10.244.1.5:8080"]);
    for (name, export_to) in &services[..3] {
        let refused = explain(&by_name, name, "");
        assert_eq!(refused["reason"], "not_exported", "{refused}");
        let why =
            format!("is hidden from the gateway by {EXPORT_TO} {export_to:?} of Service shop/{name} (east)");
        let steps: Vec<&str> =
            refused["steps"].as_array().expect("steps").iter().filter_map(Value::as_str).collect();
        assert!(steps.iter().any(|step| step.contains(&why)), "{why}: {steps:?}");
    }
    let exposed = by_name.json("/api/v1/exposed").to_string();
    assert!(exposed.contains("all.shop.svc") && !exposed.contains("tilde.shop.svc"), "{exposed}");

    // By marks: a ServiceExport does not outweigh the annotation, and its condition names it.
    let by_mark = gateway(&[&cluster], ", marked: {serviceExport: true}", "");
    for name in ["dot", "listed"] {
        let metadata = json!({"namespace": "shop", "name": name});
        cluster.admin().create(&json!({"apiVersion": MCS, "kind": "ServiceExport", "metadata": metadata}));
    }
    leads_to(&by_mark, "listed", "", &["10.244.1.4:8080"]);
    let ready = |export: &Value| {
        let conditions = export["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.into_iter().find(|one| one["type"] == "Ready").unwrap_or_default()
    };
    let path = at(MCS, "serviceexports", "shop/dot");
    let export = becomes(cluster.admin(), &path, |export| ready(export)["status"] == "False");
    let message = ready(&export)["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("its annotation networking.istio.io/exportTo is \".\""), "{message}");
    assert_eq!(explain(&by_mark, "dot", "")["reason"], "not_exported");

    // The annotation is followed while the gateway runs.
    annotate(&cluster, "shop/dot", EXPORT_TO, &Value::Null);
    for gateway in [&by_name, &by_mark] {
        leads_to(gateway, "dot", "", &["10.244.1.2:8080"]);
    }
    annotate(&cluster, "shop/all", EXPORT_TO, &json!("pay"));
    eventually("a hidden service", || {
        (explain(&by_name, "all", "")["reason"] == "not_exported").then_some(())
    });
}

/// Installs the CRD of DestinationRules, whose fields the API server does not check here.
fn install_destination_rules(cluster: &Cluster) {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let names =
        json!({"kind": "DestinationRule", "plural": "destinationrules", "singular": "destinationrule"});
    cluster.admin().create(&json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "destinationrules.networking.istio.io"},
        "spec": {"group": "networking.istio.io", "scope": "Namespaced", "names": names, "versions": [
            {"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}
        ]}
    }));
    becomes(cluster.admin(), &at("networking.istio.io/v1", "destinationrules", ""), |_| true);
}

#[test]
fn subsets_select_endpoints_by_the_labels_that_istiod_adds_to_them() {
    let (Some(east), Some(west)) = (start("east"), start("west")) else { return };
    let node = |region: &str, zone: &str, subzone: &str| {
        json!({"topology.kubernetes.io/region": region, "topology.kubernetes.io/zone": zone,
            "topology.istio.io/subzone": subzone})
    };
    east.node("n1", &node("r1", "z1", "s1"));
    east.node("n2", &node("r2", "z2", "s2"));
    let port = json!({"ports": [{"name": "http", "port": 80, "targetPort": 8080}]});
    for (cluster, name, on, address) in [
        (&east, "shop/web-1", "n1", "10.244.1.1"),
        (&east, "shop/web-2", "n2", "10.244.1.2"),
        (&west, "shop/web-1", "node", "10.244.2.1"),
    ] {
        cluster.service("shop/web", &json!({}), &port);
        let mut pod = Pod::new(name, address);
        pod.labels = json!({"app": "web", "security.istio.io/tlsMode": "istio"});
        pod.node = on;
        cluster.pod(&pod);
    }
    install_destination_rules(&east);
    let subset = |(name, label, value): (&str, &str, &str)| json!({"name": name, "labels": {label: value}});
    let subsets = [
        ("in-east", "topology.istio.io/cluster", "east"),
        ("in-west", "topology.istio.io/cluster", "west"),
        ("net-east", "topology.istio.io/network", "net-east"),
        ("on-n1", "kubernetes.io/hostname", "n1"),
        ("in-r2", "topology.kubernetes.io/region", "r2"),
        ("in-z1", "topology.kubernetes.io/zone", "z1"),
        ("in-s2", "topology.istio.io/subzone", "s2"),
        ("v9", "version", "v9"),
    ];
    east.admin().create(&json!({
        "apiVersion": "networking.istio.io/v1", "kind": "DestinationRule",
        "metadata": {"namespace": "shop", "name": "web"},
        "spec": {"host": "web", "subsets": subsets.map(subset)}
    }));
    let gateway = gateway(&[&east, &west], "", ", destinationRules: true");
    let (first, second) = ("10.244.1.1:8080", "10.244.1.2:8080");
    leads_to(&gateway, "web", "", &[first, second]);
    leads_to(&gateway, "web", "in-east", &[first, second]);
    leads_to(&gateway, "web", "net-east", &[first, second]);
    for (subset, address) in [("on-n1", first), ("in-r2", second), ("in-z1", first), ("in-s2", second)] {
        leads_to(&gateway, "web", subset, &[address]);
    }
    // The endpoints in the west are behind the gateway of their network.
    let other = explain(&gateway, "web", "in-west");
    assert_eq!(
        (&other["reason"], &other["omitted"][0]["why"]),
        (&json!("no_endpoints"), &json!("other network"))
    );
    let horizon = |subset: &str| {
        let path = "/api/v1/horizon?network=net-east&cluster=east&service=web.shop.svc.cluster.local&port=80";
        let entries = gateway.json(&format!("{path}&subset={subset}"))["entries"].clone();
        let entries = entries.as_array().cloned().unwrap_or_default();
        entries.iter().filter_map(|one| one["address"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(horizon("in-west"), ["192.0.2.2:15443"]);
    assert_eq!(horizon("in-east"), [first, second]);
    // No endpoint has the labels, and the explanation says so.
    let none = explain(&gateway, "web", "v9");
    assert_eq!(none["reason"], "no_endpoints", "{none}");
    let omitted = none["omitted"].as_array().cloned().unwrap_or_default();
    let counts: u64 = omitted
        .iter()
        .filter(|one| one["why"] == "not in subset")
        .filter_map(|one| one["count"].as_u64())
        .sum();
    assert_eq!(counts, 3, "{none}");
    let labels = r#"the subset "v9" selects endpoints with the labels {"version": "v9"}"#;
    let steps: Vec<&str> =
        none["steps"].as_array().expect("steps").iter().filter_map(Value::as_str).collect();
    assert!(steps.contains(&labels), "{steps:?}");
}
