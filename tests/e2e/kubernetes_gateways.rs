//! Gateways of networks that a real API server describes: node ports, load balancers with a custom port, external addresses,
//! and Gateway objects.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::at;

/// A gateway as the admin API lists it: address, SNI port, HBONE port.
type Shown = (String, Option<u64>, Option<u64>);

fn start() -> Option<Cluster> {
    let cluster = Cluster::start(&kube::installed()?, "east", &Options::default());
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-east"}));
    cluster.namespace("shop", &json!({}));
    Some(cluster)
}

/// Starts an aggregator on another network, which reads the cluster and looks for gateways in two namespaces.
fn aggregator(cluster: &Cluster) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let registries =
        kube::registries(folder.path(), &[cluster], ", gateways: {namespaces: [istio-system, edge]}");
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: west, network: net-west}}\nexports: [{{services: [\"*\"], tls: own}}]\n{registries}"
    );
    Gateway::start_in(folder, &config, &[])
}

fn gateways(gateway: &Gateway) -> BTreeSet<Shown> {
    let all = gateway.json("/api/v1/gateways").as_array().cloned().unwrap_or_default();
    let shown = |one: &Value| {
        let address = one["address"].as_str().unwrap_or_default().to_owned();
        (address, one["sni_port"].as_u64(), one["hbone_port"].as_u64())
    };
    all.iter().map(shown).collect()
}

/// Waits until the aggregator knows exactly these gateways.
#[track_caller]
fn are(gateway: &Gateway, what: &str, wanted: &[(&str, Option<u64>, Option<u64>)]) {
    let wanted: BTreeSet<Shown> =
        wanted.iter().map(|(address, sni, hbone)| ((*address).to_owned(), *sni, *hbone)).collect();
    eventually(&format!("{what}: {wanted:?}"), || (gateways(gateway) == wanted).then_some(()));
}

/// Waits until the registry reports a problem with this text.
#[track_caller]
fn reports(gateway: &Gateway, text: &str) {
    eventually(text, || {
        let report = gateway.json("/api/v1/registries")[0]["report"]["problems"].to_string();
        report.contains(text).then_some(())
    });
}

/// Returns the ports of a gateway's Service: 15443 and 15008.
fn both() -> Value {
    json!([
        {"name": "tls", "port": 15443, "targetPort": 15443}, {"name": "hbone", "port": 15008, "targetPort": 15008}
    ])
}

fn network() -> Value {
    json!({"topology.istio.io/network": "net-east"})
}

fn annotate(cluster: &Cluster, service: &str, annotations: &Value) {
    let patch = json!({"metadata": {"annotations": annotations}});
    cluster.admin().patch(&at("v1", "services", service), &patch);
}

/// Creates a pod of a gateway's Service on a node.
fn pod(cluster: &Cluster, key: &str, app: &str, address: &str, node: &str) {
    let mut pod = Pod::new(key, address);
    pod.labels = json!({"app": app});
    pod.node = node;
    cluster.pod(&pod);
}

#[test]
fn a_node_port_is_reached_at_the_nodes_that_forward_to_a_ready_pod() {
    let Some(cluster) = start() else { return };
    for (number, labels) in [(1, json!({"edge": "yes"})), (2, json!({"edge": "yes"})), (3, json!({}))] {
        let name = format!("n{number}");
        cluster.node(&name, &labels);
        let addresses = json!([
            {"type": "InternalIP", "address": format!("10.0.0.{number}")},
            {"type": "ExternalIP", "address": format!("192.0.2.{number}")}
        ]);
        cluster.admin().patch_status(&at("v1", "nodes", &name), &json!({"addresses": addresses}));
    }
    let service = "istio-system/eastwest";
    let spec = json!({"type": "NodePort", "externalTrafficPolicy": "Local", "ports": both()});
    cluster.service(service, &network(), &spec);
    pod(&cluster, "istio-system/gateway-1", "eastwest", "10.244.3.1", "n1");
    pod(&cluster, "istio-system/gateway-3", "eastwest", "10.244.3.3", "n3");
    let path = at("v1", "services", service);
    let node_port = |number: u64| {
        let ports = cluster.admin().read(&path)["spec"]["ports"].as_array().cloned().unwrap_or_default();
        ports.iter().find(|port| port["port"] == number).and_then(|port| port["nodePort"].as_u64())
    };
    let (sni, hbone) = (node_port(15443), node_port(15008));
    assert!(sni.is_some() && hbone.is_some() && sni != hbone);
    let gateway = aggregator(&cluster);
    // A Service of type NodePort has no addresses until an annotation selects nodes.
    reports(&gateway, "Service istio-system/eastwest, a gateway of network net-east, has no address");
    annotate(&cluster, service, &json!({"traffic.istio.io/nodeSelector": r#"{"edge": "yes"}"#}));
    are(&gateway, "the selected node with a pod", &[("192.0.2.1", sni, hbone)]);
    annotate(&cluster, service, &json!({"traffic.istio.io/nodeSelector": "{}"}));
    are(&gateway, "all nodes with a pod", &[("192.0.2.1", sni, hbone), ("192.0.2.3", sni, hbone)]);
    // A node whose pod is not ready drops connections; another node replaces it as soon as it has a ready pod.
    cluster.set_ready("istio-system/gateway-3", "False");
    are(&gateway, "the node with a ready pod", &[("192.0.2.1", sni, hbone)]);
    pod(&cluster, "istio-system/gateway-2", "eastwest", "10.244.3.2", "n2");
    are(&gateway, "two", &[("192.0.2.1", sni, hbone), ("192.0.2.2", sni, hbone)]);
    annotate(&cluster, service, &json!({"isthmus.dev/node-address-type": "InternalIP"}));
    are(&gateway, "by internal addresses", &[("10.0.0.1", sni, hbone), ("10.0.0.2", sni, hbone)]);
    // A node that loses its label is not selected any more. With the policy Cluster, every node forwards connections.
    annotate(&cluster, service, &json!({"traffic.istio.io/nodeSelector": r#"{"edge": "yes"}"#}));
    cluster.admin().patch(&at("v1", "nodes", "n1"), &json!({"metadata": {"labels": {"edge": null}}}));
    are(&gateway, "the node that is left", &[("10.0.0.2", sni, hbone)]);
    cluster.admin().patch(&path, &json!({"spec": {"externalTrafficPolicy": "Cluster"}}));
    annotate(&cluster, service, &json!({"traffic.istio.io/nodeSelector": "{}"}));
    let all = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|address| (address, sni, hbone));
    are(&gateway, "every node", &all);
}

#[test]
fn a_port_of_its_own_external_addresses_and_a_gateway_without_ready_pods() {
    let Some(cluster) = start() else { return };
    cluster.namespace("edge", &json!({}));
    let mut labels = network();
    labels["networking.istio.io/gatewayPort"] = "443".into();
    let ports = json!([{"name": "https", "port": 443, "targetPort": 15443}]);
    cluster.service("istio-system/first", &labels, &json!({"type": "LoadBalancer", "ports": ports}));
    cluster.balance("istio-system/first", &json!([{"ip": "192.0.2.10"}]));
    pod(&cluster, "istio-system/first-0", "first", "10.244.3.1", "node");
    let gateway = aggregator(&cluster);
    are(&gateway, "the port of the label", &[("192.0.2.10", Some(443), None)]);
    // A Service that has neither the port of its label nor the HBONE port is no gateway.
    let path = at("v1", "services", "istio-system/first");
    let label = |port: Value| json!({"metadata": {"labels": {"networking.istio.io/gatewayPort": port}}});
    cluster.admin().patch(&path, &label("8443".into()));
    are(&gateway, "none", &[]);
    reports(
        &gateway,
        "Service istio-system/first is ignored as a gateway, because it has neither the port 8443 nor the port \
                       15008",
    );
    cluster.admin().patch(&path, &label(Value::Null));
    reports(
        &gateway,
        "Service istio-system/first is ignored as a gateway, because it has neither the port 15443 nor the port \
                       15008",
    );
    cluster.admin().patch(&path, &label("443".into()));
    // External addresses are addresses that the administrator routes to the nodes. They are gateway addresses in addition to
    // those of the load balancer. An address in both lists gives one gateway.
    let external = json!({"spec": {"externalIPs": ["192.0.2.10", "192.0.2.11"]}});
    cluster.admin().patch(&path, &external);
    let own = [("192.0.2.10", Some(443), None), ("192.0.2.11", Some(443), None)];
    are(&gateway, "external addresses", &own);

    // The network has a second gateway, in another namespace. The second gateway has no ready pod, and the first gateway has
    // one, so the second gateway gets no connections by SNI. It is the only gateway for HBONE.
    let spec = json!({"ports": both(), "externalIPs": ["192.0.2.20"]});
    cluster.service("edge/second", &network(), &spec);
    reports(
        &gateway,
        "gateway edge/second/192.0.2.20 is not used for SNI, because none of its endpoints is ready",
    );
    are(&gateway, "one for each", &[own[0], own[1], ("192.0.2.20", None, Some(15008))]);
    pod(&cluster, "edge/second-0", "second", "10.244.4.1", "node");
    let second = ("192.0.2.20", Some(15443), Some(15008));
    are(&gateway, "both", &[own[0], own[1], second]);
    cluster.set_ready("istio-system/first-0", "False");
    are(&gateway, "the one that lives", &[second]);
    // If no gateway has a ready pod, all are used, because the reported state may be wrong.
    cluster.set_ready("edge/second-0", "False");
    are(&gateway, "all", &[own[0], own[1], second]);
    // A gateway that is being deleted is not used.
    cluster.admin().patch(&path, &json!({"metadata": {"finalizers": ["example.com/load-balancer"]}}));
    cluster.admin().delete(&path);
    are(&gateway, "the one that stays", &[second]);
    cluster.admin().patch(&path, &json!({"metadata": {"finalizers": null}}));
}

#[test]
fn a_gateway_object_for_hbone_leaves_the_sni_gateway_of_a_service_in_use() {
    let Some(cluster) = start() else { return };
    cluster.install_crds();
    let service = "istio-system/eastwest";
    cluster.service(service, &network(), &json!({"type": "LoadBalancer", "ports": both()}));
    cluster.balance(service, &json!([{"ip": "192.0.2.1"}]));
    pod(&cluster, "istio-system/gateway-0", "eastwest", "10.244.3.1", "node");
    cluster.admin().create(&json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
        "metadata": {"namespace": "istio-system", "name": "ambient", "labels": network()},
        "spec": {"gatewayClassName": "istio-remote", "addresses": [{"type": "IPAddress", "value": "192.0.2.30"}],
            "listeners": [{"name": "mesh", "port": 15008, "protocol": "HBONE"}]}
    }));
    let gateway = aggregator(&cluster);
    let (of_service, of_object) =
        (("192.0.2.1", Some(15443), Some(15008)), ("192.0.2.30", None, Some(15008)));
    are(&gateway, "both", &[of_service, of_object]);
    // The pods behind the object are not known, so the object replaces no other gateway when pods are not ready.
    cluster.set_ready("istio-system/gateway-0", "False");
    eventually("a slice without a ready pod", || {
        (cluster.slices(service).first()?["endpoints"][0]["conditions"]["ready"] == false).then_some(())
    });
    // A gateway with a ready pod replaces it for both kinds of ports; the note shows that the change has arrived.
    cluster.service(
        "istio-system/second",
        &network(),
        &json!({"ports": both(), "externalIPs": ["192.0.2.20"]}),
    );
    let second = ("192.0.2.20", Some(15443), Some(15008));
    are(&gateway, "all, as none is known to be ready", &[of_service, of_object, second]);
    pod(&cluster, "istio-system/second-0", "second", "10.244.3.2", "node");
    are(&gateway, "the one with a ready pod, and the unknown one", &[of_object, second]);
    reports(&gateway, "gateway istio-system/eastwest/192.0.2.1 is not used for SNI");
    reports(&gateway, "gateway istio-system/eastwest/192.0.2.1 is not used for HBONE");
}

#[test]
fn gateway_objects_are_gateways_by_their_addresses_and_listeners() {
    let Some(cluster) = start() else { return };
    cluster.namespace("edge", &json!({}));
    cluster.install_crds();
    let gateway = aggregator(&cluster);
    let object = |key: &str, class: &str, addresses: Value, listeners: Value| {
        let (namespace, name) = key.split_once('/').expect("a key");
        cluster.admin().apply(&json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
            "metadata": {"namespace": namespace, "name": name, "labels": network()},
            "spec": {"gatewayClassName": class, "addresses": addresses, "listeners": listeners}
        }));
    };
    let address = |kind: &str, value: &str| json!({"type": kind, "value": value});
    let listener = |name: &str, port: u16, protocol: &str, tls: Value| json!({"name": name, "port": port, "protocol": protocol, "tls": tls});
    let passes = json!({"mode": "Passthrough"});
    // The Gateway has listeners with the usual ports, for TLS passthrough and HBONE.
    let two = json!([
        listener("tls", 15443, "TLS", passes), {"name": "mesh", "port": 15008, "protocol": "HBONE"}
    ]);
    let addresses = json!([address("IPAddress", "192.0.2.30"), address("Hostname", "gw.example.com")]);
    object("istio-system/eastwest", "istio-remote", addresses, two.clone());
    let first = [("192.0.2.30", Some(15443), Some(15008)), ("gw.example.com", Some(15443), Some(15008))];
    are(&gateway, "both addresses", &first);
    // A listener with the auto-passthrough option may use any port. A listener that terminates TLS does not count.
    let option = json!({
        "mode": "Passthrough", "options": {"gateway.istio.io/listener-protocol": "auto-passthrough"}
    });
    let ends = json!({"mode": "Terminate", "certificateRefs": [{"name": "own"}]});
    let listeners =
        json!([listener("own", 15443, "TLS", ends.clone()), listener("mesh", 8443, "TLS", option)]);
    object("edge/option", "any", json!([address("IPAddress", "192.0.2.31")]), listeners);
    let option = ("192.0.2.31", Some(8443), None);
    are(&gateway, "the option", &[first[0], first[1], option]);
    // A Gateway may have HBONE alone. The addresses in the spec of Istio's class are names within the cluster; a controller
    // writes the address for other clusters into the status.
    let mesh = json!([{"name": "mesh", "port": 15008, "protocol": "HBONE"}]);
    let within = json!([address("Hostname", "ambient.edge.svc.cluster.local")]);
    object("edge/ambient", "istio-east-west", within, mesh);
    reports(&gateway, "Gateway edge/ambient of network net-east has no address");
    let path = at("gateway.networking.k8s.io/v1", "gateways", "edge/ambient");
    cluster.admin().patch_status(&path, &json!({"addresses": [address("IPAddress", "192.0.2.32")]}));
    let ambient = ("192.0.2.32", None, Some(15008));
    are(&gateway, "the address of the status", &[first[0], first[1], option, ambient]);
    // A Gateway without a usable listener, and one in a namespace that is not trusted, are left out.
    object(
        "edge/web",
        "any",
        json!([address("IPAddress", "192.0.2.33")]),
        json!([listener("own", 15443, "TLS", ends)]),
    );
    object("shop/trap", "any", json!([address("IPAddress", "192.0.2.66")]), two);
    reports(&gateway, "Gateway edge/web is ignored, because it has no listener for TLS passthrough or HBONE");
    reports(
        &gateway,
        "Gateway shop/trap is ignored: it has the label topology.istio.io/network, but its namespace",
    );
    assert_eq!(gateways(&gateway).len(), 4);
    // A Gateway that loses its label belongs to no network; without the CRD, there are no Gateways.
    let unlabelled = json!({"metadata": {"labels": {"topology.istio.io/network": null}}});
    cluster.admin().patch(&at("gateway.networking.k8s.io/v1", "gateways", "edge/option"), &unlabelled);
    are(&gateway, "without the label", &[first[0], first[1], ambient]);
    cluster.remove_crd("gateways.gateway.networking.k8s.io");
    are(&gateway, "without the CRD", &[]);
    assert_eq!(gateway.json("/api/v1/registries")[0]["state"], "live");
}
