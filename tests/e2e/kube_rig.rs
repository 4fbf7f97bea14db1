//! The real API server that other tests use: its controllers, permissions, faults and streaming lists work as in a cluster.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes, takes};
use crate::support::namespace;

const STREAMED: &str = "/api/v1/namespaces?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";

fn start(name: &str) -> Option<Cluster> {
    Some(Cluster::start(&kube::installed()?, name, &Options::default()))
}

/// Returns the sorted addresses of a service's endpoints for which the condition is true.
fn endpoints(cluster: &Cluster, service: &str, condition: &str) -> Vec<String> {
    let slices = cluster.slices(service);
    let all = slices.iter().flat_map(|slice| slice["endpoints"].as_array().cloned().unwrap_or_default());
    let so = all.filter(|endpoint| endpoint["conditions"][condition] == true);
    let mut addresses: Vec<String> =
        so.map(|endpoint| endpoint["addresses"][0].as_str().expect("an address").to_owned()).collect();
    addresses.sort();
    addresses
}

#[test]
fn a_service_and_pods_become_endpoint_slices() {
    const TEST: &str = "kube_rig::a_service_and_pods_become_endpoint_slices";
    let Some(program) = kube::installed() else { return };
    if !namespace::inside(TEST, kube::PODS) {
        return;
    }
    let cluster = Cluster::start(&program, "east", &Options::default());
    cluster.namespace("shop", &json!({}));
    cluster.node("node", &json!({"topology.kubernetes.io/zone": "z1"}));
    let ports = json!([{"name": "https", "port": 443, "targetPort": 8443}]);
    cluster.service("shop/web", &json!({}), &json!({"ports": ports}));
    cluster.scale("shop/web", 3, "10.244.7");

    let three = ["10.244.7.0", "10.244.7.1", "10.244.7.2"];
    let took = takes("slices", || endpoints(&cluster, "shop/web", "ready") == three);
    eprintln!("slices name three new pods after {took:?}");
    let slice = &cluster.slices("shop/web")[0];
    assert_eq!(slice["ports"], json!([{"name": "https", "port": 8443, "protocol": "TCP"}]));
    assert_eq!(slice["endpoints"][0]["zone"], "z1");
    assert_eq!(slice["endpoints"][0]["targetRef"]["kind"], "Pod");

    cluster.set_ready("shop/web-0", "False");
    takes("a pod that is not ready", || endpoints(&cluster, "shop/web", "ready") == three[1..]);
    cluster.terminate_pod("shop/web-1");
    takes("a pod that ends", || endpoints(&cluster, "shop/web", "terminating") == [three[1]]);
    assert_eq!(endpoints(&cluster, "shop/web", "ready"), [three[2]]);
    cluster.scale("shop/web", 1, "10.244.7");
    takes("pods that are gone", || endpoints(&cluster, "shop/web", "serving").is_empty());

    // The test can bind and reach the address of a pod.
    let pod = TcpListener::bind("10.244.7.0:8443").expect("bound");
    let mut client = TcpStream::connect("10.244.7.0:8443").expect("connected");
    pod.accept().expect("a client").0.write_all(b"x").expect("sent");
    assert_eq!(client.read(&mut [0; 2]).expect("read"), 1);
}

#[test]
fn pods_of_both_families_ports_by_name_and_crds_are_taken() {
    let Some(cluster) = start("east") else { return };
    cluster.install_crds();
    cluster.namespace("shop", &json!({}));
    let ports = json!([{"name": "https", "port": 443, "targetPort": "tls"}]);
    let families = json!(["IPv4", "IPv6"]);
    let spec = json!({"ports": ports, "ipFamilyPolicy": "RequireDualStack", "ipFamilies": families});
    cluster.service("shop/web", &json!({"istio.io/global": "true"}), &spec);
    let mut pod = Pod::new("shop/web-0", "10.244.7.0");
    pod.addresses.push("fd00:244::7");
    pod.labels = json!({"app": "web"});
    pod.ports = json!([{"name": "tls", "containerPort": 9443}]);
    cluster.pod(&pod);
    takes("a slice for each family", || {
        endpoints(&cluster, "shop/web", "ready") == ["10.244.7.0", "fd00:244::7"]
    });
    cluster.slices("shop/web").iter().for_each(|slice| assert_eq!(slice["ports"][0]["port"], 9443));
    cluster.balance("shop/web", &json!([]));

    let export = |version: &str| {
        let metadata = json!({"namespace": "shop", "name": "web"});
        json!({"apiVersion": format!("multicluster.x-k8s.io/{version}"), "kind": "ServiceExport", "metadata": metadata})
    };
    cluster.admin().create(&export("v1beta1"));
    cluster.admin().apply(&export("v1alpha1"));
    let gateway = json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": {"namespace": "shop", "name": "east"},
        "spec": {"gatewayClassName": "istio-east-west", "listeners": [{"name": "tls", "port": 15443, "protocol": "TLS",
            "tls": {"mode": "Passthrough"}}]}
    });
    cluster.admin().create(&gateway);
    let gateways = at("gateway.networking.k8s.io/v1", "gateways", "");
    assert_eq!(cluster.admin().read(&gateways)["items"].as_array().expect("a list").len(), 1);
    cluster.remove_crd("gateways.gateway.networking.k8s.io");
    takes("no more gateways", || cluster.admin().get(&gateways).status == 404);

    // The namespace controller deletes the objects of the namespace. A pod on a node would wait for a kubelet, which does not
    // exist here, so the test deletes this pod itself first.
    cluster.delete_pod("shop/web-0");
    cluster.admin().delete(&at("v1", "namespaces", "shop"));
    takes("no more namespace", || cluster.admin().get(&at("v1", "namespaces", "shop")).status == 404);
}

