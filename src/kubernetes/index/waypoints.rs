//! The waypoints of services and pods, which follow from labels as with istiod: those of the object, or else of its namespace.

use std::sync::Arc;

use super::super::gateway_api::grants::allows;
use super::super::kinds::service::ServiceRecord;
use super::super::kinds::waypoint::Traffic;
use super::super::kinds::{Kind, Tables};
use super::super::objects::is_true;
use super::super::table::ObjectKey;
use super::Index;
use isthmus_model::endpoint::Labels;
use isthmus_model::name::HostName;
use isthmus_model::service::{ServiceKey, Waypoint};

/// The label of Services that Istio has made for a waypoint or an east-west gateway. They use no waypoint themselves.
const MANAGED: (&str, [&str; 2]) =
    ("gateway.istio.io/managed", ["istio.io-mesh-controller", "istio.io-eastwest-controller"]);
/// The label of pods that names their Gateway. Pods of a waypoint use none.
const GATEWAY_NAME: &str = "gateway.networking.k8s.io/gateway-name";
/// The labels that name a waypoint and its namespace, and the name that stands for none.
const PRIMARY: [&str; 2] = ["istio.io/use-waypoint", "istio.io/use-waypoint-namespace"];
const CANARY: [&str; 2] = ["istio.io/use-waypoint-canary", "istio.io/use-waypoint-canary-namespace"];
const NONE: &str = "none";
/// The label with which calls of ingress gateways go to the waypoint too.
const INGRESS: &str = "istio.io/ingress-use-waypoint";
/// The largest number of ignored waypoints in a report; further ones are counted.
const REPORTED_MAX: usize = 50;

/// The waypoint of a service.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) used: Option<Waypoint>,
    /// Why the waypoint is not used as the labels ask for, in a sentence.
    pub(super) ignored: Option<String>,
}

/// The reason why a waypoint cannot be used.
enum Unusable {
    /// There is no Gateway of this name with an address.
    Missing,
    /// The listener of the Gateway does not allow the namespace.
    NotAllowed,
    /// The Gateway is for other traffic.
    OtherTraffic,
}

impl Unusable {
    fn text(&self) -> &'static str {
        match self {
            Self::Missing => "there is no Gateway of this name that has an address",
            Self::NotAllowed => "its HBONE listener does not allow routes of this namespace",
            Self::OtherTraffic => {
                "its label istio.io/waypoint-for, or that of its class, does not name this traffic"
            }
        }
    }
}

impl Index {
    /// Returns why some waypoints may not be known; `None` if all are.
    pub(super) fn waypoints_unknown(&self) -> Option<String> {
        let mut watches = self.watches.all.iter().filter(|watch| watch.kind == Kind::Waypoint);
        watches.find_map(|watch| self.unreadable.unknown(watch))
    }

    /// Returns the waypoints that are not used as their objects ask for, a sentence each.
    pub(crate) fn waypoints_ignored(&self) -> Vec<String> {
        let all = self.waypoints_ignored.iter();
        let mut lines: Vec<String> =
            all.take(REPORTED_MAX).map(|(key, why)| format!("Service {key}: {why}")).collect();
        let more = self.waypoints_ignored.len().saturating_sub(REPORTED_MAX);
        lines.extend((more > 0).then(|| format!("and of {more} more Services")));
        lines
    }
}

/// Returns the waypoint of a Service. `unknown` returns why some waypoints may not be known, if so.
pub(super) fn of_service(
    tables: &Tables,
    key: &ObjectKey,
    record: &ServiceRecord,
    unknown: impl Fn() -> Option<String>,
) -> Found {
    let labels = &record.labels;
    let is_managed = labels.get(MANAGED.0).is_some_and(|value| MANAGED.1.contains(&&**value));
    if is_managed || !tables.spec.waypoints {
        return Found::default();
    }
    let namespace = &key.namespace;
    let of_namespace = tables.labels_of(namespace);
    let is_own = labels.get(PRIMARY[0]).is_some();
    let Some(name) = named(if is_own { labels } else { of_namespace }, PRIMARY, namespace) else {
        return Found::default();
    };
    let ingress = labels.get(INGRESS).or_else(|| of_namespace.get(INGRESS));
    let takes_ingress = ingress.is_some_and(|text| is_true(text));
    let usable = |name: &ObjectKey| usable(tables, name, namespace, |traffic| traffic.services);
    let used = |services| Some(Waypoint::Services { services, takes_ingress });
    let primary = match usable(&name) {
        Ok(service) => service,
        Err(why) => {
            let unknown = unknown().filter(|_| matches!(why, Unusable::Missing));
            if let Some(unknown) = unknown {
                let ignored = format!(
                    "its waypoint {name} cannot be read, so HBONE callers are refused and ztunnels get none: {unknown}"
                );
                return Found { used: used(Vec::new()), ignored: Some(ignored) };
            }
            // A waypoint of the whole namespace may be meant for its workloads alone.
            let is_meant = is_own || !matches!(why, Unusable::OtherTraffic);
            let ignored =
                || format!("its calls pass the waypoint {name} by, as inside the cluster: {}", why.text());
            return Found { used: None, ignored: is_meant.then(ignored) };
        }
    };
    let with_canary = canary(tables, record, namespace, is_own).map(|(canary, weight)| {
        let why = match (weight, usable(&canary)) {
            _ if canary == name => "it is the waypoint itself",
            (Err(()), _) => "the annotation istio.io/use-waypoint-canary-weight is no percentage",
            (_, Err(why)) => why.text(),
            (Ok(weight), Ok(service)) => {
                return Ok(vec![(primary.clone(), 100 - weight), (service, weight)]);
            }
        };
        Err(format!("its canary waypoint {canary} takes no calls, as inside the cluster: {why}"))
    });
    match with_canary {
        Some(Ok(services)) => Found { used: used(services), ignored: None },
        Some(Err(ignored)) => Found { used: used(vec![(primary, 100)]), ignored: Some(ignored) },
        None => Found { used: used(vec![(primary, 100)]), ignored: None },
    }
}

