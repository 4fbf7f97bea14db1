//! Registries in Kubernetes, on real API servers with the real controllers of EndpointSlices.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::backend::{Backend, tls_echo};
use crate::support::client::{call, tls};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes as becomes_so};
use crate::support::pki::PKI;
use crate::support::{eventually, namespace, within};

const WEB: &str = "web.shop.svc.cluster.local";
const HTTPS: &str = r#"[{"name": "https", "port": 443, "targetPort": 8443}]"#;

fn ports() -> Value {
    serde_json::from_str(HTTPS).expect("JSON")
}

fn start(options: &Options<'_>) -> Option<Cluster> {
    let cluster = Cluster::start(&kube::installed()?, "east", options);
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-east"}));
    cluster.namespace("shop", &json!({}));
    Some(cluster)
}

/// Returns the config of a gateway whose only registry is the cluster of `east.kubeconfig`. `more` is further keys of the
/// registry, each with a comma before it.
fn config(more: &str) -> String {
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: net-east, namespace: istio-system}}\n\
         exports: [{{services: [\"*\"], tls: own}}]\naggregator: {{staleAfter: 8s, withdrawalHold: 3s}}\n\
         registries: [{{kubernetes: {{cluster: east, kubeconfig: east.kubeconfig{more}}}}}]\n"
    )
}

/// Starts a gateway with this kubeconfig.
pub(crate) fn gateway_with(kubeconfig: &str, config: &str) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("east.kubeconfig"), kubeconfig).expect("written");
    Gateway::start_in(folder, config, &[])
}

pub(crate) fn gateway(cluster: &Cluster, config: &str) -> Gateway {
    gateway_with(&cluster.kubeconfig(cluster.admin_token()), config)
}

fn registry(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/registries")[0].clone()
}

#[track_caller]
fn becomes(gateway: &Gateway, state: &str) -> Value {
    eventually(state, || Some(registry(gateway)).filter(|registry| registry["state"] == state))
}

/// The time within which everything works again after an API server has come back: gateways and controllers wait up to 30 s
/// between attempts, and the API server itself answers slowly after its start.
const RETURN: Duration = Duration::from_secs(60);

/// Waits until the registry is live again.
#[track_caller]
fn returns(gateway: &Gateway) {
    within(RETURN, "a live registry", || (registry(gateway)["state"] == "live").then_some(()));
}

/// Returns the addresses to which a name leads, sorted.
fn leads_to(gateway: &Gateway, name: &str) -> Vec<String> {
    let candidates = explain(gateway, name)["candidates"].as_array().cloned().unwrap_or_default();
    let healthy = candidates.iter().filter(|one| one["health"] == "healthy");
    let mut all: Vec<String> =
        healthy.map(|one| one["address"].as_str().expect("an address").to_owned()).collect();
    all.sort();
    all
}

fn explain(gateway: &Gateway, name: &str) -> Value {
    gateway.json(&format!("/api/v1/explain?sni={name}"))
}

/// Returns the number of endpoints that `explain` leaves out for a reason.
fn omitted(gateway: &Gateway, name: &str, why: &str) -> u64 {
    let omitted = explain(gateway, name)["omitted"].as_array().cloned().unwrap_or_default();
    omitted.iter().filter(|one| one["why"] == why).filter_map(|one| one["count"].as_u64()).sum()
}

#[track_caller]
fn waits(what: &str, mut ready: impl FnMut() -> bool) {
    within(RETURN, what, || ready().then_some(()));
}

fn sockets(network: &str, count: usize, port: u16) -> Vec<String> {
    let mut all: Vec<String> = (0..count).map(|number| format!("{network}.{number}:{port}")).collect();
    all.sort();
    all
}

