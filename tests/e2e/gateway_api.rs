//! Gateways and routes of the Gateway API, with the API's own CRDs on a real API server, and real TLS clients.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::kubernetes::{gateway, gateway_with};
use crate::support::backend::{Backend, tls_echo};
use crate::support::client::{Tls, call, connect, tls};
use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{at, becomes};
use crate::support::pki::PKI;
use crate::support::{eventually, has_stopped, namespace, within};

pub(crate) const API: &str = "gateway.networking.k8s.io/v1";
/// A time in which the status of every object is written.
const SETTLED: Duration = Duration::from_secs(6);

/// Starts a cluster with the CRDs, the class `isthmus` and the namespaces infra, shop and other, in a namespace of the test.
#[track_caller]
pub(crate) fn start(test: &str) -> Option<Cluster> {
    let cluster = without_crds(test)?;
    cluster.install_crds();
    class(&cluster, "isthmus", "isthmus.io/gateway-controller");
    Some(cluster)
}

#[track_caller]
fn without_crds(test: &str) -> Option<Cluster> {
    if !namespace::inside(test, kube::PODS) {
        return None;
    }
    let cluster = Cluster::start(&kube::installed()?, "east", &Options::default());
    cluster.namespace("istio-system", &json!({"topology.istio.io/network": "net-east"}));
    for name in ["infra", "shop", "other"] {
        cluster.namespace(name, &json!({"team": name}));
    }
    Some(cluster)
}

/// Returns the config of a gateway that serves the class on the ports 443 and 8443.
pub(crate) fn config(more: &str) -> String {
    format!(
        "node: {{name: replica, cluster: east, network: net-east, namespace: istio-system}}\nexports: [{{services: [\"*\"], tls: own}}]\n\
         listen: \"127.0.0.1:0\"\nregistries: [{{kubernetes: {{cluster: east, kubeconfig: east.kubeconfig, \
         gatewayApi: {{class: isthmus, ports: [443, 8443], addresses: [127.0.0.1]{more}}}}}}}]\n"
    )
}

pub(crate) fn class(cluster: &Cluster, name: &str, controller: &str) {
    let spec = json!({"controllerName": controller});
    cluster.admin().create(
        &json!({"apiVersion": API, "kind": "GatewayClass", "metadata": {"name": name}, "spec": spec}),
    );
}

pub(crate) fn put(cluster: &Cluster, kind: &str, key: &str, spec: Value) {
    let (namespace, name) = key.split_once('/').expect("a namespace and a name");
    cluster.admin().apply(
        &json!({"apiVersion": API, "kind": kind, "metadata": {"namespace": namespace, "name": name}, "spec": spec}),
    );
}

/// Returns a listener for routes of all namespaces.
pub(crate) fn listener(name: &str, port: u16, protocol: &str) -> Value {
    let mut listener = json!({"name": name, "port": port, "protocol": protocol,
        "allowedRoutes": {"namespaces": {"from": "All"}}});
    if protocol == "TLS" {
        listener["tls"] = json!({"mode": "Passthrough"});
    }
    listener
}

/// Creates a Gateway of the class; with `address`, it requests that address.
pub(crate) fn edge(cluster: &Cluster, key: &str, address: Option<&str>, listeners: Value) {
    let mut spec = json!({"gatewayClassName": "isthmus", "listeners": listeners});
    if let Some(address) = address {
        spec["addresses"] = json!([{"type": "IPAddress", "value": address}]);
    }
    put(cluster, "Gateway", key, spec);
}

/// Creates a TLSRoute of the namespace shop to a Gateway of the namespace infra.
pub(crate) fn route(cluster: &Cluster, name: &str, gateway: &str, hostnames: &[&str], backends: Value) {
    put(
        cluster,
        "TLSRoute",
        &format!("shop/{name}"),
        json!({
            "parentRefs": [{"namespace": "infra", "name": gateway}], "hostnames": hostnames,
            "rules": [{"backendRefs": backends}],
        }),
    );
}

pub(crate) fn to(service: &str) -> Value {
    json!([{"name": service, "port": 443}])
}

/// Creates a Service on port 443 with one pod, which answers as a TLS server for the name with a mark.
pub(crate) fn serve(cluster: &Cluster, key: &str, address: &str, name: &str, mark: &'static str) -> Backend {
    let (namespace, service) = key.split_once('/').expect("a namespace and a name");
    cluster.service(key, &json!({}), &json!({"ports": [{"port": 443, "targetPort": 10443}]}));
    let pod_key = format!("{namespace}/{service}-0");
    let mut pod = Pod::new(&pod_key, address);
    pod.labels = json!({"app": service});
    cluster.pod(&pod);
    let config = PKI.server(name);
    let address: SocketAddr = format!("{address}:10443").parse().expect("an address");
    Backend::start_at(address, move |stream| tls_echo(stream, config.clone(), mark))
}

