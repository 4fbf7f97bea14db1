//! Rows about classes, Gateways, ListenerSets and their listeners.

use super::*;

#[test]
fn a_listener_says_why_it_is_not_served() {
    let grants = [
        grant("other", ("Gateway", "infra"), ("Secret", "")),
        grant("other", ("Gateway", "infra"), ("Secret", "cert")),
        grant("other", ("Gateway", "infra"), ("Secret", "another")),
        grant("other", ("Gateway", "shop"), ("Secret", "")),
    ];
    let terminated = |reference: Value| json!({"tls": {"mode": "Terminate", "certificateRefs": [reference]}});
    let foreign = json!({"name": "cert", "namespace": "other"});
    let none = [
        "Gateway infra/edge: Accepted=False/ListenersNotValid",
        "TLSRoute shop/web: Accepted=False/NotAllowedByListeners",
    ];
    let refused = |more: &[&str]| -> Vec<String> {
        let (gateway, route) = (none[0].to_owned(), none[1].to_owned());
        std::iter::once(gateway).chain(more.iter().map(|&text| text.to_owned())).chain([route]).collect()
    };
    for (what, listener, grant, expected) in [
        (
            "HTTP",
            json!({"protocol": "HTTP"}),
            None,
            refused(&["edge tls: Accepted=False/UnsupportedProtocol"]),
        ),
        (
            "Terminate",
            json!({"tls": {"mode": "Terminate"}}),
            None,
            refused(&["edge tls: Accepted=False/UnsupportedValue"]),
        ),
        (
            "a mode that is left out is Terminate",
            json!({"tls": null}),
            None,
            refused(&["edge tls: Accepted=False/UnsupportedValue"]),
        ),
        ("a closed port", json!({"port": 444}), None, refused(&["edge tls: Accepted=False/PortUnavailable"])),
        (
            "a certificate that is no Secret",
            terminated(json!({"name": "cert", "kind": "ConfigMap"})),
            None,
            refused(&[
                "edge tls: Accepted=False/UnsupportedValue",
                "edge tls: ResolvedRefs=False/InvalidCertificateRef",
            ]),
        ),
        (
            "a certificate of another namespace",
            terminated(foreign.clone()),
            None,
            refused(&[
                "edge tls: Accepted=False/UnsupportedValue",
                "edge tls: ResolvedRefs=False/RefNotPermitted",
            ]),
        ),
        (
            "a permitted certificate",
            terminated(foreign.clone()),
            Some(&grants[0]),
            refused(&[
                "edge tls: Accepted=False/UnsupportedValue",
                "edge tls: ResolvedRefs=False/InvalidCertificateRef",
            ]),
        ),
        (
            "a certificate that is permitted by name",
            terminated(foreign.clone()),
            Some(&grants[1]),
            refused(&[
                "edge tls: Accepted=False/UnsupportedValue",
                "edge tls: ResolvedRefs=False/InvalidCertificateRef",
            ]),
        ),
        (
            "a grant for another certificate",
            terminated(foreign.clone()),
            Some(&grants[2]),
            refused(&[
                "edge tls: Accepted=False/UnsupportedValue",
                "edge tls: ResolvedRefs=False/RefNotPermitted",
            ]),
        ),
        (
            "a grant for another namespace",
            terminated(foreign),
            Some(&grants[3]),
            refused(&[
                "edge tls: Accepted=False/UnsupportedValue",
                "edge tls: ResolvedRefs=False/RefNotPermitted",
            ]),
        ),
        (
            "kinds that cannot be attached",
            json!({"allowedRoutes": {"namespaces": {"from": "All"}, "kinds": [{"kind": "HTTPRoute"}]}}),
            None,
            vec![
                "edge tls: ResolvedRefs=False/InvalidRouteKinds".to_owned(),
                "TLSRoute shop/web: Accepted=False/NotAllowedByListeners".to_owned(),
            ],
        ),
        (
            "one kind that can be attached",
            json!({"allowedRoutes": {"namespaces": {"from": "All"}, "kinds": [{"kind": "HTTPRoute"}, {"kind": "TLSRoute"}]}}),
            None,
            vec!["edge tls: ResolvedRefs=False/InvalidRouteKinds".to_owned(), "edge tls: 1".to_owned()],
        ),
    ] {
        let mut world = World::new(&[edge(listener), route("shop/web", &["a.test"], web())]);
        grant.into_iter().for_each(|grant| world.put(grant));
        assert_eq!(world.told(), expected, "{what}");
    }
}

