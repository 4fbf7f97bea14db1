//! Tables of Gateways and routes, asked through admission.

use crate::admit::{admit, readmit};
use crate::decision::{AdmissionRequest, Permit, Requested};
use crate::view::onward::Computed;
use isthmus_model::address::Bind;
use isthmus_model::reason::Reason;
use isthmus_model::service::{CallerKind, PortProtocol};
use isthmus_registry::change::Dirty;
use isthmus_registry::change::{Item, Key};
use isthmus_registry::gateway_api::{
    Claim, GatewayListener, GatewayPlaces, GatewayRoute, ListenerKey, Place, PlaceProtocol,
};
use isthmus_settings::backend::BackendPort;
use isthmus_settings::backend::{Backend, backend_of};
use isthmus_settings::listener::{Listener, ListenerProtocol};
use isthmus_settings::policy::Policy;
use isthmus_settings::route::Conditions;
use isthmus_settings::route::{Route, RouteName, RouteTarget};
use isthmus_settings::scope::SourceRule;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build::next;
use isthmus_snapshot::testing::{Mesh, endpoint, host_name, pattern, port, rule, service, shard};
use std::collections::BTreeMap;
use std::sync::Arc;

const EDGE: Place = Place { port: 443, address: None };

fn at(address: [u8; 4]) -> Place {
    Place { port: 443, address: Some(address.into()) }
}

fn to(name: &str, weight: u32) -> Backend {
    Backend { weight, to: Ok(BackendPort { hostname: host_name(name), port: 443 }) }
}

/// Returns a route that was created on this day of January.
fn route(object: &str, day: u8, claims: &[(Place, &str)], backends: Vec<Backend>) -> GatewayRoute {
    let claim = |(place, name): &(Place, &str)| Claim {
        place: *place,
        listener: ListenerKey::default(),
        name: Some(pattern(name)),
    };
    GatewayRoute {
        object: object.into(),
        created: format!("2026-01-{day:02}T00:00:00Z").into(),
        claims: claims.iter().map(claim).collect(),
        backends: backends.into(),
    }
}

fn places(object: &str, places: &[Place], protocol: PlaceProtocol) -> Item {
    let places = places.iter().map(|place| (*place, protocol)).collect();
    let listeners = Vec::new();
    Item::GatewayPlaces(GatewayPlaces { object: object.into(), generation: 1, places, listeners }.into())
}

fn key(owner: &str, name: &str) -> ListenerKey {
    ListenerKey { owner: owner.into(), name: pattern(name) }
}

/// Returns the Gateway of a namespace, which was created on this day of January, with listeners of these names.
fn gateway(owner: &str, day: u8, names: &[&str]) -> Item {
    let listener = |name: &&str| GatewayListener {
        place: EDGE,
        key: key(owner, name),
        created: format!("2026-01-{day:02}T00:00:00Z").into(),
    };
    let gateway = GatewayPlaces {
        object: format!("Gateway {owner}/{day}").into(),
        generation: 1,
        places: vec![(EDGE, PlaceProtocol::Tls)],
        listeners: names.iter().map(listener).collect(),
    };
    Item::GatewayPlaces(gateway.into())
}

/// Returns a route to a.mesh, which was created on this day, at listeners (owner and name) with its own names.
fn at_listeners(object: &str, day: u8, claims: &[(&str, &str, &str)]) -> Item {
    let claim = |(owner, listener, name): &(&str, &str, &str)| Claim {
        place: EDGE,
        listener: key(owner, listener),
        name: Some(pattern(name)),
    };
    let claims = claims.iter().map(claim).collect();
    Item::GatewayRoute(GatewayRoute { claims, ..route(object, day, &[], vec![to("a.mesh", 1)]) }.into())
}

/// Returns the object of the route that a name leads to, or the reason of the refusal.
fn leads(snapshot: &Snapshot, name: &str) -> String {
    asked(snapshot, None, name).trim_end_matches(" 10.0.0.1").to_owned()
}

