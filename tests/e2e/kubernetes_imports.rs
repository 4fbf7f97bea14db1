//! ServiceImports that a gateway writes into real clusters: what they have, when they change, and what is never touched.

use std::time::Duration;
use std::{fs, thread};

use serde_json::{Value, json};

use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes};
use crate::support::{PATIENCE, eventually, within};

const MCS: &str = "multicluster.x-k8s.io/v1beta1";
/// A time longer than a replica needs to write an import or to acquire the Lease. A replica checks both every two seconds.
const SETTLED: Duration = Duration::from_secs(6);

fn start(name: &str) -> Option<Cluster> {
    let cluster = Cluster::start(&kube::installed()?, name, &Options::default());
    cluster.install_crds();
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": format!("net-{name}")}));
    cluster.namespace("shop", &json!({}));
    Some(cluster)
}

/// The time for what waits for another timer first: an object that does not stay as it was written is written again after 30 s, and
/// a Lease that is not renewed expires after 15 s.
const AGAIN: Duration = Duration::from_secs(90);

/// Returns the config of a replica in the cluster east, without its registries.
fn config(name: &str) -> String {
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{name: {name}, cluster: east, network: net-east, namespace: istio-system}}\n\
         exports: [{{services: [\"*\"], tls: own, marked: {{serviceExport: true}}}}]\n"
    )
}

/// Starts a replica that reads these clusters, and writes imports into all of them.
fn replica(name: &str, clusters: &[&Cluster]) -> Gateway {
    replica_with(name, clusters, "")
}

/// Starts a replica with further keys of each registry.
fn replica_with(name: &str, clusters: &[&Cluster], more: &str) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let more = format!(", serviceImports: write{more}");
    let registries = kube::registries(folder.path(), clusters, &more);
    Gateway::start_in(folder, &(config(name) + &registries), &[])
}

fn export(cluster: &Cluster, key: &str) {
    let (namespace, name) = key.split_once('/').expect("a namespace and a name");
    cluster.admin().create(
        &json!({"apiVersion": MCS, "kind": "ServiceExport", "metadata": {"namespace": namespace, "name": name}}),
    );
}

fn withdraw(cluster: &Cluster, key: &str) {
    cluster.admin().delete(&at(MCS, "serviceexports", key));
}

fn import(key: &str) -> String {
    at(MCS, "serviceimports", key)
}

fn clusters(import: &Value) -> Vec<&str> {
    let all = import["status"]["clusters"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(|one| one["cluster"].as_str()).collect()
}

/// Waits until the import of a cluster names these clusters, and returns it.
#[track_caller]
fn imported(cluster: &Cluster, key: &str, of: &[&str]) -> Value {
    becomes(cluster.admin(), &import(key), |import| clusters(import) == of)
}

#[track_caller]
fn gone(cluster: &Cluster, key: &str) {
    gone_within(PATIENCE, cluster, key);
}

#[track_caller]
fn gone_within(limit: Duration, cluster: &Cluster, key: &str) {
    within(limit, &format!("no import {key} in {}", cluster.name), || {
        (cluster.admin().get(&import(key)).status == 404).then_some(())
    });
}

fn version(cluster: &Cluster, key: &str) -> Value {
    cluster.admin().read(&import(key))["metadata"]["resourceVersion"].clone()
}

fn holder(cluster: &Cluster) -> String {
    let lease =
        cluster.admin().get(&at("coordination.k8s.io/v1", "leases", "istio-system/isthmus-service-imports"));
    let lease = if lease.status == 200 { lease.json() } else { Value::Null };
    let holder = lease["spec"]["holderIdentity"].as_str().and_then(|text| text.split_once('_'));
    holder.map_or_else(String::new, |(name, _)| name.to_owned())
}

fn service(cluster: &Cluster, key: &str, port: u16) {
    let ports = json!([{"name": "https", "port": port, "appProtocol": "https"}, {"name": "dns", "port": 53, "protocol": "UDP"}]);
    cluster.service(key, &json!({}), &json!({"ports": ports}));
}

/// Returns the facts of the report on how the first cluster is read.
fn facts(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/registries")[0]["report"]["facts"].clone()
}

/// Returns the problems of the report on how the first cluster is read.
fn problems(gateway: &Gateway) -> String {
    gateway.json("/api/v1/registries")[0]["report"]["problems"].to_string()
}

#[test]
fn an_import_follows_its_exports_and_goes_with_the_last_one() {
    let (Some(east), Some(west)) = (start("east"), start("west")) else { return };
    for cluster in [&east, &west] {
        service(cluster, "shop/web", 443);
    }
    let gateway = replica("aggregator", &[&east, &west]);
    export(&west, "shop/web");
    for cluster in [&east, &west] {
        let import = imported(cluster, "shop/web", &["west"]);
        assert_eq!(import["metadata"]["labels"], json!({"app.kubernetes.io/managed-by": "isthmus"}));
        let spec = &import["spec"];
        assert_eq!(
            (&spec["type"], &spec["sessionAffinity"], &spec["ipFamilies"], &spec["internalTrafficPolicy"]),
            (&json!("ClusterSetIP"), &json!("None"), &json!(["IPv4"]), &json!("Cluster"))
        );
        // A cluster that exports the service has an address for it.
        let service = cluster.admin().read(&at("v1", "services", "shop/web"));
        let ips = if cluster.name == "west" { service["spec"]["clusterIPs"].clone() } else { Value::Null };
        assert_eq!(spec["ips"], ips, "{}", cluster.name);
        let ports = json!([{"name": "https", "port": 443, "protocol": "TCP", "appProtocol": "https"},
            {"name": "dns", "port": 53, "protocol": "UDP"}]);
        assert_eq!(spec["ports"], ports);
    }
    // The resolution of creationTimestamp is one second, so the export of the west is the older one then.
    thread::sleep(Duration::from_millis(1_100));
    export(&east, "shop/web");
    imported(&east, "shop/web", &["east", "west"]);
    imported(&west, "shop/web", &["east", "west"]);
    eventually("a holder", || (holder(&east) == "aggregator" && holder(&west) == "aggregator").then_some(()));

    // Nothing is written at rest, and a change of ports is one write.
    thread::sleep(SETTLED);
    let before = [version(&east, "shop/web"), version(&west, "shop/web")];
    thread::sleep(SETTLED);
    assert_eq!([version(&east, "shop/web"), version(&west, "shop/web")], before);
    let from = before[0].as_str().expect("a version");
    let list = at(MCS, "serviceimports", "shop/");
    let mut events = east.admin().watch(&format!("{list}?watch=1&resourceVersion={from}"));
    service(&west, "shop/web", 8443);
    let event = events.next().expect("an event");
    // Both exports have a port of this name; that of the older export is used.
    assert_eq!(event["object"]["spec"]["ports"][0]["port"], 8443, "{event}");

    // Labels, annotations and settings of the service are those of the older export, and are removed with it. What other programs
    // have written stays.
    let theirs = json!({"metadata": {"labels": {"theirs": "x"}, "annotations": {"theirs": "x"}}});
    east.admin().patch(&import("shop/web"), &theirs);
    let event = events.next().expect("an event");
    assert_eq!(event["object"]["metadata"]["labels"]["theirs"], "x", "a second write: {event}");
    let given = json!({"spec": {"exportedLabels": {"team": "a"}, "exportedAnnotations": {"note": "b"}}});
    west.admin().patch(&at(MCS, "serviceexports", "shop/web"), &given);
    let settings = json!({"spec": {"trafficDistribution": "PreferClose", "sessionAffinity": "ClientIP"}});
    west.admin().patch(&at("v1", "services", "shop/web"), &settings);
    let changed = becomes(east.admin(), &import("shop/web"), |import| {
        import["metadata"]["labels"]["team"] == "a" && import["spec"]["sessionAffinity"] == "ClientIP"
    });
    assert_eq!(changed["metadata"]["annotations"]["note"], "b");
    assert_eq!(changed["spec"]["trafficDistribution"], "PreferClose");
    assert_eq!(changed["spec"]["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"], 10_800);
    withdraw(&west, "shop/web");
    let left = imported(&east, "shop/web", &["east"]);
    assert_eq!(
        left["metadata"]["labels"],
        json!({"app.kubernetes.io/managed-by": "isthmus", "theirs": "x"}),
        "{left}"
    );
    assert_eq!(left["metadata"]["annotations"], json!({"theirs": "x"}), "{left}");
    let spec = &left["spec"];
    assert_eq!((&spec["trafficDistribution"], &spec["sessionAffinityConfig"]), (&Value::Null, &Value::Null));
    assert_eq!((&spec["sessionAffinity"], &spec["ports"][0]["port"]), (&json!("None"), &json!(443)));

    withdraw(&east, "shop/web");
    gone(&east, "shop/web");
    gone(&west, "shop/web");

    // An import is in each cluster that has the namespace; one that gets it later gets the import.
    east.namespace("pay", &json!({}));
    east.service("pay/db", &json!({}), &json!({"clusterIP": "None", "ports": [{"port": 5432}]}));
    export(&east, "pay/db");
    let import_of_east = imported(&east, "pay/db", &["east"]);
    let spec = &import_of_east["spec"];
    assert_eq!(
        (&spec["type"], &spec["ips"], &spec["internalTrafficPolicy"]),
        (&json!("Headless"), &Value::Null, &Value::Null)
    );
    assert_eq!(west.admin().get(&import("pay/db")).status, 404);
    west.namespace("pay", &json!({}));
    imported(&west, "pay/db", &["east"]);
    assert_eq!(gateway.json("/api/v1/registries")[0]["report"]["problems"], json!([]));
    // Without `slices`, none are written.
    assert!(slices(&east, "pay").is_empty() && slices(&west, "pay").is_empty());
}

/// Returns the EndpointSlices of imports in a namespace, in order of their clusters.
fn slices(cluster: &Cluster, namespace: &str) -> Vec<Value> {
    let list = at("discovery.k8s.io/v1", "endpointslices", &format!("{namespace}/"));
    let list = format!("{list}?labelSelector=multicluster.kubernetes.io%2Fsource-cluster");
    let mut all = cluster.admin().read(&list)["items"].as_array().expect("a list").clone();
    let source = |slice: &Value| {
        slice["metadata"]["labels"]["multicluster.kubernetes.io/source-cluster"].as_str().map(str::to_owned)
    };
    all.sort_by_key(source);
    all
}

/// Returns the addresses of a slice, each with `+` if the endpoint is ready.
fn endpoints(slice: &Value) -> Vec<String> {
    let all = slice["endpoints"].as_array().map(Vec::as_slice).unwrap_or_default();
    let one = |endpoint: &Value| {
        let address = endpoint["addresses"][0].as_str().expect("an address");
        format!("{address}{}", if endpoint["conditions"]["ready"] == true { "+" } else { "" })
    };
    all.iter().map(one).collect()
}

#[test]
fn the_slices_of_an_import_have_the_endpoints_of_its_network_and_go_with_it() {
    let (Some(east), Some(west)) = (start("east"), start("west")) else { return };
    for (cluster, network) in [(&east, "10.244.7"), (&west, "10.245.7")] {
        cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-one"}));
        service(cluster, "shop/web", 443);
        cluster.scale("shop/web", 2, network);
    }
    // A slice of another program is never touched, and a pod on another network is not reached by its address.
    let theirs = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "shop", "name": "theirs", "labels": {
            "multicluster.kubernetes.io/service-name": "web", "multicluster.kubernetes.io/source-cluster": "zz",
            "endpointslice.kubernetes.io/managed-by": "theirs"}},
        "ports": [], "endpoints": [{"addresses": ["192.0.2.1"]}]});
    east.admin().create(&theirs);
    let mut far = Pod::new("shop/far", "10.246.0.1");
    far.labels = json!({"app": "web", "topology.istio.io/network": "net-far"});
    west.pod(&far);
    let gateway = replica_with("aggregator", &[&east, &west], ", slices: true");
    export(&west, "shop/web");
    let import = imported(&east, "shop/web", &["west"]);
    let becomes = |cluster: &Cluster, what: &str, wanted: &[&[&str]]| -> Vec<Value> {
        eventually(what, || {
            let found = slices(cluster, "shop");
            (found.iter().map(endpoints).collect::<Vec<_>>() == wanted).then_some(found)
        })
    };
    let theirs: &[&str] = &["192.0.2.1"];
    let of_west: &[&str] = &["10.245.7.0+", "10.245.7.1+"];
    let found = becomes(&east, "the endpoints of the west", &[of_west, theirs]);
    becomes(&west, "its own endpoints", &[of_west]);
    let metadata = &found[0]["metadata"];
    assert_eq!(
        metadata["labels"],
        json!({"multicluster.kubernetes.io/service-name": "web", "multicluster.kubernetes.io/source-cluster": "west",
            "endpointslice.kubernetes.io/managed-by": "isthmus.io"})
    );
    let owner = json!([{"apiVersion": MCS, "kind": "ServiceImport", "name": "web", "uid": import["metadata"]["uid"]}]);
    assert_eq!(metadata["ownerReferences"], owner);
    assert_eq!(found[0]["ports"], json!([{"name": "https", "port": 443, "protocol": "TCP"}]));

    // Nothing is written at rest; a change of one cluster's endpoints changes the slice of that cluster.
    thread::sleep(Duration::from_millis(1_100));
    export(&east, "shop/web");
    let of_east: &[&str] = &["10.244.7.0+", "10.244.7.1+"];
    let versions = |found: &[Value]| -> Vec<Value> {
        found.iter().map(|slice| slice["metadata"]["resourceVersion"].clone()).collect()
    };
    becomes(&east, "both", &[of_east, of_west, theirs]);
    thread::sleep(SETTLED);
    let before = versions(&slices(&east, "shop"));
    thread::sleep(SETTLED);
    assert_eq!(versions(&slices(&east, "shop")), before);
    west.set_ready("shop/web-1", "False");
    let after =
        versions(&becomes(&east, "one is not ready", &[of_east, &["10.245.7.0+", "10.245.7.1"], theirs]));
    assert_eq!((&after[0], &after[2]), (&before[0], &before[2]));

    withdraw(&west, "shop/web");
    becomes(&east, "the east alone", &[of_east, theirs]);
    // A replica that reads one cluster leaves the slices of others as they are.
    drop(gateway);
    let _gateway = replica_with("gateway", &[&west], ", slices: true");
    withdraw(&east, "shop/web");
    thread::sleep(SETTLED);
    becomes(&west, "those of the east stay", &[of_east]);
    let _gateway = replica_with("second", &[&east, &west], ", slices: true");
    // The Lease of the replica that was killed lasts for 15 s.
    gone_within(AGAIN, &east, "shop/web");
    becomes(&east, "none but theirs", &[theirs]);
    becomes(&west, "none", &[]);
}

