//! ServiceEntries and WorkloadEntries on a real API server: virtual machines beside pods, endpoints on other networks, and bytes that
//! arrive at them.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::support::backend::Backend;
use crate::support::client::{call, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes};
use crate::support::namespace;
use crate::support::pki::PKI;

const VERSION: &str = "networking.istio.io/v1";
const VM: &str = "vm.example.com";

/// Installs a CRD of Istio, whose fields the API server does not check here.
fn install(cluster: &Cluster, kind: &str, plural: &str) {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let names = json!({"kind": kind, "plural": plural, "singular": kind.to_lowercase()});
    let version = json!({"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}}});
    cluster.admin().create(&json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.networking.istio.io")},
        "spec": {"group": "networking.istio.io", "scope": "Namespaced", "names": names, "versions": [version]}
    }));
    becomes(cluster.admin(), &at(VERSION, plural, ""), |_| true);
}

fn object(kind: &str, key: &str, spec: &Value) -> Value {
    let (namespace, name) = key.split_once('/').expect("a namespace");
    json!({"apiVersion": VERSION, "kind": kind, "metadata": {"namespace": namespace, "name": name}, "spec": spec})
}

/// Returns the spec of an internal ServiceEntry with the port 443.
fn entry(host: &str, more: &Value) -> Value {
    let mut spec = json!({"hosts": [host], "location": "MESH_INTERNAL", "resolution": "STATIC",
        "ports": [{"number": 443, "name": "https", "protocol": "HTTPS"}]});
    let more = more.as_object().expect("an object").clone();
    spec.as_object_mut().expect("an object").extend(more);
    spec
}

