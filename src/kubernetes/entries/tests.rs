//! ServiceEntries and WorkloadEntries as an API server sends them, and what istiod makes of them (pilot/pkg/serviceregistry/serviceentry
//! of August 2026), within what a namespace may claim.

use std::collections::BTreeMap;

use super::super::endpoints::tests::Cluster;
use super::super::kinds::Kind;
use isthmus_aggregator::spec::kubernetes::{KubernetesSpec, NamespaceChoice};
use isthmus_model::endpoint::{DeclaredTls, TlsMode};
use isthmus_model::place::Network;
use isthmus_registry::change::MarkKind;

const WEB: &str = "shop/web.shop.svc.cluster.local";

fn spec() -> KubernetesSpec {
    KubernetesSpec {
        service_entries: true,
        destination_rules: true,
        networks: vec![Network::new("vms")],
        ..KubernetesSpec::plain()
    }
}

fn cluster() -> Cluster {
    Cluster::new(spec())
}

/// Returns an object of the namespace `shop`, of which `at` is the name, and `spec` and `more` are JSON.
fn object(at: &str, spec: &str, more: &str) -> String {
    let (namespace, name) = at.split_once('/').unwrap_or(("shop", at));
    format!(r#"{{"metadata":{{"namespace":"{namespace}","name":"{name}"{more}}},"spec":{{{spec}}}}}"#)
}

impl Cluster {
    fn entry(&mut self, at: &str, spec: &str) {
        self.put(Kind::ServiceEntry, &object(at, spec, ""));
    }

    fn workload(&mut self, at: &str, spec: &str) {
        self.put(Kind::WorkloadEntry, &object(at, spec, ""));
    }

    fn service(&mut self, at: &str, spec: &str) {
        self.put(Kind::Service, &object(at, spec, ""));
    }

    /// Creates a pod of `shop`.
    fn pod(&mut self, number: u8, app: &str, ready: &str) {
        self.put(Kind::Pod, &pod(number, app, ready));
    }

    /// Returns the lines on objects without effect.
    fn ignored(&mut self) -> Vec<String> {
        self.renew();
        self.index.ignored.iter().map(|one| format!("{} {} {}", one.count, one.kind, one.first)).collect()
    }

    fn addresses(&mut self, service: &str) -> Vec<String> {
        self.renew();
        self.services[service].addresses.iter().map(ToString::to_string).collect()
    }
}

/// Returns a pod of `shop` with this label `app` and address, ready or not, with the named port `http` at 8080.
fn pod(number: u8, app: &str, ready: &str) -> String {
    let uid = format!("0000000000000000000000000000000{number}");
    let more = format!(r#","uid":"{uid}","labels":{{"app":"{app}","security.istio.io/tlsMode":"istio"}}"#);
    let spec =
        r#""serviceAccountName":"pods","containers":[{"ports":[{"name":"http","containerPort":8080}]}]"#;
    let status = format!(
        r#""status":{{"podIPs":[{{"ip":"10.0.0.{number}"}}],"conditions":[{{"type":"Ready","status":"{ready}"}}]}}"#
    );
    let pod = object(&format!("p{number}"), spec, &more);
    format!("{},{status}}}", pod.strip_suffix('}').expect("an object"))
}

const HTTP: &str = r#""ports":[{"number":80,"name":"http","protocol":"HTTP"}]"#;

/// Returns the spec of an internal ServiceEntry with one HTTP port.
fn internal(host: &str, more: &str) -> String {
    format!(r#""hosts":["{host}"],"location":"MESH_INTERNAL","resolution":"STATIC",{HTTP},{more}"#)
}

#[test]
fn a_service_selects_workload_entries_beside_its_pods() {
    let mut cluster = cluster();
    cluster.service(
        "web",
        r#""clusterIP":"10.96.0.1","selector":{"app":"web"},
           "ports":[{"name":"http","port":80,"targetPort":8080},{"name":"admin","port":81,"targetPort":"adm"}]"#,
    );
    cluster
        .workload("vm1", r#""address":"10.9.0.1","labels":{"app":"web"},"serviceAccount":"vms","weight":7"#);
    cluster
        .workload("vm2", r#""address":"10.9.0.2","labels":{"app":"web"},"ports":{"http":9080,"adm":9081}"#);
    cluster.workload("vm3", r#""address":"vm3.example.com","labels":{"app":"web"}"#);
    cluster.workload("vm4", r#""address":"10.9.0.4","labels":{"app":"other"}"#);
    cluster.workload("vm5", r#""labels":{"app":"web"},"network":"vms""#);
    cluster.workload("other/vm6", r#""address":"10.9.0.6","labels":{"app":"web"}"#);
    // A named target port is that of the entry, as are the ports by the names of service ports; names are for ServiceEntries.
    assert_eq!(cluster.endpoints(WEB), ["10.9.0.1:8080", "10.9.0.2:9080+9081", ":8080"]);
    let service = cluster.services[WEB].clone();
    let [first, second, third] = &service.endpoints[..] else { panic!("three endpoints") };
    assert_eq!(first.weight.value(), 7);
    let identity = first.template.identity.as_ref().map(ToString::to_string);
    assert_eq!(identity.as_deref(), Some("spiffe://cluster.local/ns/shop/sa/vms"));
    assert_eq!(first.template.tls, Some(DeclaredTls::Mode(TlsMode::Mesh)), "an account means the mesh");
    assert_eq!(second.template.tls, Some(DeclaredTls::Application));
    assert_eq!(third.template.network, Some(Network::new("vms")), "it has no address of its own");
    cluster.workload("vm2", r#""address":"10.9.0.2","labels":{"app":"other"}"#);
    cluster.workload("vm5", r#""labels":{"app":"web"},"network":"east""#);
    assert_eq!(
        cluster.ignored(),
        ["1 WorkloadEntry shop/vm5: it has no address, and is not on another network"]
    );
    assert_eq!(cluster.endpoints(WEB), ["10.9.0.1:8080"]);
    cluster
        .service("web", r#""clusterIP":"None","selector":{"app":"web"},"ports":[{"name":"http","port":80}]"#);
    assert_eq!(cluster.endpoints(WEB), [""; 0], "callers use the addresses of a headless service's pods");
}

#[test]
fn labels_of_a_workload_entry_come_from_both_places_and_its_mode_locality_and_network_too() {
    let mut cluster = cluster();
    cluster.entry("e", &internal("vm.example.com", r#""workloadSelector":{"labels":{"a":"meta"}}"#));
    let labels = r#","labels":{"a":"meta","b":"meta","istio-locality":"r.z.s"}"#;
    let spec = r#""address":"10.9.0.1","serviceAccount":"sa","labels":{"a":"spec","c":"spec",
        "topology.istio.io/network":"vms","security.istio.io/tlsMode":"disabled"}"#;
    cluster.put(Kind::WorkloadEntry, &object("vm", spec, labels));
    let host = "shop/vm.example.com";
    assert_eq!(cluster.endpoints(host), ["10.9.0.1:80"]);
    let endpoint = cluster.services[host].endpoints[0].clone();
    let label = |name: &str| endpoint.template.labels.get(name).map(|value| value.to_string());
    assert_eq!(["a", "b", "c"].map(label), ["meta", "meta", "spec"].map(|text| Some(text.to_owned())));
    assert_eq!(endpoint.template.network, Some(Network::new("vms")));
    assert_eq!(endpoint.template.tls, Some(DeclaredTls::Application));
    assert_eq!(endpoint.locality.to_string(), "r/z/s");
    let spec = r#""address":"10.9.0.1","labels":{"a":"meta"},"locality":"r2","network":"foreign""#;
    cluster.workload("vm", spec);
    assert_eq!(cluster.endpoints(host), [""; 0], "`allow.networks` does not have the network");
    assert_eq!(cluster.services[host].withheld.len(), 1);
}

#[test]
fn a_service_entry_has_endpoints_of_its_own_or_selects_pods_and_workloads() {
    let mut cluster = cluster();
    let host = "shop/api.example.com";
    cluster.entry(
        "e",
        r#""hosts":["api.example.com"],"location":"MESH_INTERNAL","resolution":"STATIC",
           "ports":[{"number":80,"name":"http","protocol":"HTTP"},{"number":443,"name":"tls","protocol":"TLS","targetPort":8443},
                    {"number":53,"name":"dns","protocol":"UDP"}],
           "endpoints":[{"address":"10.9.0.1","ports":{"http":8080},"network":"vms","locality":"r/z"},
                        {"address":"name.example.com"},{"address":"unix:///run/x"},{"address":"2001:db8::9"}]"#,
    );
    assert_eq!(cluster.endpoints(host), ["10.9.0.1:8080+8443", "2001:db8::9:80+8443"]);
    let endpoint = &cluster.services[host].endpoints[0];
    assert_eq!(
        (endpoint.template.network.as_ref(), endpoint.locality.to_string()),
        (Some(&Network::new("vms")), "r/z".to_owned())
    );
    cluster.entry("e", &internal("api.example.com", r#""workloadSelector":{"labels":{"app":"web"}}"#));
    cluster.pod(1, "web", "True");
    cluster.pod(2, "web", "False");
    cluster.pod(3, "other", "True");
    cluster.workload("vm", r#""address":"10.9.0.1","labels":{"app":"web"}"#);
    // The pod's own port of that name counts, as for istiod.
    assert_eq!(cluster.endpoints(host), ["10.0.0.1:8080", "10.0.0.2:8080 unhealthy", "10.9.0.1:80"]);
    let endpoint = &cluster.services[host].endpoints[0];
    assert_eq!(endpoint.template.tls, Some(DeclaredTls::Mode(TlsMode::Mesh)));
    cluster.pod(2, "web", "True");
    cluster.pod(3, "web", "True");
    assert_eq!(cluster.endpoints(host), ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080", "10.9.0.1:80"]);
    cluster.delete(
        Kind::Pod,
        r#"{"metadata":{"namespace":"shop","name":"p1","uid":"00000000000000000000000000000001"}}"#,
    );
    cluster.pod(3, "other", "True");
    assert_eq!(cluster.endpoints(host), ["10.0.0.2:8080", "10.9.0.1:80"]);
    cluster.delete(Kind::ServiceEntry, &object("e", "", ""));
    assert_eq!(cluster.endpoints(host), ["no service"]);
}

#[test]
fn names_are_resolved_only_by_entries_that_say_so() {
    let mut cluster = cluster();
    let of = |resolution: &str, more: &str| {
        format!(
            r#""hosts":["api.example.com"],"location":"MESH_INTERNAL","resolution":"{resolution}",{HTTP}{more}"#
        )
    };
    let named = r#","endpoints":[{"address":"a.example.com","serviceAccount":"a"},{"address":"10.9.0.1"}]"#;
    for (resolution, more, expected) in [
        ("DNS", "", &["api.example.com:80"][..]),
        ("DNS_ROUND_ROBIN", "", &["api.example.com:80"]),
        ("DNS", named, &["10.9.0.1:80", "a.example.com:80"]),
        ("STATIC", named, &["10.9.0.1:80"]),
        ("STATIC", "", &[]),
        ("NONE", "", &["no service"]),
        ("DYNAMIC_DNS", "", &["no service"]),
    ] {
        cluster.entry("e", &of(resolution, more));
        assert_eq!(cluster.endpoints("shop/api.example.com"), expected, "{resolution} {more}");
    }
    assert_eq!(cluster.ignored(), ["1 ServiceEntry shop/e: its resolution DYNAMIC_DNS has no endpoints"]);
}

#[test]
fn a_service_entry_adds_to_the_service_of_its_host() {
    let mut cluster = cluster();
    let own = internal(
        "web.shop.svc.cluster.local",
        r#""endpoints":[{"address":"10.9.0.1"},{"address":"a.example.com"}]"#,
    );
    cluster.entry("e", &own);
    assert_eq!(cluster.endpoints(WEB), ["10.9.0.1:80"]);
    // The Service's ports count; an endpoint is one for the ports of the same names.
    cluster.service(
        "web",
        r#""clusterIP":"10.96.0.1","ports":[{"name":"http","port":8000},{"name":"more","port":9000}]"#,
    );
    assert_eq!(cluster.endpoints(WEB), ["10.9.0.1:80"]);
    let ports =
        |cluster: &Cluster| cluster.services[WEB].ports.iter().map(|port| port.port).collect::<Vec<_>>();
    assert_eq!((ports(&cluster), cluster.addresses(WEB)), (vec![8000, 9000], vec!["10.96.0.1".to_owned()]));
    cluster.delete(Kind::Service, &object("web", "", ""));
    assert_eq!((cluster.endpoints(WEB), ports(&cluster)), (vec!["10.9.0.1:80".to_owned()], vec![80]));
}

#[test]
fn a_host_of_another_namespace_is_refused_and_the_oldest_entry_has_any_other_host() {
    let mut cluster = cluster();
    let end = |address: &str| format!(r#""endpoints":[{{"address":"{address}"}}]"#);
    for host in ["api.pay.svc.cluster.local", "api.shop.svc.clusterset.local", "pay.svc.cluster.local"] {
        cluster.entry("e", &internal(host, &end("10.9.0.1")));
        assert_eq!(cluster.renew(), [""; 0], "{host}");
    }
    assert_eq!(
        cluster.ignored(),
        ["1 ServiceEntry shop/e: the host pay.svc.cluster.local is for the namespace pay"]
    );
    let at = |second: u8| format!(r#","creationTimestamp":"2026-01-01T00:00:0{second}Z""#);
    let put = |cluster: &mut Cluster, name: &str, second, address: &str| {
        let spec = internal("api.example.com", &end(address));
        cluster.put(Kind::ServiceEntry, &object(name, &spec, &at(second)));
    };
    put(&mut cluster, "shop/e", 2, "10.9.0.2");
    put(&mut cluster, "pay/a", 3, "10.9.0.3");
    put(&mut cluster, "shop/f", 4, "10.9.0.4");
    assert_eq!(cluster.endpoints("shop/api.example.com"), ["10.9.0.2:80", "10.9.0.4:80"]);
    assert_eq!(
        cluster.ignored(),
        ["1 ServiceEntry pay/a: the host api.example.com is that of the older ServiceEntry shop/e"]
    );
    cluster.delete(Kind::ServiceEntry, &object("shop/e", "", ""));
    assert_eq!(cluster.endpoints("pay/api.example.com"), ["10.9.0.3:80"]);
    assert_eq!(cluster.endpoints("shop/api.example.com"), ["no service"]);
    cluster.service("db", r#""clusterIP":"None","ports":[{"name":"http","port":80}]"#);
    cluster.entry("g", &internal("db-0.db.shop.svc.cluster.local", &end("10.9.0.9")));
    let of_pod = "shop/db-0.db.shop.svc.cluster.local";
    assert_eq!(cluster.endpoints(of_pod), ["no service"], "it may be the name of a pod");
    cluster.delete(Kind::Service, &object("db", "", ""));
    assert_eq!(cluster.endpoints(of_pod), ["10.9.0.9:80"]);
}

#[test]
fn addresses_of_pods_and_services_of_other_namespaces_are_not_taken() {
    let mut cluster = cluster();
    cluster.pod(1, "web", "True");
    cluster.service("web", r#""clusterIP":"10.96.0.1","ports":[{"name":"http","port":80}]"#);
    let end = r#""endpoints":[{"address":"10.0.0.1"},{"address":"10.96.0.1"},{"address":"10.9.0.1"}]"#;
    cluster.entry("shop/own", &internal("own.example.com", end));
    cluster.entry("pay/e", &internal("pay.example.com", end));
    assert_eq!(cluster.endpoints("shop/own.example.com"), ["10.0.0.1:80", "10.9.0.1:80", "10.96.0.1:80"]);
    assert_eq!(cluster.endpoints("pay/pay.example.com"), ["10.9.0.1:80"]);
    // What comes later takes an address back.
    cluster.service("late", r#""clusterIP":"10.9.0.1","ports":[{"name":"http","port":80}]"#);
    assert_eq!(cluster.endpoints("pay/pay.example.com"), [""; 0]);
    cluster.delete(Kind::Service, &object("late", "", ""));
    cluster.delete(
        Kind::Pod,
        r#"{"metadata":{"namespace":"shop","name":"p1","uid":"00000000000000000000000000000001"}}"#,
    );
    assert_eq!(cluster.endpoints("pay/pay.example.com"), ["10.0.0.1:80", "10.9.0.1:80"]);
    cluster.service(
        "pay/sel",
        r#""clusterIP":"10.96.0.9","selector":{"a":"b"},"ports":[{"name":"http","port":80}]"#,
    );
    cluster.workload("pay/vm", r#""address":"10.0.0.2","labels":{"a":"b"}"#);
    assert_eq!(cluster.endpoints("pay/sel.pay.svc.cluster.local"), ["10.0.0.2:80"]);
    cluster.pod(2, "web", "True");
    assert_eq!(cluster.endpoints("pay/sel.pay.svc.cluster.local"), [""; 0]);
}

#[test]
fn virtual_addresses_are_those_of_nobody_else() {
    let mut cluster = cluster();
    cluster.pod(1, "web", "True");
    cluster.service("web", r#""clusterIP":"10.96.0.1","ports":[{"name":"http","port":80}]"#);
    let of = |list: &str| internal("a.example.com", &format!(r#""addresses":[{list}]"#));
    let host = "shop/a.example.com";
    cluster.entry(
        "e",
        &of(r#""10.0.0.1","10.96.0.1","127.0.0.1","169.254.169.254","10.1.0.0/16","10.2.0.1/32","10.2.0.2","x""#),
    );
    assert_eq!(cluster.addresses(host), ["10.2.0.1", "10.2.0.2"]);
    let spec = internal("b.example.com", r#""addresses":["10.2.0.2","10.2.0.3"]"#);
    let older = r#","creationTimestamp":"2025-01-01T00:00:00Z""#;
    cluster.put(
        Kind::ServiceEntry,
        &object("e", &of(r#""10.2.0.1","10.2.0.2""#), r#","creationTimestamp":"2026-01-01T00:00:00Z""#),
    );
    cluster.put(Kind::ServiceEntry, &object("pay/older", &spec, older));
    assert_eq!(
        cluster.addresses(host),
        ["10.2.0.1"],
        "an older entry of another namespace has the other one"
    );
    assert_eq!(cluster.addresses("pay/b.example.com"), ["10.2.0.2", "10.2.0.3"]);
    let allocated = |more: &str| {
        let spec = internal("a.example.com", r#""endpoints":[]"#);
        let status = r#""status":{"addresses":[{"value":"240.240.0.7","host":"a.example.com"},{"value":"240.240.0.8","host":"other"}]}"#;
        let text = object("e", &spec, more);
        format!("{},{status}}}", text.strip_suffix('}').expect("an object"))
    };
    cluster.put(Kind::ServiceEntry, &allocated(""));
    assert_eq!(cluster.addresses(host), ["240.240.0.7"]);
    cluster.put(
        Kind::ServiceEntry,
        &allocated(r#","labels":{"networking.istio.io/enable-autoallocate-ip":"False"}"#),
    );
    assert_eq!(cluster.addresses(host), [""; 0]);
}

#[test]
fn export_rules_do_not_apply_to_entries_that_the_gateway_does_not_see() {
    let mut cluster = cluster();
    let hidden = |cluster: &mut Cluster, more: &str| {
        let spec = format!(
            r#""hosts":["a.example.com"],"resolution":"STATIC",{HTTP},"endpoints":[{{"address":"10.9.0.1"}}]{more}"#
        );
        cluster.put(Kind::ServiceEntry, &object("e", &spec, r#","labels":{"export":"yes"}"#));
        cluster.renew();
        let marks: Vec<_> =
            cluster.marks.values().map(|mark| (mark.kind, mark.key.object.to_string())).collect();
        marks
    };
    let seen = [(MarkKind::Service, "ServiceEntry shop/e".to_owned())];
    let internal = r#","location":"MESH_INTERNAL""#;
    for list in ["[]", r#"["*"]"#, r#"["istio-system"]"#, r#"["~","*"]"#] {
        assert_eq!(hidden(&mut cluster, &format!(r#"{internal},"exportTo":{list}"#)), seen, "{list}");
    }
    for list in [r#"["."]"#, r#"["~"]"#, r#"["pay"]"#] {
        let marks = hidden(&mut cluster, &format!(r#"{internal},"exportTo":{list}"#));
        assert_eq!(marks.len(), 1, "{marks:?}");
        assert!(marks[0].0 == MarkKind::Hidden && marks[0].1.starts_with("exportTo"), "{marks:?}");
    }
    for location in ["", r#","location":"MESH_EXTERNAL""#] {
        let of_place = "location MESH_EXTERNAL of ServiceEntry shop/e".to_owned();
        assert_eq!(hidden(&mut cluster, location), [(MarkKind::Hidden, of_place)]);
    }
    assert_eq!(cluster.endpoints("shop/a.example.com"), ["10.9.0.1:80"], "clients on its network have it");
}

#[test]
fn a_workload_whose_checks_fail_is_unhealthy_until_they_succeed() {
    let mut cluster = cluster();
    cluster.entry("e", &internal("a.example.com", r#""workloadSelector":{"labels":{"a":"b"}}"#));
    let mut health = |annotations: &str, conditions: &str| {
        let text = object(
            "vm",
            r#""address":"10.9.0.1","labels":{"a":"b"}"#,
            &format!(r#","annotations":{{{annotations}}}"#),
        );
        let status = format!(r#""status":{{"conditions":[{conditions}]}}"#);
        cluster
            .put(Kind::WorkloadEntry, &format!("{},{status}}}", text.strip_suffix('}').expect("an object")));
        cluster.endpoints("shop/a.example.com").remove(0)
    };
    let checked = r#""proxy.istio.io/health-checks-enabled":"true""#;
    let is = |status: &str| format!(r#"{{"type":"Healthy","status":"{status}"}}"#);
    assert_eq!(health("", &is("False")), "10.9.0.1:80", "it is not checked");
    assert_eq!(health(checked, ""), "10.9.0.1:80 unhealthy");
    assert_eq!(health(checked, &is("False")), "10.9.0.1:80 unhealthy");
    assert_eq!(health(checked, &is("True")), "10.9.0.1:80");
}

#[test]
fn rules_of_the_mesh_apply_to_hosts_of_entries() {
    let mut cluster = cluster();
    cluster.entry(
        "e",
        &internal(
            "a.example.com",
            r#""endpoints":[{"address":"10.9.0.1","serviceAccount":"a","labels":{"v":"1"}}]"#,
        ),
    );
    cluster.renew();
    let rule = |host: &str, more: &str| object("r", &format!(r#""host":"{host}"{more}"#), "");
    let subset =
        r#","subsets":[{"name":"v1","labels":{"v":"1"}}],"trafficPolicy":{"tls":{"mode":"DISABLE"}}"#;
    for host in ["a.example.com", "*.example.com"] {
        cluster.put(Kind::DestinationRule, &rule(host, subset));
        assert_eq!(cluster.renew(), ["shop/a.example.com"], "{host}");
        let service = &cluster.services["shop/a.example.com"];
        assert_eq!(service.subsets.keys().map(|name| &**name).collect::<Vec<_>>(), ["v1"]);
        assert!(service.endpoints[0].template.mesh_tls.is_some(), "mTLS is off");
        cluster.delete(Kind::DestinationRule, &rule(host, ""));
        cluster.renew();
    }
    cluster.put(Kind::DestinationRule, &rule("b.example.com", subset));
    assert_eq!(cluster.renew(), [""; 0]);
    let off = object("p", r#""mtls":{"mode":"DISABLE"}"#, "");
    cluster.put(Kind::PeerAuthentication, &off);
    assert_eq!(cluster.renew(), ["shop/a.example.com"]);
    assert!(cluster.services["shop/a.example.com"].endpoints[0].template.mesh_tls.is_some());
}

#[test]
fn entries_of_namespaces_that_are_not_read_have_no_effect() {
    let except = NamespaceChoice { except: vec!["shop".into()], ..NamespaceChoice::default() };
    let mut cluster = Cluster::new(KubernetesSpec { namespaces: except, ..spec() });
    cluster.entry("e", &internal("a.example.com", r#""endpoints":[{"address":"10.9.0.1"}]"#));
    assert_eq!(cluster.renew(), [""; 0]);
}

#[test]
fn entries_that_are_not_read_are_counted_with_the_first_name() {
    let mut cluster = Cluster::new(KubernetesSpec { service_entries: false, ..spec() });
    let one = internal("a.example.com", r#""endpoints":[{"address":"10.9.0.1"}]"#);
    cluster.entry("b", &one);
    cluster.entry("a", &one);
    cluster.workload("vm", r#""address":"10.9.0.1","labels":{"app":"web"}"#);
    cluster.service(
        "web",
        r#""clusterIP":"10.96.0.1","selector":{"app":"web"},"ports":[{"name":"http","port":80}]"#,
    );
    assert_eq!(cluster.endpoints(WEB), [""; 0]);
    let off = "`serviceEntries` of the registry is false";
    assert_eq!(
        cluster.ignored(),
        [format!("2 ServiceEntry shop/a: {off}"), format!("1 WorkloadEntry shop/vm: {off}")]
    );
    assert_eq!(cluster.services.len(), 1);
    cluster.delete(Kind::ServiceEntry, &object("a", "", ""));
    assert_eq!(cluster.ignored()[0], format!("1 ServiceEntry shop/b: {off}"));
}

#[test]
fn hosts_and_endpoints_without_a_legal_form_are_counted() {
    let mut cluster = cluster();
    let hosts =
        r#""hosts":["*.example.com","a.example.com"],"location":"MESH_INTERNAL","resolution":"STATIC","#;
    cluster.entry("e", &format!(r#"{hosts}{HTTP},"endpoints":[{{"address":"10.9.0.1"}}]"#));
    cluster.workload("vm", r#""address":"unix:///run/vm""#);
    assert_eq!(cluster.endpoints("shop/a.example.com"), ["10.9.0.1:80"]);
    assert_eq!(
        cluster.ignored(),
        [
            "1 ServiceEntry shop/e: the host *.example.com has a wildcard",
            "1 WorkloadEntry shop/vm: its address is neither an IP address nor a host name"
        ]
    );
    let many = vec![r#"{"address":"10.9.0.1"}"#; 10_001].join(",");
    let hosts = hosts.replace("*.example.com", "b.example.com");
    cluster.entry("e", &format!(r#"{hosts}{HTTP},"endpoints":[{many}]"#));
    assert_eq!(cluster.endpoints("shop/a.example.com"), ["no service"]);
    assert!(cluster.ignored()[0].contains("20002 endpoints together"), "{:?}", cluster.ignored());
    let hosts_of = |many: &str| {
        let hosts = format!(r#""hosts":[{many}],"location":"MESH_INTERNAL","resolution":"STATIC""#);
        format!(r#"{hosts},{HTTP},"endpoints":[{{"address":"10.9.0.1"}}]"#)
    };
    let many: Vec<String> = (0..257).map(|number| format!(r#""h{number}.example.com""#)).collect();
    cluster.entry("e", &hosts_of(&many.join(",")));
    assert_eq!(cluster.endpoints("shop/h255.example.com"), ["10.9.0.1:80"]);
    assert_eq!(cluster.endpoints("shop/h256.example.com"), ["no service"]);
    assert_eq!(cluster.ignored()[0], "1 ServiceEntry shop/e: it has 257 hosts, and 256 are read");
}

/// The variants of the objects of a small cluster: kind, name, and the rest of each variant.
fn variants() -> Vec<(Kind, String, Vec<String>)> {
    let mut all = Vec::new();
    let at = |second: u8| format!(r#","creationTimestamp":"2026-01-01T00:00:0{second}Z""#);
    let hosts = [
        "a.example.com",
        "web.shop.svc.cluster.local",
        "x.web.shop.svc.cluster.local",
        "web.pay.svc.cluster.local",
    ];
    let own = [
        r#""endpoints":[{"address":"10.0.0.1"},{"address":"10.9.0.1","network":"vms"}],"addresses":["10.2.0.1","10.96.0.1"]"#,
        r#""endpoints":[{"address":"10.96.0.1"},{"address":"a.example.com"}],"addresses":["10.2.0.1","10.0.0.1"]"#,
        r#""workloadSelector":{"labels":{"app":"web"}},"addresses":["10.2.0.1"]"#,
    ];
    for (number, key) in ["shop/e", "shop/f", "pay/g", "pay/h"].into_iter().enumerate() {
        let mut texts = Vec::new();
        for (other, host) in hosts.into_iter().enumerate() {
            for more in own {
                let second = u8::try_from((number * 3 + other) % 7).expect("small");
                texts.push(object(key, &internal(host, more), &at(second)));
            }
        }
        texts.push(object(key, &internal("a.example.com\",\"web.shop.svc.cluster.local", own[0]), &at(3)));
        all.push((Kind::ServiceEntry, key.to_owned(), texts));
    }
    for key in ["shop/v", "shop/w", "pay/v"] {
        let texts = ["10.9.0.2", "10.0.0.2", "10.96.0.2", "vm.example.com", "unix:///x"].map(|address| {
            ["web", "db"]
                .map(|app| object(key, &format!(r#""address":"{address}","labels":{{"app":"{app}"}}"#), ""))
        });
        all.push((Kind::WorkloadEntry, key.to_owned(), texts.into_iter().flatten().collect()));
    }
    for (number, key) in ["shop/web", "pay/web", "pay/other"].into_iter().enumerate() {
        let ports = r#""ports":[{"name":"http","port":80,"targetPort":8080}]"#;
        let texts = [
            format!(r#""clusterIP":"10.96.0.{number}","selector":{{"app":"web"}},{ports}"#),
            format!(r#""clusterIP":"10.96.0.{}",{ports}"#, number + 1),
            format!(r#""clusterIP":"None",{ports}"#),
            r#""type":"ExternalName","externalName":"a.example.com""#.to_owned(),
        ];
        all.push((Kind::Service, key.to_owned(), texts.map(|spec| object(key, &spec, "")).to_vec()));
    }
    for number in 1..=3 {
        let texts = ["web", "db"].map(|app| ["True", "False"].map(|ready| pod(number, app, ready)));
        all.push((Kind::Pod, format!("shop/p{number}"), texts.into_iter().flatten().collect()));
    }
    let rule = |host: &str| {
        object("r", &format!(r#""host":"{host}","subsets":[{{"name":"v","labels":{{"app":"web"}}}}]"#), "")
    };
    let rules = ["web", "a.example.com", "*.example.com", "*"].map(rule).to_vec();
    all.push((Kind::DestinationRule, "shop/r".to_owned(), rules));
    let peers =
        ["DISABLE", "STRICT"].map(|mode| object("p", &format!(r#""mtls":{{"mode":"{mode}"}}"#), "")).to_vec();
    all.push((Kind::PeerAuthentication, "shop/p".to_owned(), peers));
    let namespaces = ["", r#","labels":{"a":"b"}"#];
    let namespaces = namespaces.map(|labels| format!(r#"{{"metadata":{{"name":"shop"{labels}}}}}"#)).to_vec();
    all.push((Kind::Namespace, "shop".to_owned(), namespaces));
    all
}

/// Returns the next of a sequence of numbers that look random, below `most`.
fn next(seed: &mut u64, most: usize) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*seed >> 33).expect("31 bits") % most
}

#[test]
fn what_is_made_step_by_step_is_what_is_made_at_once() {
    let variants = variants();
    for first in 0..60 {
        let mut seed = first;
        let (mut cluster, mut objects) = (cluster(), BTreeMap::new());
        for step in 0..40 {
            let at = next(&mut seed, variants.len());
            let (kind, name, texts) = &variants[at];
            let text = &texts[next(&mut seed, texts.len())];
            match next(&mut seed, 4) {
                0 => {
                    cluster.delete(*kind, text);
                    objects.remove(&at);
                }
                _ => {
                    cluster.put(*kind, text);
                    objects.insert(at, text);
                }
            }
            cluster.renew();
            let mut at_once = Cluster::new(spec());
            objects.iter().for_each(|(at, text)| at_once.put(variants[*at].0, text));
            at_once.renew();
            let of = format!("seed {first}, step {step}: {kind:?} {name} {text}\n{objects:#?}");
            assert_eq!(cluster.services, at_once.services, "{of}");
            assert_eq!(cluster.marks, at_once.marks, "{of}");
            assert_eq!(cluster.index.ignored, at_once.index.ignored, "{of}");
        }
    }
}

#[test]
fn the_identities_that_an_entry_names_are_those_of_its_host_and_others_are_ignored_aloud() {
    let mut cluster = cluster();
    let names = |list: &str| {
        internal("db.test", &format!(r#""subjectAltNames":[{list}],"endpoints":[{{"address":"10.9.0.1"}}]"#))
    };
    let told = |cluster: &mut Cluster, service: &str| -> Vec<String> {
        cluster.renew();
        cluster.services[service].identities.iter().map(ToString::to_string).collect()
    };
    let (one, other) = ("spiffe://cluster.local/ns/shop/sa/db", "spiffe://far.example/db");
    cluster.entry("a", &names(&format!(r#""{other}","db.example.com""#)));
    assert_eq!(told(&mut cluster, "shop/db.test"), [other]);
    assert_eq!(
        cluster.ignored(),
        [r#"1 ServiceEntry shop/a: its subjectAltNames have "db.example.com", which is no SPIFFE ID"#]
    );
    // The identities of all entries of the host count.
    cluster.entry("a", &names(&format!(r#""{other}""#)));
    cluster.entry("b", &names(&format!(r#""{one}","{other}""#)));
    assert_eq!(told(&mut cluster, "shop/db.test"), [one, other]);
    assert!(cluster.ignored().is_empty());
    // So do those of an entry for the host of a Service.
    cluster.service("web", r#""clusterIP":"10.96.0.1","ports":[{"name":"http","port":80}]"#);
    cluster.entry(
        "c",
        &internal(
            "web.shop.svc.cluster.local",
            &format!(r#""subjectAltNames":["{one}"],"endpoints":[{{"address":"10.9.0.3"}}]"#),
        ),
    );
    assert_eq!(told(&mut cluster, WEB), [one]);
}
