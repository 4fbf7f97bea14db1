//! Tenants of the Gateway API on a real API server: what the objects of one namespace cannot take from another.

use serde_json::{Value, json};

use crate::gateway_api::{API, answers, config, edge, has, listener, put, refused, serve, start, to};
use crate::kubernetes::gateway;
use crate::support::eventually;
use crate::support::kube::Cluster;
use crate::support::kube_client::{at, becomes};

/// The group of the CRDs.
const CRD: &str = "apiextensions.k8s.io/v1";

/// Returns a listener with a host name.
fn named(name: &str, hostname: &str) -> Value {
    let mut listener = listener(name, 443, "TLS");
    listener["hostname"] = hostname.into();
    listener
}

/// Creates a TLSRoute to a listener of a Gateway.
fn route(cluster: &Cluster, key: &str, gateway: (&str, &str, &str), hostname: &str) {
    let (namespace, name, section) = gateway;
    let parent = json!({"namespace": namespace, "name": name, "sectionName": section});
    let service = if key.starts_with("shop/") { "web" } else { "evil" };
    let rules = json!([{"backendRefs": to(service)}]);
    put(cluster, "TLSRoute", key, json!({"parentRefs": [parent], "hostnames": [hostname], "rules": rules}));
}

/// Waits until the message of a condition has this text.
#[track_caller]
fn says(cluster: &Cluster, kinds: &str, key: &str, pointer: &str, text: &str) {
    becomes(cluster.admin(), &at(API, kinds, key), |object| {
        let part = object["status"].pointer(pointer).cloned().unwrap_or_default();
        part["conditions"].to_string().contains(text)
    });
}

#[test]
fn a_tenant_takes_no_name_port_or_address_of_another() {
    const TEST: &str = "tenants::a_tenant_takes_no_name_port_or_address_of_another";
    let Some(cluster) = start(TEST) else { return };
    let _servers = [
        serve(&cluster, "shop/web", "10.244.7.1", "*.a.test", "web:"),
        serve(&cluster, "other/evil", "10.244.7.2", "*.a.test", "evil:"),
    ];
    let replica = gateway(&cluster, &config(""));
    let of_team = json!({"namespaces": {"from": "Selector", "selector": {"matchLabels": {"team": "shop"}}}});
    let mut reserved = named("a", "*.a.test");
    reserved["allowedRoutes"] = of_team.clone();
    let mut exact = named("b", "b.a.test");
    exact["allowedRoutes"] = of_team;
    edge(&cluster, "infra/edge", None, json!([reserved, exact, listener("rest", 443, "TLS")]));
    let (a, rest) = (("infra", "edge", "a"), ("infra", "edge", "rest"));
    // The older route is at the listener for all.
    route(&cluster, "other/pay", rest, "pay.a.test");
    has(&cluster, "tlsroutes", "other/pay", "/parents/0", "Accepted", "False/HostnameConflict");
    says(
        &cluster,
        "tlsroutes",
        "other/pay",
        "/parents/0",
        "pay.a.test belongs to the listener *.a.test of the namespace infra",
    );
    refused("127.0.0.1", "pay.a.test");
    route(&cluster, "shop/web", a, "*.a.test");
    answers("127.0.0.1", "pay.a.test", "web:hi");
    answers("127.0.0.1", "x.a.test", "web:hi");
    // A listener with the exact name and without a route refuses.
    refused("127.0.0.1", "b.a.test");
    route(&cluster, "other/theirs", rest, "c.test");
    has(&cluster, "tlsroutes", "other/theirs", "/parents/0", "Accepted", "True/Accepted");
    let exposed = replica.json("/api/v1/exposed").as_array().cloned().expect("a list");
    let names: Vec<&str> = exposed.iter().filter_map(|row| row["name"].as_str()).collect();
    let count = |name: &str| names.iter().filter(|found| **found == name).count();
    assert_eq!((count("*.a.test"), count("pay.a.test"), count("c.test")), (1, 0, 1), "{names:?}");

    // Gateways of another namespace: at an address of the host, under the host name, without a host name, and for TCP.
    edge(&cluster, "other/address", Some("127.0.0.2"), json!([listener("tls", 443, "TLS")]));
    has(&cluster, "gateways", "other/address", "", "Programmed", "False/AddressNotUsable");
    let problem = "Gateway other/address requests the address 127.0.0.2 of this host";
    eventually("the problem with the line to write", || {
        let problems = replica.json("/api/v1/registries")[0]["report"]["problems"].to_string();
        (problems.contains(problem) && problems.contains("`requestable: [127.0.0.2/32]`")).then_some(())
    });
    edge(&cluster, "other/under", None, json!([named("tls", "x.a.test")]));
    has(&cluster, "gateways", "other/under", "/listeners/0", "Conflicted", "True/HostnameConflict");
    says(&cluster, "gateways", "other/under", "/listeners/0", "Gateway infra/edge, which is older");
    edge(&cluster, "other/open", None, json!([listener("tls", 443, "TLS")]));
    edge(&cluster, "other/raw", None, json!([listener("raw", 443, "TCP")]));
    has(&cluster, "gateways", "other/raw", "/listeners/0", "Conflicted", "True/ProtocolConflict");
    for name in ["address", "under", "open"] {
        route(&cluster, &format!("other/{name}"), ("other", name, "tls"), "x.a.test");
    }
    has(&cluster, "tlsroutes", "other/open", "/parents/0", "Accepted", "False/HostnameConflict");
    answers("127.0.0.1", "x.a.test", "web:hi");
    answers("127.0.0.2", "x.a.test", "web:hi");
    let explained = replica.json("/api/v1/explain?sni=x.a.test&listener=gateway-443&to=127.0.0.2");
    assert_eq!(explained["rule"], "TLSRoute shop/web", "{explained}");
    assert!(explained["steps"].to_string().contains("the one *.a.test of the namespace infra has this name"));
}

