//! The demand of networks that have lost endpoints, and of those that were scaled down on purpose.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options};
use crate::support::kube_client::at;
use crate::support::organisation::{Organisation, free_port, start, write};
use crate::support::{eventually, within};

/// The time within which a change in a cluster reaches the gateway.
const LIMIT: Duration = Duration::from_secs(60);
const WEB: &str = "web.shop.svc.cluster.local";

/// Returns the group of a network, as a viewer on another one has it.
fn group(gateway: &Gateway, viewer: &str, service: &str, network: &str) -> Option<Value> {
    let path = format!("/api/v1/horizon?network={viewer}&service={service}&tunnel=hbone");
    let (status, body) = gateway.get(&path);
    let view: Value = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
    view["groups"].as_array()?.iter().find(|group| group["network"] == network).cloned()
}

/// Waits until net-east has this number of ready endpoints and this demand; returns its share in percent, and the sentence that says why.
#[track_caller]
fn own(gateway: &Gateway, ready: u64, stands_for: Option<u64>) -> (f64, String) {
    let found = within(LIMIT, "the endpoints", || {
        let group = group(gateway, "net-east", WEB, "net-east")?;
        (group["ready"] == ready && group["standsFor"].as_u64() == stands_for).then_some(group)
    });
    let share = (found["share"].as_f64().expect("a share") * 1e4).round() / 1e2;
    (share, found["why"].as_str().expect("a text").to_owned())
}

/// Returns a list with the service and this number of endpoints.
fn services(count: usize, octet: u8) -> String {
    let one = |number: usize| format!("{{address: 10.{octet}.0.{number}, tunnel: hbone}}");
    let endpoints: Vec<String> = (0..count).map(one).collect();
    format!(
        "services:\n  - {{hostname: {WEB}, namespace: shop, ports: [{{name: https, port: 443, protocol: HTTPS}}], endpoints: [{}]}}\n",
        endpoints.join(", ")
    )
}

/// Returns a folder for a gateway: net-west, 5 ms away, has 30 endpoints in a file.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "west.yaml", &services(30, 9));
    folder
}

