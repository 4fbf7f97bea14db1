//! Rows about classes, Gateways, ListenerSets and their listeners.

use super::*;
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;

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
fn some_listeners_may_be_invalid_and_of_two_in_conflict_neither_is_served() {
    let tls = |name: &str, hostname: &str| listener(name, json!({"hostname": hostname}));
    let raw = |name: &str| listener(name, json!({"protocol": "TCP"}));
    let apart = || listener("apart", json!({"port": 8443}));
    for (what, listeners, conflicted, attached) in [
        ("one of another port is served", json!([tls("a", ""), raw("b"), apart()]), "a b", "apart"),
        ("in the other order", json!([raw("b"), apart(), tls("a", "")]), "b a", "apart"),
        (
            "two of one protocol beside one of another",
            json!([tls("a", "a.test"), tls("b", "b.test"), raw("c")]),
            "a b c",
            "",
        ),
        ("equal host names", json!([tls("a", "a.test"), tls("b", "a.test"), tls("c", "*.test")]), "a b", "c"),
        ("three equal host names", json!([tls("a", ""), tls("b", ""), tls("c", "")]), "a b c", ""),
        ("two for TCP", json!([raw("a"), raw("b"), apart()]), "a b", "apart"),
        (
            "host names of which one is under the other",
            json!([tls("a", "*.test"), tls("b", "a.test")]),
            "",
            "a b",
        ),
        ("no host name and some", json!([tls("a", ""), tls("b", "a.test")]), "", "a b"),
        ("HTTP beside TLS", json!([tls("a", ""), listener("h", json!({"protocol": "HTTP"}))]), "", "a"),
    ] {
        let mut world =
            World::new(&[gateway("infra/edge", 1, listeners), route("shop/web", &["a.test"], web())]);
        let told = world.told();
        let parent = world.api.parents.values().next().expect("the Gateway");
        let names = |is_wanted: &dyn Fn(&Listener) -> bool| {
            let listeners = parent.listeners.iter().filter(|listener| is_wanted(listener));
            listeners.map(|listener| listener.name.as_str()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&|listener| listener.conflict.is_some()), conflicted, "{what}");
        assert!(parent.listeners.iter().all(|one| one.conflict.is_none() || one.places.is_empty()), "{what}");
        let found: Vec<_> =
            told.iter().filter_map(|one| one.strip_prefix("edge ")?.strip_suffix(": 1")).collect();
        assert_eq!(found.join(" "), attached, "{what}");
        let is_invalid = told.iter().any(|one| one.contains("/ListenersNotValid"));
        assert_eq!(is_invalid, !conflicted.is_empty() || what.starts_with("HTTP"), "{what}");
    }
}

/// Returns the listeners that conflict with others, as `other/gw tls: HostnameConflict`, and the Gateways that the messages name.
fn conflicts(world: &mut World) -> Vec<String> {
    world.renew();
    let mut found = Vec::new();
    for ((_, key), parent) in &world.api.parents {
        for listener in &parent.listeners {
            let Some(Verdict { reason, message, .. }) = &listener.conflict else { continue };
            assert!(!listener.accepted.is_true && listener.places.is_empty(), "{message}");
            let other =
                message.strip_prefix("Gateway ").and_then(|rest| rest.split_once(',')).expect("its name").0;
            found.push(format!("{key} {}: {reason} {other}", listener.name));
        }
    }
    found
}