#[test]
fn pods_that_come_and_go_are_endpoints() {
    let Some(cluster) = start(&Options::default()) else { return };
    cluster
        .node("node", &json!({"topology.kubernetes.io/region": "r1", "topology.kubernetes.io/zone": "z1"}));
    cluster.service("shop/web", &json!({}), &json!({"ports": ports()}));
    let gateway = gateway(&cluster, &config(""));
    let status = becomes(&gateway, "live");
    assert_eq!(
        (&status["network"], &status["report"]["server"]),
        (&json!("net-east"), &json!(cluster.server()))
    );
    assert!(
        status["report"]["version"].as_str().is_some_and(|version| version.starts_with("v1.")),
        "{status}"
    );
    for (from, to) in [(0, 3), (3, 1), (1, 0)] {
        cluster.scale("shop/web", to, "10.244.7");
        let wanted = sockets("10.244.7", to, 8443);
        waits(&format!("{to} endpoints in place of {from}"), || leads_to(&gateway, WEB) == wanted);
    }
    cluster.scale("shop/web", 1, "10.244.7");
    waits("an endpoint", || leads_to(&gateway, WEB).len() == 1);
    let endpoint = || gateway.json("/api/v1/services/web.shop.svc.cluster.local")["endpoints"][0].clone();
    let shown = endpoint();
    assert_eq!(
        (&shown["locality"], &shown["network"], &shown["identity"]),
        (&json!("r1/z1"), &json!("net-east"), &json!("spiffe://cluster.local/ns/shop/sa/default")),
        "{shown}"
    );

    // Labels and annotations of a pod change while it runs.
    let pod = at("v1", "pods", "shop/web-0");
    cluster.admin().patch(&pod, &json!({"metadata": {"labels": {"security.istio.io/tlsMode": "istio"}}}));
    waits("mesh TLS", || endpoint()["tls"] == "mesh");
    cluster
        .admin()
        .patch(&pod, &json!({"metadata": {"annotations": {"ambient.istio.io/redirection": "enabled"}}}));
    waits("HBONE", || endpoint()["tunnel"] == "hbone");
    cluster.admin().patch(&pod, &json!({"metadata": {"labels": {"topology.istio.io/network": "elsewhere"}}}));
    waits("a network that the registry may not name", || omitted(&gateway, WEB, "network not allowed") == 1);
    cluster.admin().patch(&pod, &json!({"metadata": {"labels": {"topology.istio.io/network": null}}}));
    waits("the own network", || leads_to(&gateway, WEB).len() == 1);

    // If the pods have several TLS modes, callers by hostname get the endpoints whose application speaks TLS itself.
    let plain = json!({"metadata": {"labels": {"security.istio.io/tlsMode": null}, "annotations": {"ambient.istio.io/redirection": null}}});
    cluster.admin().patch(&pod, &plain);
    waits("own TLS", || endpoint()["tls"] == "application" && endpoint()["tunnel"] == "none");

    // A change of the label on the system namespace moves all endpoints to another network in one generation.
    cluster.scale("shop/web", 5, "10.244.7");
    waits("five", || leads_to(&gateway, WEB).len() == 5);
    let generation = || gateway.json("/api/v1/status")["generation"].as_u64().expect("a number");
    let before = generation();
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-other"}));
    waits("another network", || registry(&gateway)["network"] == "net-other");
    waits("all moved", || omitted(&gateway, WEB, "other network") == 5);
    assert_eq!(generation(), before + 1);
}

#[test]
fn a_rolling_restart_of_fifty_pods_costs_no_connection() {
    const TEST: &str = "kubernetes::a_rolling_restart_of_fifty_pods_costs_no_connection";
    const PODS: usize = 50;
    if kube::installed().is_none() || !namespace::inside(TEST, kube::PODS) {
        return;
    }
    let cluster = start(&Options::default()).expect("installed");
    cluster.service("shop/web", &json!({}), &json!({"ports": ports()}));
    let server = PKI.server(WEB);
    // Each pod says which one it is.
    let pod = |generation: usize, number: usize| {
        let (key, address) =
            (format!("shop/web-{generation}-{number}"), format!("10.244.{}.{}", generation + 1, number + 1));
        let socket: SocketAddr = format!("{address}:8443").parse().expect("an address");
        let (server, mark) = (server.clone(), format!("{generation} {number} "));
        let backend = Backend::start_at(socket, move |stream| tls_echo(stream, server.clone(), &mark));
        let mut pod = Pod::new(&key, &address);
        pod.labels = json!({"app": "web"});
        cluster.pod(&pod);
        (key.clone(), backend)
    };
    let mut old: Vec<_> = (0..PODS).map(|number| pod(0, number)).collect();
    let gateway = gateway(&cluster, &config(""));
    waits("all pods", || leads_to(&gateway, WEB).len() == PODS);
    let stop = Arc::new(AtomicBool::new(false));
    let listener = gateway.listener("default");
    // Each client returns when its calls began, and their answers.
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut calls = Vec::new();
                while !stop.load(Ordering::SeqCst) {
                    let began = Instant::now();
                    let answer = tls(listener, WEB).and_then(|mut session| call(&mut session, "hello"));
                    calls.push((began, answer.map_err(|error| error.to_string())));
                }
                calls
            })
        })
        .collect();
    let (mut new, mut drained) = (Vec::new(), Vec::new());
    for (number, (key, _backend)) in old.drain(..).enumerate() {
        new.push(pod(1, number));
        cluster.terminate_pod(&key);
        let address = format!("10.244.1.{}:8443", number + 1);
        waits("a pod that drains", || !leads_to(&gateway, WEB).contains(&address));
        drained.push(Instant::now());
        cluster.delete_pod(&key);
    }
    stop.store(true, Ordering::SeqCst);
    let calls: Vec<_> = clients.into_iter().flat_map(|client| client.join().expect("it ends")).collect();
    eprintln!("{} calls while {PODS} pods were replaced", calls.len());
    assert!(calls.len() > PODS);
    for (began, answer) in &calls {
        let answer = answer.as_ref().expect("a call");
        let number = answer.strip_prefix("0 ").and_then(|rest| rest.strip_suffix(" hello"));
        // A terminating pod gets no new connections.
        let late = number.is_some_and(|number| *began > drained[number.parse::<usize>().expect("a number")]);
        assert!(!late, "{answer}: the pod should have been drained");
    }
    assert_eq!(leads_to(&gateway, WEB).len(), PODS);
}

