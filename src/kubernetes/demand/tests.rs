//! Workloads as an API server sends them, and the demand of the Services that select their pods.

use super::super::endpoints::tests::Cluster;
use super::super::kinds::Kind;
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_model::place::Network;

const WEB: &str = "shop/web.shop.svc.cluster.local";

fn object(name: &str, spec: &str) -> String {
    format!(r#"{{"metadata":{{"namespace":"shop","name":"{name}"}},"spec":{{{spec}}}}}"#)
}

/// Returns a workload with this number of replicas, a JSON text, and labels of its pods.
fn workload(name: &str, replicas: &str, labels: &str) -> String {
    object(name, &format!(r#""replicas":{replicas},"template":{{"metadata":{{"labels":{{{labels}}}}}}}"#))
}

fn cluster() -> Cluster {
    let networks = vec![Network::new("vms")];
    let mut cluster = Cluster::new(KubernetesSpec { replicas: true, networks, ..KubernetesSpec::plain() });
    cluster.put(Kind::Service, &object("web", r#""ports":[{"port":80}],"selector":{"app":"web"}"#));
    cluster.put(Kind::Service, &object("other", r#""ports":[{"port":80}],"selector":{"app":"other"}"#));
    cluster.put(Kind::Service, &object("by-hand", r#""ports":[{"port":80}]"#));
    cluster.renew();
    cluster
}

/// Returns the demand of the Service `web` by network.
fn demand(cluster: &mut Cluster) -> String {
    cluster.renew();
    let said = cluster.services[WEB].demand.iter();
    let text = said.map(|said| format!("{} {}", said.network.clone().unwrap_or_default(), said.weight));
    text.collect::<Vec<_>>().join(", ")
}

#[test]
fn a_service_has_the_replicas_of_the_workloads_whose_pods_it_selects() {
    let mut cluster = cluster();
    assert_eq!(demand(&mut cluster), "", "not known");
    cluster.put(Kind::Deployment, &workload("a", "30", r#""app":"web","v":"1""#));
    assert_eq!(cluster.renew(), [WEB], "and no other service");
    assert_eq!(demand(&mut cluster), "east 30");
    cluster.put(Kind::StatefulSet, &workload("a", "5", r#""app":"web""#));
    cluster.put(Kind::Deployment, &workload("b", "9", r#""app":"another""#));
    assert_eq!(demand(&mut cluster), "east 35");
    cluster.put(Kind::Deployment, &workload("a", "10", r#""app":"web","v":"2""#));
    assert_eq!(demand(&mut cluster), "east 15", "scaled down");
    cluster.put(Kind::Deployment, &workload("a", "0", r#""app":"web""#));
    assert_eq!(demand(&mut cluster), "east 5");
    cluster.delete(Kind::StatefulSet, &workload("a", "5", ""));
    assert_eq!(demand(&mut cluster), "", "a workload that wants none does not know what other owners want");
    cluster.put(Kind::Deployment, &workload("a", "3", r#""app":"moved""#));
    assert_eq!(demand(&mut cluster), "");
}

#[test]
fn the_status_of_a_workload_changes_nothing_and_absent_replicas_are_one() {
    let mut cluster = cluster();
    cluster.put(Kind::Deployment, &workload("a", "null", r#""app":"web""#));
    assert_eq!(demand(&mut cluster), "east 1");
    let ready = workload("a", "1", r#""app":"web""#).replacen('{', r#"{"status":{"readyReplicas":1},"#, 1);
    cluster.put(Kind::Deployment, &ready);
    assert_eq!(cluster.renew(), Vec::<String>::new());
    for (hostile, read) in [("-1", String::new()), ("9223372036854775807", format!("east {}", u32::MAX))] {
        cluster.put(Kind::Deployment, &workload("a", hostile, r#""app":"web""#));
        assert_eq!(demand(&mut cluster), read);
    }
    cluster.put(Kind::StatefulSet, &workload("b", "7", r#""app":"web""#));
    assert_eq!(demand(&mut cluster), format!("east {}", u32::MAX));
}

#[test]
fn the_network_label_of_the_pods_leads_to_allowed_networks_alone() {
    let mut cluster = cluster();
    let of = |name: &str, network: &str| {
        workload(name, "4", &format!(r#""app":"web","topology.istio.io/network":"{network}""#))
    };
    cluster.put(Kind::Deployment, &of("a", "vms"));
    cluster.put(Kind::Deployment, &of("b", "foreign"));
    cluster.put(Kind::Deployment, &of("c", "east"));
    cluster.put(Kind::Deployment, &of("d", ""));
    assert_eq!(demand(&mut cluster), "east 8, vms 4");
}

#[test]
fn workloads_are_read_only_if_the_config_says_so() {
    let watched = |replicas| {
        let spec = KubernetesSpec { replicas, ..KubernetesSpec::plain() };
        Kind::watched(&spec).into_iter().filter(|(kind, _)| kind.plural() == "deployments").count()
    };
    assert_eq!([false, true].map(watched), [0, 1]);
}