pub(crate) fn socket(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse::<IpAddr>().expect("an address"), port)
}

/// Returns the answer of the endpoint to which a name leads on port 443 of an address.
pub(crate) fn asked(address: &str, name: &str) -> Result<String, ErrorKind> {
    let mut stream: Tls = tls(socket(address, 443), name).map_err(|error| error.kind())?;
    call(&mut stream, "hi").map_err(|error| error.kind())
}

#[track_caller]
pub(crate) fn answers(address: &str, name: &str, wanted: &str) {
    eventually(&format!("{name} at {address} answers {wanted:?}"), || {
        (asked(address, name).ok().as_deref() == Some(wanted)).then_some(())
    });
}

#[track_caller]
pub(crate) fn refused(address: &str, name: &str) {
    eventually(&format!("{name} at {address} is refused"), || asked(address, name).is_err().then_some(()));
}

/// Returns the status and reason of a condition: `True/Accepted`.
pub(crate) fn condition(of: &Value, kind: &str) -> String {
    let all = of["conditions"].as_array().cloned().unwrap_or_default();
    let found = all.into_iter().find(|one| one["type"] == kind).unwrap_or_default();
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text("status"), text("reason"))
}

/// Waits until an object has this condition, in the part of its status at a JSON pointer.
#[track_caller]
pub(crate) fn has(
    cluster: &Cluster,
    kinds: &str,
    key: &str,
    pointer: &str,
    kind: &str,
    wanted: &str,
) -> Value {
    let path = at(API, kinds, key);
    eventually(&format!("{kinds} {key} {pointer}: {kind}={wanted}"), || {
        let object = cluster.admin().get(&path);
        let object = if object.status == 200 { object.json() } else { return None };
        let part = object["status"].pointer(pointer).cloned().unwrap_or_default();
        (condition(&part, kind) == wanted).then_some(object)
    })
}

/// Waits until a route has this condition.
#[track_caller]
pub(crate) fn route_has(cluster: &Cluster, name: &str, kind: &str, wanted: &str) -> Value {
    has(cluster, "tlsroutes", &format!("shop/{name}"), "/parents/0", kind, wanted)
}