#[test]
fn slices_that_claim_what_no_pod_is_are_not_believed() {
    let Some(cluster) = start(&Options::default()) else { return };
    cluster.namespace("other", &json!({}));
    // For a service without a selector, no controller writes slices.
    cluster.service("shop/web", &json!({}), &json!({"ports": ports(), "selector": null}));
    let mut foreign = Pod::new("other/secret", "10.244.9.9");
    foreign.labels = json!({"app": "secret"});
    cluster.pod(&foreign);
    cluster.pod(&Pod::new("shop/real", "10.244.7.1"));
    let uid = |key: &str| cluster.admin().read(&at("v1", "pods", key))["metadata"]["uid"].clone();
    let endpoint = |address: &str, target: Value| json!({"addresses": [address], "conditions": {"ready": true}, "targetRef": target});
    let pod = |namespace: &str, name: &str, uid: Value| json!({"kind": "Pod", "namespace": namespace, "name": name, "uid": uid});
    let absent = "00000000-0000-4000-8000-000000000000";
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"namespace": "shop", "name": "forged", "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"name": "https", "port": 8443, "protocol": "TCP"}],
        "endpoints": [
            // These endpoints name an existing pod of the service, first with its own address, then with another one.
            endpoint("10.244.7.1", pod("shop", "real", uid("shop/real"))),
            endpoint("10.96.0.1", pod("shop", "real", uid("shop/real"))),
            // These endpoints name a pod of another namespace, a pod that does not exist, a pod with a link-local address, no
            // pod, and a pod without its UID.
            endpoint("10.244.9.9", pod("other", "secret", uid("other/secret"))),
            endpoint("10.244.7.8", pod("shop", "later", json!(absent))),
            endpoint("169.254.169.254", pod("shop", "real", uid("shop/real"))),
            endpoint("10.244.7.3", Value::Null),
            endpoint("10.244.7.4", pod("shop", "real", Value::Null)),
        ],
    });
    // The API server itself refuses link-local addresses.
    let refused = cluster.admin().call(
        "POST",
        &at("discovery.k8s.io/v1", "endpointslices", "shop/"),
        ("application/json", &slice.to_string()),
    );
    assert_eq!(refused.status, 422, "{refused:?}");
    let mut slice = slice;
    slice["endpoints"].as_array_mut().expect("a list").remove(4);
    cluster.admin().create(&slice);
    let gateway = gateway(&cluster, &config(""));
    waits("the pod that is there", || leads_to(&gateway, WEB) == ["10.244.7.1:8443"]);
    assert_eq!(omitted(&gateway, WEB, "claimed"), 3);
    assert_eq!(omitted(&gateway, WEB, "waiting for pod"), 1);
    assert_eq!(omitted(&gateway, WEB, "no pod"), 1);
    eventually("left out", || {
        let left_out = registry(&gateway)["report"]["left_out"].clone();
        (left_out["claimed"] == 3 && left_out["waiting for pod"] == 1 && left_out["no pod"] == 1)
            .then_some(())
    });
    // A pod that is deleted before its slice says so stays an endpoint.
    cluster.delete_pod("shop/real");
    thread::sleep(Duration::from_millis(500));
    assert_eq!(leads_to(&gateway, WEB), ["10.244.7.1:8443"]);

    gateway.reload(&config(", manualEndpoints: true"));
    waits("an endpoint without a pod", || leads_to(&gateway, WEB).contains(&"10.244.7.3:8443".to_owned()));
}