/// Returns the canary waypoint of a Service in a namespace, with its percentage of the calls. `is_own` is true if the labels of the
/// Service itself name its waypoint: then those of the namespace do not count.
fn canary(
    tables: &Tables,
    record: &ServiceRecord,
    namespace: &Arc<str>,
    is_own: bool,
) -> Option<(ObjectKey, Result<u32, ()>)> {
    let of_namespace = tables.namespaces.get(namespace).filter(|_| !is_own);
    let own = Some(&record.labels).filter(|labels| labels.get(CANARY[0]).is_some());
    let labels = own.or_else(|| of_namespace.map(|namespace| &namespace.labels))?;
    let name = named(labels, CANARY, namespace)?;
    let weight = record.canary_weight.or_else(|| of_namespace?.canary_weight);
    Some((name, weight.unwrap_or(Ok(0)).map(u32::from).map_err(|_| ())))
}

/// Returns the service of the waypoint of a pod; `None` if it uses none.
pub(super) fn of_pod(tables: &Tables, namespace: &Arc<str>, labels: &Labels) -> Option<ServiceKey> {
    let gateway = |name: &Arc<str>| ObjectKey { namespace: namespace.clone(), name: name.clone() };
    if labels.get(GATEWAY_NAME).is_some_and(|name| tables.waypoints.get(&gateway(name)).is_some()) {
        return None;
    }
    let is_own = labels.get(PRIMARY[0]).is_some();
    let name = named(if is_own { labels } else { tables.labels_of(namespace) }, PRIMARY, namespace)?;
    usable(tables, &name, namespace, |traffic| traffic.workloads).ok()
}

/// Returns the Gateway that labels name; `None` if they name none.
fn named(labels: &Labels, [name, own]: [&str; 2], namespace: &Arc<str>) -> Option<ObjectKey> {
    let name = labels.get(name).filter(|name| !name.is_empty() && &***name != NONE)?;
    let namespace = labels.get(own).filter(|name| !name.is_empty()).unwrap_or(namespace);
    Some(ObjectKey { namespace: namespace.clone(), name: name.clone() })
}

/// Returns the service of a waypoint, if objects of the namespace can use it for the traffic that `takes` tells.
fn usable(
    tables: &Tables,
    name: &ObjectKey,
    namespace: &Arc<str>,
    takes: impl Fn(Traffic) -> bool,
) -> Result<ServiceKey, Unusable> {
    let found = tables.waypoints.get(name).ok_or(Unusable::Missing)?;
    if !allows(&found.namespaces, "Same", &name.namespace, namespace, tables.labels_of(namespace)) {
        return Err(Unusable::NotAllowed);
    }
    if !takes(found.traffic(tables)) {
        return Err(Unusable::OtherTraffic);
    }
    match &found.hostname {
        Some(hostname) => Ok(ServiceKey { namespace: name.namespace.clone(), hostname: hostname.clone() }),
        None => service_key(tables, name).ok_or(Unusable::Missing),
    }
}