#[test]
fn some_listeners_may_be_invalid_and_the_first_of_two_in_conflict_is_served() {
    let listeners = json!([
        listener("tls", json!({})),
        listener("http", json!({"protocol": "HTTP", "port": 8443})),
        listener("same", json!({})),
        listener("raw", json!({"protocol": "TCP"})),
        listener("named", json!({"hostname": "b.test"})),
    ]);
    let mut world =
        World::new(&[gateway("infra/edge", 1, listeners), route("shop/web", &["a.test", "b.test"], web())]);
    assert_eq!(
        world.told(),
        [
            "Gateway infra/edge: Accepted=True/ListenersNotValid",
            "edge http: Accepted=False/UnsupportedProtocol",
            "edge same: Accepted=False/HostnameConflict",
            "edge same: Conflicted=True/HostnameConflict",
            "edge raw: Accepted=False/ProtocolConflict",
            "edge raw: Conflicted=True/ProtocolConflict",
            "edge tls: 1",
            "edge named: 1",
        ]
    );
    assert_eq!(world.tls("web"), format!("a.test at :443, b.test at :443 -> {WEB}"));
}

#[test]
fn of_gateways_that_share_a_place_the_oldest_has_its_protocol() {
    let raw = |key, day| gateway(key, day, json!([listener("raw", json!({"protocol": "TCP"}))]));
    let mut world = World::new(&[edge(json!({})), raw("infra/late", 2), raw("infra/apart", 3)]);
    world.put(&object(
        "Gateway",
        "infra/apart",
        3,
        json!({"gatewayClassName": "isthmus",
        "addresses": [{"type": "IPAddress", "value": "127.0.0.7"}],
        "listeners": [listener("raw", json!({"protocol": "TCP"}))]}),
    ));
    assert_eq!(
        world.told(),
        [
            "Gateway infra/late: Accepted=False/ListenersNotValid",
            "late raw: Accepted=False/ProtocolConflict",
            "late raw: Conflicted=True/ProtocolConflict",
        ]
    );
    let tcp =
        json!({"parentRefs": [{"namespace": "infra", "name": "apart"}], "rules": [{"backendRefs": web()}]});
    world.put(&object("TCPRoute", "shop/raw", 1, tcp));
    assert_eq!(world.told().last().map(String::as_str), Some("apart raw: 1"));
    assert_eq!(world.leads(RouteKind::Tcp, "shop", "raw"), format!("all at 127.0.0.7:443 -> {WEB}"));
}

#[test]
fn a_class_that_no_gateway_serves_says_so_and_the_decision_of_another_release_stays() {
    let class = |name: &str, reason: &str| {
        json!({"kind": "GatewayClass", "metadata": {"name": name}, "spec": {"controllerName": "isthmus.io/gateway-controller"},
            "status": {"conditions": [{"type": "Accepted", "status": "Unknown", "reason": reason}]}})
    };
    let mut world = World::new(&[class("typo", "Pending"), class("second", "Accepted")]);
    let not_served = ["class typo: Accepted=False/NotServed"];
    assert_eq!(world.told(), not_served);
    world.put(&class("typo", "NotServed"));
    assert_eq!(world.told(), not_served, "its status still follows the generation");
    world.put(&class("typo", "Accepted"));
    assert!(world.told().is_empty());
}

#[test]
fn a_listener_lists_the_kinds_of_routes_that_it_supports() {
    let kinds = |more: Value| {
        let mut world = World::new(&[gateway("infra/edge", 1, json!([listener("tls", more)]))]);
        world.told();
        let parent = world.api.parents.values().next().expect("the Gateway");
        parent.listeners[0].kinds.iter().map(|kind| kind.text()).collect::<Vec<_>>()
    };
    assert_eq!(kinds(json!({})), ["TLSRoute"]);
    assert_eq!(kinds(json!({"protocol": "TCP"})), ["TCPRoute"]);
    assert!(kinds(json!({"protocol": "HTTP"})).is_empty());
    assert!(kinds(json!({"tls": {"mode": "Terminate"}})).is_empty());
}