#[test]
fn dual_stack_headless_pods_and_exports_of_teams() {
    let Some(cluster) = start(&Options::default()) else { return };
    cluster.install_crds();
    let families = json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]});
    let mut spec = json!({"ports": ports(), "clusterIP": "None"});
    spec.as_object_mut().expect("a map").extend(families.as_object().expect("a map").clone());
    cluster.service("shop/db", &json!({}), &spec);
    for number in 0..2 {
        let (key, v4, v6) =
            (format!("shop/db-{number}"), format!("10.244.8.{number}"), format!("fd00:244::{}", number + 1));
        let mut pod = Pod::new(&key, &v4);
        pod.addresses.push(&v6);
        pod.labels = json!({"app": "db"});
        cluster.pod(&pod);
    }
    cluster.service("shop/web", &json!({"istio.io/global": "true"}), &json!({"ports": ports()}));
    cluster.scale("shop/web", 2, "10.244.7");
    let by_export = config("").replace(
        "services: [\"*\"]",
        "services: [\"*.shop.svc.cluster.local\"], marked: {serviceExport: true}",
    );
    let by_label = config("").replace(
        "services: [\"*\"]",
        "services: [\"*.shop.svc.cluster.local\"], marked: {labels: {istio.io/global: \"true\"}}",
    );
    let everything = config("");
    let gateway = gateway(&cluster, &everything);
    let db = "db.shop.svc.cluster.local";
    waits("pods of both families", || leads_to(&gateway, db) == ["10.244.8.0:8443", "10.244.8.1:8443"]);
    // Viewers with different address families: one with IPv6 alone gets the IPv6 addresses.
    let seen = |families: &str| {
        gateway.json(&format!(
            "/api/v1/horizon?network=net-east&cluster=east&service={db}&port=443&families={families}"
        ))
    };
    let addresses = |answer: &Value| -> Vec<String> {
        let entries = answer["entries"].as_array().cloned().unwrap_or_default();
        let mut all: Vec<String> =
            entries.iter().map(|entry| entry["address"].as_str().expect("a text").to_owned()).collect();
        all.sort();
        all
    };
    assert_eq!(addresses(&seen("4,6")), ["10.244.8.0:8443", "10.244.8.1:8443"]);
    // The controller fills the slice of each family separately.
    waits("IPv6 of both", || addresses(&seen("6")) == ["[fd00:244::1]:8443", "[fd00:244::2]:8443"]);

    // Nothing is exported without a ServiceExport, and `explain` says which rule requires one.
    gateway.reload(&by_export);
    let refused = explain(&gateway, WEB);
    assert_eq!(refused["reason"], "not_exported", "{refused}");
    assert!(
        refused["steps"].to_string().contains("export rule exports[0]: requires a ServiceExport"),
        "{refused}"
    );
    let export = json!({"apiVersion": "multicluster.x-k8s.io/v1beta1", "kind": "ServiceExport", "metadata": {"namespace": "shop", "name": "web"}});
    cluster.admin().create(&export);
    waits("an exported service", || leads_to(&gateway, WEB).len() == 2);
    let exposed = gateway.json("/api/v1/exposed");
    assert!(exposed.to_string().contains("ServiceExport shop/web (east)"), "{exposed}");
    // The service can also be reached by its name in the cluster set, as hostname and as mesh name.
    let alias = "web.shop.svc.clusterset.local";
    assert_eq!(leads_to(&gateway, alias).len(), 2);
    assert_eq!(leads_to(&gateway, &format!("outbound_.443_._.{alias}")).len(), 2);
    assert_eq!(leads_to(&gateway, db), Vec::<String>::new(), "no team has exported it");
    // The replica that holds the Lease writes the status of exports; the second replica writes nothing.
    let second = gateway_with(&cluster.kubeconfig(cluster.admin_token()), &by_export);
    let condition = |export: &Value, kind: &str| {
        let all = export["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().find(|one| one["type"] == kind).cloned().unwrap_or_default()
    };
    let exports = |name: &str| at("multicluster.x-k8s.io/v1beta1", "serviceexports", &format!("shop/{name}"));
    let ready =
        becomes_so(cluster.admin(), &exports("web"), |export| condition(export, "Ready")["status"] == "True");
    assert_eq!(condition(&ready, "Valid")["status"], "True", "{ready}");
    let nothing = json!({"apiVersion": "multicluster.x-k8s.io/v1beta1", "kind": "ServiceExport", "metadata": {"namespace": "shop", "name": "nothing"}});
    cluster.admin().create(&nothing);
    let invalid = becomes_so(cluster.admin(), &exports("nothing"), |export| {
        condition(export, "Valid")["status"] == "False"
    });
    assert_eq!(condition(&invalid, "Valid")["reason"], "NoService", "{invalid}");
    let version = || cluster.admin().read(&exports("web"))["metadata"]["resourceVersion"].clone();
    let before = version();
    let lease =
        cluster.admin().read(&at("coordination.k8s.io/v1", "leases", "istio-system/isthmus-service-exports"));
    assert!(
        lease["spec"]["holderIdentity"].as_str().is_some_and(|holder| holder.starts_with("isthmus_")),
        "{lease}"
    );
    waits("a renewed lease", || {
        let now = cluster.admin().read(&at(
            "coordination.k8s.io/v1",
            "leases",
            "istio-system/isthmus-service-exports",
        ));
        now["spec"]["renewTime"] != lease["spec"]["renewTime"]
            && now["spec"]["holderIdentity"] == lease["spec"]["holderIdentity"]
    });
    assert_eq!(version(), before, "what is so already is not written again");
    drop(second);
    cluster.admin().delete(&at("multicluster.x-k8s.io/v1beta1", "serviceexports", "shop/web"));
    waits("a service that is exported no more", || explain(&gateway, WEB)["reason"] == "not_exported");
    assert_eq!(explain(&gateway, alias)["reason"], "sni_unknown");

    gateway.reload(&by_label);
    waits("marked by a label", || leads_to(&gateway, WEB).len() == 2);

    // A pod of a headless service has a hostname of its own; the rule for its service covers it.
    let (namespace, name) = ("shop", "db-9");
    cluster.admin().create(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": namespace, "name": name, "labels": {"app": "db"}},
        "spec": {"hostname": "db-9", "subdomain": "db", "nodeName": "node", "containers": [{"name": "c", "image": "none"}]}
    }));
    let ready = json!([{"type": "Ready", "status": "True"}]);
    let status = json!({"phase": "Running", "podIP": "10.244.8.9", "podIPs": [{"ip": "10.244.8.9"}], "conditions": ready});
    cluster.admin().patch_status(&at("v1", "pods", "shop/db-9"), &status);
    gateway.reload(&config("").replace("services: [\"*\"]", "services: [\"db.shop.svc.cluster.local\"]"));
    waits("three pods", || leads_to(&gateway, db).len() == 3);
    assert_eq!(leads_to(&gateway, &format!("db-9.{db}")), ["10.244.8.9:8443"]);
}

