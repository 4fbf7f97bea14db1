//! Tests of exports of one name by several clusters, with the registries of the clusters in every order.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use crate::build;
use crate::clusterset_service::ClusterSetService;
use crate::inputs::Inputs;
use crate::routes::Resolved;
use crate::service_view::ServiceView;
use crate::testing::{export, policy_of};
use isthmus_model::endpoint::Labels;
use isthmus_model::load_balancing::ServiceFamilies;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{PortProtocol, Service, ServiceKey};
use isthmus_registry::change::{Dirty, ExportedPort, Item, Mark, MarkKey, MarkKind};
use isthmus_registry::shard::Shard;
use isthmus_settings::scope::RegistryScope;

const ALIAS: &str = "web.shop.svc.clusterset.local";

fn port(name: &str, number: u16) -> ServicePort {
    ServicePort {
        name: name.into(),
        port: number,
        target_port: number,
        is_target_named: false,
        protocol: PortProtocol::Tcp,
    }
}

/// Returns the shard of a cluster that exports the service; without `export`, the shard has the service but no ServiceExport.
fn shard(cluster: &str, export: Option<Export>, ports: Vec<ServicePort>) -> Arc<Shard> {
    let key = ServiceKey { namespace: "shop".into(), hostname: HostName::parse(ALIAS).expect("legal") };
    let service = Service {
        key: key.clone(),
        addresses: Vec::new(),
        ports,
        subsets: BTreeMap::new(),
        waypoint: None,
        endpoints: Arc::default(),
        exported_as: None,
        import: None,
        load_balancing: None,
        families: ServiceFamilies::Automatic,
        identities: Box::default(),
        demand: Box::default(),
        withheld: Box::default(),
    };
    let mut shard = Shard::new(ClusterId::new(cluster), Network::new("net"), &RegistryScope::default());
    let mut dirty = Dirty::default();
    shard.put(Item::Service(Arc::new(service)), &mut dirty);
    if let Some(export) = export {
        let key = MarkKey { service: key, object: "ServiceExport shop/web".into() };
        let (kind, labels, export) = (MarkKind::ServiceExport, Labels::default(), Some(Arc::new(export)));
        shard.put(Item::Mark(Mark { key, kind, labels, export }), &mut dirty);
    }
    Arc::new(shard)
}

/// Returns the merged service, after checking that every order of the registries gives the same service.
#[track_caller]
fn merged(shards: &[Arc<Shard>]) -> Arc<ServiceView> {
    let (policy, resolved) = (policy_of("east", "net").into(), Resolved::default());
    let view = |shards: &[Arc<Shard>]| {
        let trust_roots = Arc::default();
        let inputs = Inputs {
            trust_roots: &trust_roots,
            policy_generation: 1,
            policy: &policy,
            shards,
            resolved: &resolved,
            virtual_addresses: None,
            probes: None,
            drains: &Arc::default(),
            recent: None,
            remembered: None,
        };
        build::all(inputs, 1).service(ALIAS).expect("there").clone()
    };
    let first = view(shards);
    let mut reversed = shards.to_vec();
    reversed.reverse();
    let other = view(&reversed);
    assert_eq!(first.export_conflict, other.export_conflict);
    assert_eq!(clusters(&first), clusters(&other));
    first
}

fn clusters(view: &ServiceView) -> Vec<&str> {
    view.parts.iter().map(|part| part.origin.cluster.as_str()).collect()
}

fn conflict_of(shards: &[Arc<Shard>]) -> Option<(String, String)> {
    let view = merged(shards);
    let conflict = view.export_conflict.as_deref()?;
    Some((conflict.reason.clone(), conflict.message.clone()))
}

const OLD: &str = "2026-01-01T00:00:00Z";
const NEW: &str = "2026-01-01T00:00:01Z";