#[test]
fn each_gateway_without_an_address_has_one_of_the_pool_and_keeps_it() {
    let tls = || json!([listener("tls", json!({}))]);
    let with = |key, day, address: &str| {
        let addresses = json!([{"type": "IPAddress", "value": address}]);
        let spec = json!({"gatewayClassName": "isthmus", "addresses": addresses, "listeners": tls()});
        object("Gateway", key, day, spec)
    };
    let mut world = World::new(&[
        gateway("infra/young", 4, tls()),
        gateway("infra/old", 1, tls()),
        gateway("infra/last", 5, tls()),
        // An address of the pool that a Gateway requests is that Gateway's, whatever its age; an empty one is left to the pool.
        with("infra/fixed", 6, "127.0.7.2"),
        with("infra/empty", 3, ""),
        with("infra/shared", 6, "192.0.2.1"),
    ]);
    world.spec.pool = vec!["127.0.7.0/29".parse().expect("a network")];
    let addresses = |world: &mut World| {
        world.told();
        let parents = world.api.parents.iter().filter(|((_, key), _)| *key.namespace == *"infra");
        let text = |shown: &Host| shown.to_string();
        let all = parents.map(|((_, key), parent)| {
            let shown: Vec<String> = parent.addresses.iter().map(text).collect();
            (key.name.to_string(), shown.join(", "))
        });
        all.collect::<BTreeMap<String, String>>()
    };
    let first = addresses(&mut world);
    let expected = [
        ("old", "127.0.7.1"),
        ("fixed", "127.0.7.2"),
        ("empty", "127.0.7.3"),
        ("young", "127.0.7.4"),
        ("last", "127.0.7.5"),
        ("shared", "192.0.2.1"),
    ];
    for (name, address) in expected {
        assert_eq!(first[name], address, "{name}");
    }
    // A Gateway keeps the address of its status, and a new one gets what is free. An address of no pool is not kept.
    let shows = |key, day, address: &str| {
        let mut object = gateway(key, day, tls());
        object["status"] = json!({"addresses": [{"type": "IPAddress", "value": address}]});
        object
    };
    world.put(&shows("infra/young", 4, "127.0.7.4"));
    world.put(&shows("infra/last", 5, "192.0.2.9"));
    world.put(&json!({"kind": "Gateway", "metadata": {"namespace": "infra", "name": "old"},
        "spec": {"gatewayClassName": "another"}}));
    let second = addresses(&mut world);
    assert_eq!((&*second["young"], &*second["empty"]), ("127.0.7.4", "127.0.7.1"));
    assert_eq!(second["last"], "127.0.7.3");
    // Where none is left, the youngest has none, and says so.
    world.spec.pool = vec!["127.0.7.4/31".parse().expect("a network")];
    world.tables.dirty.gateway_api.is_all = true;
    let told = world.told();
    assert_eq!(
        told,
        [
            "Gateway infra/last: Programmed=False/AddressNotAssigned",
            "last tls: Programmed=False/AddressNotAssigned"
        ]
    );
    // An address that the host does not have is shown, and no connection can reach it.
    world.spec.pool = vec!["198.51.100.0/24".parse().expect("a network")];
    world.tables.dirty.gateway_api.is_all = true;
    assert!(world.told().contains(&"Gateway infra/young: Programmed=False/AddressNotUsable".to_owned()));
}