#[test]
fn a_listener_that_an_older_one_of_another_namespace_excludes_says_with_whom_it_conflicts() {
    let tls = |key: &str, day: u8, hostname: &str| {
        gateway(key, day, json!([listener("tls", json!({"hostname": hostname}))]))
    };
    let raw = |key: &str, day: u8| gateway(key, day, json!([listener("raw", json!({"protocol": "TCP"}))]));
    let at = |mut gateway: Value, address: &str| {
        gateway["spec"]["addresses"] = json!([{"type": "IPAddress", "value": address}]);
        gateway
    };
    let set = |key: &str, day: u8, hostname: &str| {
        object(
            "ListenerSet",
            key,
            day,
            json!({"parentRef": {"namespace": "infra", "name": "edge"},
            "listeners": [listener("own", json!({"hostname": hostname}))]}),
        )
    };
    let open = |mut gateway: Value| {
        gateway["spec"]["allowedListeners"] = json!({"namespaces": {"from": "All"}});
        gateway
    };
    let by_name = "other/gw tls: HostnameConflict infra/edge";
    for (what, objects, expected) in [
        ("an equal name", vec![tls("infra/edge", 1, "a.test"), tls("other/gw", 2, "a.test")], &[by_name][..]),
        ("a name under it", vec![tls("infra/edge", 1, "*.test"), tls("other/gw", 2, "a.b.test")], &[by_name]),
        (
            "a suffix under it",
            vec![tls("infra/edge", 1, "*.test"), tls("other/gw", 2, "*.b.test")],
            &[by_name],
        ),
        ("an equal suffix", vec![tls("infra/edge", 1, "*.test"), tls("other/gw", 2, "*.test")], &[by_name]),
        (
            "of the same age, by name",
            vec![tls("infra/edge", 1, "*.test"), tls("other/gw", 1, "*.test")],
            &[by_name],
        ),
        (
            "a wider suffix is shared",
            vec![tls("infra/edge", 1, "*.b.test"), tls("other/gw", 2, "*.test")],
            &[],
        ),
        ("and without a host name", vec![tls("infra/edge", 1, "*.test"), tls("other/gw", 2, "")], &[]),
        ("under one without a host name", vec![tls("infra/edge", 1, ""), tls("other/gw", 2, "a.test")], &[]),
        ("two without a host name", vec![tls("infra/edge", 1, ""), tls("other/gw", 2, "")], &[]),
        ("another suffix", vec![tls("infra/edge", 1, "*.a.test"), tls("other/gw", 2, "*.b.test")], &[]),
        ("the suffix itself", vec![tls("infra/edge", 1, "*.a.test"), tls("other/gw", 2, "a.test")], &[]),
        ("in one namespace", vec![tls("infra/edge", 1, "*.test"), tls("infra/gw", 2, "a.test")], &[]),
        (
            "at another address",
            vec![tls("infra/edge", 1, "*.test"), at(tls("other/gw", 2, "a.test"), "127.0.0.9")],
            &[],
        ),
        (
            "the third of three",
            vec![tls("infra/edge", 1, "*.test"), tls("shop/gw", 2, ""), tls("other/gw", 3, "a.test")],
            &[by_name],
        ),
        (
            "one that lost excludes nobody",
            vec![tls("infra/edge", 1, "a.test"), tls("shop/gw", 2, "a.test"), tls("other/gw", 3, "b.test")],
            &["shop/gw tls: HostnameConflict infra/edge"],
        ),
        (
            "a set of the Gateway is as old as itself",
            vec![
                open(tls("infra/edge", 1, "")),
                set("shop/set", 3, "*.b.test"),
                tls("other/gw", 2, "*.b.test"),
            ],
            &["shop/set own: HostnameConflict other/gw"],
        ),
        (
            "and excludes younger Gateways",
            vec![
                open(tls("infra/edge", 1, "")),
                set("shop/set", 2, "*.b.test"),
                tls("other/gw", 3, "x.b.test"),
            ],
            &[by_name],
        ),
        (
            "TCP after TLS",
            vec![tls("infra/edge", 1, ""), raw("other/gw", 2)],
            &["other/gw raw: ProtocolConflict infra/edge"],
        ),
        (
            "TCP after TLS with a host name",
            vec![tls("infra/edge", 1, "a.test"), raw("other/gw", 2)],
            &["other/gw raw: ProtocolConflict infra/edge"],
        ),
        (
            "TLS after TCP",
            vec![raw("infra/edge", 1), tls("other/gw", 2, "a.test")],
            &["other/gw tls: ProtocolConflict infra/edge"],
        ),
        (
            "TCP after TCP",
            vec![raw("infra/edge", 1), raw("other/gw", 2)],
            &["other/gw raw: ProtocolConflict infra/edge"],
        ),
        ("TCP after TCP of one namespace", vec![raw("infra/edge", 1), raw("infra/gw", 2)], &[]),
        ("TCP at another address", vec![tls("infra/edge", 1, ""), at(raw("other/gw", 2), "127.0.0.9")], &[]),
    ] {
        assert_eq!(conflicts(&mut World::new(&objects)), expected, "{what}");
    }
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
        // An address of the pool may be requested; an empty one is left to the pool.
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

/// Returns the addresses of each Gateway, or the reason why it has none, as `infra/old 127.0.0.7` or `infra/late AddressNotUsable`.
fn had(world: &mut World) -> Vec<String> {
    world.tables.dirty.gateway_api.is_all = true;
    world.renew();
    let gateways = world.api.parents.iter().filter(|((kind, _), _)| *kind == ParentKind::Gateway);
    let text = |((_, key), parent): (&ParentId, &Parent)| {
        let places = || parent.listeners.iter().flat_map(|listener| &listener.places);
        let why = match (&parent.accepted, &parent.unreachable) {
            (accepted, _) if !accepted.is_true => Some(accepted.reason),
            (_, Some(why)) => Some(why.reason),
            (_, None) => None,
        };
        if let Some(why) = why {
            assert_eq!(places().count(), 0, "{key} is served nowhere");
            return format!("{key} {why}");
        }
        let places: Vec<String> = places().map(ToString::to_string).collect();
        format!("{key} {}", places.join(" "))
    };
    gateways.map(text).collect()
}

#[test]
fn an_address_belongs_to_the_oldest_gateway_that_may_request_it() {
    let with = |key: &str, day: u8, addresses: &[&str], shown: &[&str]| {
        let list = |all: &[&str]| {
            all.iter().map(|value| json!({"type": "IPAddress", "value": value})).collect::<Vec<_>>()
        };
        let mut gateway = gateway(key, day, json!([listener("tls", json!({}))]));
        gateway["spec"]["addresses"] = list(addresses).into();
        gateway["status"] = json!({"addresses": list(shown)});
        gateway
    };
    let pod = json!({"kind": "Pod", "metadata": {"namespace": "infra", "name": "isthmus-0", "uid": "00000000-0000-4000-8000-000000000001"},
        "status": {"phase": "Running", "podIP": "127.0.0.50", "podIPs": [{"ip": "127.0.0.50"}]}});
    let (none, edge) = (&[][..], with("infra/edge", 1, &[], &[]));
    for (what, requestable, pool, objects, expected) in [
        (
            "nothing may be requested",
            "",
            "",
            vec![edge.clone(), with("other/evil", 2, &["127.0.0.1"], none)],
            &["infra/edge :443", "other/evil AddressNotUsable"][..],
        ),
        (
            "also not beside one of the config",
            "",
            "",
            vec![edge.clone(), with("other/evil", 2, &["192.0.2.1", "127.0.0.1"], none)],
            &["infra/edge :443", "other/evil AddressNotUsable"],
        ),
        (
            "an address elsewhere and one of the host",
            "127.0.0.0/24",
            "",
            vec![edge.clone(), with("other/evil", 2, &["203.0.113.77", "127.0.0.1"], none)],
            &["infra/edge :443", "other/evil AddressNotUsable"],
        ),
        (
            "one of the config is as none",
            "",
            "",
            vec![edge, with("other/gw", 2, &["192.0.2.1"], none)],
            &["infra/edge :443", "other/gw :443"],
        ),
        (
            "one of the config that is also requestable",
            "192.0.2.0/24",
            "",
            vec![with("other/gw", 2, &["192.0.2.1"], none)],
            &["other/gw :443"],
        ),
        (
            "outside the block",
            "127.0.1.0/24",
            "",
            vec![with("other/gw", 2, &["127.0.0.7"], none)],
            &["other/gw AddressNotUsable"],
        ),
        (
            "inside it",
            "127.0.0.0/24",
            "",
            vec![with("other/gw", 2, &["127.0.0.7"], none)],
            &["other/gw 127.0.0.7:443"],
        ),
        (
            "the oldest has it",
            "127.0.0.0/24",
            "",
            vec![with("infra/old", 1, &["127.0.0.7"], none), with("other/late", 2, &["127.0.0.7"], none)],
            &["infra/old 127.0.0.7:443", "other/late AddressNotUsable"],
        ),
        (
            "of the same age, the first by name",
            "127.0.0.0/24",
            "",
            vec![with("infra/old", 1, &["127.0.0.7"], none), with("infra/other", 1, &["127.0.0.7"], none)],
            &["infra/old 127.0.0.7:443", "infra/other AddressNotUsable"],
        ),
        (
            "a Gateway keeps the address of its status",
            "127.0.0.0/24",
            "",
            vec![
                with("infra/old", 1, &["127.0.0.7"], none),
                with("shop/has", 2, &["127.0.0.7"], &["127.0.0.7"]),
            ],
            &["infra/old AddressNotUsable", "shop/has 127.0.0.7:443"],
        ),
        (
            "not one that it does not request",
            "127.0.0.0/24",
            "",
            vec![
                with("infra/old", 1, &["127.0.0.7"], none),
                with("shop/had", 2, &["127.0.0.8"], &["127.0.0.7"]),
            ],
            &["infra/old 127.0.0.7:443", "shop/had 127.0.0.8:443"],
        ),
        (
            "one of two is another's",
            "127.0.0.0/24",
            "",
            vec![
                with("infra/old", 1, &["127.0.0.7"], none),
                with("other/two", 2, &["127.0.0.8", "127.0.0.7"], none),
            ],
            &["infra/old 127.0.0.7:443", "other/two AddressNotUsable"],
        ),
        (
            "an address that the pool has given",
            "",
            "127.0.0.8/30",
            vec![with("infra/a", 1, &[], &["127.0.0.9"]), with("other/evil", 2, &["127.0.0.9"], none)],
            &["infra/a 127.0.0.9:443", "other/evil AddressNotUsable"],
        ),
        (
            "also where the request is older",
            "",
            "127.0.0.8/30",
            vec![with("infra/a", 2, &[], &["127.0.0.9"]), with("other/evil", 1, &["127.0.0.9"], none)],
            &["infra/a 127.0.0.9:443", "other/evil AddressNotUsable"],
        ),
        (
            "the pool gives what nobody requests",
            "",
            "127.0.0.8/30",
            vec![with("infra/a", 2, &[], none), with("other/b", 1, &["127.0.0.9"], none)],
            &["infra/a 127.0.0.10:443", "other/b 127.0.0.9:443"],
        ),
        (
            "an address of the pod itself",
            "127.0.0.0/24",
            "",
            vec![with("other/evil", 1, &["127.0.0.50"], none)],
            &["other/evil AddressNotUsable"],
        ),
        (
            "not even from the pool",
            "",
            "127.0.0.50/31",
            vec![with("infra/a", 1, &[], none), with("infra/b", 2, &[], none)],
            &["infra/a 127.0.0.51:443", "infra/b AddressNotAssigned"],
        ),
        (
            "an address that the host has not",
            "198.51.100.0/24",
            "",
            vec![with("infra/a", 1, &["198.51.100.9"], none)],
            &["infra/a AddressNotUsable"],
        ),
    ] {
        let mut world = World::new(&objects);
        world.put(&pod);
        let net =
            |text: &str| (!text.is_empty()).then(|| text.parse().expect("a network")).into_iter().collect();
        (world.spec.requestable, world.spec.pool) = (net(requestable), net(pool));
        assert_eq!(had(&mut world), expected, "{what}");
    }
}

#[test]
fn only_the_namespaces_that_may_have_gateways_have_some() {
    let gateways =
        ["infra/a", "shop/b", "other/c"].map(|key| gateway(key, 1, json!([listener("tls", json!({}))])));
    let choice = |only: &[&str], labels: &[(&str, &str)]| NamespaceChoice {
        only: only.iter().map(|&name| name.into()).collect(),
        except: Vec::new(),
        labels: labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
    };
    let served = |allowed: &str| {
        let all = ["infra/a", "other/c", "shop/b"];
        all.map(|key| format!("{key} {}", if allowed.contains(key) { ":443" } else { "NotAllowed" })).to_vec()
    };
    for (from, allowed) in [
        (NamespaceChoice::default(), "infra/a shop/b other/c"),
        (choice(&["infra"], &[]), "infra/a"),
        (choice(&["infra", "shop"], &[]), "infra/a shop/b"),
        (choice(&[], &[("team", "shop")]), "shop/b"),
        (choice(&["infra"], &[("team", "shop")]), ""),
        (choice(&["nowhere"], &[]), ""),
    ] {
        let mut world = World::new(&gateways);
        world.spec.from = from;
        assert_eq!(had(&mut world), served(allowed), "{allowed}");
    }
    // A Gateway that is not accepted owns no address, and excludes no listener.
    let mut barred = gateway("other/c", 1, json!([listener("tls", json!({"hostname": "a.test"}))]));
    barred["spec"]["addresses"] = json!([{"value": "127.0.0.7"}]);
    let mut allowed = gateway("infra/a", 2, json!([listener("tls", json!({"hostname": "a.test"}))]));
    allowed["spec"]["addresses"] = json!([{"value": "127.0.0.7"}]);
    let mut world = World::new(&[barred, allowed]);
    world.spec.from = choice(&["infra"], &[]);
    assert_eq!(had(&mut world), ["infra/a 127.0.0.7:443", "other/c NotAllowed"]);
    let (_, refused) = world.api.parents.iter().find(|((_, key), _)| *key.name == *"c").expect("the Gateway");
    let status = status_of("isthmus", refused, |_| 0);
    let all = status.listeners.iter().flat_map(|listener| &listener.conditions).chain(&status.conditions);
    assert!(all.filter(|(kind, _)| *kind == "Programmed").all(|(_, verdict)| !verdict.is_true));
}

#[test]
fn a_request_that_was_served_before_is_named_with_the_line_that_permits_it() {
    let mut world = World::new(&[edge(json!({}))]);
    world.spec.requestable.clear();
    let notes = |world: &mut World| {
        world.tables.dirty.gateway_api.is_all = true;
        world.renew();
        world.api.notes()
    };
    assert!(notes(&mut world).is_empty());
    for number in 1..=7 {
        let mut gateway = gateway(&format!("infra/g{number}"), 2, json!([]));
        gateway["spec"]["addresses"] = json!([{"value": format!("127.0.0.{number}")}]);
        world.put(&gateway);
    }
    let found = notes(&mut world);
    assert_eq!(found.len(), 6, "{found:?}");
    assert!(
        found[0].starts_with("Gateway infra/g1 requests the address 127.0.0.1 of this host"),
        "{}",
        found[0]
    );
    assert!(found[0].ends_with("write `requestable: [127.0.0.1/32]` under gatewayApi"), "{}", found[0]);
    assert_eq!(found[5], "2 more Gateways request addresses that gatewayApi does not permit");
    world.spec.requestable = vec!["127.0.0.0/29".parse().expect("a network")];
    assert!(notes(&mut world).is_empty());
}

#[test]
fn the_addresses_of_a_gateway_are_those_of_the_gateways_own_service_too() {
    let mut world = World::new(&[gateway("infra/edge", 1, json!([listener("tls", json!({}))]))]);
    world.spec.service = Some("own".into());
    world.spec.addresses.clear();
    world.tables.spec = Arc::new(KubernetesSpec {
        gateway_api: Some(world.spec.clone()),
        ..KubernetesSpec::clone(&world.tables.spec)
    });
    let edge =
        Target::Parent((ParentKind::Gateway, ObjectKey { namespace: "infra".into(), name: "edge".into() }));
    let mut addresses = |service: Option<Value>| {
        if let Some(service) = service {
            world.put(&service);
        }
        world.renew();
        let status = &world.api.due[&edge].status;
        let (_, programmed) =
            status.conditions.iter().find(|(kind, _)| *kind == "Programmed").expect("has one");
        (status.addresses.clone(), programmed.message.clone())
    };
    let why = "Service n/own has no address of a load balancer and no external one";
    assert_eq!(addresses(None), (Vec::new(), why.to_owned()));
    let own = |external: Value, ingress: Value| {
        let mut own = service("n/own", json!({"ports": [{"port": 443}], "externalIPs": external}));
        own["status"] = json!({"loadBalancer": {"ingress": ingress}});
        Some(own)
    };
    assert_eq!(addresses(own(json!([]), json!([]))).1, why);
    let (found, programmed) =
        addresses(own(json!(["192.0.2.7"]), json!([{"hostname": "lb.test"}, {"ip": ""}])));
    assert_eq!(found, [("IPAddress", "192.0.2.7".to_owned()), ("Hostname", "lb.test".to_owned())]);
    assert_eq!(programmed, "connections are served");
    let mut foreign = own(json!(["192.0.2.8"]), json!([]));
    foreign.as_mut().expect("made")["metadata"]["namespace"] = "shop".into();
    assert_eq!(addresses(foreign).0.len(), 2, "a Service of another namespace");
}
