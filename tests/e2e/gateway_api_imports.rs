//! A TLSRoute whose backend is a ServiceImport: real TLS calls to the pods of two real clusters.

use serde_json::{Value, json};

use crate::gateway_api::{answers, asked, edge, listener, put, route, route_has, socket, start, withdrawn};
use crate::support::backend::{Backend, tls_echo};
use crate::support::client::{call, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes};
use crate::support::pki::PKI;

const MCS: &str = "multicluster.x-k8s.io/v1beta1";
const NAME: &str = "a.test";

/// Exports the service other/web of a cluster.
fn export(cluster: &Cluster) {
    cluster.admin().create(
        &json!({"apiVersion": MCS, "kind": "ServiceExport", "metadata": {"namespace": "other", "name": "web"}}),
    );
}

/// Creates the service other/web with a pod at each address, which answers as a TLS server with a mark.
fn serve(cluster: &Cluster, addresses: &[&str], mark: &'static str) -> Vec<Backend> {
    cluster.service("other/web", &json!({}), &json!({"ports": [{"port": 443, "targetPort": 10443}]}));
    let pod = |(index, address): (usize, &&str)| {
        let key = format!("other/web-{index}");
        let mut pod = Pod::new(&key, address);
        pod.labels = json!({"app": "web"});
        cluster.pod(&pod);
        let config = PKI.server(NAME);
        Backend::start_at(socket(address, 10_443), move |stream| tls_echo(stream, config.clone(), mark))
    };
    addresses.iter().enumerate().map(pod).collect()
}

/// Returns the numbers of answers from the east and from the west to this number of calls.
fn shares(calls: u32) -> (u32, u32) {
    let mut shares = (0, 0);
    for _ in 0..calls {
        match asked("127.0.0.1", NAME).as_deref() {
            Ok("east:hi") => shares.0 += 1,
            Ok("west:hi") => shares.1 += 1,
            other => panic!("{other:?}"),
        }
    }
    shares
}

#[test]
fn a_route_to_an_import_reaches_both_clusters_by_weight_until_its_grant_is_withdrawn() {
    const TEST: &str = "gateway_api_imports::a_route_to_an_import_reaches_both_clusters_by_weight_until_its_grant_is_withdrawn";
    let Some(east) = start(TEST) else { return };
    let west = Cluster::start(&kube::installed().expect("installed"), "west", &Options::default());
    west.install_crds();
    west.namespace("other", &json!({}));
    let _in_east = serve(&east, &["10.244.1.1"], "east:");
    let _in_west = serve(&west, &["10.244.2.1", "10.244.2.2", "10.244.2.3"], "west:");
    let folder = tempfile::tempdir().expect("a folder");
    for cluster in [&east, &west] {
        let file = folder.path().join(format!("{}.kubeconfig", cluster.name));
        std::fs::write(file, cluster.kubeconfig(cluster.admin_token())).expect("written");
    }
    let config = "node: {name: replica, cluster: east, network: net-east, namespace: istio-system}\nlisten: \"127.0.0.1:0\"\n\
         exports: [{services: [\"*\"], tls: own, marked: {serviceExport: true}}]\nregistries:\n  \
         - kubernetes: {cluster: east, kubeconfig: east.kubeconfig, serviceImports: write, \
         gatewayApi: {class: isthmus, ports: [443], addresses: [127.0.0.1]}}\n  \
         - kubernetes: {cluster: west, kubeconfig: west.kubeconfig, network: net-east}\n";
    let _gateway = Gateway::start_in(folder, config, &[]);
    edge(&east, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    let backend = json!([{"group": "multicluster.x-k8s.io", "kind": "ServiceImport", "namespace": "other",
        "name": "web", "port": 443}]);
    route(&east, "web", "edge", &[NAME], backend);
    route_has(&east, "web", "ResolvedRefs", "False/RefNotPermitted");
    let grant = || {
        let from = json!([{"group": "gateway.networking.k8s.io", "kind": "TLSRoute", "namespace": "shop"}]);
        let to = json!([{"group": "multicluster.x-k8s.io", "kind": "ServiceImport"}]);
        put(&east, "ReferenceGrant", "other/grant", json!({"from": from, "to": to}));
    };
    grant();
    route_has(&east, "web", "ResolvedRefs", "False/BackendNotFound");

    // The export of the west alone makes the import in the east, and the route leads there.
    export(&west);
    route_has(&east, "web", "ResolvedRefs", "True/ResolvedRefs");
    answers("127.0.0.1", NAME, "west:hi");
    assert_eq!(shares(20), (0, 20));
    export(&east);
    let both = json!([{"cluster": "east"}, {"cluster": "west"}]);
    let is_of_both = |import: &Value| import["status"]["clusters"] == both;
    becomes(east.admin(), &at(MCS, "serviceimports", "other/web"), is_of_both);
    eventually("an answer of the east", || {
        (asked("127.0.0.1", NAME).as_deref() == Ok("east:hi")).then_some(())
    });
    let (in_east, in_west) = shares(400);
    eprintln!("one pod in the east and three in the west: {in_east} and {in_west} of 400 calls");
    // Six standard deviations of a share of a quarter are 52.
    assert!(in_east.abs_diff(100) < 52, "{in_east} and {in_west}");

    let mut open = tls(socket("127.0.0.1", 443), NAME).expect("admitted");
    let again = || {
        grant();
        eventually("an answer", || asked("127.0.0.1", NAME).ok());
    };
    eprintln!("a withdrawn grant refused after {:?}", withdrawn(&east, NAME, again));
    let answer = call(&mut open, "still").expect("an open connection stays");
    assert!(answer.ends_with(":still"), "{answer}");
    route_has(&east, "web", "ResolvedRefs", "False/RefNotPermitted");
    grant();
    route_has(&east, "web", "ResolvedRefs", "True/ResolvedRefs");
    eventually("an answer", || asked("127.0.0.1", NAME).ok());

    // The import goes with the last export, and the route says so.
    for cluster in [&east, &west] {
        cluster.admin().delete(&at(MCS, "serviceexports", "other/web"));
    }
    route_has(&east, "web", "ResolvedRefs", "False/BackendNotFound");
}