/// Returns a mesh with the services a.mesh, b.mesh and c.mesh, whose endpoints are 10.0.0.1, 10.0.0.2 and 10.0.0.3, and with
/// listeners for the mesh and for Gateways.
fn mesh(items: Vec<Item>) -> Mesh {
    let of =
        |name: &str, host: &str| service(name, vec![port(443, PortProtocol::Tcp)], vec![endpoint(host, 1)]);
    let services = vec![of("a.mesh", "10.0.0.1"), of("b.mesh", "10.0.0.2"), of("c.mesh", "10.0.0.3")];
    let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", services)]);
    let listener = Listener::sni("gateway-443".into(), Bind::Any { port: 443 });
    let listeners = vec![
        Listener::sni("mesh".into(), Bind::Any { port: 15_443 }).into(),
        Listener { is_of_gateways: true, ..listener }.into(),
    ];
    mesh.policy = Policy { listeners, exports: vec![rule("*")], ..(*mesh.policy).clone() }.into();
    let shard = Arc::make_mut(&mut mesh.shards[0]);
    items.into_iter().for_each(|item| shard.put(item, &mut Dirty::default()));
    mesh
}

fn request<'a>(snapshot: &'a Snapshot, listener: &str, name: &'a str) -> AdmissionRequest<'a> {
    AdmissionRequest {
        listener: snapshot.listener(listener).expect("a listener"),
        requested: Requested::ServerName(Some(name.as_bytes())),
        source: None,
        alpn: None,
        identity: None,
        kind: CallerKind::default(),
        local: None,
        draw: Some(0),
        is_passed_on: false,
        far: Some(&Computed),
    }
}

/// Returns the object and the endpoint that a name leads to on the Gateways' port, or the reason of the refusal.
fn asked(snapshot: &Snapshot, address: Option<[u8; 4]>, name: &str) -> String {
    let request =
        AdmissionRequest { local: address.map(Into::into), ..request(snapshot, "gateway-443", name) };
    match admit(snapshot, &request, &mut ()) {
        Ok(admission) => {
            let address = admission.candidates.endpoints()[0].key.address;
            format!("{} {}", admission.matched.rule.expect("a rule"), address.ip())
        }
        Err(refusal) => refusal.reason.to_string(),
    }
}

#[test]
fn the_most_specific_name_wins_then_the_config_then_the_oldest_route() {
    let routes = [
        route("TLSRoute n/new", 2, &[(EDGE, "x.test")], vec![to("b.mesh", 1)]),
        route("TLSRoute n/old", 1, &[(EDGE, "x.test"), (EDGE, "y.test")], vec![to("a.mesh", 1)]),
        route("TLSRoute n/same-b", 3, &[(EDGE, "z.test")], vec![to("b.mesh", 1)]),
        route("TLSRoute n/same-a", 3, &[(EDGE, "z.test")], vec![to("c.mesh", 1)]),
        route("TLSRoute n/wide", 1, &[(EDGE, "*.test"), (EDGE, "*.deep.test")], vec![to("c.mesh", 1)]),
    ];
    let items = routes.into_iter().map(|route| Item::GatewayRoute(route.into()));
    let mut mesh = mesh(items.chain([places("Gateway n/g", &[EDGE], PlaceProtocol::Tls)]).collect());
    let target =
        |name: &str| RouteTarget::Service { hostname: host_name(name), port: 443, subset: "".into() };
    let own = |key: &str, name: &str| Arc::new(Route::new(RouteName::Name(pattern(key)), target(name)));
    let snapshot = mesh.snapshot();
    assert_eq!(asked(&snapshot, None, "x.test"), "TLSRoute n/old 10.0.0.1");
    assert_eq!(asked(&snapshot, None, "z.test"), "TLSRoute n/same-a 10.0.0.3");
    assert_eq!(asked(&snapshot, None, "w.test"), "TLSRoute n/wide 10.0.0.3");
    assert_eq!(asked(&snapshot, None, "test"), "sni_unknown");
    // Neither mesh names nor host names of services are known on a port of Gateways.
    assert_eq!(asked(&snapshot, None, "a.mesh"), "sni_unknown");
    assert_eq!(asked(&snapshot, None, "outbound_.443_._.a.mesh"), "sni_unknown");
    // Routes of Gateways apply on no other listener.
    let elsewhere = request(&snapshot, "mesh", "x.test");
    assert_eq!(admit(&snapshot, &elsewhere, &mut ()).expect_err("unknown").reason, Reason::SniUnknown);
    mesh.policy = Policy {
        routes: vec![own("y.test", "c.mesh"), own("*.test", "b.mesh"), own("q.test", "c.mesh")],
        ..(*mesh.policy).clone()
    }
    .into();
    let snapshot = mesh.snapshot();
    for (name, expected) in [
        ("x.test", "TLSRoute n/old 10.0.0.1"),
        ("y.test", "y.test 10.0.0.3"),
        ("w.test", "*.test 10.0.0.2"),
        ("w.deep.test", "TLSRoute n/wide 10.0.0.3"),
    ] {
        assert_eq!(asked(&snapshot, None, name), expected, "{name}");
    }
}