#[test]
fn an_import_of_another_program_is_never_touched() {
    let Some(east) = start("east") else { return };
    let theirs = |name: &str| {
        east.admin().create(&json!({"apiVersion": MCS, "kind": "ServiceImport",
            "metadata": {"namespace": "shop", "name": name}, "spec": {"type": "ClusterSetIP", "ports": [{"port": 1}]}}));
    };
    for name in ["shop/web", "shop/db"] {
        service(&east, name, 443);
        export(&east, name);
    }
    theirs("web");
    theirs("alone");
    let before = (version(&east, "shop/web"), version(&east, "shop/alone"));
    let gateway = replica("gateway", &[&east]);
    imported(&east, "shop/db", &["east"]);
    thread::sleep(SETTLED);
    assert_eq!((version(&east, "shop/web"), version(&east, "shop/alone")), before);
    eventually("the report", || (facts(&gateway)["ServiceImports of other programs"] == "2").then_some(()));
    // An import that loses the label belongs to another program from then on.
    let path = import("shop/db");
    east.admin().patch(&path, &json!({"metadata": {"labels": {"app.kubernetes.io/managed-by": "them"}}}));
    withdraw(&east, "shop/db");
    thread::sleep(SETTLED);
    assert_eq!(east.admin().get(&path).status, 200);
    // A change of another program to an import of this one is undone once, without a fight.
    east.admin().delete(&import("shop/web"));
    imported(&east, "shop/web", &["east"]);
    thread::sleep(SETTLED);
    east.admin().patch(&import("shop/web"), &json!({"spec": {"ports": [{"port": 7}]}}));
    within(AGAIN, "the ports again", || {
        (east.admin().read(&import("shop/web"))["spec"]["ports"][0]["port"] == 443).then_some(())
    });
    withdraw(&east, "shop/web");
    gone(&east, "shop/web");
    assert_eq!(version(&east, "shop/alone"), before.1);
}

