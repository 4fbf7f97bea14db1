//! Rows of objects in, and conditions and routes out: the objects of a cluster, and rows about routes.

mod listeners;
mod names;
mod withdrawn;

use serde_json::{Value, json};

use super::super::kinds::Kind;
use super::*;
use crate::testing::World;
use isthmus_aggregator::spec::kubernetes::{GATEWAY_CONTROLLER, NamespaceChoice};
use isthmus_settings::backend::Backend;

impl World {
    /// Returns a cluster with these objects beside those that every cluster has.
    fn new(objects: &[Value]) -> Self {
        let mut world = Self::default();
        objects.iter().for_each(|object| world.put(object));
        world
    }

    fn put(&mut self, object: &Value) {
        assert!(self.apply(&object.to_string()).is_some(), "{object}");
    }

    /// Returns the conditions that are not the usual ones, each as `TLSRoute shop/web: Accepted=False/NoMatchingParent`, and the
    /// numbers of attached routes.
    fn told(&mut self) -> Vec<String> {
        self.renew();
        let mut told = Vec::new();
        let mut conditions = |of: &str, all: &[(&'static str, Verdict)]| {
            for (kind, Verdict { is_true, reason, .. }) in all {
                let usual = ["Accepted", "Programmed", "ResolvedRefs", "NoConflicts", "Invalid"];
                if !usual.contains(reason) {
                    let status = if *is_true { "True" } else { "False" };
                    told.push(format!("{of}: {kind}={status}/{reason}"));
                }
            }
        };
        let mut attached = Vec::new();
        for (target, wanted) in &self.api.due {
            match target {
                Target::Class(name) => conditions(&format!("class {name}"), &wanted.status.conditions),
                Target::Parent((kind, key)) => {
                    conditions(&format!("{} {key}", kind.text()), &wanted.status.conditions);
                    for listener in &wanted.status.listeners {
                        conditions(&format!("{} {}", key.name, listener.name), &listener.conditions);
                        if listener.attached > 0 {
                            attached.push(format!("{} {}: {}", key.name, listener.name, listener.attached));
                        }
                    }
                }
                Target::Route(id) => {
                    for parent in &wanted.status.parents {
                        conditions(&object_of(id), &parent.conditions);
                    }
                }
            }
        }
        told.extend(attached);
        told
    }

    /// Returns the claims and backends of a route, as `*.a.test at :443 -> web.shop.svc.cluster.local:443 (1)`.
    fn leads(&self, kind: RouteKind, namespace: &str, name: &str) -> String {
        let key = ObjectKey { namespace: namespace.into(), name: name.into() };
        let Some(item) = self.api.routes.get(&(kind, key)).and_then(|found| found.item.clone()) else {
            return "nowhere".to_owned();
        };
        let claims: Vec<String> = item
            .claims
            .iter()
            .map(|claim| {
                let name = claim.applied().map_or_else(|| "all".to_owned(), ToString::to_string);
                format!("{name} at {}", claim.place)
            })
            .collect();
        let backend = |backend: &Backend| match &backend.to {
            Ok(to) => format!("{to} ({})", backend.weight),
            Err(_) => format!("refused ({})", backend.weight),
        };
        let backends: Vec<String> = item.backends.iter().map(backend).collect();
        format!("{} -> {}", claims.join(", "), backends.join(", "))
    }

    fn tls(&self, name: &str) -> String {
        self.leads(RouteKind::Tls, "shop", name)
    }
}

fn split(key: &str) -> (&str, &str) {
    key.split_once('/').expect("a namespace and a name")
}

fn object(kind: &str, key: &str, day: u8, spec: Value) -> Value {
    let (namespace, name) = split(key);
    json!({
        "kind": kind, "spec": spec,
        "metadata": {"namespace": namespace, "name": name, "generation": 7, "resourceVersion": "1",
            "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z")},
    })
}

fn service(key: &str, spec: Value) -> Value {
    object("Service", key, 1, spec)
}

/// Returns a Gateway with these listeners.
fn gateway(key: &str, day: u8, listeners: Value) -> Value {
    object("Gateway", key, day, json!({"gatewayClassName": "isthmus", "listeners": listeners}))
}

/// Returns a TLS listener on port 443 for routes of all namespaces; `more` replaces fields.
fn listener(name: &str, more: Value) -> Value {
    let mut listener = json!({"name": name, "port": 443, "protocol": "TLS", "tls": {"mode": "Passthrough"},
        "allowedRoutes": {"namespaces": {"from": "All"}}});
    for (key, value) in more.as_object().expect("an object") {
        listener[key] = value.clone();
    }
    listener
}