#[test]
fn gateways_are_found_by_label_in_trusted_namespaces() {
    let Some(cluster) = start(&Options::default()) else { return };
    let entrance = json!([{"name": "tls", "port": 15443, "targetPort": 15443}, {"name": "hbone", "port": 15008, "targetPort": 15008}]);
    let network = json!({"topology.istio.io/network": "net-east"});
    let spec = json!({"type": "LoadBalancer", "ports": entrance});
    cluster.service("istio-system/eastwest", &network, &spec);
    cluster.service("shop/trap", &network, &spec);
    cluster.balance("istio-system/eastwest", &json!([{"ip": "192.0.2.10"}, {"hostname": "lb.example.com"}]));
    cluster.balance("shop/trap", &json!([{"ip": "192.0.2.66"}]));
    cluster.scale("istio-system/eastwest", 2, "10.244.3");
    let gateway = gateway(&cluster, &config(""));
    let gateways = || -> Vec<(String, Value, Value)> {
        let all = gateway.json("/api/v1/gateways").as_array().cloned().unwrap_or_default();
        all.iter()
            .map(|one| {
                (
                    one["address"].as_str().unwrap_or_default().to_owned(),
                    one["sni_port"].clone(),
                    one["hbone_port"].clone(),
                )
            })
            .collect()
    };
    eprintln!("{}", gateway.json("/api/v1/gateways"));
    waits("two gateways", || gateways().len() == 2);
    let found = gateways();
    assert!(
        found.iter().any(|(address, sni, hbone)| address == "192.0.2.10" && sni == 15443 && hbone == 15008),
        "{found:?}"
    );
    assert!(found.iter().any(|(address, ..)| address == "lb.example.com"), "{found:?}");
    eventually("the label that is ignored is shown", || {
        registry(&gateway)["report"]["problems"].to_string().contains("Service shop/trap").then_some(())
    });
    // The pods of the gateway's own Service are never endpoints, so its name leads nowhere.
    let own = "eastwest.istio-system.svc.cluster.local";
    let loops = explain(&gateway, &format!("outbound_.15443_._.{own}"));
    assert_ne!(loops["verdict"], "admitted", "{loops}");

    // If the operator names an address by annotation, only that address is used.
    let annotations = json!({"metadata": {"annotations": {"isthmus.dev/gateway-address": "gw.example.com:31443", "isthmus.dev/gateway-weight": "3"}}});
    cluster.admin().patch(&at("v1", "services", "istio-system/eastwest"), &annotations);
    waits("the named address", || {
        let found = gateways();
        found.len() == 1 && found[0].0 == "gw.example.com" && found[0].1 == 31443
    });
}