#[test]
fn classes_and_gateways_of_others_and_those_with_parameters_are_not_served() {
    let class = |spec: Value| json!({"kind": "GatewayClass", "metadata": {"name": "isthmus"}, "spec": spec});
    let ours = "isthmus.io/gateway-controller";
    let objects = [edge(json!({})), route("shop/web", &["a.test"], web())];
    for (what, class, expected) in [
        ("another controller", class(json!({"controllerName": "example.com/other"})), &[][..]),
        (
            "parameters",
            class(json!({"controllerName": ours, "parametersRef": {"name": "x"}})),
            &["class isthmus: Accepted=False/InvalidParameters"],
        ),
    ] {
        let mut world = World::new(&objects);
        world.put(&class);
        assert_eq!(
            (world.told(), world.tls("web").as_str()),
            (expected.iter().map(|&t| t.to_owned()).collect(), "nowhere"),
            "{what}"
        );
    }
    let of = |spec: Value| {
        let mut gateway = edge(json!({}));
        for (key, value) in spec.as_object().expect("an object") {
            gateway["spec"][key] = value.clone();
        }
        gateway
    };
    for (what, gateway, expected, leads) in [
        ("another class", of(json!({"gatewayClassName": "other"})), &[][..], "nowhere".to_owned()),
        (
            "parameters",
            of(json!({"infrastructure": {"parametersRef": {"name": "x"}}})),
            &["Gateway infra/edge: Accepted=False/InvalidParameters", "edge tls: 1"],
            "nowhere".to_owned(),
        ),
        (
            "an address of the host",
            of(json!({"addresses": [{"value": "127.0.0.9"}]})),
            &["edge tls: 1"],
            format!("a.test at 127.0.0.9:443 -> {WEB}"),
        ),
        (
            "an address of the config",
            of(json!({"addresses": [{"type": "IPAddress", "value": "192.0.2.1"}]})),
            &["edge tls: 1"],
            format!("a.test at :443 -> {WEB}"),
        ),
        (
            "an address of neither",
            of(json!({"addresses": [{"type": "IPAddress", "value": "192.0.2.7"}]})),
            &[
                "Gateway infra/edge: Programmed=False/AddressNotUsable",
                "edge tls: Programmed=False/AddressNotUsable",
                "edge tls: 1",
            ],
            "nowhere".to_owned(),
        ),
        (
            "an unknown type of address",
            of(json!({"addresses": [{"type": "example.com/x", "value": "y"}]})),
            &["Gateway infra/edge: Accepted=False/UnsupportedAddress", "edge tls: 1"],
            "nowhere".to_owned(),
        ),
    ] {
        let mut world = World::new(&[gateway, objects[1].clone()]);
        assert_eq!(
            (world.told(), world.tls("web")),
            (expected.iter().map(|&t| t.to_owned()).collect(), leads),
            "{what}"
        );
    }
}

#[test]
fn a_listener_set_adds_listeners_to_a_gateway_that_allows_it() {
    let set = object(
        "ListenerSet",
        "shop/more",
        2,
        json!({"parentRef": {"namespace": "infra", "name": "edge"},
        "listeners": [listener("own", json!({"hostname": "*.shop.test"})), listener("tls", json!({}))]}),
    );
    let allowing = |from: Value| {
        let mut gateway = edge(json!({}));
        gateway["spec"]["allowedListeners"] = json!({"namespaces": from});
        gateway
    };
    let to_set = route_to(
        "shop/web",
        json!({"kind": "ListenerSet", "name": "more"}),
        &["a.shop.test", "a.test"],
        web(),
    );
    let mut world = World::new(&[allowing(json!({"from": "All"})), set.clone(), to_set.clone()]);
    assert_eq!(
        world.told(),
        [
            "ListenerSet shop/more: Accepted=True/ListenersNotValid",
            "more tls: Accepted=False/HostnameConflict",
            "more tls: Conflicted=True/HostnameConflict",
            "more own: 1",
        ]
    );
    assert_eq!(world.tls("web"), format!("a.shop.test at :443 -> {WEB}"));
    let id = (ParentKind::Gateway, ObjectKey { namespace: "infra".into(), name: "edge".into() });
    assert_eq!(world.api.parents[&id].sets, 1);
    let mut barred = World::new(&[edge(json!({})), set, to_set]);
    assert_eq!(
        barred.told(),
        [
            "ListenerSet shop/more: Accepted=False/NotAllowed",
            "TLSRoute shop/web: Accepted=False/NoMatchingParent",
        ]
    );
}