/// Returns the Gateway infra/edge with one listener `tls`.
fn edge(more: Value) -> Value {
    gateway("infra/edge", 1, json!([listener("tls", more)]))
}

/// Returns a TLSRoute to the Gateway infra/edge.
fn route(key: &str, hostnames: &[&str], backends: Value) -> Value {
    route_to(key, json!({"namespace": "infra", "name": "edge"}), hostnames, backends)
}

fn route_to(key: &str, parent: Value, hostnames: &[&str], backends: Value) -> Value {
    let rules = json!([{"backendRefs": backends}]);
    object("TLSRoute", key, 1, json!({"parentRefs": [parent], "hostnames": hostnames, "rules": rules}))
}

fn web() -> Value {
    json!([{"name": "web", "port": 443}])
}

fn grant(namespace: &str, from: (&str, &str), to: (&str, &str)) -> Value {
    let from = json!([{"group": "gateway.networking.k8s.io", "kind": from.0, "namespace": from.1}]);
    let to = json!([{"group": "", "kind": to.0, "name": to.1}]);
    object("ReferenceGrant", &format!("{namespace}/grant"), 1, json!({"from": from, "to": to}))
}

const WEB: &str = "web.shop.svc.cluster.local:443 (1)";

#[test]
fn a_route_is_attached_to_the_listeners_that_allow_it() {
    let to = |parent: Value| route_to("shop/web", parent, &["a.test"], web());
    let edge_and = |more: Value| {
        let mut parent = json!({"namespace": "infra", "name": "edge"});
        for (key, value) in more.as_object().expect("an object") {
            parent[key] = value.clone();
        }
        parent
    };
    let from = |rule: Value| json!({"allowedRoutes": {"namespaces": rule}});
    let selector = |label: Value| json!({"from": "Selector", "selector": label});
    let not_allowed = &["TLSRoute shop/web: Accepted=False/NotAllowedByListeners"][..];
    for (what, gateway, route, expected) in [
        ("plain", edge(json!({})), to(edge_and(json!({}))), &["edge tls: 1"][..]),
        ("by section", edge(json!({})), to(edge_and(json!({"sectionName": "tls"}))), &["edge tls: 1"]),
        ("by port", edge(json!({})), to(edge_and(json!({"port": 443}))), &["edge tls: 1"]),
        (
            "no such section",
            edge(json!({})),
            to(edge_and(json!({"sectionName": "no"}))),
            &["TLSRoute shop/web: Accepted=False/NoMatchingParent"],
        ),
        (
            "no such port",
            edge(json!({})),
            to(edge_and(json!({"port": 8443}))),
            &["TLSRoute shop/web: Accepted=False/NoMatchingParent"],
        ),
        ("same namespace", edge(json!({"allowedRoutes": {}})), to(edge_and(json!({}))), not_allowed),
        ("none", edge(from(json!({"from": "None"}))), to(edge_and(json!({}))), not_allowed),
        (
            "by label",
            edge(from(selector(json!({"matchLabels": {"team": "shop"}})))),
            to(edge_and(json!({}))),
            &["edge tls: 1"],
        ),
        (
            "by another label",
            edge(from(selector(json!({"matchLabels": {"team": "core"}})))),
            to(edge_and(json!({}))),
            not_allowed,
        ),
        (
            "by expressions",
            edge(from(selector(json!({"matchExpressions": [
                {"key": "team", "operator": "In", "values": ["a", "shop"]}, {"key": "team", "operator": "Exists"},
                {"key": "no", "operator": "DoesNotExist"}, {"key": "team", "operator": "NotIn", "values": ["core"]}]})))),
            to(edge_and(json!({}))),
            &["edge tls: 1"],
        ),
        (
            "by an unknown operator",
            edge(from(selector(json!({"matchExpressions": [{"key": "team", "operator": "Like"}]})))),
            to(edge_and(json!({}))),
            not_allowed,
        ),
        (
            "no common name",
            edge(json!({"hostname": "*.b.test"})),
            to(edge_and(json!({}))),
            &["TLSRoute shop/web: Accepted=False/NoMatchingListenerHostname"],
        ),
        ("another kind of parent", edge(json!({})), to(edge_and(json!({"kind": "Mesh"}))), &[]),
        ("another Gateway", edge(json!({})), to(json!({"name": "edge"})), &[]),
    ] {
        let mut world = World::new(&[gateway, route]);
        assert_eq!(world.told(), expected, "{what}");
        let is_served = expected.first().is_some_and(|told| told.starts_with("edge"));
        let leads = format!("a.test at :443 -> {WEB}");
        assert_eq!(world.tls("web"), if is_served { leads.as_str() } else { "nowhere" }, "{what}");
    }
}

