//! Tests of the `services:` list: the listing that is read from it, and the positions in its errors.

use std::fmt::Write as _;

use super::*;
use crate::form::Keys;
use crate::table::{Kind, Object};
use isthmus_model::address::Host;
use isthmus_model::endpoint::{DeclaredTls, Health, TlsMode, Weight};
use isthmus_model::service::PortProtocol;

fn registry(text: &str) -> Result<Listing, Vec<String>> {
    let read =
        read_registry(path::Path::new("r.yaml"), text, &ClusterId::new("west"), &Network::new("net-west"));
    read.map_err(|list| list.iter().map(ToString::to_string).collect())
}

#[test]
fn a_registry_file_becomes_a_shard() {
    let shard = registry(
        "services:\n- hostname: Reviews.shop.mesh.\n  namespace: shop\n  addresses: [240.240.0.7]\n  ports:\n  - {name: \
         https, port: 443, targetPort: 8443, protocol: TLS}\n  - {name: http, port: 80}\n  subsets: {v1: {version: v1}}\n  \
         endpoints:\n  - {address: 10.1.0.4, ports: {https: 9443}, labels: {version: v1, empty: ''}, locality: a/b, weight: \
         3, health: draining, tls: none, identity: 'spiffe://td/ns/a', network: n}\n  - {address: pod.local}\n",
    )
    .expect("good");
    assert_eq!((shard.cluster.as_str(), shard.network.as_str()), ("west", "net-west"));
    let (key, service) = shard.services.first_key_value().expect("a service");
    assert_eq!(key.to_string(), "shop/reviews.shop.mesh");
    let port = &service.ports[1];
    assert_eq!((port.target_port, port.protocol), (80, PortProtocol::Tcp));
    assert_eq!(service.ports[0].protocol, PortProtocol::Tls);
    let [first, second] = &*service.endpoints else { panic!("two endpoints") };
    assert_eq!((first.health, first.weight.value()), (Health::Draining, 3));
    let template = &first.template;
    let v1 = &service.subsets["v1"];
    assert!(template.labels.has_all(v1) && !second.template.labels.has_all(v1));
    assert_eq!(
        (template.ports.get("https"), template.tls),
        (Some(&9443), Some(DeclaredTls::Mode(TlsMode::None)))
    );
    assert_eq!(template.network, Some(Network::new("n")));
    assert!(template.identity.as_ref().is_some_and(|identity| identity.as_str() == "spiffe://td/ns/a"));
    assert_eq!((second.health, second.weight), (Health::Healthy, Weight::ONE));
    assert!(matches!(&second.host, Host::Name(name) if name.as_str() == "pod.local"));
    assert_eq!(*second.template, EndpointTemplate::default());
}

#[test]
fn a_registry_file_has_nothing_but_services() {
    assert_eq!(registry("services: []").map(|shard| shard.services.len()), Ok(0));
    let problems = registry("cluster: x\n").expect_err("bad");
    assert!(problems[0].starts_with("r.yaml:1:1: cluster: found the unknown key"), "{problems:?}");
    assert!(problems[1].starts_with("r.yaml:1:1: the key services is missing"), "{problems:?}");
    let problems = registry("").expect_err("bad");
    assert_eq!(problems, ["r.yaml:1:1: found nothing, expected a map with the keys services"]);
}

#[test]
fn variables_are_not_for_registry_files() {
    let problems = registry("services: [{hostname: '${HOME}', namespace: n, ports: [{name: a, port: 1}]}]");
    assert!(problems.expect_err("bad")[0].contains("found \"${HOME}\": it has a character"));
}

#[test]
fn a_service_twice_names_both_places() {
    let problems = registry(
        "services:\n- {hostname: a.b, namespace: n, ports: [{name: a, port: 1}]}\n- {hostname: a.b, namespace: m, ports: \
         [{name: a, port: 1}]}\n- {hostname: A.B, namespace: n, ports: [{name: a, port: 1}]}\n",
    );
    assert_eq!(
        problems.expect_err("bad"),
        ["r.yaml:4:3: services[2]: the service n/a.b is listed twice; first at r.yaml:2:3"]
    );
}

#[test]
fn aliases_work_within_and_across_services() {
    let shard = registry(
        "services:\n- {hostname: a.b, namespace: n, ports: &p [{name: a, port: 1}], endpoints: &e [{address: 10.0.0.1}]}\n- \
         {hostname: c.d, namespace: n, ports: *p, endpoints: *e}\n",
    )
    .expect("good");
    assert!(shard.services.values().all(|service| service.endpoints.len() == 1));
    let aliased = registry("services: &s [{hostname: a.b, namespace: n, ports: [{name: a, port: 1}]}]\n")
        .expect("good");
    assert_eq!(aliased.services.len(), 1);
}

#[test]
fn a_large_document_is_read_service_by_service_and_shares_equal_values() {
    let mut text = "services:\n".to_owned();
    for service in 0..20 {
        let _ = write!(
            text,
            "- hostname: s{service}.shop.mesh\n  namespace: shop\n  ports: [{{name: https, port: 443}}]\n  endpoints:\n"
        );
        for endpoint in 0..1000 {
            let _ = writeln!(
                text,
                "  - address: 10.{service}.{}.{}\n    labels: {{app: s{service}, version: v{}}}\n    locality: r/z{}\n    \
                 ports: {{https: 8443}}\n    identity: spiffe://td/ns/shop/sa/s{service}",
                endpoint / 250,
                endpoint % 250,
                endpoint % 2,
                endpoint % 3
            );
        }
    }
    let shard = registry(&text).expect("good");
    let endpoints: Vec<&Endpoint> =
        shard.services.values().flat_map(|service| service.endpoints.iter()).collect();
    assert_eq!(endpoints.len(), 20_000);
    let distinct = |pointers: Vec<usize>| pointers.into_iter().collect::<BTreeSet<_>>().len();
    let workloads = endpoints.iter().map(|endpoint| Arc::as_ptr(&endpoint.template).addr());
    assert_eq!(distinct(workloads.collect()), 40);
    let localities = endpoints.iter().map(|endpoint| endpoint.locality.as_str().as_ptr().addr());
    assert_eq!(distinct(localities.collect()), 3);
    let problems = registry(&text.replacen("10.7.3.9\n", "10.7.3.999\n", 1)).expect_err("bad");
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].contains("services[7].endpoints[759].address: found \"10.7.3.999\""), "{problems:?}");
}

#[test]
fn the_words_of_the_table_are_those_of_the_model() {
    let words = |object: &Object, key: &str| match object.key(key).map(|key| *key.kind()) {
        Some(Kind::Choice(words)) => words.to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!(words(keys::ServicePort::OBJECT, "protocol"), PortProtocol::ALL.map(PortProtocol::text));
    assert_eq!(words(keys::Endpoint::OBJECT, "health"), Health::ALL.map(Health::text));
    assert_eq!(words(keys::Endpoint::OBJECT, "tls"), TlsMode::ALL.map(TlsMode::text));
}