fn gateway(cluster: &Cluster, more: &str) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let registries = kube::registries(folder.path(), &[cluster], more);
    let registries = registries.replace("}\n", "}\n    allow: {networks: [net-east, net-vms]}\n");
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: net-east, namespace: istio-system}}\n\
         networks: {{net-vms: {{gateways: [{{address: 192.0.2.2, sniPort: 15443}}], probe: off}}, net-east: {{gateways: \
         [{{address: 192.0.2.1, sniPort: 15443}}], probe: off}}}}\n\
         exports: [{{services: [\"*\"], tls: own}}]\n{registries}"
    );
    Gateway::start_in(folder, &config, &[])
}

/// Waits until a mesh name leads to exactly these addresses of the gateway's own network.
#[track_caller]
fn leads_to(gateway: &Gateway, host: &str, addresses: &[&str]) {
    eventually(&format!("{host} leads to {addresses:?}"), || {
        let found = gateway.json(&format!("/api/v1/explain?sni=outbound_.443_._.{host}"));
        let candidates = found["candidates"].as_array().cloned().unwrap_or_default();
        let found: Vec<&str> = candidates.iter().filter_map(|one| one["address"].as_str()).collect();
        (found == addresses).then_some(())
    });
}

/// Waits until clients of a network get these addresses for a service.
#[track_caller]
fn sees(gateway: &Gateway, network: &str, host: &str, entries: &[(&str, f64)]) {
    let mut last = Value::Null;
    eventually(&format!("{network} sees {entries:?} for {host}"), || {
        let view = gateway.json(&format!("/api/v1/horizon?network={network}&port=443&service={host}"));
        if view != last {
            eprintln!("{network}: {view}");
            last = view.clone();
        }
        let all = view["entries"].as_array().cloned().unwrap_or_default();
        let stands =
            |one: &Value| one["standsFor"].as_f64().or_else(|| one["weight"].as_f64()).unwrap_or(0.0);
        let found: Vec<(String, f64)> = all
            .iter()
            .map(|one| (one["address"].as_str().unwrap_or_default().to_owned(), stands(one)))
            .collect();
        let wanted: Vec<(String, f64)> =
            entries.iter().map(|(at, weight)| ((*at).to_owned(), *weight)).collect();
        (found == wanted).then_some(())
    });
}

#[test]
fn virtual_machines_serve_beside_pods_and_behind_their_own_network() {
    const TEST: &str = "kubernetes_entries::virtual_machines_serve_beside_pods_and_behind_their_own_network";
    let Some(program) = kube::installed() else { return };
    if !namespace::inside(TEST, kube::PODS) {
        return;
    }
    let cluster = Cluster::start(&program, "east", &Options::default());
    for (kind, plural) in [("ServiceEntry", "serviceentries"), ("WorkloadEntry", "workloadentries")] {
        install(&cluster, kind, plural);
    }
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-east"}));
    cluster.namespace("shop", &json!({}));
    cluster.namespace("pay", &json!({}));
    let ports = json!([{"name": "https", "port": 443, "targetPort": 8443}]);
    let spec = json!({"ports": ports, "selector": {"app": "web"}});
    cluster.service("shop/web", &json!({}), &spec);
    let mut pod = Pod::new("shop/web-0", "10.244.1.1");
    pod.labels = json!({"app": "web", "security.istio.io/tlsMode": "istio"});
    cluster.pod(&pod);
    let create = |kind: &str, key: &str, spec: &Value| cluster.admin().create(&object(kind, key, spec));
    create(
        "WorkloadEntry",
        "shop/vm1",
        &json!({"address": "10.244.9.1", "labels": {"app": "web"}, "serviceAccount": "vms"}),
    );
    let far = json!({"address": "10.8.0.1", "labels": {"app": "web"}, "network": "net-vms", "weight": 3, "serviceAccount": "vms"});
    create("WorkloadEntry", "shop/vm2", &far);
    let own = json!({"workloadSelector": {"labels": {"app": "vm"}}});
    create("ServiceEntry", "shop/vms", &entry(VM, &own));
    create(
        "WorkloadEntry",
        "shop/vm3",
        &json!({"address": "10.244.9.3", "labels": {"app": "vm"}, "ports": {"https": 9443}}),
    );
    let gateway = gateway(&cluster, ", serviceEntries: true");
    let web = "web.shop.svc.cluster.local";

    // As for istiod: the pod and the machine on this network, and the other one behind its gateway with its weight.
    leads_to(&gateway, web, &["10.244.1.1:8443", "10.244.9.1:8443"]);
    sees(
        &gateway,
        "net-east",
        web,
        &[("10.244.1.1:8443", 1.0), ("10.244.9.1:8443", 1.0), ("192.0.2.2:15443", 3.0)],
    );
    sees(&gateway, "net-vms", web, &[("10.8.0.1:8443", 3.0), ("192.0.2.1:15443", 2.0)]);

    // Bytes arrive at a machine on the port that its entry names.
    leads_to(&gateway, VM, &["10.244.9.3:9443"]);
    let address: SocketAddr = "10.244.9.3:9443".parse().expect("an address");
    let config = PKI.server(VM);
    let _machine = Backend::start_at(address, move |stream| {
        crate::support::backend::tls_echo(stream, config.clone(), "vm ")
    });
    let mut session = tls(gateway.listener("default"), VM).expect("a handshake");
    assert_eq!(call(&mut session, "hello").expect("an answer"), "vm hello");

    // The name of the object is in what the operator reads.
    let marks = gateway.json("/api/v1/services").to_string();
    assert!(marks.contains(VM), "{marks}");

    // An entry may not take the host or the pods of another namespace.
    create("ServiceEntry", "pay/taken", &entry(web, &json!({"endpoints": [{"address": "10.8.0.9"}]})));
    create(
        "ServiceEntry",
        "pay/pods",
        &entry("pods.example.com", &json!({"endpoints": [{"address": "10.244.1.1"}]})),
    );
    eventually("the problem", || {
        let problems = gateway.json("/api/v1/status")["problems"].as_array().cloned().unwrap_or_default();
        let text = |code: &str| {
            let found = problems.iter().find(|problem| problem["code"] == code)?;
            found["text"].as_str().map(str::to_owned)
        };
        let why = "pay/taken: the host web.shop.svc.cluster.local is for the namespace shop";
        (text("objects_ignored")?.contains(why) && text("endpoint_claimed")?.contains("1 endpoints"))
            .then_some(())
    });
    leads_to(&gateway, "pods.example.com", &[]);
    leads_to(&gateway, web, &["10.244.1.1:8443", "10.244.9.1:8443"]);
    assert_eq!(gateway.metric("isthmus_registry_objects_ignored", &["kind=\"ServiceEntry\""]), 1.0);

    // A machine whose health check fails is used only while nothing else is healthy.
    let annotated = json!({"metadata": {"annotations": {"proxy.istio.io/health-checks-enabled": "true"}}});
    cluster.admin().patch(&at(VERSION, "workloadentries", "shop/vm1"), &annotated);
    sees(&gateway, "net-vms", web, &[("10.8.0.1:8443", 3.0), ("192.0.2.1:15443", 1.0)]);
    let healthy = json!({"conditions": [{"type": "Healthy", "status": "True"}]});
    cluster.admin().patch_status(&at(VERSION, "workloadentries", "shop/vm1"), &healthy);
    sees(&gateway, "net-vms", web, &[("10.8.0.1:8443", 3.0), ("192.0.2.1:15443", 2.0)]);

    // Entries are followed while the gateway runs, also if the CRD goes away.
    cluster.admin().delete(&at(VERSION, "workloadentries", "shop/vm1"));
    leads_to(&gateway, web, &["10.244.1.1:8443"]);
    cluster.admin().delete(&at(VERSION, "serviceentries", "shop/vms"));
    eventually("a host that is gone", || {
        let found = gateway.json(&format!("/api/v1/explain?sni=outbound_.443_._.{VM}"));
        (found["reason"] == "sni_unknown").then_some(())
    });
}

#[test]
fn a_cluster_without_entries_is_read_and_entries_that_are_not_read_are_counted() {
    let Some(program) = kube::installed() else { return };
    let cluster = Cluster::start(&program, "east", &Options::default());
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-east"}));
    cluster.namespace("shop", &json!({}));
    cluster.service(
        "shop/web",
        &json!({}),
        &json!({"ports": [{"name": "https", "port": 443, "targetPort": 8443}]}),
    );
    let mut pod = Pod::new("shop/web-0", "10.244.1.1");
    pod.labels = json!({"app": "web"});
    cluster.pod(&pod);
    let first = gateway(&cluster, ", destinationRules: true");
    leads_to(&first, "web.shop.svc.cluster.local", &["10.244.1.1:8443"]);
    drop(first);
    install(&cluster, "ServiceEntry", "serviceentries");
    let spec = entry(VM, &json!({"endpoints": [{"address": "10.9.0.1"}]}));
    cluster.admin().create(&object("ServiceEntry", "shop/vms", &spec));
    let gateway = gateway(&cluster, ", destinationRules: true");
    eventually("the problem", || {
        let problems = gateway.json("/api/v1/status")["problems"].as_array().cloned().unwrap_or_default();
        let found = problems.iter().find(|problem| problem["code"] == "objects_ignored")?;
        let text = "1 object of the kind ServiceEntry without effect, the first one shop/vms: `serviceEntries` of the registry is false";
        found["text"].as_str()?.contains(text).then_some(())
    });
    assert_eq!(gateway.json(&format!("/api/v1/explain?sni=outbound_.443_._.{VM}"))["reason"], "sni_unknown");
}