/// Returns an EndpointSlice of shop/web with one endpoint, which has this target.
fn slice(name: &str, target: Value) -> Value {
    json!({
        "kind": "EndpointSlice", "addressType": "IPv4", "ports": [{"port": 443}],
        "metadata": {"namespace": "shop", "name": name, "labels": {"kubernetes.io/service-name": "web"}},
        "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": target}],
    })
}

#[test]
fn a_backend_that_cannot_be_used_is_refused_with_its_reason() {
    let import =
        json!({"group": "multicluster.x-k8s.io", "kind": "ServiceImport", "name": "web", "port": 443});
    let unresolved = |reason: &str| {
        vec![format!("TLSRoute shop/web: ResolvedRefs=False/{reason}"), "edge tls: 1".to_owned()]
    };
    let attached = || vec!["edge tls: 1".to_owned()];
    let of_other = json!([{"name": "web", "namespace": "other", "port": 443}]);
    for (what, backends, more, expected, leads) in [
        (
            "no such Service",
            json!([{"name": "no", "port": 443}]),
            None,
            unresolved("BackendNotFound"),
            "refused (1)",
        ),
        (
            "no such port",
            json!([{"name": "web", "port": 80}]),
            None,
            unresolved("BackendNotFound"),
            "refused (1)",
        ),
        ("no port", json!([{"name": "web"}]), None, unresolved("BackendNotFound"), "refused (1)"),
        (
            "an external name",
            json!([{"name": "far", "port": 443}]),
            Some(service("shop/far", json!({"type": "ExternalName", "ports": [{"port": 443}]}))),
            unresolved("BackendNotFound"),
            "refused (1)",
        ),
        (
            "a port without TLS",
            json!([{"name": "plain", "port": 80}]),
            Some(service("shop/plain", json!({"ports": [{"port": 80, "appProtocol": "kubernetes.io/h2c"}]}))),
            unresolved("UnsupportedProtocol"),
            "refused (1)",
        ),
        (
            "a port whose name alone says HTTP",
            json!([{"name": "plain", "port": 80}]),
            Some(service("shop/plain", json!({"ports": [{"port": 80, "name": "http"}]}))),
            attached(),
            "plain.shop.svc.cluster.local:80 (1)",
        ),
        (
            "endpoints that were made by hand",
            json!([{"name": "web", "port": 443}]),
            // Another registry may have endpoints of the same name.
            Some(slice("by-hand", json!(null))),
            attached(),
            "web.shop.svc.cluster.local:443 (1)",
        ),
        (
            "endpoints of a pod",
            json!([{"name": "web", "port": 443}]),
            Some(slice("of-pods", json!({"kind": "Pod", "uid": "0123456789abcdef0123456789abcdef"}))),
            attached(),
            "web.shop.svc.cluster.local:443 (1)",
        ),
        (
            "an unknown kind",
            json!([{"group": "example.com", "kind": "Bucket", "name": "web", "port": 443}]),
            None,
            unresolved("InvalidKind"),
            "refused (1)",
        ),
        ("another namespace", of_other.clone(), None, unresolved("RefNotPermitted"), "refused (1)"),
        (
            "a grant",
            of_other.clone(),
            Some(grant("other", ("TLSRoute", "shop"), ("Service", ""))),
            attached(),
            "web.other.svc.cluster.local:443 (1)",
        ),
        (
            "a grant for routes of another kind",
            of_other.clone(),
            Some(grant("other", ("TCPRoute", "shop"), ("Service", ""))),
            unresolved("RefNotPermitted"),
            "refused (1)",
        ),
        (
            "a grant for another Service",
            of_other,
            Some(grant("other", ("TLSRoute", "shop"), ("Service", "db"))),
            unresolved("RefNotPermitted"),
            "refused (1)",
        ),
        (
            "one of three",
            json!([{"name": "web", "port": 443, "weight": 3}, {"name": "no", "port": 443, "weight": 2},
                {"name": "web", "port": 443, "weight": 0}]),
            None,
            unresolved("BackendNotFound"),
            "web.shop.svc.cluster.local:443 (3), refused (2), web.shop.svc.cluster.local:443 (0)",
        ),
        ("no import", json!([import.clone()]), None, unresolved("BackendNotFound"), "refused (1)"),
        (
            "an import without the port",
            json!([import.clone()]),
            Some(object("ServiceImport", "shop/web", 1, json!({"ports": [{"port": 80}]}))),
            unresolved("BackendNotFound"),
            "refused (1)",
        ),
        (
            "an import",
            json!([import]),
            Some(object("ServiceImport", "shop/web", 1, json!({"ports": [{"port": 80}, {"port": 443}]}))),
            attached(),
            "web.shop.svc.clusterset.local:443 (1)",
        ),
        ("none", json!([]), None, attached(), ""),
    ] {
        let mut world = World::new(&[edge(json!({})), route("shop/web", &["a.test"], backends)]);
        more.iter().for_each(|object| world.put(object));
        assert_eq!(world.told(), expected, "{what}");
        assert_eq!(world.tls("web"), format!("a.test at :443 -> {leads}"), "{what}");
    }
    let two = json!([{"backendRefs": web()}, {"backendRefs": web()}]);
    let mut two_rules = route("shop/web", &["a.test"], web());
    two_rules["spec"]["rules"] = two;
    let mut world = World::new(&[edge(json!({})), two_rules]);
    assert_eq!(world.told(), ["TLSRoute shop/web: Accepted=False/UnsupportedValue"]);
}