/// Returns the key of a Service in the mesh.
pub(super) fn service_key(tables: &Tables, key: &ObjectKey) -> Option<ServiceKey> {
    let hostname = format!("{}.{}.svc.{}", key.name, key.namespace, tables.spec.cluster_domain);
    Some(ServiceKey { namespace: key.namespace.clone(), hostname: HostName::parse(&hostname).ok()? })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::super::interner::Interner;
    use super::super::super::kinds::Reading;
    use super::*;
    use isthmus_aggregator::spec::kubernetes::KubernetesSpec;

    /// Returns the waypoint of the Service `shop/web` among these objects: its services with their shares, and what is ignored.
    fn of(objects: &[Value], web: &Value, unknown: Option<&str>) -> (String, String) {
        let spec = Arc::new(KubernetesSpec { waypoints: true, ..KubernetesSpec::plain() });
        let (mut tables, mut texts) = (Tables::new(spec.clone()), Interner::default());
        let mut reading = Reading { trust_domain: &spec.trust_domain, spec: &spec, texts: &mut texts };
        for object in objects.iter().chain([web]) {
            let kind = match object["kind"].as_str() {
                Some("Namespace") => Kind::Namespace,
                Some("Gateway") => Kind::Waypoint,
                Some("GatewayClass") => Kind::WaypointClass,
                _ => Kind::Service,
            };
            assert!(tables.put(&kind.read(&object.to_string()).expect("legal"), 1, &mut reading));
        }
        let key = ObjectKey { namespace: "shop".into(), name: "web".into() };
        let record = tables.services.get(&key).expect("put");
        let found = of_service(&tables, &key, record, || unknown.map(str::to_owned));
        let used = match found.used {
            None => "none".to_owned(),
            Some(Waypoint::Services { services, takes_ingress }) => {
                let services = services.iter().map(|(key, share)| format!("{key} {share}"));
                let services = services.collect::<Vec<_>>().join(", ");
                format!("{services}{}", if takes_ingress { " and ingress" } else { "" })
            }
            Some(Waypoint::Address { .. }) => panic!("never by an address"),
        };
        (used, found.ignored.unwrap_or_default())
    }

    fn gate(key: (&str, &str), labels: &Value, allowed: &Value, addresses: &Value) -> Value {
        json!({"kind": "Gateway", "metadata": {"namespace": key.0, "name": key.1, "labels": labels},
            "spec": {"gatewayClassName": "of-gates", "listeners": [{"port": 15008, "protocol": "HBONE", "allowedRoutes": allowed}]},
            "status": {"addresses": addresses}})
    }

    fn ready(name: &str) -> Value {
        gate(("shop", name), &json!({}), &json!({}), &json!([{"type": "IPAddress", "value": "10.96.0.1"}]))
    }

    fn namespace(labels: &Value, annotations: &Value) -> Value {
        json!({"kind": "Namespace", "metadata": {"name": "shop", "labels": labels, "annotations": annotations}})
    }

    fn web(labels: &Value, annotations: &Value) -> Value {
        json!({"metadata": {"namespace": "shop", "name": "web", "labels": labels, "annotations": annotations}})
    }

    const GATE: &str = "shop/gate.shop.svc.cluster.local 100";

    #[test]
    fn the_labels_of_a_service_outweigh_those_of_its_namespace() {
        let uses = |name: &str| json!({"istio.io/use-waypoint": name});
        let none = json!({});
        let found = |of_namespace: &Value, of_service: &Value| {
            let objects = [ready("gate"), ready("other"), namespace(of_namespace, &none)];
            let (used, ignored) = of(&objects, &web(of_service, &none), None);
            assert_eq!(ignored, "");
            used
        };
        assert_eq!(found(&none, &none), "none");
        assert_eq!(found(&uses("gate"), &none), GATE);
        assert_eq!(found(&none, &uses("gate")), GATE);
        assert_eq!(found(&uses("other"), &uses("gate")), GATE);
        assert_eq!(found(&uses("gate"), &uses("none")), "none");
        let managed =
            json!({"istio.io/use-waypoint": "gate", "gateway.istio.io/managed": "istio.io-mesh-controller"});
        assert_eq!(found(&none, &managed), "none");
        let ingress =
            |value: &str| json!({"istio.io/use-waypoint": "gate", "istio.io/ingress-use-waypoint": value});
        assert_eq!(found(&none, &ingress("true")), format!("{GATE} and ingress"));
        assert_eq!(found(&ingress("true"), &none), format!("{GATE} and ingress"));
        assert_eq!(found(&ingress("true"), &ingress("false")), GATE);
    }

    #[test]
    fn a_waypoint_that_cannot_be_used_is_named_and_one_that_cannot_be_read_is_not_passed_by() {
        let none = json!({});
        let far = |more: Value| {
            let mut labels =
                json!({"istio.io/use-waypoint": "far", "istio.io/use-waypoint-namespace": "edge"});
            labels.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
            labels
        };
        let address = json!([{"type": "Hostname", "value": "entry.edge.example"}]);
        let of_edge = |labels: Value, from: &str| {
            gate(("edge", "far"), &labels, &json!({"namespaces": {"from": from}}), &address)
        };
        let found = |gateway: Option<Value>, unknown| {
            of(&gateway.into_iter().collect::<Vec<_>>(), &web(&far(json!({})), &none), unknown)
        };
        assert_eq!(
            found(Some(of_edge(json!({}), "All")), None),
            ("edge/entry.edge.example 100".to_owned(), String::new())
        );
        let workload = json!({"istio.io/waypoint-for": "workload"});
        for (gateway, why) in [
            (None, "there is no Gateway of this name that has an address"),
            (Some(of_edge(json!({}), "Same")), "does not allow routes of this namespace"),
            (Some(of_edge(workload.clone(), "All")), "does not name this traffic"),
        ] {
            let (used, ignored) = found(gateway, None);
            assert_eq!(used, "none");
            assert!(ignored.contains("pass the waypoint edge/far by") && ignored.contains(why), "{ignored}");
        }
        let (used, ignored) = found(None, Some("gateways is forbidden"));
        assert_eq!(used, "");
        assert!(ignored.contains("HBONE callers are refused") && ignored.contains("forbidden"), "{ignored}");
        // One that was read is used, whatever else cannot be read; and one for the workloads of a namespace is as it should be.
        assert_eq!(found(Some(of_edge(json!({}), "All")), Some("forbidden")).1, "");
        let of_namespace = [of_edge(workload, "All"), namespace(&far(json!({})), &none)];
        assert_eq!(of(&of_namespace, &web(&none, &none), None), ("none".to_owned(), String::new()));
    }

    #[test]
    fn the_class_of_a_waypoint_says_which_traffic_it_takes_unless_its_own_label_does() {
        let (none, uses) = (json!({}), json!({"istio.io/use-waypoint": "gate"}));
        let class = |labels: Value| json!({"kind": "GatewayClass", "metadata": {"name": "of-gates", "labels": labels}});
        let labelled = |value: &str| json!({"istio.io/waypoint-for": value});
        let address = json!([{"type": "IPAddress", "value": "10.96.0.1"}]);
        for (of_class, of_gate, expected) in [
            (json!({}), json!({}), GATE),
            (labelled("all"), json!({}), GATE),
            (labelled("workload"), json!({}), "none"),
            (labelled("none"), json!({}), "none"),
            (labelled("none"), labelled("service"), GATE),
            (labelled("service"), labelled("workload"), "none"),
        ] {
            let gate = gate(("shop", "gate"), &of_gate, &none, &address);
            let (used, ignored) = of(&[gate, class(of_class.clone())], &web(&uses, &none), None);
            assert_eq!(used, expected, "{of_class} {of_gate}");
            assert_eq!(ignored.contains("or that of its class"), expected == "none", "{ignored}");
        }
    }

    #[test]
    fn a_canary_takes_its_percentage_unless_it_cannot_be_used() {
        let labels = |more: Value| {
            let mut labels = json!({"istio.io/use-waypoint": "gate", "istio.io/use-waypoint-canary": "next"});
            labels.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
            labels
        };
        let weight = |value: &str| json!({"istio.io/use-waypoint-canary-weight": value});
        let none = json!({});
        let both = "shop/gate.shop.svc.cluster.local 90, shop/next.shop.svc.cluster.local 10";
        let objects = [ready("gate"), ready("next")];
        let whole = |web: &Value| of(&objects, web, None);
        assert_eq!(whole(&web(&labels(json!({})), &weight("10"))), (both.to_owned(), String::new()));
        let unsaid = whole(&web(&labels(json!({})), &none)).0;
        assert_eq!(unsaid, "shop/gate.shop.svc.cluster.local 100, shop/next.shop.svc.cluster.local 0");
        let inherited = [ready("gate"), ready("next"), namespace(&labels(json!({})), &weight("10"))];
        assert_eq!(of(&inherited, &web(&none, &none), None).0, both);
        // A Service with a waypoint of its own has no canary of its namespace.
        let own = web(&json!({"istio.io/use-waypoint": "gate"}), &none);
        assert_eq!(of(&inherited, &own, None), (GATE.to_owned(), String::new()));
        for (web, why) in [
            (web(&labels(json!({})), &weight("101")), "is no percentage"),
            (
                web(&labels(json!({"istio.io/use-waypoint-canary": "gate"})), &weight("10")),
                "the waypoint itself",
            ),
            (
                web(&labels(json!({"istio.io/use-waypoint-canary": "absent"})), &weight("10")),
                "no Gateway of this name",
            ),
        ] {
            let (used, ignored) = whole(&web);
            assert_eq!(used, GATE);
            assert!(ignored.contains("takes no calls") && ignored.contains(why), "{ignored}");
        }
    }
}
