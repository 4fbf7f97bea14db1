//! Tests good and bad records of peers.

use super::*;
use isthmus_model::identity::TrustDomain;
use isthmus_model::name::NamePattern;
use isthmus_settings::peer::{NameTemplate, PeerIdentity, PeerImport, PeerLimits};

pub(in crate::imports) fn peer(limit: Option<usize>) -> Peer {
    let domain = TrustDomain::parse("west.example").expect("legal");
    Peer {
        name: "west".into(),
        who: Some(PeerIdentity {
            gateway: Identity::parse("spiffe://west.example/ns/isthmus/sa/gateway").expect("legal"),
            trust_domain: domain.clone(),
            alias: domain,
        }),
        unused_link: None,
        from: Vec::new(),
        exports: Vec::new(),
        imports: vec![PeerImport {
            rule: "peers[0].import[0]".into(),
            services: vec![NamePattern::parse("*.pay.west.global").expect("legal")],
            rename: Some(NameTemplate::parse("{service}.{namespace}.here").expect("legal")),
            limit,
            merge: false,
        }],
        carry: Vec::new(),
        limits: PeerLimits::default(),
    }
}

pub(in crate::imports) fn record(name: &str, weight: u32) -> proto::Service {
    let port = |name: &str, number, protocol: &str| proto::Port {
        name: name.into(),
        number,
        protocol: protocol.into(),
    };
    proto::Service {
        name: name.into(),
        namespace: "pay".into(),
        exported_at: 7,
        ports: vec![port("http", 80, "HTTP"), port("tls", 443, "TLS")],
        groups: vec![proto::Group {
            network: "net-west".into(),
            locality: "eu/west".into(),
            tls: "mesh".into(),
            hbone: true,
            identity: "spiffe://west.example/ns/pay/sa/a".into(),
            ports: vec!["http".into()],
            weight,
            drained: 0,
            drained_parts: 0,
            not_ready: 0,
            demand: 0,
        }],
    }
}

fn read(record: &proto::Service) -> Result<Read, String> {
    service(&peer(None), &record.encode_to_vec(), 1_000, &mut Interner::default())
}

#[test]
fn a_record_becomes_a_service_that_only_gateways_reach() {
    let read = read(&record("ratings.pay.west.global", 7)).expect("taken");
    let service = &read.service;
    assert_eq!(service.key.hostname.as_str(), "ratings.pay.here");
    assert_eq!(&*service.key.namespace, "west/pay");
    let import = service.import.as_ref().expect("an import");
    assert_eq!(
        (&*import.peer, import.exported_name.as_str(), import.exported_at),
        ("west", "ratings.pay.west.global", 7)
    );
    let [endpoint] = &*service.endpoints else { panic!("one") };
    assert_eq!(endpoint.host, Host::Ips(Arc::default()));
    assert_eq!((endpoint.weight.value(), endpoint.locality.as_str()), (7, "eu/west"));
    assert_eq!(endpoint.template.network, Some(Network::new("peer/west/net-west")));
    // The group has only one of the service's two ports.
    let ports: Vec<_> = service.ports.iter().map(|port| endpoint.template.port_for(port)).collect();
    assert_eq!(ports, [Some(80), None]);
}

#[test]
fn groups_that_serve_the_same_ports_share_their_list_and_one_without_ports_is_none() {
    let mut record = record("ratings.pay.west.global", 7);
    let group = record.groups.remove(0);
    for (network, ports) in [("a", "http"), ("b", "http"), ("c", "tls http"), ("d", ""), ("e", "other")] {
        let ports = ports.split_whitespace().map(str::to_owned).collect();
        record.groups.push(proto::Group { network: network.into(), ports, ..group.clone() });
    }
    let service = read(&record).expect("taken").service;
    let lists: Vec<_> = service.endpoints.iter().map(|endpoint| endpoint.template.only.as_ref()).collect();
    let [Some(a), Some(b), None] = &*lists else { panic!("{lists:?}") };
    assert!(Arc::ptr_eq(a, b) && a.len() == 1);
}