/// Waits until the controller of EndpointSlices has written this number of endpoints of `shop/web`. After the API server was
/// away, the controller waits up to half a minute before it reads again, and its retries double their pause.
#[track_caller]
fn written(cluster: &Cluster, count: usize) {
    let of = |slice: &Value| slice["endpoints"].as_array().map_or(0, Vec::len);
    within(Duration::from_secs(150), "the controller", || {
        (cluster.slices("shop/web").iter().map(of).sum::<usize>() == count).then_some(())
    });
}

#[test]
fn an_api_server_that_dies_hangs_or_forbids_loses_no_endpoint() {
    let Some(mut cluster) = start(&Options::default()) else { return };
    cluster.service("shop/web", &json!({}), &json!({"ports": ports()}));
    cluster.scale("shop/web", 2, "10.244.7");
    let token = cluster.account_with_secret("istio-system/reader");
    cluster.allow("istio-system/reader", &kube::reader());
    let gateway = gateway_with(&cluster.kubeconfig(&token), &config(""));
    becomes(&gateway, "live");
    let two = sockets("10.244.7", 2, 8443);
    let holds = || assert_eq!(leads_to(&gateway, WEB), two);
    waits("two endpoints", || leads_to(&gateway, WEB) == two);

    cluster.kill();
    becomes(&gateway, "stale");
    holds();
    becomes(&gateway, "demoted");
    holds();
    cluster.restart();
    returns(&gateway);
    holds();

    // The API server is paused: its connections stay open and silent.
    cluster.pause();
    let status = becomes(&gateway, "stale");
    eprintln!("a frozen server: {}", status["problems"]);
    holds();
    cluster.resume();
    returns(&gateway);
    holds();

    // etcd is compacted, so the gateway cannot resume from the versions that it knows.
    cluster.kill();
    cluster.compact();
    cluster.restart();
    returns(&gateway);
    holds();
    cluster.scale("shop/web", 3, "10.244.7");
    written(&cluster, 3);
    within(RETURN, "a third pod", || (leads_to(&gateway, WEB).len() == 3).then_some(()));
    cluster.scale("shop/web", 2, "10.244.7");
    written(&cluster, 2);
    within(RETURN, "two again", || (leads_to(&gateway, WEB) == two).then_some(()));

    // The account loses its permissions: endpoints that were read before stay.
    cluster.forbid("istio-system/reader");
    cluster.kill();
    cluster.restart();
    let status = within(RETURN, "forbidden", || {
        Some(registry(&gateway)).filter(|status| status["problems"].to_string().contains("forbidden"))
    });
    assert!(status["problems"].to_string().contains("services"), "{status}");
    holds();
    cluster.allow("istio-system/reader", &kube::reader());
    returns(&gateway);
    holds();

    // The account is deleted, and its token with it.
    cluster.admin().delete(&at("v1", "serviceaccounts", "istio-system/reader"));
    cluster.kill();
    cluster.restart();
    within(RETURN, "unauthorized", || {
        registry(&gateway)["problems"].to_string().contains("unauthorized").then_some(())
    });
    holds();
}