#[test]
fn a_token_has_the_rights_of_its_account_and_dies_with_it() {
    let Some(cluster) = start("east") else { return };
    cluster.namespace("mesh", &json!({}));
    let pods = at("v1", "pods", "");
    for token in [cluster.account("mesh/reader"), cluster.account_with_secret("mesh/lasting")] {
        assert_eq!(cluster.client(&token).get(&pods).status, 403);
    }
    let reader = cluster.client(&cluster.account("mesh/other"));
    cluster.allow("mesh/other", &kube::reader());
    takes("rights", || reader.get(&pods).status == 200);
    assert_eq!(reader.get(&at("v1", "secrets", "")).status, 403);
    cluster.forbid("mesh/other");
    takes("no rights", || reader.get(&pods).status == 403);
    cluster.admin().delete(&at("v1", "serviceaccounts", "mesh/other"));
    takes("no account", || reader.get(&pods).status == 401);
    assert_eq!(cluster.client("nobody's").get(&pods).status, 401);
    assert_eq!(cluster.client("").get(&pods).status, 403);
    let certificate = |group: &str| cluster.client_with(cluster.pki().issue_to("someone", group));
    assert_eq!(certificate("system:masters").get(&pods).status, 200);
    assert_eq!(certificate("nobody").get(&pods).status, 403);
}

#[test]
fn an_api_server_that_was_killed_or_paused_answers_again() {
    let Some(mut cluster) = start("east") else { return };
    cluster.namespace("shop", &json!({}));
    let path = at("v1", "namespaces", "shop");
    let uid = cluster.admin().read(&path)["metadata"]["uid"].clone();
    cluster.kill();
    assert!(cluster.admin().try_call("GET", &path, ("application/json", "")).is_err());
    cluster.restart();
    assert_eq!(cluster.admin().read(&path)["metadata"]["uid"], uid);
    // The controllers work again, too.
    cluster.service("shop/web", &json!({}), &json!({"ports": [{"port": 443}]}));
    cluster.scale("shop/web", 1, "10.244.7");
    let took = takes("slices", || endpoints(&cluster, "shop/web", "ready").len() == 1);
    eprintln!("slices come {took:?} after a restart");

    let (sender, receiver) = mpsc::channel();
    cluster.pause();
    std::thread::scope(|scope| {
        scope.spawn(|| sender.send(cluster.admin().get(&path).status));
        assert!(receiver.recv_timeout(Duration::from_millis(500)).is_err(), "a paused server answered");
        cluster.resume();
        assert_eq!(receiver.recv().expect("an answer"), 200);
    });
}

#[test]
fn lists_are_streamed_where_the_feature_is_on() {
    let Some(program) = kube::installed() else { return };
    let cluster = Cluster::start(&program, "new", &Options::default());
    let ends = |event: &Value| {
        event["type"] == "BOOKMARK"
            && event["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"] == "true"
    };
    cluster.admin().watch(STREAMED).until("the end of the list", ends);
    drop(cluster);
    let options = Options { flags: &["--feature-gates=WatchList=false"], ..Options::default() };
    let cluster = Cluster::start(&program, "old", &options);
    let answer = cluster.admin().get(STREAMED);
    assert_eq!((answer.status, &answer.json()["reason"]), (422, &json!("Invalid")), "{answer:?}");
}

#[test]
fn kubectl_and_helm_know_the_cluster() {
    let (Some(kubectl), Some(helm)) = (kube::kubectl(), kube::helm()) else { return };
    let Some(cluster) = start("east") else { return };
    let nodes = cluster.run(&kubectl, &["create", "namespace", "shop"]);
    assert!(nodes.status.success(), "{nodes:?}");
    becomes(cluster.admin(), &at("v1", "serviceaccounts", "shop/default"), |_| true);
    let list = cluster.run(&helm, &["list", "--all-namespaces", "--output", "json"]);
    assert!(list.status.success() && list.stdout.trim_ascii() == b"[]", "{list:?}");
}