#[test]
fn an_address_of_a_gateway_has_the_routes_of_that_gateway_alone() {
    let (one, two) = ([127, 0, 0, 1], [127, 0, 0, 2]);
    let items = vec![
        Item::GatewayRoute(route("TLSRoute n/one", 1, &[(at(one), "x.test")], vec![to("a.mesh", 1)]).into()),
        Item::GatewayRoute(route("TLSRoute n/all", 1, &[(EDGE, "x.test")], vec![to("b.mesh", 1)]).into()),
        places("Gateway n/all", &[EDGE], PlaceProtocol::Tls),
        places("Gateway n/one", &[at(one)], PlaceProtocol::Tls),
        places("Gateway n/two", &[at(two)], PlaceProtocol::Tcp),
    ];
    let snapshot = mesh(items).snapshot();
    assert_eq!(asked(&snapshot, Some(one), "x.test"), "TLSRoute n/one 10.0.0.1");
    assert_eq!(asked(&snapshot, Some(two), "x.test"), "sni_unknown");
    assert_eq!(asked(&snapshot, Some([127, 0, 0, 3]), "x.test"), "TLSRoute n/all 10.0.0.2");
    let listener = snapshot.listener("gateway-443").expect("it");
    let protocol =
        |address: Option<[u8; 4]>| snapshot.gateway_api.protocol(listener, address.map(Into::into));
    assert_eq!(protocol(Some(two)), ListenerProtocol::Tcp);
    assert_eq!((protocol(Some(one)), protocol(None)), (ListenerProtocol::Sni, ListenerProtocol::Sni));
}

#[test]
fn a_backend_that_cannot_be_used_refuses_its_share() {
    let refused = Backend { weight: 1, to: Err("the Service n/no does not exist".into()) };
    let backends = vec![to("a.mesh", 2), refused, to("b.mesh", 0), to("c.mesh", 3)];
    let route = route("TLSRoute n/r", 1, &[(EDGE, "x.test")], backends);
    let gateway = places("Gateway n/g", &[EDGE], PlaceProtocol::Tls);
    let snapshot = mesh(vec![gateway, Item::GatewayRoute(route.into())]).snapshot();
    let mut shares: BTreeMap<String, u32> = BTreeMap::new();
    for draw in 0..600 {
        let request = AdmissionRequest { draw: Some(draw), ..request(&snapshot, "gateway-443", "x.test") };
        let answer = match admit(&snapshot, &request, &mut ()) {
            Ok(admission) => admission.candidates.endpoints()[0].key.address.ip().to_string(),
            Err(refusal) => refusal.reason.to_string(),
        };
        *shares.entry(answer).or_default() += 1;
    }
    let shares: Vec<(&str, u32)> = shares.iter().map(|(name, share)| (name.as_str(), *share)).collect();
    assert_eq!(shares, [("10.0.0.1", 200), ("10.0.0.3", 300), ("no_endpoints", 100)]);
    assert_eq!(backend_of(&[], 7), None);
    assert_eq!(backend_of(&[to("a.mesh", 0)], 7), None);
    // `explain` draws no number.
    let shown = AdmissionRequest { draw: None, ..request(&snapshot, "gateway-443", "x.test") };
    assert!(admit(&snapshot, &shown, &mut ()).is_ok());
}

