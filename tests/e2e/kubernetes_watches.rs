//! Watches that a server answers without telling anything, and the return of a server that was away.

use std::time::Duration;

use serde_json::{Value, json};

use crate::kubernetes_hostile::{Rig, install, service};
use crate::support::clock::Monotonic;
use crate::support::fake_kube::{FakeKube, Reply};
use crate::support::gateway::Gateway;
use crate::support::kube::{self, Cluster, Options};
use crate::support::kube_client::{at, becomes};
use crate::support::kube_proxy::{KubeProxy, PATH};
use crate::support::kube_world::{Asked, status};
use crate::support::{eventually, within};

/// The time for three resumed watches and the pauses between them, on a busy machine.
const RESUMED: Duration = Duration::from_secs(60);

/// A reply of the fake API server to a watch that is resumed.
type Answer = fn() -> Reply;

fn lists_of_services(fake: &FakeKube) -> usize {
    fake.seen(|asked| asked.plural == "services" && asked.is_stream()).len()
}

#[test]
fn a_watch_that_is_resumed_in_vain_is_replaced_by_a_listing() {
    let rig = Rig::live(Rig::fake());
    let fake = &rig.fake;
    let error = || {
        let error =
            json!({"type": "ERROR", "object": status(500, "InternalError", "etcd was restored", None)});
        Reply::text(200, format!("{error}\n"))
    };
    let too_large =
        || Reply::json(504, &status(504, "Timeout", "Too large resource version: 9, current: 2", None));
    let answers: [(&str, Answer); 3] =
        [("empty", || Reply::ok(Vec::new())), ("error", error), ("newer", too_large)];
    for (name, answer) in answers {
        let before = lists_of_services(fake);
        fake.rule(move |asked: &Asked| (asked.plural == "services" && asked.is_resumed()).then(answer));
        fake.cut();
        // The watches that are resumed say nothing of this service.
        fake.put(&service(name, 8443));
        within(RESUMED, &format!("{name}: another listing"), || {
            (lists_of_services(fake) > before).then_some(())
        });
        let path = format!("/api/v1/services/{name}.shop.svc.cluster.local");
        within(RESUMED, &format!("{name}: the service"), || (rig.gateway.get(&path).0 == 200).then_some(()));
        fake.behave();
    }
    rig.recovers();
}

