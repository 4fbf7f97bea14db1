//! The program as a pod of the chart runs it, with the config from the chart and the token of the chart's service account, at a
//! real API server. It needs every permission that the chart grants, and no other.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::support::backend::{Backend, tls_echo};
use crate::support::client::{call, tls_with};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::helm::{Helm, NAMESPACE, RELEASE, chart, object, path, said};
use crate::support::kube::{self, Cluster, Options, PODS, Pod};
use crate::support::namespace::inside;
use crate::support::pki::PKI;
use crate::support::{eventually, skip};

/// The mesh name of a service, as a sidecar of another network sends it.
const NAME: &str = "outbound_.443_._.reviews.shop.svc.cluster.local";
/// The address of the gateway's load balancer.
const BALANCER: &str = "192.0.2.10";

/// Starts a cluster with a service that has one pod.
fn cluster(rig: &Path) -> Cluster {
    let cluster = Cluster::start(rig, "east", &Options::default());
    cluster.install_crds();
    cluster.namespace(NAMESPACE, &json!({"topology.istio.io/network": "net-east"}));
    cluster.namespace("shop", &json!({}));
    cluster.node(
        "node",
        &json!({"topology.kubernetes.io/region": "us-east1", "topology.kubernetes.io/zone": "b"}),
    );
    let ports = json!([{"name": "tls", "port": 443, "targetPort": 8443}]);
    cluster.service("shop/reviews", &json!({"istio.io/global": "true"}), &json!({"ports": ports}));
    let labels = json!({"app": "reviews", "security.istio.io/tlsMode": "istio"});
    cluster.pod(&Pod { labels, ..Pod::new("shop/reviews-0", "10.244.7.1") });
    cluster
}

/// Starts the gateway of a release as its pod would run it, with the files that a kubelet mounts at their usual paths.
fn start(cluster: &Cluster, kubectl: &Path, objects: &[Value]) -> Gateway {
    const SCRIPT: &str = "
        mount -t tmpfs tmpfs /run
        mkdir -p /run/secrets/kubernetes.io/serviceaccount
        mount -t tmpfs tmpfs /var/lib
        cp token ca.crt /run/secrets/kubernetes.io/serviceaccount
        exec \"$@\"";
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    for (name, text) in object(objects, "ConfigMap", RELEASE)["data"].as_object().expect("files") {
        write(name, text.as_str().expect("a text"));
    }
    let token = said(cluster.run(kubectl, &["create", "token", RELEASE, "--namespace", NAMESPACE]));
    write("token", &token.unwrap_or_else(|error| panic!("{error}")));
    write("ca.crt", &cluster.ca_pem());
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-ec", SCRIPT, "sh", BINARY, "run", "-c", "isthmus.yaml"])
        .current_dir(folder.path());
    let address = cluster.address();
    command.env("KUBERNETES_SERVICE_HOST", address.ip().to_string());
    command.env("KUBERNETES_SERVICE_PORT", address.port().to_string());
    command.env("POD_NAME", "gateway-0").env("POD_NAMESPACE", NAMESPACE);
    Gateway::spawn(command, folder)
}

#[test]
fn a_pod_of_the_chart_reads_its_cluster_and_serves_other_networks() {
    const TEST: &str = "pod::a_pod_of_the_chart_reads_its_cluster_and_serves_other_networks";
    let (Some(rig), Some(kubectl), Some(helm)) = (kube::installed(), kube::kubectl(), kube::helm()) else {
        return;
    };
    if Path::new("/var/run").read_link().is_err() {
        return skip(&format!("{TEST}: /var/run is no link to /run here"));
    }
    if !inside(TEST, PODS) {
        return;
    }
    let cluster = cluster(&rig);
    let mut server = (*PKI.server(NAME)).clone();
    server.alpn_protocols = vec![b"istio".to_vec()];
    let server = Arc::new(server);
    let pod = "10.244.7.1:8443".parse().expect("an address");
    let _backend = Backend::start_at(pod, move |stream| tls_echo(stream, server.clone(), ""));
    let base = [
        "--set",
        "image.repository=r/isthmus,networkGateway=net-east,cluster=east",
        "--set-json",
        r#"config={"telemetry":{"log":{"format":"json"}}}"#,
        "--set-json",
        r#"networks={"net-west":{}}"#,
        "--set-json",
        r#"exports=[{"services":["*.shop.svc.cluster.local"],"marked":{"labels":{"istio.io/global":"true"}}}]"#,
    ];
    // The values that limit or widen what the gateway reads, with the permissions that the chart grants for each.
    let cases = [
        "kubernetes.enabled=true",
        "kubernetes.destinationRules=true,kubernetes.meshConfig=true",
        "kubernetes.namespaces.only={shop}",
        "kubernetes.namespaces.only={shop},kubernetes.gateways.enabled=false",
        "remoteClusters.watch.enabled=true",
    ];
    let local = Helm::installed().expect("helm");
    let chart = chart();
    let mut command = "install";
    for case in cases {
        let values = [&base[..], &["--set", case]].concat();
        let arguments = [&[command, RELEASE, path(&chart), "--namespace", NAMESPACE], &values[..]].concat();
        said(cluster.run(&helm, &arguments)).unwrap_or_else(|error| panic!("{case}: {error}"));
        command = "upgrade";
        let balanced = json!([{"ip": BALANCER}]);
        cluster.balance(&format!("{NAMESPACE}/{RELEASE}"), &balanced);
        let gateway = start(&cluster, &kubectl, &local.objects(None, &values));
        serves(&gateway, case);
        finds_its_own_gateway(&gateway, case);
    }
}

/// Checks that the gateway reads its cluster without a problem, and forwards a call from another network.
#[track_caller]
fn serves(gateway: &Gateway, case: &str) {
    let listener = "127.0.0.1:15443".parse().expect("an address");
    let answer = eventually(case, || {
        let mut stream = tls_with(PKI.client(&["istio"]), listener, NAME).ok()?;
        call(&mut stream, "hello").ok()
    });
    assert_eq!(answer, "hello");
    let registries = gateway.json("/api/v1/registries");
    let registry = &registries[0];
    assert_eq!(registry["state"], "live", "{case}: {registries:#}");
    // A missing permission would be a problem of the registry.
    assert!(!registries.to_string().contains("forbidden"), "{case}: {registries:#}");
    assert!(!gateway.log().iter().any(|line| line.contains("forbidden")), "{case}");
    let exposed = gateway.json("/api/v1/exposed").to_string();
    assert!(exposed.contains("reviews.shop.svc.cluster.local"), "{case}: {exposed}");
}

/// Checks that a viewer on another network gets the release's load balancer, if the gateway looks for gateways.
#[track_caller]
fn finds_its_own_gateway(gateway: &Gateway, case: &str) {
    let path = "/api/v1/horizon?network=net-west&service=reviews.shop.svc.cluster.local";
    if case.contains("gateways.enabled=false") {
        assert!(!gateway.get(path).1.contains(BALANCER), "{case}");
        return;
    }
    eventually(case, || gateway.get(path).1.contains(&format!("{BALANCER}:15443")).then_some(()));
}