#[test]
fn changes_of_routes_give_the_same_table_as_a_build_of_everything() {
    let old = route("TLSRoute n/old", 1, &[(EDGE, "x.test")], vec![to("a.mesh", 1)]);
    let new = route("TLSRoute n/new", 2, &[(EDGE, "x.test"), (EDGE, "*.y.test")], vec![to("b.mesh", 1)]);
    let mut mesh = mesh(vec![places("Gateway n/g", &[EDGE], PlaceProtocol::Tls)]);
    let mut snapshot = mesh.snapshot();
    let moved = route("TLSRoute n/new", 2, &[(at([127, 0, 0, 9]), "x.test")], vec![to("c.mesh", 1)]);
    let put = |route: &GatewayRoute| Ok(Item::GatewayRoute(Arc::new(route.clone())));
    let of_new = "TLSRoute n/new 10.0.0.2";
    for (change, expected) in [
        (put(&new), [of_new, of_new, of_new]),
        (put(&old), ["TLSRoute n/old 10.0.0.1", of_new, "TLSRoute n/old 10.0.0.1"]),
        (Err(Key::GatewayRoute("TLSRoute n/old".into())), [of_new, of_new, of_new]),
        // The address becomes one of a Gateway that has no routes.
        (
            Ok(places("Gateway n/h", &[at([127, 0, 0, 9])], PlaceProtocol::Tls)),
            [of_new, of_new, "sni_unknown"],
        ),
        (put(&moved), ["sni_unknown", "sni_unknown", "TLSRoute n/new 10.0.0.3"]),
        (Err(Key::GatewayRoute("TLSRoute n/new".into())), ["sni_unknown"; 3]),
    ] {
        let mut dirty = Dirty::default();
        let shard = Arc::make_mut(&mut mesh.shards[0]);
        match &change {
            Ok(item) => shard.put(item.clone(), &mut dirty),
            Err(key) => shard.remove(key, &mut dirty),
        }
        assert!(!dirty.is_empty(), "{change:?}");
        snapshot = next(&snapshot, mesh.world(), &dirty).0;
        for snapshot in [&snapshot, &mesh.snapshot()] {
            let nine = Some([127, 0, 0, 9]);
            let found = [
                asked(snapshot, None, "x.test"),
                asked(snapshot, None, "a.y.test"),
                asked(snapshot, nine, "x.test"),
            ];
            assert_eq!(found, expected, "{change:?}");
        }
        // The same item again changes nothing.
        let mut dirty = Dirty::default();
        if let Ok(item) = change {
            Arc::make_mut(&mut mesh.shards[0]).put(item, &mut dirty);
        }
        assert!(dirty.is_empty());
    }
}

#[test]
fn a_connection_outlives_its_route_but_not_a_route_of_the_config_that_refuses_it() {
    let route = route("TLSRoute n/r", 1, &[(EDGE, "x.test")], vec![to("a.mesh", 1)]);
    let gateway = places("Gateway n/g", &[EDGE], PlaceProtocol::Tls);
    let mut mesh = mesh(vec![gateway, Item::GatewayRoute(route.into())]);
    let snapshot = mesh.snapshot();
    let mut asked = request(&snapshot, "gateway-443", "x.test");
    asked.source = Some([10, 0, 0, 9].into());
    let permit = admit(&snapshot, &asked, &mut ()).expect("admitted").permit;
    assert_eq!(permit, Permit::GatewayRoute);
    Arc::make_mut(&mut mesh.shards[0])
        .remove(&Key::GatewayRoute("TLSRoute n/r".into()), &mut Dirty::default());
    let after = mesh.snapshot();
    assert!(admit(&after, &asked, &mut ()).is_err() && readmit(&after, &asked, &permit));
    let target = RouteTarget::Service { hostname: host_name("a.mesh"), port: 443, subset: "".into() };
    let own = Route::new(RouteName::Name(pattern("x.test")), target);
    let from = vec!["192.0.2.0/24".parse().expect("a block")];
    let sources = SourceRule { from, ..SourceRule::EVERYONE };
    let own = Route { conditions: Conditions { sources, ..Conditions::default() }.into(), ..own };
    mesh.policy = Policy { routes: vec![own.into()], ..(*mesh.policy).clone() }.into();
    assert!(!readmit(&mesh.snapshot(), &asked, &permit));
}