#[test]
fn labels_annotations_distribution_and_families_are_compared() {
    let labels = |value: &str| Labels::from_iter([("a".into(), value.into())]);
    let of = |export: Export| {
        vec![shard("west", Some(self::export(OLD)), vec![]), shard("east", Some(export), vec![])]
    };
    let long = labels(&"x".repeat(1_000));
    for (other, reason, used) in [
        (Export { labels: labels("b"), ..export(NEW) }, "LabelsConflict", "labels. Using none"),
        (
            Export { annotations: labels("b"), ..export(NEW) },
            "AnnotationsConflict",
            "annotations. Using none",
        ),
        (
            Export { traffic_distribution: "PreferClose".into(), ..export(NEW) },
            "TrafficDistributionConflict",
            "traffic distribution. Using none",
        ),
        (Export { ip_families: "IPv6".into(), ..export(NEW) }, "IPFamilyConflict", "IP families. Using IPv4"),
        (Export { labels: long, ..export("2025-12-31T00:00:00Z") }, "LabelsConflict", "labels. Using a=xxx"),
    ] {
        let (found, message) = conflict_of(&of(other)).expect("a conflict");
        assert_eq!(found, reason, "{message}");
        assert!(message.starts_with(&format!("Conflicting {used}")) && message.len() < 400, "{message}");
    }
}

#[test]
fn clusters_that_agree_have_no_conflict() {
    let https = || vec![port("https", 443)];
    assert_eq!(conflict_of(&[shard("west", Some(export(OLD)), https())]), None);
    let (west, east) = (shard("west", Some(export(OLD)), https()), shard("east", Some(export(NEW)), https()));
    assert_eq!(conflict_of(&[west.clone(), east]), None);
    // The order of the ports makes no difference.
    let two =
        |names: [&str; 2]| names.iter().map(|name| port(name, if *name == "a" { 1 } else { 2 })).collect();
    let (one, other) = (two(["a", "b"]), two(["b", "a"]));
    assert_eq!(
        conflict_of(&[shard("a", Some(export(OLD)), one), shard("b", Some(export(OLD)), other)]),
        None
    );
    // A cluster that has the service under this name, but does not export it, causes no conflict.
    let none = shard("north", None, vec![port("https", 8443)]);
    let (policy, resolved) = (policy_of("east", "net").into(), Resolved::default());
    let shards = [none, west];
    let trust_roots = Arc::default();
    let inputs = Inputs {
        trust_roots: &trust_roots,
        policy_generation: 1,
        policy: &policy,
        shards: &shards,
        resolved: &resolved,
        virtual_addresses: None,
        probes: None,
        drains: &Arc::default(),
        recent: None,
        remembered: None,
    };
    let view = build::all(inputs, 1).service(ALIAS).expect("there").clone();
    assert_eq!(view.export_conflict, None);
    assert_eq!(clusters(&view), ["north", "west"], "the order of the registries");
}

#[test]
fn the_oldest_export_decides_and_of_equally_old_ones_that_of_the_first_cluster_by_name() {
    let shards = [
        shard("east", Some(export(NEW)), vec![port("https", 8443), port("more", 9443)]),
        shard("west", Some(export(OLD)), vec![port("https", 443)]),
        shard("north", Some(export(NEW)), vec![port("https", 443)]),
    ];
    let view = merged(&shards);
    assert_eq!(clusters(&view), ["west", "east", "north"]);
    let numbers: Vec<u16> = view.ports.iter().map(|port| port.port).collect();
    assert_eq!(numbers, [443, 9443], "the oldest's port of that name, and those of others beside it");
    let (reason, message) = conflict_of(&shards).expect("a conflict");
    assert_eq!(reason, "PortConflict");
    assert_eq!(
        message,
        "Conflicting ports. Using https TCP 443 from the oldest service export in \"west\". 1/3 clusters disagree."
    );
    let unknown = [
        shard("a", Some(export("")), vec![port("https", 1)]),
        shard("east", Some(export(NEW)), vec![port("https", 2)]),
    ];
    assert_eq!(clusters(&merged(&unknown)), ["east", "a"]);
    let tie = [
        shard("east", Some(export(OLD)), vec![port("https", 1)]),
        shard("b", Some(export(OLD)), vec![port("https", 2)]),
    ];
    assert_eq!(clusters(&merged(&tie)), ["b", "east"]);
}