#[test]
fn a_route_leads_real_clients_and_its_status_says_so() {
    const TEST: &str = "gateway_api::a_route_leads_real_clients_and_its_status_says_so";
    let Some(cluster) = start(TEST) else { return };
    let _web = serve(&cluster, "shop/web", "10.244.7.1", "a.test", "web:");
    let replica = gateway(&cluster, &config(""));
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS"), listener("closed", 9443, "TLS")]));
    route(&cluster, "web", "edge", &["a.test"], to("web"));
    answers("127.0.0.1", "a.test", "web:hi");

    // A class of another name may be that of another release, unless nobody has decided about it.
    class(&cluster, "typo", "isthmus.io/gateway-controller");
    has(&cluster, "gatewayclasses", "typo", "", "Accepted", "False/NotServed");
    let class = has(&cluster, "gatewayclasses", "isthmus", "", "Accepted", "True/Accepted");
    let features: Vec<&str> = class["status"]["supportedFeatures"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| one["name"].as_str())
        .collect();
    // The features whose tests in the conformance suite pass.
    assert_eq!(features, ["Gateway", "ReferenceGrant", "TCPRoute", "TLSRoute"]);
    has(&cluster, "gateways", "infra/edge", "", "Programmed", "True/Programmed");
    has(&cluster, "gateways", "infra/edge", "/listeners/1", "Accepted", "False/PortUnavailable");
    let event = eventually("an event", || {
        let events = cluster.admin().read("/api/v1/namespaces/infra/events");
        let mut events = events["items"].as_array()?.iter();
        events.find(|event| event["reason"] == "PortUnavailable").cloned()
    });
    let object = &event["involvedObject"];
    assert_eq!((&object["kind"], &object["name"]), (&json!("Gateway"), &json!("edge")), "{event}");
    has(&cluster, "gateways", "infra/edge", "", "Accepted", "True/ListenersNotValid");
    let edge = becomes(cluster.admin(), &at(API, "gateways", "infra/edge"), |edge| {
        edge["status"]["listeners"][0]["attachedRoutes"] == 1
    });
    assert_eq!(edge["status"]["addresses"], json!([{"type": "IPAddress", "value": "127.0.0.1"}]));
    let first = &edge["status"]["listeners"][0];
    assert_eq!(
        (&first["attachedRoutes"], condition(first, "Programmed").as_str()),
        (&json!(1), "True/Programmed")
    );
    assert_eq!(first["supportedKinds"], json!([{"group": "gateway.networking.k8s.io", "kind": "TLSRoute"}]));
    let settled = route_has(&cluster, "web", "Accepted", "True/Accepted");
    let parent = &settled["status"]["parents"][0];
    assert_eq!(condition(parent, "ResolvedRefs"), "True/ResolvedRefs");
    assert_eq!(parent["controllerName"], "isthmus.io/gateway-controller");
    assert_eq!(parent["conditions"][0]["observedGeneration"], settled["metadata"]["generation"]);

    // `explain`, the list of routes and that of reachable names know the route by its object.
    let explained = replica.json("/api/v1/explain?sni=a.test&listener=gateway-443");
    assert_eq!(
        (&explained["rule"], &explained["verdict"]),
        (&json!("TLSRoute shop/web"), &json!("admitted"))
    );
    let listed = replica.json("/api/v1/routes").to_string();
    assert!(
        listed.contains("TLSRoute shop/web") && listed.contains("web.shop.svc.cluster.local:443"),
        "{listed}"
    );
    let exposed = replica.json("/api/v1/exposed").as_array().cloned().expect("a list");
    let row = exposed.iter().find(|row| row["by"] == "TLSRoute shop/web").expect("a row");
    assert_eq!((&row["name"], &row["listener"]), (&json!("a.test"), &json!("gateway-443")));
    replica.logged("the connection", |line| line["route"] == "TLSRoute shop/web" && line["reason"] == "ok");

    // A route is a permission on its Gateway's ports only, where exports give none.
    assert!(tls(replica.listener("default"), "a.test").is_err());
    assert!(asked("127.0.0.1", "outbound_.443_._.web.shop.svc.cluster.local").is_err());
    replica.logged("the export", |line| line["reason"] == "sni_unknown" && line["listener"] == "gateway-443");

    // Nothing is written at rest.
    let versions = || {
        ["gatewayclasses/isthmus", "gateways/infra/edge", "tlsroutes/shop/web"].map(|path| {
            let (kinds, key) = path.split_once('/').expect("a kind");
            cluster.admin().read(&at(API, kinds, key))["metadata"]["resourceVersion"].clone()
        })
    };
    thread::sleep(SETTLED);
    let before = versions();
    thread::sleep(SETTLED);
    assert_eq!(versions(), before);

    // Parents of other controllers stay as they are.
    let theirs = json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "theirs"});
    let foreign = json!({"parentRef": theirs, "controllerName": "example.com/other", "conditions": [{
        "type": "Accepted", "status": "True", "reason": "Accepted", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    let path = at(API, "tlsroutes", "shop/web");
    cluster.admin().patch_status(&path, &json!({"parents": [foreign]}));
    let both = becomes(cluster.admin(), &path, |route| {
        route["status"]["parents"].as_array().is_some_and(|parents| parents.len() == 2)
    });
    assert_eq!(both["status"]["parents"][0], foreign);

    cluster.admin().delete(&path);
    refused("127.0.0.1", "a.test");
    becomes(cluster.admin(), &at(API, "gateways", "infra/edge"), |gateway| {
        gateway["status"]["listeners"][0]["attachedRoutes"] == 0
    });
}

#[test]
fn gateways_without_addresses_have_one_of_the_pool_each_and_keep_it_over_a_restart() {
    const TEST: &str =
        "gateway_api::gateways_without_addresses_have_one_of_the_pool_each_and_keep_it_over_a_restart";
    let Some(cluster) = start(TEST) else { return };
    let _servers = [
        serve(&cluster, "shop/one", "10.244.7.1", "a.test", "one:"),
        serve(&cluster, "shop/two", "10.244.7.2", "a.test", "two:"),
        serve(&cluster, "shop/new", "10.244.7.3", "a.test", "new:"),
    ];
    let address = |name: &str| {
        let key = format!("infra/{name}");
        let gateway = has(&cluster, "gateways", &key, "", "Programmed", "True/Programmed");
        gateway["status"]["addresses"][0]["value"].as_str().expect("an address").to_owned()
    };
    let add = |name: &str| {
        edge(&cluster, &format!("infra/{name}"), None, json!([listener("tls", 443, "TLS")]));
        route(&cluster, name, name, &["a.test"], to(name));
        let address = address(name);
        answers(&address, "a.test", &format!("{name}:hi"));
        address
    };
    let config = config(", pool: [127.0.9.0/30]");
    let mut replica = gateway(&cluster, &config);
    let (one, two) = (add("one"), add("two"));
    assert_eq!((&*one, &*two), ("127.0.9.1", "127.0.9.2"));
    // A replica that stops withdraws its note, so that no Gateway waits for it.
    replica.signal("TERM");
    assert!(replica.ended().success());
    // The address of a Gateway that goes away is free, and no other Gateway moves.
    cluster.admin().delete(&at(API, "gateways", "infra/one"));
    let _replica = gateway(&cluster, &config);
    assert_eq!(add("new"), "127.0.9.1");
    assert_eq!(address("two"), "127.0.9.2");
    answers("127.0.9.2", "a.test", "two:hi");
    // Where all addresses are in use, a Gateway says that it has none.
    edge(&cluster, "infra/last", None, json!([listener("tls", 443, "TLS")]));
    has(&cluster, "gateways", "infra/last", "", "Programmed", "False/AddressNotAssigned");
}

#[test]
fn gateways_on_one_port_are_told_apart_by_their_addresses() {
    const TEST: &str = "gateway_api::gateways_on_one_port_are_told_apart_by_their_addresses";
    let Some(cluster) = start(TEST) else { return };
    let _servers = [
        serve(&cluster, "shop/one", "10.244.7.1", "a.test", "one:"),
        serve(&cluster, "shop/two", "10.244.7.2", "a.test", "two:"),
        serve(&cluster, "shop/all", "10.244.7.3", "a.test", "all:"),
        serve(&cluster, "shop/wide", "10.244.7.4", "x.example.test", "wide:"),
    ];
    cluster.service("shop/raw", &json!({}), &json!({"ports": [{"port": 443, "targetPort": 10443}]}));
    let mut pod = Pod::new("shop/raw-0", "10.244.7.5");
    pod.labels = json!({"app": "raw"});
    cluster.pod(&pod);
    // The server speaks first.
    let _raw = Backend::start_at(socket("10.244.7.5", 10_443), |mut stream| {
        let _ = stream.write_all(b"220 ready\r\n");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let replica = gateway(&cluster, &config(", requestable: [127.0.0.0/27]"));
    let tls_on = |hostname: &str| {
        let mut listener = listener("tls", 443, "TLS");
        listener["hostname"] = hostname.into();
        json!([listener])
    };
    edge(&cluster, "infra/one", Some("127.0.0.21"), tls_on("a.test"));
    edge(&cluster, "infra/two", Some("127.0.0.22"), tls_on("*.test"));
    edge(&cluster, "infra/raw", Some("127.0.0.23"), json!([listener("raw", 443, "TCP")]));
    edge(&cluster, "infra/all", None, json!([listener("tls", 443, "TLS")]));
    edge(&cluster, "infra/far", Some("192.0.2.77"), json!([listener("tls", 443, "TLS")]));
    for (name, backend) in [("one", "one"), ("two", "two"), ("all", "all")] {
        route(&cluster, name, name, &["a.test"], to(backend));
    }
    // `*.com` of a route and `*.example.com` of a listener have `*.example.com` in common; here with another suffix.
    let mut wide = listener("wide", 8443, "TLS");
    wide["hostname"] = "*.example.test".into();
    edge(&cluster, "infra/wide", Some("127.0.0.24"), json!([wide]));
    route(&cluster, "wide", "wide", &["*.test"], to("wide"));
    put(
        &cluster,
        "TCPRoute",
        "shop/raw",
        json!({
            "parentRefs": [{"namespace": "infra", "name": "raw"}], "rules": [{"backendRefs": to("raw")}],
        }),
    );
    answers("127.0.0.21", "a.test", "one:hi");
    answers("127.0.0.22", "a.test", "two:hi");
    answers("127.0.0.99", "a.test", "all:hi");
    let greeting = || {
        let mut client = connect(socket("127.0.0.23", 443));
        let mut greeting = [0; 11];
        client.read_exact(&mut greeting).ok().map(|()| greeting)
    };
    eventually("the greeting", || greeting().filter(|greeting| greeting == b"220 ready\r\n"));
    let wide =
        |name: &str| tls(socket("127.0.0.24", 8443), name).and_then(|mut stream| call(&mut stream, "hi"));
    eventually("the common suffix", || wide("x.example.test").ok().filter(|answer| answer == "wide:hi"));
    assert!(wide("x.other.test").is_err());
    has(&cluster, "gateways", "infra/one", "", "Programmed", "True/Programmed");
    has(&cluster, "gateways", "infra/far", "", "Programmed", "False/AddressNotUsable");
    has(&cluster, "tcproutes", "shop/raw", "/parents/0", "Accepted", "True/Accepted");
    let explained = replica.json("/api/v1/explain?sni=a.test&listener=gateway-443&to=127.0.0.22");
    assert_eq!(explained["rule"], "TLSRoute shop/two");
    let raw = replica.json("/api/v1/explain?sni=x&listener=gateway-443&to=127.0.0.23");
    assert_eq!((&raw["rule"], &raw["verdict"]), (&json!("TCPRoute shop/raw"), &json!("admitted")));
    // A Gateway of another class, an address of another Gateway, and a protocol that the oldest Gateway of the address does not have.
    class(&cluster, "theirs", "example.com/other");
    put(
        &cluster,
        "Gateway",
        "infra/theirs",
        json!({"gatewayClassName": "theirs", "listeners": [listener("tls", 443, "TLS")]}),
    );
    edge(&cluster, "infra/late", Some("127.0.0.21"), json!([listener("raw", 443, "TCP")]));
    has(&cluster, "gateways", "infra/late", "", "Programmed", "False/AddressNotUsable");
    edge(&cluster, "infra/shared", None, json!([listener("raw", 443, "TCP")]));
    has(&cluster, "gateways", "infra/shared", "/listeners/0", "Conflicted", "True/ProtocolConflict");
    answers("127.0.0.21", "a.test", "one:hi");
    let theirs = cluster.admin().read(&at(API, "gateways", "infra/theirs"));
    assert_eq!(condition(&theirs["status"], "Accepted"), "Unknown/Pending", "{theirs}");
}

/// Withdraws the grant of `other`, and returns the time until the first refused call, which must be less than a second. One of three
/// times must be, because a machine may stand still; `again` gives the grant back.
#[track_caller]
pub(crate) fn withdrawn(cluster: &Cluster, name: &str, again: impl Fn()) -> Duration {
    let mut all = Vec::new();
    loop {
        cluster.admin().delete(&at(API, "referencegrants", "other/grant"));
        let begun = Instant::now();
        while asked("127.0.0.1", name).is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(10), "a withdrawn grant is still used");
        }
        all.push(begun.elapsed());
        match all.last() {
            Some(took) if *took < Duration::from_secs(1) => return *took,
            _ => assert!(all.len() < 3, "{all:?}"),
        }
        again();
    }
}

#[test]
fn a_withdrawn_grant_refuses_the_next_connection_within_a_second() {
    const TEST: &str = "gateway_api::a_withdrawn_grant_refuses_the_next_connection_within_a_second";
    let Some(cluster) = start(TEST) else { return };
    let _db = serve(&cluster, "other/db", "10.244.7.1", "a.test", "db:");
    let replica = gateway(&cluster, &config(", refusal: close"));
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    route(&cluster, "web", "edge", &["a.test"], json!([{"name": "db", "namespace": "other", "port": 443}]));
    route_has(&cluster, "web", "ResolvedRefs", "False/RefNotPermitted");
    // The client sees the end of the connection, and no alert.
    assert_eq!(asked("127.0.0.1", "a.test"), Err(ErrorKind::UnexpectedEof));
    let explained = replica.json("/api/v1/explain?sni=a.test&listener=gateway-443");
    let steps = explained["steps"].to_string();
    assert!(steps.contains("no ReferenceGrant permits the reference to Service other/db"), "{steps}");
    let grant = || {
        let from = json!([{"group": "gateway.networking.k8s.io", "kind": "TLSRoute", "namespace": "shop"}]);
        put(
            &cluster,
            "ReferenceGrant",
            "other/grant",
            json!({"from": from, "to": [{"group": "", "kind": "Service"}]}),
        );
    };
    grant();
    answers("127.0.0.1", "a.test", "db:hi");
    let mut open = tls(socket("127.0.0.1", 443), "a.test").expect("admitted");
    let (calls, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let took = thread::scope(|scope| {
        let load: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _ = asked("127.0.0.1", "a.test");
                        calls.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        eventually("load", || (calls.load(Ordering::Relaxed) > 20).then_some(()));
        let again = || {
            grant();
            answers("127.0.0.1", "a.test", "db:hi");
        };
        let took = withdrawn(&cluster, "a.test", again);
        stop.store(true, Ordering::Relaxed);
        load.into_iter().for_each(|load| load.join().expect("no panic"));
        took
    });
    eprintln!("a withdrawn grant refused after {took:?}, under {} calls", calls.load(Ordering::Relaxed));
    assert_eq!(call(&mut open, "still").expect("an open connection stays"), "db:still");
    route_has(&cluster, "web", "ResolvedRefs", "False/RefNotPermitted");
    grant();
    answers("127.0.0.1", "a.test", "db:hi");
}

#[test]
fn an_invalid_backend_refuses_its_share_and_an_import_is_a_backend() {
    const TEST: &str = "gateway_api::an_invalid_backend_refuses_its_share_and_an_import_is_a_backend";
    let Some(cluster) = start(TEST) else { return };
    let _servers = [
        serve(&cluster, "shop/one", "10.244.7.1", "a.test", "one:"),
        serve(&cluster, "shop/two", "10.244.7.2", "a.test", "two:"),
    ];
    let replica = gateway(&cluster, &config(""));
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    let backends = json!([{"name": "one", "port": 443, "weight": 2}, {"name": "two", "port": 443, "weight": 1},
        {"name": "no", "port": 443, "weight": 1}, {"name": "one", "port": 443, "weight": 0}]);
    route(&cluster, "web", "edge", &["a.test"], backends);
    route_has(&cluster, "web", "ResolvedRefs", "False/BackendNotFound");
    route_has(&cluster, "web", "Accepted", "True/Accepted");
    eventually("an answer", || asked("127.0.0.1", "a.test").ok());
    let mut shares = [0_u32; 3];
    for _ in 0..400 {
        match asked("127.0.0.1", "a.test").as_deref() {
            Ok("one:hi") => shares[0] += 1,
            Ok("two:hi") => shares[1] += 1,
            Err(_) => shares[2] += 1,
            other => panic!("{other:?}"),
        }
    }
    eprintln!("weights 2, 1 and 1 of an invalid backend: {shares:?} of 400");
    // Six standard deviations of a share of a quarter are 52, and of a half 60.
    assert!(
        shares[0].abs_diff(200) < 60 && shares[1].abs_diff(100) < 52 && shares[2].abs_diff(100) < 52,
        "{shares:?}"
    );
    replica.logged("the refused share", |line| {
        line["reason"] == "no_endpoints" && line["route"] == "TLSRoute shop/web"
    });

    // An import leads to the endpoints of the clusters that export the service.
    let import =
        json!([{"group": "multicluster.x-k8s.io", "kind": "ServiceImport", "name": "two", "port": 443}]);
    route(&cluster, "web", "edge", &["a.test"], import);
    route_has(&cluster, "web", "ResolvedRefs", "False/BackendNotFound");
    cluster.admin().create(&json!({"apiVersion": "multicluster.x-k8s.io/v1beta1", "kind": "ServiceExport",
        "metadata": {"namespace": "shop", "name": "two"}}));
    route_has(&cluster, "web", "ResolvedRefs", "True/ResolvedRefs");
    answers("127.0.0.1", "a.test", "two:hi");
}

#[test]
fn without_the_crds_nothing_changes_and_the_problem_names_the_kinds() {
    const TEST: &str = "gateway_api::without_the_crds_nothing_changes_and_the_problem_names_the_kinds";
    let Some(cluster) = without_crds(TEST) else { return };
    let replica = gateway(&cluster, &config(""));
    eventually("a live registry", || {
        (replica.json("/api/v1/registries")[0]["state"] == "live").then_some(())
    });
    for kind in ["gatewayclasses", "tlsroutes", "tcproutes", "listenersets", "referencegrants"] {
        let lines = || {
            let log = replica.log();
            log.iter().filter(|line| line.contains("does not have this kind") && line.contains(kind)).count()
        };
        eventually(kind, || (lines() == 1).then_some(()));
    }
    let lacks = |kind: &str, versions: &str| {
        format!(
            "{kind}: the API server does not serve gateway.networking.k8s.io/{versions}; it has no version of this kind"
        )
    };
    let expected = [
        lacks("gatewayclasses", "v1"),
        lacks("gateways", "v1"),
        lacks("referencegrants", "v1 or v1beta1"),
        lacks("tlsroutes", "v1 or v1alpha3"),
    ];
    assert_eq!(replica.json("/api/v1/registries")[0]["report"]["problems"], json!(expected));
    // The ports are open, and lead nowhere.
    assert!(asked("127.0.0.1", "a.test").is_err());
    replica
        .logged("the refusal", |line| line["reason"] == "sni_unknown" && line["listener"] == "gateway-443");
}

#[test]
fn without_rights_to_write_routes_are_served_and_a_problem_says_what_is_missing() {
    const TEST: &str =
        "gateway_api::without_rights_to_write_routes_are_served_and_a_problem_says_what_is_missing";
    let Some(cluster) = start(TEST) else { return };
    let _web = serve(&cluster, "shop/web", "10.244.7.1", "a.test", "web:");
    let token = cluster.account("istio-system/gateway");
    let mut rules = kube::reader();
    let kinds = ["gatewayclasses", "gateways", "listenersets", "tlsroutes", "tcproutes", "referencegrants"];
    let list = rules.as_array_mut().expect("a list");
    list.push(
        json!({"apiGroups": ["gateway.networking.k8s.io"], "resources": kinds, "verbs": ["list", "watch"]}),
    );
    let leases = json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]});
    list.push(leases);
    cluster.allow("istio-system/gateway", &rules);
    let replica = gateway_with(&cluster.kubeconfig(&token), &config(""));
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    route(&cluster, "web", "edge", &["a.test"], to("web"));
    answers("127.0.0.1", "a.test", "web:hi");
    let report = || replica.json("/api/v1/registries")[0]["report"].clone();
    eventually("the missing right", || {
        report()["problems"]
            .to_string()
            .contains("the chart grants the right with kubernetes.gatewayApi")
            .then_some(())
    });
    let untouched = cluster.admin().read(&at(API, "tlsroutes", "shop/web"));
    assert!(untouched["status"]["parents"].as_array().is_none_or(Vec::is_empty), "{untouched}");
}

#[test]
fn two_replicas_serve_and_one_of_them_writes() {
    const TEST: &str = "gateway_api::two_replicas_serve_and_one_of_them_writes";
    let Some(cluster) = start(TEST) else { return };
    let _web = serve(&cluster, "shop/web", "10.244.7.1", "a.test", "web:");
    let on = |port: u16| config("").replace("[443, 8443]", &format!("[443, {port}]"));
    let first = gateway(&cluster, &on(8443));
    let lease = at("coordination.k8s.io/v1", "leases", "istio-system/isthmus-gateway-api-isthmus");
    becomes(cluster.admin(), &lease, |lease| {
        lease["spec"]["holderIdentity"].to_string().contains("replica_")
    });
    // Replicas of one host cannot share a port, so the second one has another list of ports.
    let second = gateway(&cluster, &config("").replace("[443, 8443]", "[9443]").replace("replica", "second"));
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    route(&cluster, "web", "edge", &["a.test"], to("web"));
    has(&cluster, "gateways", "infra/edge", "", "Programmed", "True/Programmed");
    let holder = || {
        let holder = cluster.admin().read(&lease)["spec"]["holderIdentity"].clone();
        holder.as_str().and_then(|text| text.split_once('_')).map(|(name, _)| name.to_owned())
    };
    assert_eq!(holder().as_deref(), Some("replica"));
    // The second replica stops reading, so that it does not serve the next generation.
    becomes(cluster.admin(), &lease, |lease| lease["metadata"]["annotations"].to_string().contains("second"));
    second.signal("STOP");
    has_stopped(second.process());
    let gateways = at(API, "gateways", "infra/edge");
    let another = json!([listener("other", 443, "TLS")]);
    cluster.admin().patch(&gateways, &json!({"spec": {"listeners": another}}));
    let pending = within(Duration::from_secs(25), "the laggard", || {
        let gateway = cluster.admin().read(&gateways);
        (condition(&gateway["status"], "Programmed") == "False/Pending").then_some(gateway)
    });
    let text = pending["status"]["conditions"].to_string();
    assert!(
        text.contains("these replicas do not serve this generation of the Gateway yet: second"),
        "{text}"
    );
    assert_eq!(pending["status"]["conditions"][0]["observedGeneration"], pending["metadata"]["generation"]);
    second.signal("CONT");
    has(&cluster, "gateways", "infra/edge", "", "Programmed", "True/Programmed");
    drop(first);
    // The Lease expires, and the other replica judges by its own ports.
    within(Duration::from_secs(40), "the other replica", || {
        let gateway = cluster.admin().read(&at(API, "gateways", "infra/edge"));
        (condition(&gateway["status"]["listeners"][0], "Accepted") == "False/PortUnavailable").then_some(())
    });
    assert_eq!(holder().as_deref(), Some("second"));
    drop(second);
}

#[test]
fn two_releases_share_a_route_and_a_gateway_whose_class_goes_is_left() {
    const TEST: &str = "gateway_api::two_releases_share_a_route_and_a_gateway_whose_class_goes_is_left";
    let Some(cluster) = start(TEST) else { return };
    class(&cluster, "internal", "isthmus.io/gateway-controller");
    let _web = serve(&cluster, "shop/web", "10.244.7.1", "a.test", "web:");
    let _public = gateway(&cluster, &config(""));
    // The second release is in the same namespace, and thus in the way of the first if anything is shared.
    let internal =
        [("[443, 8443]", "[9443]"), ("class: isthmus", "class: internal"), ("replica", "internal")];
    let internal = internal.iter().fold(config(""), |text, (of, by)| text.replace(of, by));
    let _internal = gateway(&cluster, &internal);
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    let inside = json!({"gatewayClassName": "internal", "listeners": [listener("tls", 9443, "TLS")]});
    put(&cluster, "Gateway", "infra/inside", inside);
    let parents = ["edge", "inside"].map(|name| json!({"namespace": "infra", "name": name}));
    let spec = json!({"parentRefs": parents, "hostnames": ["a.test"], "rules": [{"backendRefs": to("web")}]});
    put(&cluster, "TLSRoute", "shop/web", spec);
    let route = || cluster.admin().read(&at(API, "tlsroutes", "shop/web"));
    let accepted = || {
        let route = route();
        let parents = route["status"]["parents"].as_array().cloned().unwrap_or_default();
        let accepted = parents.iter().filter(|entry| condition(entry, "Accepted") == "True/Accepted");
        let mut names: Vec<String> = accepted
            .map(|entry| entry["parentRef"]["name"].as_str().unwrap_or_default().to_owned())
            .collect();
        names.sort();
        names
    };
    eventually("both entries", || (accepted() == ["edge", "inside"]).then_some(()));
    for name in ["infra/edge", "infra/inside"] {
        has(&cluster, "gateways", name, "", "Programmed", "True/Programmed");
    }
    answers("127.0.0.1", "a.test", "web:hi");
    thread::sleep(SETTLED);
    let versions = || {
        let gateways = cluster.admin().read(&at(API, "gateways", ""));
        let gateways = gateways["items"].as_array().cloned().unwrap_or_default();
        gateways.into_iter().chain([route()]).map(|object| object["metadata"]["resourceVersion"].to_string())
    };
    let before: Vec<String> = versions().collect();
    thread::sleep(SETTLED);
    assert_eq!(versions().collect::<Vec<_>>(), before, "writes at rest");
    cluster.admin().delete("/apis/gateway.networking.k8s.io/v1/gatewayclasses/internal");
    has(&cluster, "gateways", "infra/inside", "", "Programmed", "False/Pending");
    eventually("the entry is withdrawn", || (accepted() == ["edge"]).then_some(()));
    // From now on, the Gateway is that of another controller.
    let theirs = json!({"status": {"conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted", "message": "theirs",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    let path = at(API, "gateways", "infra/inside");
    cluster.admin().patch(&format!("{path}/status"), &theirs);
    let version = cluster.admin().read(&path)["metadata"]["resourceVersion"].clone();
    thread::sleep(SETTLED);
    assert_eq!(cluster.admin().read(&path)["metadata"]["resourceVersion"], version);
    answers("127.0.0.1", "a.test", "web:hi");
}

#[test]
fn many_routes_settle_with_one_write_each() {
    const TEST: &str = "gateway_api::many_routes_settle_with_one_write_each";
    const ROUTES: usize = 1_000;
    let Some(cluster) = start(TEST) else { return };
    let _web = serve(&cluster, "shop/web", "10.244.7.1", "r-7.test", "web:");
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    let object = |number: usize| {
        let name = format!("r-{number}");
        let object = json!({
            "apiVersion": API, "kind": "TLSRoute",
            "metadata": {"namespace": "shop", "name": name, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z",
                "uid": format!("00000000-0000-0000-0000-{number:012}")},
            "spec": {"parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": "infra", "name": "edge"}],
                "hostnames": [format!("{name}.test")],
                "rules": [{"backendRefs": [{"group": "", "kind": "Service", "name": "web", "port": 443, "weight": 1}]}]},
        });
        (format!("gateway.networking.k8s.io/tlsroutes/shop/{name}"), object)
    };
    cluster.store(&(0..ROUTES).map(object).collect::<Vec<_>>());
    let list = at(API, "tlsroutes", "");
    let version = cluster.admin().read(&format!("{list}?limit=1"))["metadata"]["resourceVersion"].clone();
    let version = version.as_str().expect("a version");
    let mut writes = cluster.admin().watch(&format!("{list}?watch=1&resourceVersion={version}"));
    let begun = Instant::now();
    let replica = gateway(&cluster, &config(""));
    let mut written = std::collections::BTreeSet::new();
    while written.len() < ROUTES {
        let event = writes.next().expect("an event");
        let name = event["object"]["metadata"]["name"].as_str().expect("a name").to_owned();
        assert_eq!(
            condition(&event["object"]["status"]["parents"][0], "Accepted"),
            "True/Accepted",
            "{event}"
        );
        assert!(written.insert(name), "a second write: {event}");
    }
    let took = begun.elapsed();
    answers("127.0.0.1", "r-7.test", "web:hi");
    becomes(cluster.admin(), &at(API, "gateways", "infra/edge"), |gateway| {
        gateway["status"]["listeners"][0]["attachedRoutes"] == ROUTES
    });
    thread::sleep(SETTLED);
    // Nothing was written at rest: the next event is that of this change.
    let before = replica.processor_time();
    const EDITS: usize = 50;
    for number in 0..EDITS {
        let hostnames = json!({"spec": {"hostnames": [format!("e-{number}.test")]}});
        cluster.admin().patch(&at(API, "tlsroutes", "shop/r-7"), &hostnames);
    }
    let event = writes.next().expect("an event");
    assert_eq!(event["object"]["spec"]["hostnames"], json!(["e-0.test"]), "{event}");
    eventually("the last edit", || {
        let explained =
            replica.json(&format!("/api/v1/explain?sni=e-{}.test&listener=gateway-443", EDITS - 1));
        (explained["verdict"] == "admitted").then_some(())
    });
    let each = (replica.processor_time() - before) / u32::try_from(EDITS).expect("few");
    eprintln!(
        "{ROUTES} routes settled in {took:?}; an edit took {each:?} of the processor, its status included"
    );
}
