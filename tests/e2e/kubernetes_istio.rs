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