#[test]
fn the_most_specific_listener_has_a_name_and_then_the_most_specific_name_as_the_route_has_it() {
    // One Gateway; the listener of a route, its own names, and its age decide.
    type Row<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, u8, &'a str, &'a str)], &'a [(&'a str, &'a str)]);
    let rows: &[Row<'_>] = &[
        (
            "a reserved name",
            &["*.example.com", "pay.example.com"],
            &[("a", 1, "*.example.com", "pay.example.com"), ("b", 2, "pay.example.com", "pay.example.com")],
            &[("pay.example.com", "b"), ("x.example.com", "sni_unknown")],
        ),
        (
            "a reserved name without a route",
            &["*.example.com", "pay.example.com"],
            &[("a", 1, "*.example.com", "*.example.com")],
            &[("pay.example.com", "sni_unknown"), ("x.example.com", "a")],
        ),
        (
            "a reserved suffix",
            &["*.example.com", "*.corp.example.com"],
            &[("a", 1, "*.example.com", "x.corp.example.com"), ("b", 2, "*.corp.example.com", "*.com")],
            &[("x.corp.example.com", "b"), ("corp.example.com", "sni_unknown")],
        ),
        (
            "a listener without a host name",
            &["*", "*.iso.test", "a.iso.test"],
            &[
                ("any", 1, "*", "a.iso.test"),
                ("any", 1, "*", "q.iso.test"),
                ("wild", 2, "*.iso.test", "*.iso.test"),
            ],
            &[("a.iso.test", "sni_unknown"), ("q.iso.test", "wild"), ("q.other.test", "sni_unknown")],
        ),
        (
            "the wider name is older, at a listener of one name",
            &["app.example.com"],
            &[("a", 1, "app.example.com", "*.example.com"), ("b", 2, "app.example.com", "app.example.com")],
            &[("app.example.com", "b"), ("x.example.com", "sni_unknown")],
        ),
        (
            "the wider suffix is older, at a listener of a suffix",
            &["*.foo.com"],
            &[("a", 1, "*.foo.com", "*.com"), ("b", 2, "*.foo.com", "*.foo.com")],
            &[("x.foo.com", "b"), ("x.y.foo.com", "b"), ("x.com", "sni_unknown")],
        ),
        (
            "equal names",
            &["*.foo.com"],
            &[("young", 2, "*.foo.com", "x.foo.com"), ("old", 1, "*.foo.com", "x.foo.com")],
            &[("x.foo.com", "old")],
        ),
        (
            "equal names and ages",
            &["*.foo.com"],
            &[("b", 1, "*.foo.com", "x.foo.com"), ("a", 1, "*.foo.com", "x.foo.com")],
            &[("x.foo.com", "a")],
        ),
        (
            "an exact name at a wide listener does not reach into a suffix",
            &["*.com", "*.foo.com", "*.bar.foo.com"],
            &[("wide", 1, "*.com", "x.bar.foo.com"), ("mid", 1, "*.foo.com", "x.bar.foo.com")],
            &[("x.bar.foo.com", "sni_unknown")],
        ),
        (
            "a route at two listeners has its name at the more specific one",
            &["*.com", "*.foo.com"],
            &[
                ("both", 2, "*.com", "x.foo.com"),
                ("both", 2, "*.foo.com", "x.foo.com"),
                ("wide", 1, "*.com", "x.foo.com"),
            ],
            &[("x.foo.com", "both")],
        ),
    ];
    type Claims<'a> = Vec<(&'a str, &'a str, &'a str)>;
    for (what, listeners, routes, expected) in rows {
        let mut by_object: BTreeMap<(&str, u8), Claims<'_>> = BTreeMap::new();
        for (object, day, listener, name) in *routes {
            by_object.entry((object, *day)).or_default().push(("n", listener, name));
        }
        let routes = by_object.iter().map(|((object, day), claims)| at_listeners(object, *day, claims));
        let snapshot = mesh(routes.chain([gateway("n", 1, listeners)]).collect()).snapshot();
        for (name, route) in *expected {
            assert_eq!(leads(&snapshot, name), *route, "{what}: {name}");
        }
    }
}

