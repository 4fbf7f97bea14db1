//! Rows about names that several routes have, and about the number of routes.

use std::time::Duration;

use isthmus_model::name::NamePattern;
use isthmus_registry::gateway_api::{Claim, GatewayRoute, ListenerKey};

use super::super::names::Names;
use super::super::routes::Owners as _;
use super::*;

/// Returns the condition `Accepted` of a route, as `True the route is accepted`.
fn accepted(world: &World, key: &str) -> String {
    accepted_of(world, RouteKind::Tls, key)
}

fn accepted_of(world: &World, kind: RouteKind, key: &str) -> String {
    let (namespace, name) = split(key);
    let id = (kind, ObjectKey { namespace: namespace.into(), name: name.into() });
    let found = world.api.routes.get(&id).map(|found| found.status(&id, &world.api.names));
    let status = found.expect("a status");
    let (_, Verdict { is_true, reason, message }) = &status.parents[0].conditions[0];
    match is_true {
        true => format!("True {message}"),
        false => format!("{reason} {message}"),
    }
}

fn on_day(mut route: Value, day: u8) -> Value {
    route["metadata"]["creationTimestamp"] = format!("2026-01-{day:02}T00:00:00Z").into();
    route
}

#[test]
fn a_route_whose_names_belong_to_others_says_whose_they_are() {
    let listeners = json!([listener("any", json!({})), listener("pay", json!({"hostname": "pay.test"}))]);
    let any = |key: &str, day: u8, names: &[&str]| {
        let parent = json!({"namespace": "infra", "name": "edge", "sectionName": "any"});
        on_day(route_to(key, parent, names, web()), day)
    };
    let mut world = World::new(&[
        gateway("infra/edge", 1, listeners),
        any("shop/old", 1, &["a.test", "*.b.test"]),
        any("other/same", 2, &["a.test"]),
        any("other/some", 3, &["a.test", "c.test"]),
        any("other/under", 4, &["x.b.test"]),
        any("other/wild", 5, &["*.b.test"]),
        any("other/wide", 6, &["*.test"]),
        any("other/reserved", 7, &["pay.test"]),
    ]);
    world.renew();
    let whole = "True the route is accepted";
    for (key, expected) in [
        ("shop/old", whole.to_owned()),
        ("other/same", "HostnameConflict a.test belongs to TLSRoute shop/old".to_owned()),
        ("other/some", format!("{whole}, but a.test belongs to TLSRoute shop/old")),
        // A more specific name is the route's own, and so is what a wildcard has beside it.
        ("other/under", whole.to_owned()),
        ("other/wild", "HostnameConflict *.b.test belongs to TLSRoute shop/old".to_owned()),
        ("other/wide", whole.to_owned()),
        (
            "other/reserved",
            "HostnameConflict pay.test belongs to the listener pay.test of the namespace infra, which has no such route"
                .to_owned(),
        ),
    ] {
        assert_eq!(accepted(&world, key), expected, "{key}");
    }
    // A change of one route changes what others say, and only they are evaluated.
    world.put(&any("shop/old", 1, &["*.b.test"]));
    world.renew();
    assert_eq!(accepted(&world, "other/same"), format!("{whole}; {}", earlier(&world, "other/same")));
    assert!(accepted(&world, "other/some").contains("a.test belongs to TLSRoute other/same"));
    world.put(&on_day(any("shop/all", 1, &["*.test", "c.test"]), 1));
    world.renew();
    assert!(accepted(&world, "other/wide").ends_with("*.test belongs to TLSRoute shop/all"));
    assert!(accepted(&world, "other/some").starts_with("HostnameConflict"), "both names are those of others");
    let many: Vec<String> = (0..8).map(|number| format!("n{number}.test")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    world.put(&any("shop/many", 1, &many));
    world.put(&any("other/many", 2, &many));
    world.renew();
    let told = accepted(&world, "other/many");
    assert!(told.ends_with("n4.test belongs to TLSRoute shop/many; 3 more"), "{told}");
}

/// Returns what the status of a route says about earlier owners.
fn earlier(world: &World, key: &str) -> String {
    let id = (RouteKind::Tls, ObjectKey { namespace: split(key).0.into(), name: split(key).1.into() });
    let item = world.api.routes[&id].item.clone().expect("it is attached");
    world.api.names.earlier_owner(&item.object, &item.claims[0]).expect("there was one")
}

#[test]
fn of_two_routes_for_all_connections_the_younger_says_whose_they_are() {
    let raw = |key: &str, day: u8| {
        let spec = json!({"parentRefs": [{"namespace": "infra", "name": "edge"}], "rules": [{"backendRefs": web()}]});
        object("TCPRoute", key, day, spec)
    };
    let mut world = World::new(&[edge(json!({"protocol": "TCP"})), raw("shop/a", 1), raw("other/b", 2)]);
    world.renew();
    assert_eq!(accepted_of(&world, RouteKind::Tcp, "shop/a"), "True the route is accepted");
    let lost = "True the route is accepted, but every connection to :443 belongs to TCPRoute shop/a";
    assert_eq!(accepted_of(&world, RouteKind::Tcp, "other/b"), lost);
}

#[test]
fn a_name_that_passes_to_another_namespace_is_told_to_both() {
    let claim = |name: &str| Claim {
        place: Place { port: 443, address: None },
        listener: ListenerKey { owner: "infra".into(), name: NamePattern::Any },
        name: Some(NamePattern::parse(name).expect("legal")),
    };
    let id = |key: &str| {
        let (namespace, name) = split(key);
        (RouteKind::Tls, ObjectKey { namespace: namespace.into(), name: name.into() })
    };
    let route = |key: &str, day: u8, names: &[&str]| {
        Arc::new(GatewayRoute {
            object: object_of(&id(key)),
            created: format!("2026-01-{day:02}T00:00:00Z").into(),
            claims: names.iter().map(|name| claim(name)).collect(),
            backends: Arc::new([]),
        })
    };
    let (begin, later) =
        (SystemTime::UNIX_EPOCH, |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
    let open = GatewayListener { place: claim("*").place, key: claim("*").listener, created: "".into() };
    let gateway = Arc::new(GatewayPlaces {
        object: "Gateway infra/edge".into(),
        generation: 1,
        places: vec![(open.place, PlaceProtocol::Tls)],
        listeners: vec![open],
    });
    let victim = |day| route("shop/web", day, &["a.test", "*.w.test"]);
    let squatter = || route("other/squat", 2, &["a.test", "*.w.test"]);
    let start = || {
        let mut names = Names::default();
        names.set_gateways([&gateway].into_iter());
        names.set(&id("shop/web"), None, Some(&victim(1)), begin);
        let concerned = names.set(&id("other/squat"), None, Some(&squatter()), begin);
        assert!(concerned.contains(&id("shop/web")), "the names are equal");
        names
    };
    let told = |names: &Names, route: &GatewayRoute| {
        let claims = || route.claims.iter();
        let other: Vec<_> = claims().filter_map(|claim| names.other_owner(&route.object, claim)).collect();
        let earlier: Vec<_> =
            claims().filter_map(|claim| names.earlier_owner(&route.object, claim)).collect();
        (other.join(", "), earlier.join(", "))
    };
    let theirs = "TLSRoute other/squat, TLSRoute other/squat".to_owned();
    let mine = "TLSRoute shop/web, TLSRoute shop/web".to_owned();
    let was = "a.test was that of TLSRoute shop/web until 1970-01-01T00:00:05.000Z, *.w.test was that of TLSRoute shop/web until \
               1970-01-01T00:00:05.000Z";
    // Deleted, and created again a minute later, when it is the younger one.
    let mut names = start();
    assert_eq!(told(&names, &squatter()), (mine.clone(), String::new()));
    let concerned = names.set(&id("shop/web"), Some(&victim(1)), None, later(5));
    assert!(concerned.contains(&id("other/squat")));
    assert_eq!(told(&names, &squatter()), (String::new(), was.to_owned()));
    names.set(&id("shop/web"), None, Some(&victim(3)), later(65));
    assert_eq!(told(&names, &victim(3)), (theirs.clone(), String::new()));
    assert_eq!(told(&names, &squatter()), (String::new(), was.to_owned()));
    // Replaced at once.
    let mut names = start();
    names.set(&id("shop/web"), Some(&victim(1)), Some(&victim(3)), later(5));
    assert_eq!(told(&names, &victim(3)), (theirs, String::new()));
    assert_eq!(told(&names, &squatter()), (String::new(), was.to_owned()));
    // The other route comes only after the deletion.
    let mut names = start();
    names.set(&id("other/squat"), Some(&squatter()), None, begin);
    names.set(&id("shop/web"), Some(&victim(1)), None, later(5));
    names.set(&id("other/squat"), None, Some(&squatter()), later(6));
    assert_eq!(told(&names, &squatter()), (String::new(), was.to_owned()));
    // The route comes back as the older one, as after a restore of its object.
    names.set(&id("shop/web"), None, Some(&victim(1)), later(7));
    assert_eq!(told(&names, &squatter()), (mine, String::new()));
    // After ten minutes the name is known as that of its present owner alone.
    names.set(&id("shop/web"), Some(&victim(1)), None, later(8));
    names.set(&id("shop/x"), None, Some(&route("shop/x", 1, &["x.test"])), later(608));
    assert_eq!(told(&names, &squatter()), (String::new(), String::new()));
    // Within one namespace nothing is told.
    let mut names = start();
    let own = route("shop/b", 1, &["a.test"]);
    names.set(&id("shop/b"), None, Some(&own), begin);
    names.set(&id("shop/web"), Some(&victim(1)), None, later(5));
    assert_eq!(told(&names, &own), (String::new(), String::new()));
}

#[test]
fn routes_beyond_the_limit_of_their_namespace_are_not_accepted() {
    let named = |key: &str, day: u8| on_day(route(key, &[&format!("{}.test", split(key).1)], web()), day);
    let mut world = World::new(&[
        edge(json!({})),
        named("shop/a", 4),
        named("shop/b", 2),
        named("shop/c", 3),
        named("shop/d", 1),
        named("other/e", 9),
    ]);
    world.spec.routes_per_namespace = 2;
    let refused = |world: &World| -> String {
        let all = world.api.routes.keys().map(|(_, key)| key.to_string());
        let lost = all.filter(|key| accepted(world, key).starts_with("TooManyRoutes"));
        lost.collect::<Vec<_>>().join(" ")
    };
    world.renew();
    assert_eq!(refused(&world), "shop/a shop/c");
    assert_eq!((world.tls("a").as_str(), world.tls("b").starts_with("b.test")), ("nowhere", true));
    assert!(accepted(&world, "shop/a").ends_with("more than 2 routes (gatewayApi.routesPerNamespace)"));
    // One that is younger changes nothing for the others, and an older one takes the place of the youngest.
    world.put(&named("shop/z", 8));
    world.renew();
    assert_eq!(refused(&world), "shop/a shop/c shop/z");
    world.put(&named("shop/y", 1));
    world.renew();
    assert_eq!(refused(&world), "shop/a shop/b shop/c shop/z");
    world.tables.complete(Kind::TlsRoute, 2, None);
    world.renew();
    for key in ["shop/a", "shop/c"] {
        world.put(&named(key, 5));
    }
    world.renew();
    assert_eq!(refused(&world), "");
}
