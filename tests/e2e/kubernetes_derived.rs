//! Services with a cluster IP that are derived from ServiceImports: a TLS client outside the mesh calls a service of another real cluster
//! through them, as kube-proxy and the cluster's DNS would lead it there.

use std::time::Duration;

use serde_json::{Value, json};

use crate::gateway_api::socket;
use crate::support::backend::{Backend, tls_echo};
use crate::support::client::{call, tls};
use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options, PODS, Pod};
use crate::support::kube_client::{at, becomes};
use crate::support::namespace;
use crate::support::pki::PKI;
use crate::support::{eventually, within};

const MCS: &str = "multicluster.x-k8s.io/v1beta1";
const NAME: &str = "web.shop.svc.clusterset.local";
const GATEWAY: &str = "10.244.9.9";
/// The key of the registry that asks for derived Services.
const DERIVED: &str = ", derivedServices: true";

fn start(name: &str) -> Option<Cluster> {
    let cluster = Cluster::start(&kube::installed()?, name, &Options::default());
    cluster.install_crds();
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": format!("net-{name}")}));
    cluster.namespace("shop", &json!({}));
    Some(cluster)
}

/// Returns the rules, and a node of a cluster, of a gateway's config.
fn config(name: &str, cluster: &str) -> String {
    format!(
        "node: {{name: {name}, cluster: {cluster}, network: net-{cluster}, namespace: istio-system}}\n\
         exports: [{{services: [\"*\"], tls: own, marked: {{serviceExport: true}}}}]\n"
    )
}

/// Starts the gateway of the west's network.
fn gateway_of(west: &Cluster) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let registries = kube::registries(folder.path(), &[west], "");
    let text = format!("listen: \"{GATEWAY}:15443\"\n{}{registries}", config("gateway", "west"));
    Gateway::start_in(folder, &text, &[])
}

/// Starts the replica that writes into the east, whose registry has these further keys.
fn writer(east: &Cluster, west: &Cluster, keys: &str) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let of_east = kube::registries(folder.path(), &[east], &format!(", serviceImports: write{keys}"));
    let of_west = kube::registries(folder.path(), &[west], "").replace("registries:\n", "");
    let networks =
        format!("networks: {{net-west: {{gateways: [{{address: {GATEWAY}, sniPort: 15443}}]}}}}\n");
    let text = format!("listen: \"127.0.0.1:0\"\n{networks}{}{of_east}{of_west}", config("writer", "east"));
    Gateway::start_in(folder, &text, &[])
}

fn export(cluster: &Cluster) {
    let metadata = json!({"namespace": "shop", "name": "web"});
    cluster.admin().create(&json!({"apiVersion": MCS, "kind": "ServiceExport", "metadata": metadata}));
}

fn withdraw(cluster: &Cluster) {
    cluster.admin().delete(&at(MCS, "serviceexports", "shop/web"));
}

/// Creates the service shop/web with ports of several protocols, and a pod whose port 10443 answers TLS.
fn serve(cluster: &Cluster, address: &str) {
    let ports = json!([
        {"name": "https", "port": 443, "targetPort": 10443}, {"name": "http", "port": 80},
        {"name": "dns", "port": 53, "protocol": "UDP"}
    ]);
    cluster.service("shop/web", &json!({}), &json!({"ports": ports}));
    pod(cluster, address);
}

fn pod(cluster: &Cluster, address: &str) {
    let mut pod = Pod::new("shop/web-0", address);
    pod.labels = json!({"app": "web"});
    cluster.pod(&pod);
}

fn import(cluster: &Cluster, is: impl Fn(&Value) -> bool) -> Value {
    becomes(cluster.admin(), &at(MCS, "serviceimports", "shop/web"), is)
}

/// Returns a field of the condition `Ready` of an import.
fn ready<'a>(import: &'a Value, field: &str) -> &'a str {
    let all = import["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().find(|one| one["type"] == "Ready").and_then(|one| one[field].as_str()).unwrap_or_default()
}

/// Returns the Services in the namespace that are derived.
fn derived(cluster: &Cluster) -> Vec<Value> {
    let list = at("v1", "services", "shop/");
    let path = format!("{list}?labelSelector=multicluster.kubernetes.io%2Fservice-name%3Dweb");
    cluster.admin().read(&path)["items"].as_array().expect("a list").clone()
}

