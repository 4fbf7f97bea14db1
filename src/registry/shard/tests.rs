//! Tests that add, change and remove items of a shard in any order, and that limit items to the scope.

use super::*;
use crate::change::MarkKind;
use isthmus_document::services::read_registry;
use isthmus_model::endpoint::Labels;
use isthmus_model::place::Locality;
use isthmus_model::service::Withheld;
use isthmus_settings::scope::RegistryScope;
use isthmus_snapshot::testing::{gateway, pattern};

fn service(hostname: &str, endpoints: &str) -> Arc<Service> {
    let text = format!(
        "services: [{{hostname: {hostname}, namespace: n, ports: [{{name: p, port: 80}}], endpoints: [{endpoints}]}}]"
    );
    let listing = read_registry("x".as_ref(), &text, &ClusterId::new("east"), &Network::new("net"));
    listing.expect("good").services.into_values().next().expect("one")
}

fn endpoints(ips: &[u8]) -> Arc<[Endpoint]> {
    let list: Vec<String> = ips.iter().map(|ip| format!("{{address: 10.0.0.{ip}}}")).collect();
    service("x.mesh", &list.join(", ")).endpoints.clone()
}

fn shard(scope: &RegistryScope) -> Shard {
    Shard::new(ClusterId::new("east"), Network::new("net"), scope)
}

fn set(hostname: &str, name: &str, ips: &[u8]) -> Item {
    let key = EndpointSetKey { service: service(hostname, "").key.clone(), name: name.into() };
    Item::Endpoints(EndpointSet { key, endpoints: endpoints(ips) })
}

/// Puts an item and returns the changes.
fn put(shard: &mut Shard, item: Item) -> Dirty {
    let mut dirty = Dirty::default();
    shard.put(item, &mut dirty);
    shard.check_invariants();
    dirty
}

fn remove(shard: &mut Shard, key: &Key) -> Dirty {
    let mut dirty = Dirty::default();
    shard.remove(key, &mut dirty);
    shard.check_invariants();
    dirty
}

/// Returns a mark of a service, with a label of this value.
fn mark(service: &ServiceKey, object: &str, label: &str) -> Item {
    Item::Mark(Mark {
        key: MarkKey { service: service.clone(), object: object.into() },
        kind: MarkKind::ServiceExport,
        labels: Labels::from_iter([("label".into(), label.into())]),
        export: None,
    })
}

fn addresses(shard: &Shard, hostname: &str) -> Vec<String> {
    let services = shard.services_of(hostname).iter();
    services.flat_map(|service| service.endpoints.iter()).map(|endpoint| endpoint.host.to_string()).collect()
}

#[test]
fn endpoint_sets_wait_for_their_service_and_are_joined_with_it() {
    let mut shard = shard(&RegistryScope::default());
    assert!(put(&mut shard, set("a.mesh", "s1", &[1])).is_empty(), "the service is not known yet");
    assert_eq!((shard.counts().services, shard.is_empty()), (0, false));
    assert!(!put(&mut shard, Item::Service(service("a.mesh", "{address: 10.0.0.9}"))).is_empty());
    assert_eq!(addresses(&shard, "a.mesh"), ["10.0.0.9", "10.0.0.1"]);
    put(&mut shard, set("a.mesh", "s0", &[2, 3]));
    assert_eq!(addresses(&shard, "a.mesh"), ["10.0.0.9", "10.0.0.2", "10.0.0.3", "10.0.0.1"]);
    assert!(put(&mut shard, set("a.mesh", "s0", &[2, 3])).is_empty(), "nothing has changed");
    // The service's own object changes, and its sets are kept.
    put(&mut shard, Item::Service(service("a.mesh", "")));
    assert_eq!(addresses(&shard, "a.mesh"), ["10.0.0.2", "10.0.0.3", "10.0.0.1"]);
    let keys: Vec<String> = shard.keys().map(|key| key.to_string()).collect();
    assert_eq!(keys.len(), 3, "{keys:?}");
    // A shard that is made of another shard's items equals that shard.
    let mut again = self::shard(&RegistryScope::default());
    shard.items().for_each(|item| drop(put(&mut again, item)));
    assert!(again.says_the_same(&shard, "a.mesh") && again.counts() == shard.counts());
    let (s0, s1) = (set("a.mesh", "s0", &[]).key(), set("a.mesh", "s1", &[]).key());
    assert!(!remove(&mut shard, &s0).is_empty());
    assert!(!remove(&mut shard, &s1).is_empty());
    assert!(remove(&mut shard, &s1).is_empty());
    assert_eq!((addresses(&shard, "a.mesh").len(), shard.counts().services), (0, 1));
    remove(&mut shard, &Item::Service(service("a.mesh", "")).key());
    assert!(shard.is_empty());
}

