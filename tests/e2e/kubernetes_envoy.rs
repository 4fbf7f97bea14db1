//! A real Envoy in the east learns the endpoints of a service in two Kubernetes clusters with real API servers. It gets the
//! eastern endpoints by the addresses of their pods. It gets the western endpoints by the address of the west's gateway, which
//! a Service in the west describes.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::horizon_envoy::{counted, envoy};
use crate::support::backend::Backend;
use crate::support::gateway::Gateway;
use crate::support::horizon::{CHECKOUT, client, endpoint_at};
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::at;
use crate::support::{eventually, namespace};

/// The identity of the pods: that of their service account.
const SERVER_ID: &str = "spiffe://cluster.local/ns/shop/sa/default";
/// The number of calls over which the split is measured. The choice of an endpoint is random: the standard deviation of a share
/// of 2,000 calls is at most 1.1 percentage points.
const CALLS: usize = 2000;
/// The largest deviation of a zone's share of the calls from its share of the ready pods.
const TOLERANCE: f64 = 0.04;
/// The address of the west's gateway, as its load balancer reports it.
const WEST: &str = "10.244.200.1";

/// Starts a cluster with its network, one node for each zone, and the service without pods.
fn cluster(name: &str, zones: &[&str]) -> Cluster {
    let cluster = Cluster::start(&kube::installed().expect("installed"), name, &Options::default());
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": format!("net-{name}")}));
    cluster.namespace("shop", &json!({}));
    for zone in zones {
        cluster
            .node(zone, &json!({"topology.kubernetes.io/region": name, "topology.kubernetes.io/zone": zone}));
    }
    let port = json!([{"name": "tcp", "port": 443, "targetPort": 8443}]);
    cluster.service("shop/checkout", &json!({}), &json!({"ports": port}));
    cluster
}

/// Starts a ready pod of the mesh in a zone; its endpoint answers with `says`.
fn pod(cluster: &Cluster, says: &'static str, zone: &str, address: &str) -> Backend {
    let socket: SocketAddr = format!("{address}:8443").parse().expect("an address");
    let backend = endpoint_at(socket, says, SERVER_ID);
    let key = key(address);
    let mut pod = Pod::new(&key, address);
    pod.labels = json!({"app": "checkout", "security.istio.io/tlsMode": "istio"});
    pod.node = zone;
    cluster.pod(&pod);
    backend
}

/// Returns the namespace and name of the pod with an address.
fn key(address: &str) -> String {
    format!("shop/checkout-{}", address.replace('.', "-"))
}

/// Starts a gateway that reads these clusters.
fn gateway(config: &str, clusters: &[&Cluster]) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let registries = kube::registries(folder.path(), clusters, "");
    let config = format!("{config}exports: [{{services: [\"*.shop.svc.cluster.local\"]}}]\n{registries}");
    Gateway::start_in(folder, &config, &[])
}