/// After 100 s the watch of services brings an event, and the watch of nodes a bookmark. After 200 s only the watches of the other
/// kinds have brought nothing for three minutes.
#[test]
fn a_watch_that_brings_nothing_for_three_minutes_is_replaced_by_a_listing() {
    const STEP: Duration = Duration::from_secs(100);
    let Some(clock) = Monotonic::new("kubernetes_watches: three minutes") else { return };
    let (fake, _backend) = Rig::fake();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("east.kubeconfig"), fake.kubeconfig()).expect("written");
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: east, network: net}\nexports: [{services: [\"*\"], tls: own}]\n\
                  registries: [{kubernetes: {cluster: east, kubeconfig: east.kubeconfig, network: net}}]\n";
    let environment = clock.environment();
    let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
    let gateway = Gateway::start_in(folder, config, &environment);
    let lists = |plural: &str| fake.seen(|asked| asked.plural == plural && asked.is_stream()).len();
    let is_read = |name: &str| {
        fake.put(&service(name, 8443));
        let path = format!("/api/v1/services/{name}.shop.svc.cluster.local");
        eventually(name, || (gateway.get(&path).0 == 200).then_some(()));
    };
    let is_listed = |plural: &str, count: usize| {
        eventually(&format!("{count} listings of {plural}"), || (lists(plural) == count).then_some(()));
    };
    ["services", "nodes", "pods"].iter().for_each(|plural| is_listed(plural, 1));
    // A watch without a fault for a second counts as working, and its three minutes begin.
    std::thread::sleep(Duration::from_secs(6));
    clock.set_ahead(STEP);
    fake.bookmark("nodes");
    is_read("one");
    clock.set_ahead(2 * STEP);
    is_listed("pods", 2);
    is_read("two");
    assert_eq!((lists("services"), lists("nodes")), (1, 1), "an event and a bookmark came meanwhile");
    clock.set_ahead(4 * STEP);
    is_listed("nodes", 2);
    is_listed("services", 2);
    is_read("three");
    let registry = gateway.json("/api/v1/registries")[0].clone();
    assert_eq!((&registry["state"], &registry["problems"]), (&"live".into(), &json!([])), "{registry:#}");
}

#[test]
fn a_server_that_returns_is_read_as_a_whole() {
    let fake = Rig::fake();
    install(&fake.0);
    let rig = Rig::live(fake);
    let fake = &rig.fake;
    let kinds = [
        "namespaces",
        "services",
        "endpointslices",
        "pods",
        "nodes",
        "gateways",
        "serviceexports",
        "serviceimports",
    ];
    // The waits between attempts double while the server is away: each kind is asked for six times within 16 s, and then waits for
    // 16 s, more or less by a fifth.
    fake.rule(|asked| {
        let away = || Reply::json(503, &status(503, "ServiceUnavailable", "etcd is away", None));
        asked.is_watch().then(away)
    });
    fake.cut();
    let attempts = |plural: &str| fake.seen(|asked| asked.plural == plural && asked.is_watch()).len();
    let all = kinds.map(|plural| (plural, attempts(plural)));
    within(RESUMED, "six attempts for each kind", || {
        all.iter().all(|(plural, before)| attempts(plural) >= before + 6).then_some(())
    });
    let all = kinds.map(|plural| (plural, attempts(plural)));
    fake.behave();
    within(RESUMED, "every kind", || {
        all.iter().all(|(plural, before)| attempts(plural) > *before).then_some(())
    });
    eventually("a live registry", || {
        (rig.gateway.json("/api/v1/registries")[0]["state"] == "live").then_some(())
    });
    rig.recovers();
}

#[test]
fn an_api_server_behind_a_proxy_is_read_over_http_1_and_below_its_path() {
    const MCS: &str = "multicluster.x-k8s.io/v1beta1";
    let Some(program) = kube::installed() else { return };
    let cluster = Cluster::start(&program, "east", &Options::default());
    cluster.install_crds();
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-east"}));
    cluster.namespace("shop", &json!({}));
    cluster.service(
        "shop/web",
        &json!({}),
        &json!({"ports": [{"name": "https", "port": 443, "targetPort": 8443}]}),
    );
    cluster.scale("shop/web", 1, "10.244.7");
    cluster.admin().create(
        &json!({"apiVersion": MCS, "kind": "ServiceExport", "metadata": {"namespace": "shop", "name": "web"}}),
    );
    let proxy = KubeProxy::start(&cluster);
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("east.kubeconfig"), proxy.kubeconfig(cluster.admin_token()))
        .expect("written");
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: east, network: net-east, namespace: istio-system}\n\
                  exports: [{services: [\"*.local\"], tls: own, marked: {serviceExport: true}}]\n\
                  registries: [{kubernetes: {cluster: east, kubeconfig: east.kubeconfig}}]\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    let registry = || gateway.json("/api/v1/registries")[0].clone();
    eventually("a registry that is well", || {
        let registry = registry();
        (registry["state"] == "live" && registry["report"]["problems"] == json!([])).then_some(())
    });
    let server = registry()["report"]["server"].as_str().unwrap_or_default().to_owned();
    assert_eq!(server, format!("https://{}{PATH}", proxy.address));
    // Watches bring changes, and conditions are written.
    let endpoints = |count: usize| {
        eventually(&format!("{count} pods"), || {
            let explained = gateway.json("/api/v1/explain?sni=web.shop.svc.cluster.local");
            (explained["candidates"].as_array().map_or(0, Vec::len) == count).then_some(())
        });
    };
    endpoints(1);
    cluster.scale("shop/web", 3, "10.244.7");
    endpoints(3);
    let is_ready = |export: &Value| {
        let conditions = export["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == "True")
    };
    becomes(cluster.admin(), &at(MCS, "serviceexports", "shop/web"), is_ready);
}