#[test]
fn what_the_scope_keeps_out_is_counted_and_comes_in_when_it_changes() {
    let addresses = AddressScope::Blocks(["10.0.0.0/24".parse().expect("legal")].into());
    let scope = RegistryScope {
        services: vec![pattern("*.mesh")],
        networks: None,
        addresses,
        ..RegistryScope::default()
    };
    let mut shard = shard(&scope);
    let counts = |shard: &Shard| {
        let counts = shard.counts();
        (
            counts.services,
            counts.endpoints,
            counts.denied_items,
            counts.denied_endpoints,
            counts.denied_addresses,
        )
    };
    put(&mut shard, Item::Service(service("a.other", "{address: 10.0.0.1}")));
    assert_eq!(counts(&shard), (0, 0, 1, 0, 0));
    let mixed = "{address: 10.0.0.1}, {address: 10.0.1.1}, {address: 10.0.0.2, network: foreign}";
    put(&mut shard, Item::Service(service("b.mesh", mixed)));
    assert_eq!(counts(&shard), (1, 1, 1, 1, 1));
    assert_eq!(shard.denied_addresses_of("b.mesh"), 1);
    let withheld = &shard.services_of("b.mesh")[0].withheld;
    assert_eq!(**withheld, [(Withheld::ForeignNetwork, 1)], "`explain` and `horizon` show it");
    // Every address of an endpoint must be allowed.
    put(
        &mut shard,
        Item::Service(service(
            "b.mesh",
            "{addresses: [10.0.0.1, 10.0.1.1]}, {addresses: [10.0.0.3, 10.0.0.4]}",
        )),
    );
    assert_eq!(counts(&shard), (1, 1, 1, 0, 1));
    let gateway_of = |network: &str, host: &str| {
        let key = GatewayKey { network: Network::new(network), name: "gw".into() };
        Item::Gateway(RegistryGateway { key, gateway: gateway(host, 1) })
    };
    assert!(put(&mut shard, gateway_of("foreign", "10.0.0.7")).is_empty());
    assert!(put(&mut shard, gateway_of("net", "192.0.2.1")).is_empty());
    assert_eq!((shard.counts().gateways, shard.counts().denied_items), (0, 3));
    assert_eq!(put(&mut shard, gateway_of("net", "10.0.0.7")).networks, [Network::new("net")].into());
    // A gateway that the scope does not allow any more is removed: its last allowed address may belong to another host.
    assert_eq!(put(&mut shard, gateway_of("net", "192.0.2.1")).networks, [Network::new("net")].into());
    assert_eq!((shard.counts().gateways, shard.counts().denied_items), (0, 3));
    let keys: Vec<Key> = shard.keys().collect();
    keys.iter().for_each(|key| drop(remove(&mut shard, key)));
    assert_eq!(counts(&shard), (0, 0, 0, 0, 0));
    assert!(shard.is_empty());
}