#[test]
fn envoy_in_the_east_reaches_the_pods_of_both_clusters_as_many_as_are_ready_in_each_zone() {
    const TEST: &str = "kubernetes_envoy::envoy_in_the_east_reaches_the_pods_of_both_clusters_as_many_as_are_ready_in_each_zone";
    let Some(binary) = envoy() else { return };
    if kube::installed().is_none() || !namespace::inside(TEST, kube::PODS) {
        return;
    }
    let (east, west) = (cluster("east", &["e-a"]), cluster("west", &["w-a", "w-b", "w-c"]));
    let mut pods = vec![pod(&east, "e-a", "e-a", "10.244.1.1"), pod(&east, "e-a", "e-a", "10.244.1.2")];
    for (zone, network, count) in [("w-a", "10.244.11", 3), ("w-b", "10.244.12", 2), ("w-c", "10.244.13", 1)]
    {
        pods.extend((1..=count).map(|last| pod(&west, zone, zone, &format!("{network}.{last}"))));
    }
    // A pod that is not ready does not count.
    let unready = "10.244.13.2";
    pods.push(pod(&west, "w-c", "w-c", unready));
    west.set_ready(&key(unready), "False");
    // The Service of the west's gateway: the address of its load balancer, and its own pod.
    let ports = json!([{"name": "tls", "port": 15443, "targetPort": 15443}]);
    let network = json!({"topology.istio.io/network": "net-west"});
    west.service("istio-system/eastwest", &network, &json!({"type": "LoadBalancer", "ports": ports}));
    west.balance("istio-system/eastwest", &json!([{"ip": WEST}]));
    let mut behind = Pod::new("istio-system/eastwest-0", "10.244.200.2");
    behind.labels = json!({"app": "eastwest"});
    west.pod(&behind);

    let through = gateway(
        &format!(
            "node: {{cluster: west, network: net-west}}\nlisteners: [{{name: mesh, bind: \"{WEST}:15443\"}}]\n"
        ),
        &[&west],
    );
    let control = gateway(
        "node: {cluster: east, network: net-east}\nlisteners: [{name: mesh, bind: \"127.0.0.1:0\"}]\n\
         xds: {bind: \"127.0.0.1:0\"}\n",
        &[&east, &west],
    );
    let envoy = client(&binary, control.listener("xds"), &["checkout"], "DELTA_GRPC");
    let gateway_socket: SocketAddr = format!("{WEST}:15443").parse().expect("an address");
    let weights = |behind: u32| {
        let near = ["10.244.1.1:8443", "10.244.1.2:8443"].map(|text| (text.parse().expect("an address"), 1));
        BTreeMap::from_iter(near.into_iter().chain([(gateway_socket, behind)]))
    };
    let shown = |behind: u32| {
        eventually(&format!("{behind} ready pods behind the gateway"), || {
            (envoy.weights(CHECKOUT) == weights(behind)).then_some(())
        });
        // The west's gateway reads its cluster independently of the control plane.
        eventually("the same at the gateway", || {
            let name = "outbound_.443_._.checkout.shop.svc.cluster.local";
            let explained: Value = through.json(&format!("/api/v1/explain?sni={name}&alpn=istio"));
            let candidates = explained["candidates"].as_array().cloned().unwrap_or_default();
            let healthy = candidates.iter().filter(|one| one["health"] == "healthy").count();
            (healthy == behind as usize).then_some(())
        });
    };
    let split = |expected: &[(&str, f64)]| {
        let counts = counted(envoy.listener("checkout"), CALLS);
        let total: f64 = expected.iter().map(|(_, pods)| pods).sum();
        eprintln!("{CALLS} calls: {counts:?}");
        for (zone, pods) in expected {
            let share = counts.get(*zone).copied().unwrap_or_default() as f64 / CALLS as f64;
            let wanted = pods / total;
            assert!((share - wanted).abs() < TOLERANCE, "{zone}: {share} instead of {wanted}: {counts:?}");
        }
        assert_eq!(counts.len(), expected.iter().filter(|(_, pods)| *pods > 0.0).count(), "{counts:?}");
    };
    shown(6);
    split(&[("e-a", 2.0), ("w-a", 3.0), ("w-b", 2.0), ("w-c", 1.0)]);
    assert_eq!(pods.last().expect("one").accepted(), 0, "the pod that is not ready");
    // The calls to the west came through its gateway alone, with the mesh name as SNI.
    let line = through.access_log().pop().expect("a line");
    assert_eq!(line["sni"], "outbound_.443_._.checkout.shop.svc.cluster.local", "{line}");

    // A pod of a zone becomes ready, and another zone loses its pods. In this order, five pods are ready only at the end.
    west.set_ready(&key(unready), "True");
    west.delete_pod(&key("10.244.12.1"));
    west.delete_pod(&key("10.244.12.2"));
    shown(5);
    split(&[("e-a", 2.0), ("w-a", 3.0), ("w-b", 0.0), ("w-c", 2.0)]);

    // With `trafficDistribution`, the east's own pods get all calls as long as they are ready, and the west's gateway replaces them
    // when none is.
    let near = json!({"spec": {"trafficDistribution": "PreferClose"}});
    east.admin().patch(&at("v1", "services", "shop/checkout"), &near);
    let priorities = || {
        let path = "/api/v1/horizon?network=net-east&cluster=east&service=checkout.shop.svc.cluster.local";
        let entries = control.json(path)["entries"].as_array().cloned().unwrap_or_default();
        entries.iter().map(|one| one["priority"].as_u64().unwrap_or(0)).collect::<Vec<_>>()
    };
    eventually("the gateway after the pods", || (priorities() == [0, 0, 1]).then_some(()));
    let all_from = |zones: &[&str]| {
        eventually(&format!("all calls to {zones:?}"), || {
            let counts = counted(envoy.listener("checkout"), 100);
            counts.keys().all(|zone| zones.contains(&zone.as_str())).then_some(())
        });
    };
    all_from(&["e-a"]);
    split(&[("e-a", 1.0)]);
    for pod in ["10.244.1.1", "10.244.1.2"] {
        east.set_ready(&key(pod), "False");
    }
    all_from(&["w-a", "w-c"]);
    split(&[("w-a", 3.0), ("w-c", 2.0)]);
}
