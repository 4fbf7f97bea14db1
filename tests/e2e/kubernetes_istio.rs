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
         networks: {{net-west: {{gateways: [{{address: 192.0.2.2, sniPort: 15443}}], probe: off}}, net-east: {{gateways: [{{address: 192.0.2.1, sniPort: 15443}}], \
         probe: off}}}}\n\
         exports: [{{services: [\"*.local\"]{rule}}}]\n{registries}"
    );
    Gateway::start_in(folder, &config, &[])
}

/// Creates a service `shop/NAME` with one pod, which has these labels beside `app`.
fn with_pod(cluster: &Cluster, name: &str, address: &str, labels: &Value) {
    let key = format!("shop/{name}");
    cluster.service(&key, &json!({}), &json!({"ports": [{"name": "http", "port": 80, "targetPort": 8080}]}));
    let pod_key = format!("{key}-0");
    let mut pod = Pod::new(&pod_key, address);
    pod.labels = labels.clone();
    pod.labels["app"] = name.into();
    cluster.pod(&pod);
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
    let by_name = gateway(&[&cluster], ", tls: own", "");
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
    let by_mark = gateway(&[&cluster], ", tls: own, marked: {serviceExport: true}", "");
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
    eventually("the endpoint in the west", || {
        let other = explain(&gateway, "web", "in-west");
        (other["reason"] == "no_endpoints" && other["omitted"][0]["why"] == "other network").then_some(())
    });
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

/// An entry of a view: its address, weight and health.
type Given = (String, u64, String);

/// Returns the view of a service that a client on a network gets.
fn horizon(gateway: &Gateway, network: &str, service: &str) -> Value {
    let path = format!("/api/v1/horizon?network={network}&port=80");
    gateway.json(&format!("{path}&service={service}.shop.svc.cluster.local"))
}

fn given(view: &Value) -> Vec<Given> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let entry =
        |one: &Value| (text(&one["address"]), one["weight"].as_u64().unwrap_or(0), text(&one["health"]));
    view["entries"].as_array().map(|all| all.iter().map(entry).collect()).unwrap_or_default()
}

/// Waits until a client of a network gets these entries, and no others.
#[track_caller]
fn sees(gateway: &Gateway, network: &str, service: &str, entries: &[(&str, u64, &str)]) {
    let wanted: Vec<_> = entries
        .iter()
        .map(|(address, weight, health)| ((*address).to_owned(), *weight, (*health).to_owned()))
        .collect();
    eventually(&format!("{network} sees {entries:?}"), || {
        (given(&horizon(gateway, network, service)) == wanted).then_some(())
    });
}

#[test]
fn pods_that_terminate_serve_while_no_other_pod_is_ready() {
    let Some(cluster) = start("east") else { return };
    with_pod(&cluster, "web", "10.244.1.1", &json!({"security.istio.io/tlsMode": "istio"}));
    let gateway = gateway(&[&cluster], "", "");
    let (first, second, through) = ("10.244.1.1:8080", "10.244.1.2:8080", "192.0.2.1:15443");
    sees(&gateway, "net-west", "web", &[(through, 1, "")]);
    let healthy = || {
        let candidates = explain(&gateway, "web", "")["candidates"].as_array().cloned().unwrap_or_default();
        let healthy = candidates.iter().filter(|one| one["health"] == "healthy");
        healthy.map(|one| one["address"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    // The only pod terminates, and goes on serving: clients on both sides of the gateway still get it.
    cluster.terminate_pod("shop/web-0");
    eventually("a slice with a pod that terminates", || {
        (cluster.slices("shop/web")[0]["endpoints"][0]["conditions"]["terminating"] == true).then_some(())
    });
    // A second service shows that the change of the slice has arrived.
    with_pod(&cluster, "other", "10.244.1.9", &json!({"security.istio.io/tlsMode": "istio"}));
    sees(&gateway, "net-west", "other", &[(through, 1, "")]);
    assert_eq!(healthy(), [first]);
    sees(&gateway, "net-west", "web", &[(through, 1, "")]);
    sees(&gateway, "net-east", "web", &[(first, 1, "")]);
    // A pod that is ready replaces it at once.
    let mut pod = Pod::new("shop/web-1", "10.244.1.2");
    pod.labels = json!({"app": "web", "security.istio.io/tlsMode": "istio"});
    cluster.pod(&pod);
    eventually("the ready pod alone", || (healthy() == [second]).then_some(()));
    sees(&gateway, "net-east", "web", &[(first, 1, "draining"), (second, 1, "")]);
    sees(&gateway, "net-west", "web", &[(through, 1, "")]);
    // A pod that a label takes out of use is not used, whatever else is there.
    let draining = |value: Value| json!({"metadata": {"labels": {"istio.io/draining": value}}});
    cluster.admin().patch(&at("v1", "pods", "shop/web-1"), &draining("true".into()));
    eventually("the pod that terminates", || (healthy() == [first]).then_some(()));
    sees(&gateway, "net-east", "web", &[(first, 1, ""), (second, 1, "draining")]);
    cluster.delete_pod("shop/web-0");
    eventually("none", || healthy().is_empty().then_some(()));
    sees(&gateway, "net-west", "web", &[]);
    cluster.admin().patch(&at("v1", "pods", "shop/web-1"), &draining(Value::Null));
    eventually("the pod again", || (healthy() == [second]).then_some(()));
}

#[test]
fn pods_of_another_network_are_shown_as_missing_and_pods_on_one_socket_count_once() {
    let Some(cluster) = start("east") else { return };
    let meshed = json!({"security.istio.io/tlsMode": "istio"});
    with_pod(&cluster, "web", "10.244.1.1", &meshed);
    let mut other = Pod::new("shop/web-9", "10.244.1.9");
    other.labels = json!({"app": "web", "topology.istio.io/network": "net-north"});
    cluster.pod(&other);
    // Two pods in the network of one node.
    with_pod(&cluster, "agent", "10.244.1.3", &meshed);
    let mut twin = Pod::new("shop/agent-1", "10.244.1.3");
    twin.labels = json!({"app": "agent", "security.istio.io/tlsMode": "istio"});
    cluster.pod(&twin);
    with_pod(&cluster, "agents", "10.244.1.4", &meshed);
    let mut third = Pod::new("shop/agents-1", "10.244.1.5");
    third.labels = json!({"app": "agents", "security.istio.io/tlsMode": "istio"});
    cluster.pod(&third);
    eventually("both pods in slices", || {
        let slices = cluster.slices("shop/agent");
        let endpoints = slices.iter().filter_map(|slice| slice["endpoints"].as_array()).map(Vec::len);
        (endpoints.sum::<usize>() == 2).then_some(())
    });
    let gateway = gateway(&[&cluster], "", "");
    for network in ["net-east", "net-west"] {
        eventually("the pod of another network", || {
            let missing = &horizon(&gateway, network, "web")["missing"];
            let is_it = missing[0]["why"] == "network not allowed" && missing[0]["weight"] == 1;
            (is_it && missing.as_array().is_some_and(|all| all.len() == 1)).then_some(())
        });
    }
    // One socket counts once, for clients on both sides of a gateway; two sockets count twice.
    for (service, stands_for) in [("agent", 1.0), ("agents", 2.0)] {
        eventually(&format!("{stands_for} behind {service}"), || {
            let view = horizon(&gateway, "net-west", service);
            (view["entries"][0]["standsFor"].as_f64() == Some(stands_for)).then_some(())
        });
    }
    sees(&gateway, "net-east", "agent", &[("10.244.1.3:8080", 1, "")]);
}