#[test]
fn a_missing_right_is_named_and_a_right_that_is_granted_later_is_used() {
    let Some(east) = start("east") else { return };
    service(&east, "shop/web", 443);
    export(&east, "shop/web");
    let token = east.account("istio-system/gateway");
    let mut rules = kube::reader();
    let list = rules.as_array_mut().expect("a list");
    let mut allow = |group: &str, resources: &[&str], verbs: &[&str]| {
        list.push(json!({"apiGroups": [group], "resources": resources, "verbs": verbs}));
    };
    allow("coordination.k8s.io", &["leases"], &["get", "create", "update"]);
    east.allow("istio-system/gateway", &rules);
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("east.kubeconfig"), east.kubeconfig(&token)).expect("written");
    let registries =
        "registries: [{kubernetes: {cluster: east, kubeconfig: east.kubeconfig, serviceImports: write}}]\n";
    let gateway = Gateway::start_in(folder, &(config("gateway") + registries), &[]);
    eventually("the missing right", || {
        let text = problems(&gateway);
        let parts = [
            "cannot create resource",
            "serviceimports",
            "grants the right with kubernetes.serviceImports.write",
        ];
        parts.iter().all(|part| text.contains(part)).then_some(())
    });
    assert_eq!(gateway.json("/api/v1/registries")[0]["state"], "live");
    let list = rules.as_array_mut().expect("a list");
    list.push(json!({"apiGroups": ["multicluster.x-k8s.io"], "resources": ["serviceimports"],
        "verbs": ["get", "create", "patch", "delete"]}));
    list.push(json!({"apiGroups": ["multicluster.x-k8s.io"], "resources": ["serviceimports/status"], "verbs": ["patch"]}));
    east.allow("istio-system/gateway", &rules);
    within(AGAIN, "the import", || {
        let import = east.admin().get(&import("shop/web"));
        (import.status == 200 && clusters(&import.json()) == ["east"]).then_some(())
    });
    eventually("no missing right", || (!problems(&gateway).contains("not written")).then_some(()));
}