#[test]
fn credentials_that_are_renewed_replace_those_in_use_once_they_have_read_everything() {
    const ROTATIONS: usize = 20;
    let Some(cluster) = start(&Options::default()) else { return };
    cluster.service("shop/web", &json!({}), &json!({"ports": ports()}));
    cluster.scale("shop/web", 3, "10.244.7");
    let account = |number: usize| {
        let key = format!("istio-system/reader-{number}");
        let token = cluster.account_with_secret(&key);
        cluster.allow(&key, &kube::reader());
        token
    };
    let gateway = gateway_with(&cluster.kubeconfig(&account(0)), &config(""));
    waits("endpoints", || leads_to(&gateway, WEB).len() == 3);
    let stop = Arc::new(AtomicBool::new(false));
    let admin = gateway.admin();
    let watcher = {
        let stop = stop.clone();
        thread::spawn(move || {
            let mut least = usize::MAX;
            while !stop.load(Ordering::SeqCst) {
                let (_, text) =
                    crate::support::gateway::http(admin, "GET", &format!("/api/v1/explain?sni={WEB}"));
                let explained: Value = serde_json::from_str(&text).unwrap_or_default();
                least = least.min(explained["candidates"].as_array().map_or(0, Vec::len));
                thread::sleep(Duration::from_millis(10));
            }
            least
        })
    };
    let path = gateway.folder().join("east.kubeconfig");
    let relisted = || registry(&gateway)["report"]["facts"]["last relisting"].clone();
    for number in 1..=ROTATIONS {
        let before = relisted();
        std::fs::write(&path, cluster.kubeconfig(&account(number))).expect("written");
        waits("the new session", || {
            relisted() != before && relisted().to_string().contains("new credentials")
        });
        cluster.admin().delete(&at("v1", "serviceaccounts", &format!("istio-system/reader-{}", number - 1)));
    }
    // Unusable kubeconfigs change nothing, and a problem names each.
    let good = cluster.kubeconfig(&account(ROTATIONS + 1));
    let exec = cluster.kubeconfig_of(
        "{exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: \
                                      [/tmp/isthmus-was-here]}}",
    );
    let other_ca = good.replace(&cluster.server(), "https://127.0.0.1:1");
    for (bad, why) in [
        (exec.as_str(), "users[0].user.exec: refused"),
        (&*good.replace("current-context", "current"), "current-context"),
        ("{]", "east.kubeconfig"),
        (&*other_ca, "cannot connect"),
    ] {
        std::fs::write(&path, bad).expect("written");
        eventually(why, || registry(&gateway)["report"]["problems"].to_string().contains(why).then_some(()));
        assert_eq!(leads_to(&gateway, WEB).len(), 3);
        assert_eq!(registry(&gateway)["state"], "live");
    }
    std::fs::write(&path, good).expect("written");
    eventually("no problem", || (registry(&gateway)["report"]["problems"] == json!([])).then_some(()));
    stop.store(true, Ordering::SeqCst);
    assert_eq!(watcher.join().expect("it ends"), 3, "no endpoint was lost at any time");
    assert!(!std::path::Path::new("/tmp/isthmus-was-here").exists());
}

#[test]
fn a_server_without_streaming_lists_is_read_in_pages_and_a_mass_withdrawal_is_held() {
    let options = Options { flags: &["--feature-gates=WatchList=false"], ..Options::default() };
    let Some(cluster) = start(&options) else { return };
    let services = 12;
    for number in 0..services {
        let name = format!("shop/s{number}");
        cluster.service(&name, &json!({}), &json!({"ports": ports()}));
        cluster.scale(&name, 1, &format!("10.244.{}", 20 + number));
    }
    // The services are held for long enough to look at each.
    let config = config("").replace("withdrawalHold: 3s", "withdrawalHold: 15s");
    let gateway = gateway(&cluster, &config);
    becomes(&gateway, "live");
    let ready = || {
        (0..services)
            .filter(|number| leads_to(&gateway, &format!("s{number}.shop.svc.cluster.local")).len() == 1)
            .count()
    };
    waits("all services", || ready() == services);
    let facts = eventually("facts", || {
        let facts = registry(&gateway)["report"]["facts"].clone();
        (facts["listed in pages"] != "0").then_some(facts)
    });
    assert_eq!(facts["listed on watches"], "0", "{facts}");
    for number in 0..services {
        cluster.delete_pod(&format!("shop/s{number}-0"));
    }
    becomes(&gateway, "held");
    let held = ready();
    assert!(held > 0, "some were withdrawn before it was noticed, {held} are held");
    returns(&gateway);
    waits("none", || ready() == 0);
}