#[test]
fn each_property_has_a_reason_and_several_are_joined() {
    let ports = || vec![port("https", 443)];
    let oldest = shard("west", Some(export(OLD)), ports());
    let against = |export: Export, ports| conflict_of(&[oldest.clone(), shard("east", Some(export), ports)]);
    let headless = || Export { is_headless: true, ..export(NEW) };
    let (reason, message) = against(headless(), ports()).expect("a conflict");
    assert_eq!(reason, "TypeConflict");
    assert!(message.starts_with("Conflicting type. Using ClusterSetIP from the oldest"), "{message}");
    let sticky =
        |seconds| Export { session_affinity: "ClientIP".into(), session_seconds: seconds, ..export(NEW) };
    let (reason, message) = against(sticky(10_800), ports()).expect("a conflict");
    assert_eq!(reason, "SessionAffinityConflict");
    assert!(message.contains("Using None from"), "{message}");
    let older =
        shard("north", Some(Export { created: "2025-01-01T00:00:00Z".into(), ..sticky(60) }), ports());
    let (reason, message) =
        conflict_of(&[older, shard("east", Some(sticky(10_800)), ports())]).expect("a conflict");
    assert_eq!(reason, "SessionAffinityConfigConflict");
    assert!(message.contains("Using 60 s from the oldest service export in \"north\""), "{message}");
    // Ports of other protocols than TCP count, and the ports of pods do not.
    let dns = |port| {
        let (name, protocol, app_protocol) = ("dns".into(), "UDP".into(), "example.com/x".into());
        let port = ExportedPort { name, port, protocol, app_protocol };
        Export { ports: [port].into(), ..export(NEW) }
    };
    let pair =
        |one, other| conflict_of(&[shard("west", Some(one), vec![]), shard("east", Some(other), vec![])]);
    let (reason, message) = pair(dns(53), dns(54)).expect("a conflict");
    assert_eq!(reason, "PortConflict");
    assert!(message.contains("Using dns UDP 54 of example.com/x from"), "{message}");
    let other_target = vec![ServicePort { target_port: 8443, ..port("https", 443) }];
    assert_eq!(against(export(NEW), other_target), None);
    let (reason, message) = against(headless(), vec![port("https", 444)]).expect("a conflict");
    assert_eq!(reason, "PortConflict,TypeConflict");
    assert!(message.contains("disagree. Conflicting type."), "{message}");
}

#[test]
fn a_message_does_not_grow_with_the_ports() {
    let many = (1..=500).map(|number| port(&format!("port-{number:03}"), number)).collect();
    let (_, message) = conflict_of(&[
        shard("west", Some(export(OLD)), many),
        shard("east", Some(export(NEW)), vec![port("https", 443)]),
    ])
    .expect("a conflict");
    assert!(message.contains("port-010 TCP 10, 490 more from"), "{message}");
    assert!(message.len() < 400, "{message}");
    let long = vec![port(&"x".repeat(1 << 20), 443)];
    let (_, message) = conflict_of(&[
        shard("west", Some(export(OLD)), long),
        shard("east", Some(export(NEW)), vec![port("https", 443)]),
    ])
    .expect("a conflict");
    assert!(message.len() < 400, "{} bytes", message.len());
}

#[test]
fn a_service_of_the_cluster_set_has_the_ports_of_all_exports_and_the_rest_of_the_oldest() {
    let exported = |name: &str, port, protocol: &str| ExportedPort {
        name: name.into(),
        port,
        protocol: protocol.into(),
        app_protocol: "".into(),
    };
    let of = |created: &str, ports: &[ExportedPort]| Some(Export { ports: ports.into(), ..export(created) });
    let old = [exported("dns", 53, "TCP"), exported("dns-udp", 53, "UDP")];
    let new = [exported("dns", 54, "TCP"), exported("other", 53, "UDP"), exported("web", 80, "TCP")];
    let shards = [
        shard("east", of(NEW, &new), vec![port("dns", 54)]),
        shard("west", of(OLD, &old), vec![port("dns", 53)]),
    ];
    let view = merged(&shards);
    let service = ClusterSetService::of(&view).expect("exported");
    assert_eq!((service.name, service.namespace), ("web", "shop"));
    assert_eq!(service.ports, [&old[..], &new[2..]].concat());
    assert_eq!(service.clusters.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["east", "west"]);
    assert_eq!(service.oldest.map(|export| &*export.created), Some(OLD));
    // The copy of an earlier release has no ports of its own, so those of the service are used.
    let view = merged(&[shard("east", Some(export(OLD)), vec![port("web", 80)])]);
    assert_eq!(ClusterSetService::of(&view).expect("exported").ports, [exported("web", 80, "TCP")]);
    let view = merged(&[shard("east", None, vec![port("web", 80)])]);
    assert!(
        ClusterSetService::of(&view).is_none(),
        "an operator's own service is no service of the cluster set"
    );
}