#[test]
fn a_gateway_of_another_namespace_takes_no_name_that_an_older_route_has_at_an_older_listener() {
    type Route<'a> = (&'a str, u8, &'a str, &'a str, &'a str);
    type Row<'a> = (&'a str, Vec<Item>, &'a [Route<'a>], &'a [(&'a str, &'a str)]);
    let rows: &[Row<'_>] = &[
        (
            "an older listener with a host name keeps its names from one without",
            vec![gateway("pay", 1, &["*.pay.test"]), gateway("other", 2, &["*"])],
            &[("p", 3, "pay", "*.pay.test", "*.pay.test"), ("o", 1, "other", "*", "card.pay.test")],
            &[("card.pay.test", "p"), ("x.pay.test", "p")],
        ),
        (
            "also without a route",
            vec![gateway("pay", 1, &["*.pay.test"]), gateway("other", 2, &["*"])],
            &[("o", 1, "other", "*", "card.pay.test")],
            &[("card.pay.test", "sni_unknown")],
        ),
        (
            "a younger listener does not take the name of an older route",
            vec![gateway("infra", 1, &["*"]), gateway("evil", 2, &["web.a.test"])],
            &[("web", 3, "infra", "*", "web.a.test"), ("evil", 4, "evil", "web.a.test", "web.a.test")],
            &[("web.a.test", "web")],
        ),
        (
            "nor a name under its wildcard",
            vec![gateway("infra", 1, &["*"]), gateway("evil", 2, &["web.a.test"])],
            &[("web", 3, "infra", "*", "*.a.test"), ("evil", 4, "evil", "web.a.test", "web.a.test")],
            &[("web.a.test", "web")],
        ),
        (
            "nor without a route",
            vec![gateway("infra", 1, &["*"]), gateway("evil", 2, &["*.a.test"])],
            &[("web", 3, "infra", "*", "web.a.test")],
            &[("web.a.test", "web"), ("x.a.test", "sni_unknown")],
        ),
        (
            "a younger route does not take a name from it",
            vec![gateway("infra", 1, &["*"]), gateway("team", 2, &["*.b.test"])],
            &[("late", 9, "infra", "*", "x.b.test"), ("team", 4, "team", "*.b.test", "*.b.test")],
            &[("x.b.test", "team")],
        ),
        (
            "of two listeners without a host name, the older route has a name, and its namespace the names below",
            vec![gateway("a", 1, &["*"]), gateway("b", 2, &["*"])],
            &[
                ("b-old", 3, "b", "*", "*.x.test"),
                ("a-mid", 4, "a", "*", "y.x.test"),
                ("b-new", 5, "b", "*", "y.x.test"),
                ("a-only", 6, "a", "*", "z.test"),
            ],
            &[("y.x.test", "b-new"), ("q.x.test", "b-old"), ("z.test", "a-only")],
        ),
        (
            "three namespaces",
            vec![gateway("a", 1, &["*"]), gateway("b", 2, &["*.x.test"]), gateway("c", 3, &["*"])],
            &[
                ("a", 5, "a", "*", "one.x.test"),
                ("b", 6, "b", "*.x.test", "*.x.test"),
                ("c", 4, "c", "*", "two.x.test"),
            ],
            &[("one.x.test", "a"), ("two.x.test", "b"), ("three.x.test", "b")],
        ),
        (
            "Gateways of one namespace are one",
            vec![gateway("a", 1, &["*"]), gateway("a", 2, &["pay.test"])],
            &[("wide", 3, "a", "*", "pay.test"), ("own", 4, "a", "pay.test", "pay.test")],
            &[("pay.test", "own")],
        ),
    ];
    for (what, gateways, routes, expected) in rows {
        let routes = routes.iter().map(|(object, day, owner, listener, name)| {
            at_listeners(object, *day, &[(owner, listener, name)])
        });
        let snapshot = mesh(routes.chain(gateways.iter().cloned()).collect()).snapshot();
        for (name, route) in *expected {
            assert_eq!(leads(&snapshot, name), *route, "{what}: {name}");
        }
    }
}