#[test]
fn a_folder_of_clusters_that_cannot_be_read_at_a_start_removes_nothing() {
    let Some(cluster) = start(&Options::default()) else { return };
    cluster.service("shop/web", &json!({}), &json!({"ports": ports()}));
    cluster.scale("shop/web", 2, "10.244.7");
    let kept = tempfile::tempdir().expect("a folder");
    let (clusters, elsewhere) = (kept.path().join("clusters"), kept.path().join("elsewhere"));
    std::fs::create_dir(&clusters).expect("made");
    let kubeconfig = cluster.kubeconfig(cluster.admin_token());
    std::fs::write(clusters.join("west.kubeconfig"), kubeconfig).expect("written");
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: own, network: net-east}}\nexports: [{{services: [\"*\"], tls: own}}]\n\
         state: {{dir: {}}}\naggregator: {{startTimeout: 2s}}\nregistries: [{{kubernetesClusters: {{folder: {}}}}}]\n",
        kept.path().join("state").display(),
        clusters.display()
    );
    let mut gateway = Gateway::start(&config);
    waits("the cluster", || leads_to(&gateway, WEB).len() == 2);
    gateway.signal("TERM");
    assert!(gateway.ended().success());
    std::fs::rename(&clusters, &elsewhere).expect("renamed");
    let gateway = Gateway::start(&config);
    waits("the copy", || leads_to(&gateway, WEB).len() == 2);
    let status = gateway.json("/api/v1/status").to_string();
    assert!(status.contains("registry_missing"), "{status}");
    std::fs::rename(&elsewhere, &clusters).expect("renamed");
    waits("the folder", || registry(&gateway)["state"] == "live");
    assert_eq!(leads_to(&gateway, WEB).len(), 2);
}

#[test]
fn clusters_are_found_in_a_folder_while_the_gateway_runs() {
    let Some(cluster) = start(&Options::default()) else { return };
    cluster.service("shop/web", &json!({}), &json!({"ports": ports()}));
    cluster.scale("shop/web", 2, "10.244.7");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("clusters")).expect("made");
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: own, network: net-east}\nexports: [{services: [\"*\"], tls: own}]\n\
                  registries: [{kubernetesClusters: {folder: clusters}}]\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    assert_eq!(gateway.json("/api/v1/registries"), json!([]));
    // The kubeconfig of an account with read permissions only.
    cluster.account_with_secret("istio-system/isthmus-reader");
    cluster.allow("istio-system/isthmus-reader", &kube::reader());
    let admin = gateway.folder().join("admin.kubeconfig");
    std::fs::write(&admin, cluster.kubeconfig(cluster.admin_token())).expect("written");
    let command = |more: &[&str]| {
        let mut command = Command::new(BINARY);
        command.args(["kubeconfig", "--cluster", "west", "--kubeconfig"]).arg(&admin).args(more);
        let output = command.output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    let secret = command(&["--secret", "--server", "https://api.west.example:6443"]);
    assert!(secret.contains("istio/multiCluster") && secret.contains("api.west.example:6443"), "{secret}");
    let file = gateway.folder().join("clusters/west.kubeconfig");
    std::fs::write(&file, command(&[])).expect("written");
    waits("the cluster", || leads_to(&gateway, WEB).len() == 2);
    assert_eq!(
        (&registry(&gateway)["name"], &registry(&gateway)["cluster"]),
        (&json!("kubernetes/west"), &json!("west"))
    );
    // A second file for the same cluster is a problem, and changes nothing.
    std::fs::write(gateway.folder().join("clusters/west.yaml"), "x").expect("written");
    eventually("the second file", || {
        gateway.json("/api/v1/status")["problems"]
            .to_string()
            .contains("another file for the cluster west")
            .then_some(())
    });
    std::fs::remove_file(gateway.folder().join("clusters/west.yaml")).expect("removed");
    std::fs::remove_file(&file).expect("removed");
    waits("no cluster", || {
        gateway.json("/api/v1/registries") == json!([]) && leads_to(&gateway, WEB).is_empty()
    });
}