#[test]
fn a_change_costs_what_it_concerns_and_equal_items_are_not_sent_again() {
    let mut world = World::new(&[
        edge(json!({})),
        route("shop/web", &["a.test"], web()),
        route("shop/b", &["b.test"], web()),
    ]);
    assert_eq!(world.renew().len(), 3, "a Gateway and two routes");
    assert!(world.api.new_due().is_some_and(|due| due.len() == 4), "the class, the Gateway and two routes");
    // Only the resource version has changed.
    let mut again = route("shop/web", &["a.test"], web());
    again["metadata"]["resourceVersion"] = "2".into();
    world.put(&again);
    assert_eq!(world.tables.dirty.gateway_api.routes.len(), 1);
    assert_eq!(world.renew(), []);
    world.put(&service("shop/web", json!({"ports": [{"port": 443}], "type": "LoadBalancer"})));
    assert!(world.tables.dirty.gateway_api.is_empty(), "its ports are the same");
    world.put(&service("shop/web", json!({"ports": [{"port": 80}]})));
    assert_eq!(world.tables.dirty.gateway_api.backends.len(), 1);
    assert_eq!(world.renew().len(), 2, "both routes lose their backend");
    assert!(world.tls("b").ends_with("refused (1)"));
    world.tables.complete(Kind::TlsRoute, 2, None);
    assert_eq!(world.renew().iter().filter(|change| matches!(change, Change::Remove(_))).count(), 2);
    assert_eq!(world.told(), Vec::<String>::new(), "no route is attached any more");
}

#[test]
fn the_digest_of_a_status_is_that_of_the_object_once_it_is_written() {
    let mut world =
        World::new(&[edge(json!({})), route("shop/web", &["a.test"], json!([{"name": "no", "port": 1}]))]);
    world.renew();
    let due = world.api.new_due().expect("due");
    for (target, wanted) in due {
        assert_ne!(wanted.status.digest(), wanted.stamp.digest, "{target:?}");
        let mut written = match &target {
            Target::Class(_) => {
                json!({"kind": "GatewayClass", "metadata": {"name": "isthmus", "generation": 4},
                "spec": {"controllerName": "isthmus.io/gateway-controller"}})
            }
            Target::Parent(_) => edge(json!({})),
            Target::Route(_) => route("shop/web", &["a.test"], json!([{"name": "no", "port": 1}])),
        };
        written["status"] = match &target {
            Target::Class(_) => wanted.status.of_class(&Value::Null, "now"),
            Target::Parent(_) => wanted.status.of_gateway(&Value::Null, "now"),
            Target::Route(_) => wanted.status.of_route(GATEWAY_CONTROLLER, &Value::Null, "now"),
        };
        world.put(&written);
    }
    world.renew();
    let due = world.api.new_due().expect("the stamps have changed");
    for (target, wanted) in &due {
        assert_eq!(wanted.status.digest(), wanted.stamp.digest, "{target:?}");
    }
    assert!(!due.keys().any(|target| matches!(target, Target::Route(_))), "a route at rest is not due");
}