/// Lets the API server serve TLSRoutes in one version alone.
fn only_version(cluster: &Cluster, version: &str) {
    let path = at(CRD, "customresourcedefinitions", "tlsroutes.gateway.networking.k8s.io");
    let mut versions = cluster.admin().read(&path)["spec"]["versions"].clone();
    for found in versions.as_array_mut().expect("a list") {
        found["served"] = (found["name"] == version).into();
    }
    cluster.admin().patch(&path, &json!({"spec": {"versions": versions}}));
    for name in ["v1", "v1alpha2", "v1alpha3"] {
        let path = at(&format!("gateway.networking.k8s.io/{name}"), "tlsroutes", "");
        eventually(name, || ((cluster.admin().get(&path).status == 200) == (name == version)).then_some(()));
    }
}

#[test]
fn tls_routes_are_read_in_an_older_version_and_one_that_is_not_read_is_a_problem() {
    const TEST: &str =
        "tenants::tls_routes_are_read_in_an_older_version_and_one_that_is_not_read_is_a_problem";
    let Some(cluster) = start(TEST) else { return };
    only_version(&cluster, "v1alpha3");
    let _web = serve(&cluster, "shop/web", "10.244.7.1", "a.test", "web:");
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    let older = "gateway.networking.k8s.io/v1alpha3";
    cluster.admin().apply(&json!({
        "apiVersion": older, "kind": "TLSRoute", "metadata": {"namespace": "shop", "name": "web"},
        "spec": {"parentRefs": [{"namespace": "infra", "name": "edge"}], "hostnames": ["a.test"],
            "rules": [{"backendRefs": to("web")}]},
    }));
    let replica = gateway(&cluster, &config(""));
    answers("127.0.0.1", "a.test", "web:hi");
    becomes(cluster.admin(), &at(older, "tlsroutes", "shop/web"), |route| {
        route["status"]["parents"][0]["conditions"].to_string().contains("the route is accepted")
    });
    assert_eq!(replica.json("/api/v1/registries")[0]["report"]["problems"], json!([]));
    drop(replica);
    only_version(&cluster, "v1alpha2");
    let replica = gateway(&cluster, &config(""));
    let problem = "tlsroutes: the API server does not serve gateway.networking.k8s.io/v1 or v1alpha3; it has only v1alpha2";
    eventually("the problem", || {
        let problems = &replica.json("/api/v1/registries")[0]["report"]["problems"];
        (*problems == json!([problem])).then_some(())
    });
    eventually("the problem in the status", || {
        replica.json("/api/v1/status")["problems"].to_string().contains("it has only v1alpha2").then_some(())
    });
}
