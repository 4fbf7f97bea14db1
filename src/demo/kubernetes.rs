//! The step with two real Kubernetes clusters. It measures how soon a change of a pod appears in the view of a network, either
//! as an endpoint or in the weight of a gateway.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::DemoError;
use super::cluster::{Cluster, installed, server_name};
use super::gateway::Gateway;
use super::report::Outcome;
use super::stage::Stage;
use isthmus_api::requests;
use isthmus_console::output::cell;

/// The names of the clusters. The gateway runs in the first one.
const CLUSTERS: [&str; 2] = ["kube-east", "kube-west"];
const SERVICE: &str = "web.shop.svc.cluster.local";
/// The address of the second cluster's load balancer.
const WEST: &str = "192.0.2.2";
/// The number of ready pods of each cluster at first, and the prefix of their addresses. No client calls them, as no node runs
/// them.
const PODS: [(u8, &str); 2] = [(3, "198.51.100"), (2, "203.0.113")];
/// The number of measured changes of a pod.
const CHANGES: u8 = 10;
/// The time within which the gateway must show a change of the cluster. On two idle cores the median is about 10 ms.
const SHOWN_WITHIN: Duration = Duration::from_secs(5);
/// The time within which a registry must become `stale` after its API server has ended.
const STALE_WITHIN: Duration = Duration::from_secs(15);
/// The interval at which the gateway is queried.
const LOOK_EVERY: Duration = Duration::from_millis(2);

pub(super) async fn two_clusters(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let Some(program) = installed() else {
        outcome.left_out(
            "left out, because isthmus-kube-rig (a real API server with etcd and controllers) is not on the PATH. \
             `tests/kube/build FOLDER` in the source folder of isthmus builds it with Go; then run \
             `PATH=$PATH:FOLDER isthmus demo`",
        );
        outcome.proof("left out, because no isthmus-kube-rig is on the PATH");
        return Ok(());
    };
    let begun = Instant::now();
    for name in CLUSTERS {
        stage.certificates.issue(name, "apiserver", &[&server_name(name)])?;
    }
    let start = |name| Cluster::start(&program, name, &stage.folder, &stage.certificates);
    let (east, west) = tokio::try_join!(start(CLUSTERS[0]), start(CLUSTERS[1]))?;
    let mut clusters = [east, west];
    for cluster in &clusters {
        furnish(cluster).await?;
    }
    let gateway = gateway(stage, &clusters).await?;
    outcome.note(format!(
        "two API servers with etcd and controllers, and a gateway that reads both: started in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    let mut ready = [0; 2];
    for (at, (count, network)) in PODS.into_iter().enumerate() {
        for number in 1..=count {
            create_pod(&clusters[at], number, network).await?;
        }
        ready[at] = count;
    }
    shown(&gateway, ready).await?.map_err(|found| fault(&gateway, ready, &found))?;
    outcome.note(format!(
        "seen from {}, by weight: 3 pods 1, the gateway of {} at {WEST} 2, which its Service names",
        network_of(CLUSTERS[0]),
        network_of(CLUSTERS[1])
    ));
    for change in 0..CHANGES {
        let at = usize::from(change % 2);
        let is_ready = change % 4 >= 2;
        ready[at] = if is_ready { PODS[at].0 } else { PODS[at].0 - 1 };
        set_ready(&clusters[at], PODS[at].0, is_ready).await?;
        match shown(&gateway, ready).await? {
            Ok(took) => outcome.answered_in(took, 0),
            Err(found) => outcome.check(false, || fault(&gateway, ready, &found).to_string()),
        }
    }
    outcome.note(format!(
        "the calls of this step are {CHANGES} changes of a pod, unready or ready again; the time of a call is from the answer of the \
         API server until {} sees the change",
        network_of(CLUSTERS[0])
    ));
    clusters[1].end_api();
    let stale = stale(&gateway, CLUSTERS[1]).await?;
    outcome.check(stale.is_some(), || format!("the registry of {} is not stale", CLUSTERS[1]));
    let kept = shown(&gateway, ready).await?;
    outcome.check(kept.is_ok(), || "the endpoints of a cluster without an API server are gone".to_owned());
    if let Some(took) = stale {
        outcome.note(format!(
            "the API server of {} was killed: its registry is stale after {:.1} s, and its endpoints stay in use",
            CLUSTERS[1],
            took.as_secs_f64()
        ));
    }
    outcome.proof(format!(
        "isthmus horizon, after each of {CHANGES} changes of a pod; isthmus get registries: stale"
    ));
    Ok(())
}

fn network_of(cluster: &str) -> String {
    format!("net-{cluster}")
}

/// Creates the namespaces, the node, the service of the demo, and the Service of the cluster's gateway.
async fn furnish(cluster: &Cluster) -> Result<(), DemoError> {
    let labels = json!({"topology.istio.io/network": network_of(cluster.name)});
    for (name, labels) in [("istio-system", &labels), ("shop", &json!({}))] {
        let object = json!({"metadata": {"name": name, "labels": labels}});
        cluster.create("/api/v1/namespaces", &object).await?;
    }
    cluster.create("/api/v1/nodes", &json!({"metadata": {"name": "node"}})).await?;
    let port = json!([{"name": "https", "port": 443, "targetPort": 8443}]);
    let web = json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": port}});
    cluster.create("/api/v1/namespaces/shop/services", &web).await?;
    if cluster.name == CLUSTERS[1] {
        let spec = json!({"type": "LoadBalancer", "ports": [{"name": "tls", "port": 15443}]});
        let gateway = json!({"metadata": {"name": "eastwest", "labels": labels}, "spec": spec});
        let path = "/api/v1/namespaces/istio-system/services";
        cluster.create(path, &gateway).await?;
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": WEST}]}}});
        cluster.patch(&format!("{path}/eastwest/status"), &status).await?;
    }
    Ok(())
}

/// Creates a ready pod.
async fn create_pod(cluster: &Cluster, number: u8, network: &str) -> Result<(), DemoError> {
    let path = "/api/v1/namespaces/shop/pods";
    let pod = json!({
        "metadata": {"name": format!("web-{number}"), "labels": {"app": "web"}},
        "spec": {"nodeName": "node", "containers": [{"name": "main", "image": "none"}]},
    });
    cluster.create(path, &pod).await?;
    let ip = format!("{network}.{number}");
    let addresses = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]});
    cluster.patch(&format!("{path}/web-{number}/status"), &json!({"status": addresses})).await?;
    set_ready(cluster, number, true).await
}