#[test]
fn a_wildcard_of_the_config_wins_over_names_under_it_only_where_its_route_lists_the_listener() {
    let target = || RouteTarget::Service { hostname: host_name("b.mesh"), port: 443, subset: "".into() };
    let own = |key: &str, listeners: &[&str]| {
        let listeners = listeners.iter().map(|&name| name.into()).collect();
        let conditions = Conditions { listeners, ..Conditions::default() }.into();
        Arc::new(Route { conditions, ..Route::new(RouteName::Name(pattern(key)), target()) })
    };
    let of = "gateway-443";
    for (what, config, route, listener, name, expected) in [
        (
            "a wildcard that lists it",
            own("*.a.test", &[of]),
            "x.a.test",
            "*",
            "x.a.test",
            "*.a.test 10.0.0.2",
        ),
        ("one of several", own("*.a.test", &["mesh", of]), "x.a.test", "*", "x.a.test", "*.a.test 10.0.0.2"),
        (
            "also at a narrower listener",
            own("*.a.test", &[of]),
            "x.a.test",
            "x.a.test",
            "x.a.test",
            "*.a.test 10.0.0.2",
        ),
        ("every name", own("*", &[of]), "x.a.test", "*", "x.a.test", "* 10.0.0.2"),
        ("a wildcard of all listeners", own("*.a.test", &[]), "x.a.test", "*", "x.a.test", "r 10.0.0.1"),
        (
            "a wildcard of another listener",
            own("*.a.test", &["mesh"]),
            "x.a.test",
            "*",
            "x.a.test",
            "r 10.0.0.1",
        ),
        (
            "and names that no route has",
            own("*.a.test", &[]),
            "x.a.test",
            "*",
            "y.a.test",
            "*.a.test 10.0.0.2",
        ),
        (
            "also of a listener without a route",
            own("*.a.test", &[]),
            "x.a.test",
            "*.a.test",
            "y.a.test",
            "*.a.test 10.0.0.2",
        ),
        ("an equal wildcard", own("*.a.test", &[]), "*.a.test", "*", "y.a.test", "*.a.test 10.0.0.2"),
        (
            "a name that the listener makes equal",
            own("*.a.test", &[]),
            "*.test",
            "*.a.test",
            "y.a.test",
            "*.a.test 10.0.0.2",
        ),
        (
            "a more specific wildcard",
            own("*.b.a.test", &[]),
            "*.a.test",
            "*",
            "y.b.a.test",
            "*.b.a.test 10.0.0.2",
        ),
        ("an equal name", own("x.a.test", &[]), "x.a.test", "x.a.test", "x.a.test", "x.a.test 10.0.0.2"),
        (
            "an equal name of another listener",
            own("x.a.test", &["mesh"]),
            "x.a.test",
            "*",
            "x.a.test",
            "r 10.0.0.1",
        ),
    ] {
        let mut mesh =
            mesh(vec![gateway("n", 1, &[listener]), at_listeners("r", 1, &[("n", listener, route)])]);
        mesh.policy = Policy { routes: vec![config], ..(*mesh.policy).clone() }.into();
        assert_eq!(asked(&mesh.snapshot(), None, name), expected, "{what}");
    }
    // The longest of the config's own wildcards applies.
    let routes = vec![own("*.test", &[of]), own("*.a.test", &[])];
    let mut mesh = mesh(vec![gateway("n", 1, &["*"]), at_listeners("r", 1, &[("n", "*", "x.a.test")])]);
    mesh.policy = Policy { routes, ..(*mesh.policy).clone() }.into();
    assert_eq!(asked(&mesh.snapshot(), None, "x.a.test"), "*.a.test 10.0.0.2");
}