#[test]
fn names_are_known_as_long_as_something_is_given_by_them() {
    let mut shard =
        shard(&RegistryScope { networks: Some(vec![Network::new("net")]), ..RegistryScope::default() });
    let db = HostName::parse("db.test").expect("legal");
    let dirty = put(&mut shard, Item::Service(service("a.mesh", "{address: db.test}")));
    assert_eq!(dirty.named, [db.clone()].into());
    put(&mut shard, Item::Service(service("b.mesh", "{address: db.test}")));
    let users: Vec<&str> = shard.users_of("db.test").map(HostName::as_str).collect();
    assert_eq!(users, ["a.mesh", "b.mesh"]);
    remove(&mut shard, &Key::Service(service("a.mesh", "").key.clone()));
    assert!(shard.uses_name(&db));
    let dirty = put(&mut shard, Item::Service(service("b.mesh", "{address: 10.0.0.1}")));
    assert!(dirty.named.contains(&db) && !shard.uses_name(&db));
    let key = GatewayKey { network: Network::new("net"), name: "gw".into() };
    put(&mut shard, Item::Gateway(RegistryGateway { key: key.clone(), gateway: gateway("db.test", 1) }));
    assert!(shard.uses_name(&db));
    assert!(remove(&mut shard, &Key::Gateway(key)).named.contains(&db));
    assert!(!shard.uses_name(&db));
}

#[test]
fn a_clone_is_not_changed_with_the_original() {
    let mut shard = shard(&RegistryScope::default());
    for index in 0..500 {
        put(&mut shard, Item::Service(service(&format!("s{index}.mesh"), "{address: 10.0.0.1}")));
    }
    let before = shard.clone();
    put(&mut shard, Item::Service(service("s7.mesh", "{address: 10.0.0.2}")));
    assert_eq!(addresses(&before, "s7.mesh"), ["10.0.0.1"]);
    assert_eq!(addresses(&shard, "s7.mesh"), ["10.0.0.2"]);
    let shared = |name: &str| Arc::ptr_eq(&before.services_of(name)[0], &shard.services_of(name)[0]);
    assert!(shared("s8.mesh") && !shared("s7.mesh"));
    assert_eq!(shard.services_of("s8.mesh")[0].endpoints[0].locality, Locality::default());
}

#[test]
fn a_name_that_stands_for_a_service_is_allowed_with_it() {
    let scope = RegistryScope { services: vec![pattern("*.shop.mesh")], ..RegistryScope::default() };
    let mut shard = shard(&scope);
    let alias = |of: &str, name: &str| {
        Arc::new(service(of, "{address: 10.0.0.1}").standing_for(HostName::parse(name).expect("legal")))
    };
    for (of, name, is_allowed) in
        [("web.shop.mesh", "web.shop.set", true), ("web.bank.mesh", "web.bank.set", false)]
    {
        let alias = alias(of, name);
        put(&mut shard, Item::Service(alias.clone()));
        put(&mut shard, mark(&alias.key, "ServiceExport", ""));
        assert_eq!(shard.service(&alias.key).is_some(), is_allowed, "{name}");
        assert_eq!(shard.marks_of(&alias.key).is_some(), is_allowed, "{name}");
    }
    // The service of the bank and its mark are denied.
    assert_eq!(shard.counts().denied_items, 2);
}

#[test]
fn marks_of_a_service_are_replaced_by_key_and_keep_their_order() {
    let mut shard = shard(&RegistryScope::default());
    let key = service("a.mesh", "").key.clone();
    let marks = |shard: &Shard| {
        let marks = shard.marks_of(&key).map(|marks| marks.to_vec()).unwrap_or_default();
        let shown = |mark: Mark| format!("{} {:?}", mark.key.object, mark.labels);
        assert_eq!(shard.counts().marks, marks.len());
        marks.into_iter().map(shown).collect::<Vec<_>>()
    };
    for (object, label, is_change) in
        [("b", "1", true), ("a", "1", true), ("b", "1", false), ("b", "2", true)]
    {
        let dirty = put(&mut shard, mark(&key, object, label));
        assert_eq!(dirty.services.contains(&key.hostname), is_change, "{object} {label}");
    }
    assert_eq!(marks(&shard), [r#"a {"label": "1"}"#, r#"b {"label": "2"}"#]);
    let earlier = shard.clone();
    let removal = |object: &str| Key::Mark(MarkKey { service: key.clone(), object: object.into() });
    for (object, is_change) in [("c", false), ("a", true), ("a", false), ("b", true)] {
        let dirty = remove(&mut shard, &removal(object));
        assert_eq!(dirty.services.contains(&key.hostname), is_change, "{object}");
    }
    assert!(shard.is_empty() && marks(&shard).is_empty());
    assert_eq!(marks(&earlier).len(), 2, "a clone keeps its marks");
}