/// Returns the config of a gateway on net-east with this registry beside that of net-west.
fn config(registry: &str) -> String {
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: net-east, namespace: istio-system}}\n\
         exports: [{{services: [\"*\"], tls: own}}]\nsteering: {{mode: nearest}}\naggregator: {{withdrawalHold: 3s}}\n\
         networks: {{net-west: {{distance: {{net-east: 5ms}}, gateways: [{{address: 192.0.2.2, hbonePort: 15008}}]}}}}\n\
         registries:\n- {registry}\n- file: {{path: west.yaml, cluster: west, network: net-west}}\n"
    )
}

const STAYS: &str = "the own network comes first, and its ready endpoints suffice";

#[test]
fn an_edit_of_a_file_is_on_purpose_and_no_call_leaves() {
    let folder = folder();
    write(folder.path(), "east.yaml", &services(10, 1));
    let config = config("file: {path: east.yaml, cluster: east, network: net-east}");
    let gateway = Gateway::start_in(folder, &config, &[]);
    assert_eq!(own(&gateway, 10, None), (100.0, STAYS.to_owned()));
    write(gateway.folder(), "east.yaml", &services(3, 1));
    assert_eq!(own(&gateway, 3, None), (100.0, STAYS.to_owned()));
}

/// Starts a gateway with the state folder of an earlier one.
fn on_cluster(cluster: &Cluster, state: &Path, more: &str) -> Gateway {
    let folder = folder();
    write(folder.path(), "east.kubeconfig", &cluster.kubeconfig(cluster.admin_token()));
    let registry = format!("kubernetes: {{cluster: east, kubeconfig: east.kubeconfig{more}}}");
    let state = format!("state: {{dir: {}}}\ndrain: {{delay: 0s, timeout: 2s}}\n", state.display());
    Gateway::start_in(folder, &(config(&registry) + &state), &[])
}

/// Seven of ten pods are gone at once, as after a drain of their nodes; then the Deployment is scaled down on purpose.
#[test]
fn lost_pods_leave_their_demand_and_a_scale_down_does_not() {
    let Some(program) = kube::installed() else { return };
    let cluster = Cluster::start(&program, "east", &Options::default());
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-east"}));
    cluster.namespace("shop", &json!({}));
    let ports = json!([{"name": "https", "port": 443, "targetPort": 8443}]);
    cluster.service("shop/web", &json!({}), &json!({ "ports": ports }));
    let labels = json!({"app": "web"});
    cluster.admin().create(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": "shop", "name": "web"},
        "spec": {"replicas": 10, "selector": {"matchLabels": labels}, "template": {
            "metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "none"}]}}}
    }));
    cluster.scale("shop/web", 10, "10.244.7");
    let [state, other] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let knows = on_cluster(&cluster, other.path(), ", replicas: true");
    let remembers = on_cluster(&cluster, state.path(), "");
    for gateway in [&knows, &remembers] {
        assert_eq!(own(gateway, 10, None), (100.0, STAYS.to_owned()));
    }
    cluster.scale("shop/web", 3, "10.244.7");
    let told = |source: &str| format!("stands for 10 ({source}): 3 of 10 are ready: keeps 1.4 × 3/10");
    assert_eq!(own(&knows, 3, Some(10)), (40.63, told("replicas")));
    assert_eq!(own(&remembers, 3, Some(10)), (40.63, told("the most of the last minutes")));
    // A restart forgets nothing.
    remembers.signal("TERM");
    remembers.told("stopping");
    eventually("its end", || {
        (!Path::new(&format!("/proc/{}/exe", remembers.process())).exists()).then_some(())
    });
    let next = on_cluster(&cluster, state.path(), "");
    assert_eq!(own(&next, 3, Some(10)), (40.63, told("the most of the last minutes")));
    let deployment = at("apps/v1", "deployments", "shop/web");
    cluster.admin().patch(&deployment, &json!({"spec": {"replicas": 3}}));
    assert_eq!(own(&knows, 3, None), (100.0, STAYS.to_owned()));
    cluster.scale("shop/web", 1, "10.244.7");
    assert_eq!(
        own(&knows, 1, Some(3)),
        (46.88, "stands for 3 (replicas): 1 of 3 are ready: keeps 1.4 × 1/3".to_owned())
    );
    // Another workload may own the pod.
    cluster.admin().patch(&deployment, &json!({"spec": {"replicas": 0}}));
    assert_eq!(own(&knows, 1, None), (100.0, STAYS.to_owned()));
    // From zero: nine of ten pods have no address yet.
    cluster.scale("shop/web", 0, "10.244.7");
    cluster.admin().patch(&deployment, &json!({"spec": {"replicas": 10}}));
    assert_eq!(own(&knows, 0, Some(10)), (0.0, "stands for 10 (replicas): none of 10 is ready".to_owned()));
    cluster.scale("shop/web", 1, "10.244.7");
    assert_eq!(own(&knows, 1, Some(10)).0, 12.5, "1.4/10, in steps of 1/32");
}

/// One of thirty endpoints of a peer's near network is ready, and all of its far one.
#[test]
fn a_peer_says_how_many_of_its_endpoints_are_not_ready() {
    let (west, east) = (Organisation::new("west", "west.example"), Organisation::new("east", "east.example"));
    let (west_port, east_port) = (free_port(), free_port());
    // The gateway of net-west2; nothing but probes connects to it.
    let far = TcpListener::bind("127.0.0.2:0").expect("a port");
    let far_port = far.local_addr().expect("bound").port();
    std::thread::spawn(move || far.incoming().for_each(drop));
    let endpoint = |number: usize| {
        let network = if number < 30 { "net-west" } else { "net-west2" };
        let health = if (1..30).contains(&number) { "unhealthy" } else { "healthy" };
        format!("{{address: 10.2.0.{number}, network: {network}, health: {health}, tunnel: hbone}}")
    };
    let endpoints: Vec<String> = (0..60).map(endpoint).collect();
    let from_east = "    from: [127.0.0.0/8]\n    export: [{services: [\"*.pay.svc.cluster.local\"], as: \"{service}.{namespace}.west.global\"}]\n    import: [{services: [\"*.east.global\"]}]\n";
    let at_west = format!(
        "{}networks:\n  net-west: {{gateways: [{{address: 127.0.0.1, hbonePort: {west_port}}}]}}\n  \
         net-west2: {{gateways: [{{address: 127.0.0.2, hbonePort: {far_port}}}]}}\npeers:\n{}services:\n  \
         - {{hostname: ratings.pay.svc.cluster.local, namespace: pay, ports: [{{name: http, port: 80, targetPort: 8080}}], \
         endpoints: [{}]}}\n",
        west.base(west_port),
        east.as_peer("accept: true", from_east),
        endpoints.join(", ")
    );
    let dial = format!("dial: \"127.0.0.1:{west_port}\"");
    let from_west = "    from: [127.0.0.0/8]\n    export: [{services: [\"*.mesh\"], as: \"{service}.{namespace}.east.global\"}]\n    import: [{services: [\"*.pay.west.global\"]}]\n";
    let at_east = format!(
        "{}steering: {{mode: nearest}}\nnetworks:\n  net-east: {{gateways: [{{address: 127.0.0.1, hbonePort: {east_port}}}]}}\n  \
         peer/west/net-west: {{distance: {{net-east: 5ms}}}}\n  peer/west/net-west2: {{distance: {{net-east: 50ms}}}}\n\
         peers:\n{}",
        east.base(east_port),
        west.as_peer(&dial, from_west)
    );
    let _west = start(west.folder(&[&east]), &at_west);
    let gateway = start(east.folder(&[&west]), &at_east);
    let ratings = "ratings.pay.west.global";
    let near = eventually("the import", || group(&gateway, "net-east", ratings, "peer/west/net-west"));
    assert_eq!((&near["ready"], &near["notReady"]), (&json!(1), &json!(29)), "{near:#}");
    let far = group(&gateway, "net-east", ratings, "peer/west/net-west2").expect("the other network");
    assert_eq!((&far["ready"], &far["notReady"]), (&json!(30), &json!(0)), "{far:#}");
    assert_eq!((&near["ring"], &far["ring"]), (&json!(2), &json!(3)), "{near:#}");
    // 1.4/30 is one step of 1/32. Without the others, the nearer network would get all.
    assert_eq!((&near["share"], &far["share"]), (&json!(0.03125), &json!(0.96875)), "{near:#}");
}
