//! ServiceExports of two real clusters: their conditions, the replica that writes them, and the settings that apply if the
//! clusters disagree.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::hbone::{BASE, CALLER, caller, folder};
use crate::support::backend::Backend;
use crate::support::gateway::Gateway;
use crate::support::hbone::Hbone;
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes};
use crate::support::{eventually, namespace};

const MCS: &str = "multicluster.x-k8s.io/v1beta1";
const ALIAS: &str = "web.shop.svc.clusterset.local";
/// A time longer than a replica needs to write a status or to acquire the Lease. A replica checks both every two seconds.
const SETTLED: Duration = Duration::from_secs(6);

fn start(name: &str) -> Option<Cluster> {
    let cluster = Cluster::start(&kube::installed()?, name, &Options::default());
    cluster.install_crds();
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": format!("net-{name}")}));
    cluster.namespace("shop", &json!({}));
    Some(cluster)
}

/// Starts a replica that runs in one cluster and reads these clusters.
fn replica(name: &str, own: &Cluster, clusters: &[&Cluster]) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    // This list allows the name in the cluster domain. The same service's name in the cluster set (`clusterset.local`) is then
    // allowed without being listed.
    let allow = "}\n    allow: {services: [\"*.shop.svc.cluster.local\"]}\n";
    let registries = kube::registries(folder.path(), clusters, "").replace("}\n", allow);
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{name: {name}, cluster: {own}, network: net-{own}, namespace: istio-system}}\n\
         exports: [{{services: [\"*.shop.svc.cluster.local\"], marked: {{serviceExport: true}}}}]\n{registries}",
        own = own.name
    );
    Gateway::start_in(folder, &config, &[])
}

fn export(cluster: &Cluster) {
    cluster.admin().create(
        &json!({"apiVersion": MCS, "kind": "ServiceExport", "metadata": {"namespace": "shop", "name": "web"}}),
    );
}

fn exported() -> String {
    at(MCS, "serviceexports", "shop/web")
}

fn condition(export: &Value, kind: &str) -> Value {
    let all = export["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|one| one["type"] == kind).unwrap_or_default()
}

/// Waits until the export of a cluster has a condition `Conflict` of this reason, and returns its message.
#[track_caller]
fn conflict(cluster: &Cluster, reason: &str) -> String {
    let export =
        becomes(cluster.admin(), &exported(), |export| condition(export, "Conflict")["reason"] == reason);
    let found = condition(&export, "Conflict");
    let status = if reason == "NoConflicts" { "False" } else { "True" };
    assert_eq!(found["status"], status, "{found}");
    assert!(found["lastTransitionTime"].is_string(), "{found}");
    found["message"].as_str().expect("a text").to_owned()
}

/// Returns the name of the replica that holds a cluster's Lease.
fn holder(cluster: &Cluster) -> String {
    let lease = at("coordination.k8s.io/v1", "leases", "istio-system/isthmus-service-exports");
    let holder = cluster.admin().read(&lease)["spec"]["holderIdentity"].clone();
    holder
        .as_str()
        .and_then(|text| text.split_once('_'))
        .map_or_else(String::new, |(name, _)| name.to_owned())
}

fn ports(name: &str, number: u16) -> Value {
    json!([{"name": name, "port": number, "targetPort": 8443}])
}

/// Returns the ports that a replica has for the service's name in the cluster set.
fn merged(gateway: &Gateway) -> Vec<u64> {
    let service = gateway.json(&format!("/api/v1/services/{ALIAS}"));
    let ports = service["ports"].as_array().cloned().unwrap_or_default();
    ports.iter().filter_map(|port| port["port"].as_u64()).collect()
}

#[test]
fn what_clusters_disagree_about_is_a_condition_of_their_exports_and_the_oldest_applies() {
    let (Some(east), Some(west)) = (start("east"), start("west")) else { return };
    for (cluster, number) in [(&east, 8443), (&west, 443)] {
        cluster.service("shop/web", &json!({}), &json!({"ports": ports("https", number)}));
    }
    // The west's export must be older than the east's. The resolution of creationTimestamp is one second, so this waits for
    // more than a second.
    export(&west);
    thread::sleep(Duration::from_millis(1_100));
    export(&east);

    // A gateway that reads only its own cluster writes the condition `Ready`, and nothing about conflicts.
    let gateway = replica("gateway", &east, &[&east]);
    let is_ready = |export: &Value| condition(export, "Ready")["status"] == "True";
    let ready = becomes(east.admin(), &exported(), is_ready);
    assert_eq!((condition(&ready, "Conflict"), holder(&east)), (Value::Null, "gateway".to_owned()));

    // Two replicas read both clusters: the one in the east takes over the Lease of the east, the other one holds the Lease of
    // the west.
    let in_east = replica("aggregator-1", &east, &[&east, &west]);
    let in_west = replica("aggregator-2", &west, &[&east, &west]);
    for cluster in [&east, &west] {
        let message = conflict(cluster, "PortConflict");
        assert_eq!(
            message,
            "Conflicting ports. Using https TCP 443 from the oldest service export in \"west\". 1/2 clusters disagree."
        );
    }
    assert_eq!((holder(&east), holder(&west)), ("aggregator-1".to_owned(), "aggregator-2".to_owned()));
    // Both replicas apply the same ports, although both list the east first.
    assert_eq!((merged(&in_east), merged(&in_west)), (vec![443], vec![443]));
    eventually("the conflict in the status", || {
        let conflicts = in_east.json("/api/v1/status")["conflicts"].to_string();
        (conflicts.contains("the definition of an earlier ServiceExport applies: HTTPS 443")).then_some(())
    });

    // A second replica in the east, and the gateway that has lost the Lease, write nothing.
    let second = replica("aggregator-3", &east, &[&east, &west]);
    let version = || east.admin().read(&exported())["metadata"]["resourceVersion"].clone();
    let before = version();
    thread::sleep(SETTLED);
    assert_eq!((version(), holder(&east)), (before, "aggregator-1".to_owned()));
    assert_eq!(merged(&second), [443]);

    // The clusters agree again.
    east.service("shop/web", &json!({}), &json!({"ports": ports("https", 443)}));
    for cluster in [&east, &west] {
        conflict(cluster, "NoConflicts");
    }
    // Conflicts of what an importing cluster would give its service.
    let labels = json!({"spec": {"exportedLabels": {"team": "a"}, "exportedAnnotations": {"note": "b"}}});
    east.admin().patch(&exported(), &labels);
    let message = conflict(&west, "LabelsConflict,AnnotationsConflict");
    assert!(
        message.starts_with("Conflicting labels. Using none from the oldest service export in \"west\"."),
        "{message}"
    );
    east.admin().patch(&exported(), &json!({"spec": {"exportedLabels": null, "exportedAnnotations": null}}));
    let message = conflict(&west, "NoConflicts");
    assert!(message.contains("agree in their ports, type, session affinity, labels"), "{message}");
    let service = at("v1", "services", "shop/web");
    east.admin().patch(&service, &json!({"spec": {"trafficDistribution": "PreferClose"}}));
    conflict(&west, "TrafficDistributionConflict");
    east.admin().patch(&service, &json!({"spec": {"trafficDistribution": null}}));
    conflict(&west, "NoConflicts");
    // Conflicts of session affinity, and of a service without a virtual address; the service is recreated, as its cluster IP
    // cannot be changed.
    let sticky = json!({"spec": {"sessionAffinity": "ClientIP"}});
    east.admin().patch(&service, &sticky);
    let message = conflict(&west, "SessionAffinityConflict");
    assert!(message.contains("Using None from the oldest service export in \"west\""), "{message}");
    east.admin().delete(&service);
    let gone = becomes(east.admin(), &exported(), |export| condition(export, "Valid")["status"] == "False");
    assert_eq!(condition(&gone, "Conflict"), Value::Null, "nothing is exported: {gone}");
    conflict(&west, "NoConflicts");
    east.service("shop/web", &json!({}), &json!({"ports": ports("https", 443), "clusterIP": "None"}));
    for cluster in [&east, &west] {
        let message = conflict(cluster, "TypeConflict");
        assert!(message.starts_with("Conflicting type. Using ClusterSetIP from the oldest"), "{message}");
    }

    // The west's export, which was the oldest, is deleted and recreated: the east's export is older then.
    west.admin().delete(&exported());
    conflict(&east, "NoConflicts");
    thread::sleep(Duration::from_millis(1_100));
    export(&west);
    for cluster in [&east, &west] {
        let message = conflict(cluster, "TypeConflict");
        assert!(message.starts_with("Conflicting type. Using Headless from the oldest"), "{message}");
    }
    drop(gateway);
}

#[test]
fn a_connect_by_the_name_in_the_cluster_set_reaches_the_pods_of_exporting_clusters_alone() {
    const TEST: &str = "kubernetes_exports::a_connect_by_the_name_in_the_cluster_set_reaches_the_pods_of_exporting_clusters_alone";
    if kube::installed().is_none() || !namespace::inside(TEST, kube::PODS) {
        return;
    }
    let (east, west) = (start("east").expect("installed"), start("west").expect("installed"));
    let pod = |cluster: &Cluster, address: &str| {
        let socket = format!("{address}:8080").parse().expect("an address");
        let backend = Backend::start_at(socket, |mut stream| {
            // Errors are ignored here, because the client's checks detect them.
            let _ = std::io::copy(&mut stream.try_clone().expect("a copy"), &mut stream);
        });
        let port = json!([{"name": "tcp", "port": 80, "targetPort": 8080}]);
        cluster.service("shop/web", &json!({}), &json!({"ports": port}));
        let mut pod = Pod::new("shop/web-0", address);
        pod.labels = json!({"app": "web"});
        cluster.pod(&pod);
        backend
    };
    let (in_east, in_west) = (pod(&east, "10.244.1.1"), pod(&west, "10.244.2.1"));
    // Both clusters are on the gateway's network.
    let folder = folder();
    let exports =
        "exports: [{services: [\"*.shop.svc.cluster.local\"], tls: own, marked: {serviceExport: true}}]";
    let config =
        BASE.replace("exports: [{services: [\"*\"]}]", exports).replace("cluster: c1", "cluster: east")
            + &kube::registries(folder.path(), &[&east, &west], ", network: east");
    let gateway = Gateway::start_in(folder, &config, &[]);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let authority = format!("{ALIAS}:80");
    let refused = || {
        let (status, reason) = hbone.open(&authority).err()?;
        Some((status.as_u16(), reason))
    };
    assert_eq!(refused(), Some((404, "authority_unknown".to_owned())), "nobody exports it");
    // Opens 20 streams; returns how many reached the pod in the east, and how many the pod in the west.
    let reached = || {
        let before = (in_east.accepted(), in_west.accepted());
        for _ in 0..20 {
            let mut stream = hbone.open(&authority).expect("admitted");
            assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
        }
        (in_east.accepted() - before.0, in_west.accepted() - before.1)
    };
    let candidates = || {
        let explained =
            gateway.json(&format!("/api/v1/explain?authority={authority}&listener=hbone&identity={CALLER}"));
        explained["candidates"].as_array().map_or(0, Vec::len)
    };
    export(&west);
    eventually("the pod of the west", || (candidates() == 1).then_some(()));
    assert_eq!(reached(), (0, 20));
    export(&east);
    eventually("both pods", || (candidates() == 2).then_some(()));
    let (at_east, at_west) = reached();
    assert!(at_east > 0 && at_west > 0 && at_east + at_west == 20, "{at_east} and {at_west}");
    let line = gateway
        .logged("a stream", |line| line["authority"] == authority.as_str() && line["endpoint"].is_string());
    assert_eq!((&line["service"], &line["protocol"]), (&json!(ALIAS), &json!("hbone")), "{line}");
    west.admin().delete(&exported());
    eventually("the pod of the east", || (candidates() == 1).then_some(()));
    assert_eq!(reached(), (20, 0));
    east.admin().delete(&exported());
    eventually("a name that is unknown again", || {
        (refused() == Some((404, "authority_unknown".to_owned()))).then_some(())
    });
}