#[test]
fn a_replica_that_reads_one_cluster_takes_over_and_removes_nothing_that_others_export() {
    let (Some(east), Some(west)) = (start("east"), start("west")) else { return };
    for cluster in [&east, &west] {
        service(cluster, "shop/web", 443);
        service(cluster, "shop/db", 443);
    }
    export(&west, "shop/web");
    export(&east, "shop/db");
    let aggregator = replica("aggregator", &[&east, &west]);
    imported(&east, "shop/web", &["west"]);
    imported(&east, "shop/db", &["east"]);
    let gateway = replica("gateway", &[&east]);
    thread::sleep(SETTLED);
    assert_eq!(holder(&east), "aggregator");
    let before = version(&east, "shop/web");
    drop(aggregator);
    within(AGAIN, "the other replica", || (holder(&east) == "gateway").then_some(()));
    // The other replica writes what it knows.
    withdraw(&east, "shop/db");
    gone(&east, "shop/db");
    assert_eq!(version(&east, "shop/web"), before);
    // One that reads both takes over, and knows that the west does not export the service any more.
    withdraw(&west, "shop/web");
    let aggregator = replica("second", &[&east, &west]);
    gone(&east, "shop/web");
    assert_eq!(holder(&east), "second");
    drop((gateway, aggregator));
}