/// Returns the number of slices of a Service in the namespace that the writer has written.
fn own_slices(cluster: &Cluster, name: &str) -> usize {
    let slices = cluster.slices(&format!("shop/{name}"));
    let label = |slice: &&Value| {
        slice["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == "isthmus.io"
    };
    slices.iter().filter(label).count()
}

/// Returns where kube-proxy leads connections to a port of the Service that has this cluster IP, as `ADDRESS:PORT`.
fn led_to(cluster: &Cluster, ip: &str, port: u16) -> Vec<String> {
    let all = cluster.admin().read(&at("v1", "services", "shop/"));
    let all = all["items"].as_array().expect("a list").clone();
    let service = all.iter().find(|one| one["spec"]["clusterIP"] == ip).expect("a Service with this address");
    let ports = service["spec"]["ports"].as_array().expect("ports");
    let name = &ports.iter().find(|one| one["port"] == port).expect("the port")["name"];
    let key = format!("shop/{}", service["metadata"]["name"].as_str().expect("a name"));
    let mut led = Vec::new();
    for slice in cluster.slices(&key) {
        let ports = slice["ports"].as_array().expect("ports").clone();
        let Some(number) = ports.iter().find(|one| one["name"] == *name).map(|one| one["port"].clone())
        else {
            continue;
        };
        let endpoints = slice["endpoints"].as_array().cloned().unwrap_or_default();
        let ready = endpoints.iter().filter(|one| one["conditions"]["ready"] == true);
        led.extend(
            ready.map(|one| format!("{}:{number}", one["addresses"][0].as_str().expect("an address"))),
        );
    }
    led
}

#[test]
fn a_client_outside_the_mesh_calls_a_service_of_another_cluster_by_its_import() {
    const TEST: &str =
        "kubernetes_derived::a_client_outside_the_mesh_calls_a_service_of_another_cluster_by_its_import";
    if !namespace::inside(TEST, PODS) {
        return;
    }
    let (Some(east), Some(west)) = (start("east"), start("west")) else { return };
    serve(&west, "10.244.2.1");
    let server = PKI.server(NAME);
    let _backend = Backend::start_at(socket("10.244.2.1", 10_443), move |stream| {
        tls_echo(stream, server.clone(), "west:")
    });
    let (_gateway, writer) = (gateway_of(&west), writer(&east, &west, DERIVED));
    export(&west);

    // The cluster's DNS answers with the address of the import, and kube-proxy leads it to the gateway of the west's network.
    let imported = import(&east, |import| ready(import, "status") == "True");
    let ips = imported["spec"]["ips"].as_array().expect("an address").clone();
    let ip = ips[0].as_str().expect("a text");
    assert_eq!(led_to(&east, ip, 443), [format!("{GATEWAY}:15443")]);
    let mut stream = tls(socket(GATEWAY, 15_443), NAME).expect("admitted");
    assert_eq!(call(&mut stream, "hi").expect("an answer"), "west:hi");

    // The other ports lead nowhere, and the condition and the registry's report name them, and the family that the gateway lacks.
    assert!(led_to(&east, ip, 80).is_empty() && led_to(&east, ip, 53).is_empty());
    assert_eq!(ready(&imported, "reason"), "SomePorts");
    assert_eq!(
        ready(&imported, "message"),
        "pods outside the mesh reach this service by the TLS server name web.shop.svc.clusterset.local, but not these ports: \
         443/TCP by IPv6 (no IPv6 address behind it), 80/TCP (not a port of TLS), 53/UDP (not a TCP port)"
    );
    let fact = "ServiceImports with ports that pods outside the mesh do not reach";
    eventually("the report", || {
        let report = writer.json("/api/v1/registries")[0]["report"].clone();
        report["facts"][fact].as_str()?.starts_with("1 (first: shop/web: ").then_some(())
    });
    assert_eq!(writer.json("/api/v1/registries")[0]["report"]["problems"], json!([]));

    // The Service is no service of the registry, and goes with its import.
    let [service] = &derived(&east)[..] else { panic!("one Service") };
    let name = service["metadata"]["name"].as_str().expect("a name").to_owned();
    assert_eq!(service["metadata"]["ownerReferences"][0]["uid"], imported["metadata"]["uid"]);
    assert_eq!(service["metadata"]["labels"]["app.kubernetes.io/managed-by"], "isthmus");
    assert!(!writer.json("/api/v1/services").to_string().contains(&name));

    // While no endpoint is ready, the address stays.
    west.set_ready("shop/web-0", "False");
    let without = import(&east, |import| ready(import, "status") == "False");
    assert_eq!((&without["spec"]["ips"], &led_to(&east, ip, 443)[..]), (&json!(ips), &[][..]));
    assert!(ready(&without, "message").contains("443/TCP (unready)"), "{without}");
    west.set_ready("shop/web-0", "True");
    import(&east, |import| ready(import, "status") == "True");
    eventually("the gateway again", || (!led_to(&east, ip, 443).is_empty()).then_some(()));

    // A cluster that exports the service itself has an address of its own.
    serve(&east, "10.244.1.1");
    export(&east);
    let own = east.admin().read(&at("v1", "services", "shop/web"))["spec"]["clusterIPs"].clone();
    let clusters = json!([{"cluster": "east"}, {"cluster": "west"}]);
    // The specification is written before the status.
    import(&east, |import| import["spec"]["ips"] == own && import["status"]["clusters"] == clusters);
    eventually("no derived Service", || derived(&east).is_empty().then_some(()));
    eventually("no slices", || east.slices(&format!("shop/{name}")).is_empty().then_some(()));
    import(&east, |import| ready(import, "type").is_empty());
    withdraw(&east);
    let again = import(&east, |import| ready(import, "status") == "True");
    assert_ne!(again["spec"]["ips"], own);
    withdraw(&west);
    eventually("nothing is left", || {
        let is_gone = east.admin().get(&at(MCS, "serviceimports", "shop/web")).status == 404;
        (is_gone && derived(&east).is_empty() && east.slices(&format!("shop/{name}")).is_empty())
            .then_some(())
    });

    // A Service of another program with the name of the derived one is never adopted, changed or led elsewhere.
    east.service(&format!("shop/{name}"), &json!({}), &json!({"ports": [{"name": "https", "port": 443}]}));
    let version = |cluster: &Cluster| {
        cluster.admin().read(&at("v1", "services", &format!("shop/{name}")))["metadata"]["resourceVersion"]
            .clone()
    };
    export(&west);
    let taken = import(&east, |import| ready(import, "reason") == "ServiceNameTaken");
    assert!(ready(&taken, "message").starts_with(&format!("the Service shop/{name} is not one")), "{taken}");
    assert!(taken["spec"]["ips"].is_null(), "{taken}");
    assert_eq!(own_slices(&east, &name), 0);

    // When it goes, the import gets a Service of its own, until someone takes its label away.
    let path = at("v1", "services", &format!("shop/{name}"));
    east.admin().delete(&path);
    import(&east, |import| ready(import, "status") == "True");
    let label = json!({"app.kubernetes.io/managed-by": null});
    east.admin().patch(&path, &json!({"metadata": {"labels": label}}));
    let before = version(&east);
    import(&east, |import| ready(import, "reason") == "ServiceNameTaken");
    eventually("no slices", || (own_slices(&east, &name) == 0).then_some(()));
    withdraw(&west);
    eventually("no import", || {
        (east.admin().get(&at(MCS, "serviceimports", "shop/web")).status == 404).then_some(())
    });
    assert_eq!(version(&east), before);
}

#[test]
fn a_derived_service_that_the_config_does_not_ask_for_any_more_is_left_to_other_writers() {
    let (Some(east), Some(west)) = (start("east"), start("west")) else { return };
    serve(&west, "10.244.2.1");
    export(&west);
    let writer = writer(&east, &west, DERIVED);
    import(&east, |import| ready(import, "status") == "True");
    eventually("a derived Service", || (derived(&east).len() == 1).then_some(()));

    // Another writer takes the Lease when it has expired, and leaves the Service to those that want it.
    let config = std::fs::read_to_string(writer.config_path()).expect("a config");
    writer.reload(&config.replace(DERIVED, ""));
    let read = || import(&east, |_| true);
    let left = within(Duration::from_secs(60), "the import without addresses", || {
        Some(read()).filter(|import| ready(import, "type").is_empty() && import["spec"]["ips"].is_null())
    });
    assert_eq!(left["status"]["clusters"], json!([{"cluster": "west"}]));
    assert_eq!(derived(&east).len(), 1);
    assert_eq!(writer.json("/api/v1/registries")[0]["report"]["problems"], json!([]));
}