async fn set_ready(cluster: &Cluster, number: u8, is_ready: bool) -> Result<(), DemoError> {
    let condition = json!({"type": "Ready", "status": if is_ready { "True" } else { "False" }});
    let path = format!("/api/v1/namespaces/shop/pods/web-{number}/status");
    cluster.patch(&path, &json!({"status": {"conditions": [condition]}})).await
}

/// Starts a gateway in the first cluster that reads both clusters.
async fn gateway(stage: &Stage, clusters: &[Cluster]) -> Result<Gateway, DemoError> {
    let mut registries = String::new();
    for cluster in clusters {
        let (name, file) = (cluster.name, format!("{}.kubeconfig", cluster.name));
        stage.folder.write(&file, &cluster.kubeconfig())?;
        registries += &format!("  - kubernetes: {{cluster: {name}, kubeconfig: {file}}}\n");
    }
    let config = format!(
        "# Written by `isthmus demo`.\n\
         node: {{name: gateway-kube, namespace: istio-system, cluster: {own}, network: {network}}}\n\
         listeners: [{{name: mesh, bind: \"127.3.0.1:0\"}}, {{name: plain, bind: \"127.3.0.2:0\"}}]\n\
         exports: [{{services: [\"*.shop.svc.cluster.local\"], tls: own}}]\n\
         registries:\n{registries}\
         xds: {{bind: \"127.0.0.1:0\"}}\nadmin: {{bind: \"127.0.0.1:0\"}}\n\
         telemetry: {{log: {{format: json}}}}\nworkers: 1\n",
        own = CLUSTERS[0],
        network = network_of(CLUSTERS[0]),
    );
    Gateway::start("gateway-kube", stage.folder.path("kube.yaml"), &config).await
}

/// Waits until the view of the first network has this number of ready pods of each cluster, and returns the time that this
/// took. At the timeout, the inner error contains the weight of each address in the view.
async fn shown(
    gateway: &Gateway,
    ready: [u8; 2],
) -> Result<Result<Duration, BTreeMap<String, u64>>, DemoError> {
    let begun = Instant::now();
    let own = network_of(CLUSTERS[0]);
    let path =
        requests::HORIZON.with(&[("network", own.as_str()), ("cluster", CLUSTERS[0]), ("service", SERVICE)]);
    let near = (1..=ready[0]).map(|number| (format!("{}.{number}:8443", PODS[0].1), 1));
    let expected: BTreeMap<String, u64> =
        near.chain([(format!("{WEST}:15443"), u64::from(ready[1]))]).collect();
    loop {
        let horizon = gateway.json(&path).await.unwrap_or_default();
        let entries = horizon["entries"].as_array().into_iter().flatten();
        let is_healthy = |entry: &&Value| entry["health"].as_str().is_none_or(|health| health == "healthy");
        let weight = |entry: &Value| (cell(&entry["address"]), entry["weight"].as_u64().unwrap_or_default());
        let found: BTreeMap<String, u64> = entries.filter(is_healthy).map(weight).collect();
        if found == expected {
            return Ok(Ok(begun.elapsed()));
        }
        if begun.elapsed() > SHOWN_WITHIN {
            return Ok(Err(found));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn fault(gateway: &Gateway, ready: [u8; 2], found: &BTreeMap<String, u64>) -> DemoError {
    let [east, west] = ready;
    let what = format!("shows {found:?} instead of {east} pods, and a gateway with {west} pods behind it");
    gateway.fault(what)
}

/// Returns the time until the registry of a cluster is stale; `None` at the timeout.
async fn stale(gateway: &Gateway, cluster: &str) -> Result<Option<Duration>, DemoError> {
    let begun = Instant::now();
    while begun.elapsed() < STALE_WITHIN {
        let registries = gateway.json(requests::REGISTRIES.path).await?;
        let mut of_cluster =
            registries.as_array().into_iter().flatten().filter(|one| one["cluster"] == cluster);
        if of_cluster.any(|registry| registry["state"] == "stale") {
            return Ok(Some(begun.elapsed()));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(None)
}
