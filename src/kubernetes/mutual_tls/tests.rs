//! DestinationRules and PeerAuthentications in, and the TLS modes of a service's endpoint out.

use std::sync::Arc;

use crate::index::Index;
use crate::kinds::Kind;
use crate::watch::{Event, What};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_model::place::ClusterId;
use isthmus_model::service::Service;
use isthmus_registry::change::{Change, Item};

const KINDS: [Kind; 5] =
    [Kind::Service, Kind::EndpointSlice, Kind::Pod, Kind::DestinationRule, Kind::PeerAuthentication];

/// A cluster with the Service `shop/web`, whose ports 80 (`http`, 8080 of the pod) and 443 (`https`, 8443) have one pod in the mesh.
struct World(Index);

impl World {
    fn new() -> Self {
        let spec = KubernetesSpec { destination_rules: true, ..KubernetesSpec::plain() };
        let domain = spec.trust_domain.clone();
        let watches = KINDS.map(|kind| (kind, None)).to_vec();
        let mut world = Self(Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches));
        let uid = "11111111-1111-1111-1111-111111111111";
        let ports =
            r#"{"name":"http","port":80,"targetPort":8080},{"name":"https","port":443,"targetPort":8443}"#;
        world.put(Kind::Service, "shop", "web", &format!(r#""spec":{{"ports":[{ports}]}}"#));
        let of_pod =
            format!(r#"{{"addresses":["10.0.0.1"],"targetRef":{{"kind":"Pod","name":"a","uid":"{uid}"}}}}"#);
        world.put_with(
            Kind::EndpointSlice,
            r#""namespace":"shop","name":"web-1","labels":{"kubernetes.io/service-name":"web"}"#,
            &format!(
                r#""addressType":"IPv4","ports":[{{"name":"http","port":8080}},{{"name":"https","port":8443}}],"endpoints":[{of_pod}]"#
            ),
        );
        world.put_with(
            Kind::Pod,
            &format!(
                r#""namespace":"shop","name":"a","uid":"{uid}","labels":{{"security.istio.io/tlsMode":"istio","app":"web","v":"1"}}"#
            ),
            r#""status":{"podIPs":[{"ip":"10.0.0.1"}]}"#,
        );
        world
    }

    fn put(&mut self, kind: Kind, namespace: &str, name: &str, more: &str) {
        self.put_with(kind, &format!(r#""namespace":"{namespace}","name":"{name}""#), more);
    }

    fn put_with(&mut self, kind: Kind, metadata: &str, more: &str) {
        let text = format!(r#"{{"metadata":{{{metadata}}},{more}}}"#);
        let object = kind.read(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let watch = KINDS.iter().position(|one| *one == kind).expect("watched");
        self.0.apply(Event { watch, kind, what: What::Put(object) });
    }

    fn gone(&mut self, kind: Kind, namespace: &str, name: &str) {
        let meta = format!(r#"{{"namespace":"{namespace}","name":"{name}"}}"#);
        let what = What::Gone(serde_json::from_str(&meta).expect("legal"));
        let watch = KINDS.iter().position(|one| *one == kind).expect("watched");
        self.0.apply(Event { watch, kind, what });
    }

    /// Returns the service as it is.
    fn service(&mut self) -> Option<Arc<Service>> {
        let changes = self.0.changes();
        changes.into_iter().rev().find_map(|change| match change {
            Change::Put(Item::Service(service)) => Some(service),
            _ => None,
        })
    }

    /// Returns the TLS modes of the ports 80 and 443 of the service's endpoint; then, for each subset in which they differ, those.
    fn modes(&mut self) -> Option<String> {
        let service = self.service()?;
        let template = &service.endpoints.first()?.template;
        let of = |subset: &str| {
            let modes = service.ports.iter().map(|port| template.tls_on(port, subset).text());
            modes.collect::<Vec<_>>().join(" ")
        };
        let all = of("");
        let subsets =
            service.subsets.keys().map(|name| name.to_ascii_lowercase()).filter(|name| of(name) != all);
        Some(subsets.fold(all.clone(), |text, name| format!("{text}; {name} {}", of(&name))))
    }
}

/// Returns the modes with these DestinationRules and PeerAuthentications: each with its namespace, its name, and its spec.
fn modes_with(rules: &[(&str, &str, &str)], peers: &[(&str, &str, &str)]) -> String {
    world_with(rules, peers).modes().expect("a service")
}

fn world_with(rules: &[(&str, &str, &str)], peers: &[(&str, &str, &str)]) -> World {
    let mut world = World::new();
    for (kind, all) in [(Kind::DestinationRule, rules), (Kind::PeerAuthentication, peers)] {
        for (at, (namespace, name, spec)) in all.iter().enumerate() {
            let metadata = format!(
                r#""namespace":"{namespace}","name":"{name}","creationTimestamp":"2026-01-01T00:00:{at:02}Z""#
            );
            world.put_with(kind, &metadata, &format!(r#""spec":{{{spec}}}"#));
        }
    }
    world
}

const WEB: &str = r#""host":"web.shop.svc.cluster.local""#;

fn policy(text: &str) -> String {
    format!(r#"{WEB},"trafficPolicy":{{{text}}}"#)
}

const OFF: &str = "none own";
const ON: &str = "mesh mesh";

/// The modes are those with which an istiod of 2026-08 leaves endpoints out of its gateway's clusters.
#[test]
fn destination_rules_turn_mutual_tls_off_as_istiod_reads_them() {
    let with = |spec: &str| modes_with(&[("shop", "a", spec)], &[]);
    assert_eq!(modes_with(&[], &[]), ON);
    for mode in ["DISABLE", "SIMPLE", "MUTUAL"] {
        assert_eq!(with(&policy(&format!(r#""tls":{{"mode":"{mode}"}}"#))), OFF, "{mode}");
    }
    assert_eq!(with(&policy(r#""tls":{}"#)), OFF, "DISABLE is the default");
    assert_eq!(with(&policy(r#""tls":{"mode":"ISTIO_MUTUAL"}"#)), ON);
    assert_eq!(with(&policy(r#""connectionPool":{"tcp":{"maxConnections":1}}"#)), ON);
    let port =
        |number: u16, mode: &str| format!(r#"{{"port":{{"number":{number}}},"tls":{{"mode":"{mode}"}}}}"#);
    let ports = |all: &[String]| format!(r#""portLevelSettings":[{}]"#, all.join(","));
    assert_eq!(with(&policy(&ports(&[port(80, "DISABLE")]))), "none mesh");
    assert_eq!(with(&policy(&ports(&[port(8080, "DISABLE")]))), ON, "a number of the service");
    assert_eq!(
        with(&policy(&ports(&[port(80, "ISTIO_MUTUAL"), port(80, "DISABLE")]))),
        ON,
        "the first counts"
    );
    let but_one = ports(&[port(443, "ISTIO_MUTUAL"), r#"{"port":{"number":80}}"#.to_owned()]);
    assert_eq!(with(&policy(&format!(r#""tls":{{"mode":"DISABLE"}},{but_one}"#))), "none mesh");
    let wide = |namespace, host: &str| {
        let spec = format!(r#""host":"{host}","trafficPolicy":{{"tls":{{"mode":"DISABLE"}}}}"#);
        modes_with(&[(namespace, "a", &spec)], &[])
    };
    assert_eq!(wide("istio-system", "*.local"), OFF, "for the whole mesh");
    assert_eq!(wide("shop", "*.shop.svc.cluster.local"), OFF);
    assert_eq!(wide("shop", "web"), OFF);
    assert_eq!(wide("shop", "*"), OFF);
    assert_eq!(wide("pay", "*.local"), ON, "of another namespace");
    let both = |one: &str, two: &str| modes_with(&[("shop", "a", one), ("shop", "b", two)], &[]);
    let (off, on) = (policy(r#""tls":{"mode":"DISABLE"}"#), policy(r#""tls":{"mode":"ISTIO_MUTUAL"}"#));
    assert_eq!(both(&on, &off), ON, "the oldest with a policy counts");
    assert_eq!(both(WEB, &off), OFF);
    assert_eq!(both(&policy(""), &off), ON, "an empty policy is one");
    let in_system = |spec: &str| modes_with(&[("shop", "a", &on), ("istio-system", "b", spec)], &[]);
    assert_eq!(in_system(&off), ON);
    assert_eq!(
        in_system(&format!(r#"{off},"exportTo":["."]"#)),
        OFF,
        "a private rule of the gateway's namespace"
    );
    let hidden = format!(r#"{on},"exportTo":["pay"]"#);
    let near = r#""host":"*.shop.svc.cluster.local","trafficPolicy":{"tls":{"mode":"DISABLE"}}"#;
    assert_eq!(both(&hidden, near), ON, "a hidden rule takes the place of a less specific one");
    let private = format!(r#"{on},"exportTo":["."]"#);
    assert_eq!(both(&private, near), OFF, "a private rule does not");
}

#[test]
fn a_subset_may_have_its_own_rule_for_mutual_tls() {
    let subset = |tls: &str, more: &str| {
        let subset = format!(r#"{{"name":"V1","labels":{{"v":"1"}},"trafficPolicy":{{{tls}}}}}"#);
        let plain = r#"{"name":"v2","labels":{"v":"1"}}"#;
        modes_with(&[("shop", "a", &format!(r#"{WEB},"subsets":[{subset},{plain}]{more}"#))], &[])
    };
    let off = r#","trafficPolicy":{"tls":{"mode":"DISABLE"}}"#;
    assert_eq!(subset(r#""tls":{"mode":"SIMPLE"}"#, ""), "mesh mesh; v1 none own");
    assert_eq!(subset(r#""tls":{"mode":"ISTIO_MUTUAL"}"#, off), "none own; v1 mesh mesh");
    assert_eq!(subset("", off), OFF);
    let one = r#""portLevelSettings":[{"port":{"number":80},"tls":{"mode":"ISTIO_MUTUAL"}}]"#;
    assert_eq!(subset(one, off), "none own; v1 mesh own");
}

#[test]
fn peer_authentications_turn_mutual_tls_off_as_istiod_reads_them() {
    let with = |peers: &[(&str, &str, &str)]| modes_with(&[], peers);
    let (off, on) = (r#""mtls":{"mode":"DISABLE"}"#, r#""mtls":{"mode":"PERMISSIVE"}"#);
    let of_web = r#""selector":{"matchLabels":{"app":"web"}}"#;
    let of_port =
        |port: u16, mode: &str| format!(r#"{of_web},"portLevelMtls":{{"{port}":{{"mode":"{mode}"}}}}"#);
    assert_eq!(with(&[("istio-system", "mesh", off)]), OFF);
    assert_eq!(with(&[("istio-system", "mesh", off), ("shop", "all", on)]), ON);
    assert_eq!(with(&[("istio-system", "mesh", off), ("shop", "all", r#""mtls":{"mode":"UNSET"}"#)]), OFF);
    assert_eq!(with(&[("shop", "all", off)]), OFF);
    assert_eq!(with(&[("pay", "all", off)]), ON);
    assert_eq!(with(&[("shop", "old", on), ("shop", "young", off)]), ON, "the oldest counts");
    assert_eq!(with(&[("shop", "web", &format!("{of_web},{off}"))]), OFF);
    assert_eq!(
        with(&[("shop", "other", &format!(r#""selector":{{"matchLabels":{{"app":"x"}}}},{off}"#))]),
        ON
    );
    assert_eq!(with(&[("istio-system", "web", &format!("{of_web},{off}"))]), ON, "of the root, for pods");
    assert_eq!(with(&[("shop", "web", &of_port(8080, "DISABLE"))]), "none mesh");
    assert_eq!(with(&[("shop", "web", &of_port(80, "DISABLE"))]), ON, "a number of the pod");
    let but_one = format!("{},{off}", of_port(8443, "STRICT"));
    assert_eq!(with(&[("shop", "web", &but_one)]), "none mesh");
    let inherited = of_port(8443, "UNSET");
    assert_eq!(with(&[("shop", "all", off), ("shop", "web", &inherited)]), OFF);
    // A DestinationRule that says anything of the port outweighs them.
    let mutual = policy(r#""tls":{"mode":"ISTIO_MUTUAL"}"#);
    assert_eq!(modes_with(&[("shop", "a", &mutual)], &[("shop", "all", off)]), ON);
    let one = policy(r#""portLevelSettings":[{"port":{"number":80},"tls":{"mode":"ISTIO_MUTUAL"}}]"#);
    assert_eq!(modes_with(&[("shop", "a", &one)], &[("shop", "all", off)]), "mesh own");
}

#[test]
fn a_change_of_a_rule_or_a_peer_authentication_renews_the_services_that_it_is_for() {
    let mut world = World::new();
    let off = r#""spec":{"mtls":{"mode":"DISABLE"}}"#;
    let port = r#""spec":{"ports":[{"port":80}]}"#;
    world.put(Kind::Service, "pay", "card", port);
    let _ = world.modes();
    world.put(Kind::PeerAuthentication, "shop", "all", off);
    assert_eq!((world.0.work(), world.modes().as_deref()), (1, Some(OFF)));
    world.put(Kind::PeerAuthentication, "shop", "all", off);
    assert_eq!(world.0.work(), 0, "nothing has changed");
    world.gone(Kind::PeerAuthentication, "shop", "all");
    assert_eq!((world.0.work(), world.modes().as_deref()), (1, Some(ON)));
    world.put(Kind::PeerAuthentication, "istio-system", "mesh", off);
    assert_eq!((world.0.work(), world.modes().as_deref()), (2, Some(OFF)));
    world.put(Kind::PeerAuthentication, "shop", "all", r#""spec":{"mtls":{"mode":"STRICT"}}"#);
    assert_eq!(world.modes().as_deref(), Some(ON));
    world.put(Kind::DestinationRule, "shop", "web", &format!(r#""spec":{{{}}}"#, policy(r#""tls":{}"#)));
    assert_eq!((world.0.work(), world.modes().as_deref()), (1, Some(OFF)));
    world.gone(Kind::DestinationRule, "shop", "web");
    assert_eq!(world.modes().as_deref(), Some(ON));
}

#[test]
fn the_ports_on_which_a_workload_refuses_calls_without_mutual_tls_are_known() {
    let strict = |peers: &[(&str, &str, &str)]| {
        let service = world_with(&[], peers).service().expect("a service");
        let names = service.endpoints[0].template.strict.iter().flat_map(|names| names.iter());
        names.map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    let all = r#""mtls":{"mode":"STRICT"}"#;
    assert_eq!(strict(&[]), "");
    assert_eq!(strict(&[("istio-system", "a", all)]), "http https", "for the whole mesh");
    assert_eq!(strict(&[("istio-system", "a", all), ("shop", "a", r#""mtls":{"mode":"PERMISSIVE"}"#)]), "");
    assert_eq!(strict(&[("pay", "a", all)]), "");
    let of_port = r#""selector":{"matchLabels":{"app":"web"}},"portLevelMtls":{"8443":{"mode":"STRICT"}}"#;
    assert_eq!(strict(&[("shop", "a", of_port)]), "https");
}