#[test]
fn what_a_peer_may_not_say_is_refused_with_a_text() {
    let refused = |change: &dyn Fn(&mut proto::Service), wanted: &str| {
        let mut record = record("ratings.pay.west.global", 7);
        change(&mut record);
        let problem = read(&record).expect_err("refused");
        assert!(problem.contains(wanted), "{problem}");
    };
    refused(&|record| record.name = "ratings.shop.svc.cluster.local".into(), "no import rule matches");
    refused(&|record| record.name = "a b".into(), "character");
    refused(&|record| record.name = "x".repeat(64 << 10), "long");
    refused(&|record| record.namespace = "a\nb".into(), "namespace");
    refused(&|record| record.namespace = "n".repeat(300), "namespace");
    refused(&|record| record.ports.clear(), "0 ports");
    refused(&|record| record.ports[0].number = 70_000, "not from 1 to 65535");
    refused(&|record| record.ports[1].number = 80, "two ports of the service");
    refused(&|record| record.ports[0].protocol = "SCTP".into(), "unknown protocol");
    refused(&|record| record.groups[0].weight = 0, "weight 0");
    refused(&|record| record.groups[0].tls = "maybe".into(), "unknown tls mode");
    refused(&|record| record.groups[0].network = String::new(), "network");
    refused(&|record| record.groups = vec![record.groups[0].clone(); 2_000], "groups");
    refused(&|record| record.groups[0].ports = vec![String::new(); 257], "257 ports");
    // A peer speaks for no other trust domain, and not for ours.
    refused(
        &|record| record.groups[0].identity = "spiffe://east.example/ns/a/sa/b".into(),
        "not in the trust domain",
    );
}

#[test]
fn a_gateway_needs_a_port_a_weight_and_an_address() {
    let good = proto::Gateway {
        key: "k".into(),
        network: "net-west".into(),
        host: "gw.west.example".into(),
        sni_port: 15_443,
        weight: 1,
        ..proto::Gateway::default()
    };
    let read = gateway(&peer(None), &AddressScope::Any, &good).expect("taken");
    assert_eq!((read.gateway.sni_port, read.gateway.hbone_port), (Some(15_443), None));
    for wrong in [
        proto::Gateway { sni_port: 0, ..good.clone() },
        proto::Gateway { weight: 0, ..good.clone() },
        proto::Gateway { host: "a b".into(), ..good.clone() },
        proto::Gateway { sni_port: 1 << 20, ..good.clone() },
        proto::Gateway { identity: "spiffe://other/a".into(), ..good },
    ] {
        assert!(gateway(&peer(None), &AddressScope::Any, &wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_drain_is_told_in_steps_or_in_parts() {
    let told = |drained: u32, drained_parts: u32| {
        let mut record = record("a.pay.west.global", 1);
        (record.groups[0].drained, record.groups[0].drained_parts) = (drained, drained_parts);
        read(&record).map(|read| read.service.endpoints[0].template.drained)
    };
    // A peer of an earlier version tells steps alone.
    assert_eq!([told(0, 0), told(16, 0), told(32, 0)], [Ok(0), Ok(PARTS / 2), Ok(PARTS)]);
    assert_eq!(told(31, 3_168), Ok(3_168), "99 %");
    for (steps, parts) in [(33, 0), (u32::MAX, 0), (0, 3_201), (0, u32::MAX)] {
        assert!(told(steps, parts).expect_err("too much").contains("3200 parts"), "{steps} {parts}");
    }
}

#[test]
fn a_group_has_its_unready_endpoints_and_the_networks_of_groups_their_demands() {
    let told = |numbers: &[(&str, u32, u32)]| {
        let mut record = record("a.pay.west.global", 10);
        let group = record.groups[0].clone();
        let groups = numbers.iter().map(|(network, not_ready, demand)| proto::Group {
            network: (*network).to_owned(),
            not_ready: *not_ready,
            demand: *demand,
            ..group.clone()
        });
        record.groups = groups.collect();
        let service = read(&record).expect("legal").service;
        let one = |one: &Endpoint| (one.weight.value(), one.health == Health::Healthy);
        let endpoints: Vec<_> = service.endpoints.iter().map(one).collect();
        let demands = service.demand.iter().map(|said| {
            let network = said.network.as_ref().map(ToString::to_string);
            format!("{} {}", network.unwrap_or_default(), said.weight)
        });
        (endpoints, demands.collect::<Vec<_>>().join(", "))
    };
    let ready = (10, true);
    assert_eq!(told(&[("n", 0, 0)]), (vec![ready], String::new()), "a peer of an earlier version");
    assert_eq!(
        told(&[("n", 3, 30), ("n", 0, 10), ("m", 1, 0)]),
        (vec![ready, (3, false), ready, ready, (1, false)], "peer/west/n 40".to_owned())
    );
    let most = told(&[("n", u32::MAX, u32::MAX), ("n", 0, u32::MAX)]);
    assert_eq!(most.1, format!("peer/west/n {}", u32::MAX));
}

#[test]
fn a_time_of_export_that_cannot_be_is_that_of_the_receipt() {
    for (said, taken) in
        [(7, 7), (1_000, 1_000), (87_400, 87_400), (87_401, 1_000), (u64::MAX, 1_000), (0, 1_000)]
    {
        let record = proto::Service { exported_at: said, ..record("a.pay.west.global", 1) };
        let read = read(&record).expect("legal");
        assert_eq!(read.service.import.as_ref().expect("imported").exported_at, taken, "{said}");
    }
}
