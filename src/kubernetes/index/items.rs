//! Makes the registry items of a Service and the objects that belong to it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::super::demand;
use super::super::endpoints::{Made, NODE_LABEL, Sources};
use super::super::entries::{identities, made};
use super::super::kinds::Tables;
use super::super::kinds::destination_rule::{Reach, RuleRecord};
use super::super::kinds::service::{
    DRAIN, DRAIN_BYTES_MAX, EXPORT_TO, Entrance, PortRecord, ServiceClass, ServiceRecord, TooLong, Unmarkable,
};
use super::super::mutual_tls::{PeerModes, ServiceTls};
use super::super::table::{ObjectKey, Rows as _};
use super::Index;
use super::waypoints::{of_service, service_key};
use isthmus_document::drains::read;
use isthmus_model::drain::DrainTarget;
use isthmus_model::endpoint::Labels;
use isthmus_model::load_balancing::{LoadBalancing, Mode, Scope};
use isthmus_model::name::HostName;
use isthmus_model::service::{Service, ServicePort};
use isthmus_registry::change::{Export, Item, Key, Mark, MarkKey, MarkKind, RegistryDrain};
use isthmus_snapshot::clusterset::DOMAIN;

/// The items of a Service.
#[derive(Default)]
pub(super) struct ServiceItems {
    pub(super) items: Vec<Item>,
    /// The drains that stay as they are, because the annotation [`DRAIN`] has a mistake.
    pub(super) kept: Vec<Key>,
    /// The mistake in the annotation [`DRAIN`].
    pub(super) mistake: Option<String>,
}

/// Returns the name of a service in the cluster set.
pub(crate) fn alias(key: &ObjectKey) -> Option<HostName> {
    HostName::parse(&format!("{}.{}.svc.{DOMAIN}", key.name, key.namespace)).ok()
}

impl Index {
    /// Returns the items of a Service: the service itself, its alias if it is exported, each named pod of a headless service,
    /// and the export marks of all of them.
    pub(super) fn items(&mut self, key: &ObjectKey) -> ServiceItems {
        self.withheld.remove(key);
        self.waypoints_ignored.remove(key);
        let tables = &self.tables;
        if tables.services.get(key).is_none() {
            return self.items_of_entries(key);
        }
        let namespace = tables.labels_of(&key.namespace);
        if !tables.spec.namespaces.takes(&key.namespace, namespace) {
            return ServiceItems::default();
        }
        let Some(record) = tables.services.get(key) else { return ServiceItems::default() };
        if record.class == ServiceClass::ExternalName || record.ports.is_empty() {
            return ServiceItems::default();
        }
        let Some(service_key) = service_key(tables, key) else { return ServiceItems::default() };
        let hostname = service_key.hostname.clone();
        let network = tables.network();
        let Ruled { subsets, tls } = ruled(tables, key, &hostname);
        let has_subset_of_node = subsets.values().any(|labels| labels.get(NODE_LABEL).is_some());
        let sources = Sources { tables, network: &network, has_subset_of_node };
        let Made { endpoints, named, withheld } =
            made(&sources, (key, &hostname), record, &tls, &mut self.texts);
        let waypoint = of_service(tables, key, record, || self.waypoints_unknown());
        let ports: Vec<ServicePort> = record.ports.iter().map(service_port).collect();
        // A waypoint of another network is used only if none is here, as with istiod.
        let near_waypoint = || {
            let is_waypoint = tables.waypoints.get(key).is_some();
            is_waypoint.then(|| Box::new(LoadBalancing::by(Mode::Failover, &[Scope::Network])))
        };
        let service = Service {
            key: service_key,
            addresses: record.vips.to_vec(),
            ports,
            subsets,
            waypoint: waypoint.used.map(Arc::new),
            endpoints: endpoints.into(),
            exported_as: None,
            import: None,
            load_balancing: record
                .load_balancing(tables.distribution_of(&key.namespace))
                .or_else(near_waypoint),
            families: record.families(),
            identities: identities(&tables.entries_of(&hostname)),
            demand: demand::of(tables, key, record),
            withheld: withheld.iter().map(|(why, count)| (*why, *count)).collect(),
        };
        let exported = tables.exports.get(key).filter(|_| record.unmarkable.is_none());
        let is_exported = exported.is_some();
        let alias = exported.and_then(|_| alias(key));
        let export = exported.map(|exported| {
            Arc::new(Export {
                created: exported.created.clone(),
                is_headless: record.class == ServiceClass::Headless,
                session_affinity: record.session_affinity.clone(),
                session_seconds: record.session_seconds,
                labels: exported.labels.clone(),
                annotations: exported.annotations.clone(),
                traffic_distribution: record.traffic_distribution.clone(),
                ip_families: record.ip_families.clone(),
                ports: record.exported_ports.clone(),
            })
        });
        let mut services = Vec::new();
        if let Some(alias) = alias.clone() {
            let imported = tables.imports.get(key).map(|import| import.ips.clone()).unwrap_or_default();
            services.push(Service { addresses: imported, ..service.standing_for(alias) });
        }
        if record.class == ServiceClass::Headless {
            for (name, at) in named {
                let of_pod = |rest: &str| HostName::parse(&format!("{name}.{rest}"));
                let one: Arc<[_]> = [service.endpoints[at].clone()].into();
                let mut names = vec![of_pod(hostname.as_str())];
                if is_exported {
                    let cluster = self.cluster.as_str();
                    names.push(of_pod(&format!("{cluster}.{}.{}.svc.{DOMAIN}", key.name, key.namespace)));
                }
                let of_pod = names.into_iter().flatten().map(|name| Service {
                    endpoints: one.clone(),
                    demand: Box::default(),
                    withheld: Box::default(),
                    ..service.standing_for(name)
                });
                services.extend(of_pod);
            }
        }
        services.push(service);
        let marks = marks(tables, key, record, &hostname);
        if !withheld.is_empty() {
            self.withheld.insert(key.clone(), withheld);
        }
        self.waypoints_ignored.extend(waypoint.ignored.map(|why| (key.clone(), why)));
        let of_service = |service: Service| {
            let is_alias = alias.as_ref() == Some(&service.key.hostname);
            // A ServiceExport makes names for all clusters.
            let is_of_set = service.key.hostname.as_str().ends_with(&format!(".{DOMAIN}"));
            let marks = marks.iter().filter(|(kind, ..)| *kind != MarkKind::ClusterLocal || !is_of_set);
            let marks = marks.map(|(kind, object, labels)| {
                let key = MarkKey { service: service.key.clone(), object: object.clone() };
                let export = export.clone().filter(|_| is_alias && *kind == MarkKind::ServiceExport);
                Item::Mark(Mark { key, kind: *kind, labels: labels.clone(), export })
            });
            let marks: Vec<Item> = marks.collect();
            std::iter::once(Item::Service(Arc::new(service))).chain(marks)
        };
        let mut made = ServiceItems {
            items: services.into_iter().flat_map(of_service).collect(),
            ..ServiceItems::default()
        };
        if let Some(text) = &record.drain {
            let targets = drained(record, &hostname, alias.as_ref());
            match drains(key, text, &targets) {
                Ok(drains) => made.items.extend(drains.into_iter().map(Item::Drain)),
                Err(mistake) => {
                    let kept = targets.iter().map(|(_, name)| Key::Drain(drain_object(name, key)));
                    made.kept = kept.collect();
                    made.mistake = Some(format!("{}: {mistake}", annotation(key)));
                }
            }
        }
        made
    }
}

/// Returns the name of the annotation [`DRAIN`] of a Service, which registries report with its mistakes.
pub(super) fn annotation(key: &ObjectKey) -> String {
    format!("annotation {DRAIN} of Service {key}")
}

/// Returns the name of the drain of one target of a Service.
fn drain_object(target: &str, key: &ObjectKey) -> Arc<str> {
    format!("{target} of Service {key}").into()
}

/// Returns the kinds and names of the targets of the annotation [`DRAIN`]: the service under each of its names, or the addresses of
/// the gateway whose Service it is.
fn drained(
    record: &ServiceRecord,
    hostname: &HostName,
    alias: Option<&HostName>,
) -> Vec<(&'static str, String)> {
    match record.entrance.as_deref() {
        None => [hostname].into_iter().chain(alias).map(|name| ("service", name.to_string())).collect(),
        Some(Entrance { overrides, .. }) if overrides.is_empty() => {
            record.addresses.iter().map(|host| ("gateway", host.to_string())).collect()
        }
        Some(Entrance { overrides, .. }) => {
            overrides.iter().map(|(host, _)| ("gateway", host.to_string())).collect()
        }
    }
}

/// Returns the drains of these targets that the annotation [`DRAIN`] orders. The error is its mistake.
fn drains(
    key: &ObjectKey,
    text: &Result<Arc<str>, TooLong>,
    targets: &[(&'static str, String)],
) -> Result<Vec<RegistryDrain>, String> {
    let text = text.as_ref().map_err(|TooLong| format!("its value has more than {DRAIN_BYTES_MAX} bytes"))?;
    let mut fields: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|error| format!("it is no JSON object: {error}"))?;
    if let Some(kind) = DrainTarget::KINDS.into_iter().find(|kind| fields.contains_key(*kind)) {
        return Err(format!("it has the key {kind:?}, but its object is the target"));
    }
    let mut drains = Vec::new();
    for (kind, name) in targets {
        fields.insert((*kind).to_owned(), name.clone().into());
        let document = serde_json::Value::Object(fields.clone()).to_string();
        let drain = read(Path::new("drain"), &document)
            .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))?;
        drains.push(RegistryDrain { object: drain_object(name, key), drain: drain.into() });
    }
    Ok(drains)
}

/// The rules that DestinationRules and PeerAuthentications have for a service.
pub(super) struct Ruled<'a> {
    pub(super) subsets: BTreeMap<Arc<str>, Labels>,
    pub(super) tls: ServiceTls<'a>,
}

/// Returns the subsets of a service, and its rules for mutual TLS. If several rules for the service have a subset, the one of the oldest
/// rule is used, and so is the `trafficPolicy` of the oldest rule that has one.
pub(super) fn ruled<'a>(tables: &'a Tables, key: &'a ObjectKey, hostname: &HostName) -> Ruled<'a> {
    let mut subsets = BTreeMap::new();
    let mut tls = ServiceTls::default();
    if !tables.spec.destination_rules {
        return Ruled { subsets, tls };
    }
    tls.peers = PeerModes::of(tables, &key.namespace);
    let rules = rules_for(tables, key, hostname);
    tls.policy = rules.iter().find_map(|rule| rule.tls.as_deref());
    for (name, subset) in rules.iter().flat_map(|rule| &rule.subsets) {
        if subsets.contains_key(name) {
            continue;
        }
        subsets.insert(name.clone(), subset.labels.clone());
        if let Some(own) = &subset.tls {
            tls.subsets.entry(name.to_ascii_lowercase().into()).or_insert(own);
        }
    }
    Ruled { subsets, tls }
}

/// Returns the DestinationRules for a service, oldest first. As for istiod, the first of these namespaces that has a rule for the service
/// counts alone, and there the rules whose host names the service most closely: the gateway's, with private rules alone if that is
/// the system namespace; the service's; the system namespace.
fn rules_for<'a>(tables: &'a Tables, key: &'a ObjectKey, hostname: &HostName) -> Vec<&'a RuleRecord> {
    if tables.rules.len() == 0 {
        return Vec::new();
    }
    let (viewer, system) = (&tables.spec.viewer, &tables.spec.system_namespace);
    let first: &[Reach] = if viewer == system { &[Reach::Private] } else { &[Reach::Shown] };
    let exported: &[Reach] = &[Reach::Shown, Reach::Hidden];
    for (namespace, reaches) in [(viewer, first), (&key.namespace, exported), (system, exported)] {
        let short = (*namespace == key.namespace).then_some(&*key.name);
        let named = tables.rules.inside(namespace).filter(|(_, rule)| reaches.contains(&rule.reach));
        let closeness = |rule: &RuleRecord| rule.closeness(hostname.as_str(), short);
        let mut rules: Vec<_> = named.filter_map(|(key, rule)| Some((closeness(rule)?, key, rule))).collect();
        let closest = rules.iter().map(|(closeness, ..)| *closeness).max();
        rules.retain(|(closeness, _, rule)| Some(*closeness) == closest && rule.reach != Reach::Hidden);
        rules.sort_by_key(|&(_, key, rule)| (&rule.created, key));
        if !rules.is_empty() {
            return rules.into_iter().map(|(.., rule)| rule).collect();
        }
    }
    Vec::new()
}

pub(super) fn service_port(port: &PortRecord) -> ServicePort {
    let number = port.number;
    ServicePort {
        name: port.service_name(),
        port: number,
        target_port: port.target.unwrap_or(number),
        is_target_named: port.target.is_none(),
        protocol: port.protocol,
    }
}

/// Returns the marks of a service: its ServiceExport, its own labels, and the labels of its namespace, or the annotation that hides it;
/// and the setting of the mesh that keeps it to its cluster.
fn marks(
    tables: &Tables,
    key: &ObjectKey,
    record: &ServiceRecord,
    hostname: &HostName,
) -> Vec<(MarkKind, Arc<str>, Labels)> {
    let mut marks = Vec::new();
    match &record.unmarkable {
        None => {
            let namespace = tables.labels_of(&key.namespace);
            if tables.exports.get(key).is_some() {
                marks.push((
                    MarkKind::ServiceExport,
                    format!("ServiceExport {key}").into(),
                    Labels::default(),
                ));
            }
            if !record.labels.is_empty() {
                marks.push((MarkKind::Service, format!("Service {key}").into(), record.labels.clone()));
            }
            if !namespace.is_empty() {
                let object = format!("Namespace {}", key.namespace).into();
                marks.push((MarkKind::Namespace, object, namespace.clone()));
            }
        }
        Some(Unmarkable::Hidden(list)) => {
            let object = format!("{EXPORT_TO} {list:?} of Service {key}").into();
            marks.push((MarkKind::Hidden, object, Labels::default()));
        }
        Some(Unmarkable::NodeLocal) => {}
    }
    let local = tables.local_hosts().local(hostname.as_str());
    marks.extend(local.map(|host| (MarkKind::ClusterLocal, host.clone(), Labels::default())));
    marks
}

#[cfg(test)]
mod tests {
    use super::super::super::interner::Interner;
    use super::super::super::kinds::{Kind, Reading};
    use super::*;
    use isthmus_aggregator::spec::kubernetes::KubernetesSpec;

    /// Returns the names of the subsets that the gateway in the namespace `viewer` gives the service `shop/web` by these rules, each with
    /// its namespace, its name, and further fields of its spec.
    fn subsets_of(viewer: &str, rules: &[(&str, &str, &str)]) -> String {
        let plain = KubernetesSpec::plain();
        let spec = KubernetesSpec { viewer: viewer.into(), destination_rules: true, ..plain };
        let spec = Arc::new(spec);
        let (mut tables, mut texts) = (Tables::new(spec.clone()), Interner::default());
        let mut reading = Reading { trust_domain: &spec.trust_domain, spec: &spec, texts: &mut texts };
        for (namespace, name, more) in rules {
            let object = format!(
                r#"{{"metadata":{{"namespace":"{namespace}","name":"{name}"}},
                    "spec":{{"subsets":[{{"name":"{name}","labels":{{"v":"1"}}}}],{more}}}}}"#
            );
            assert!(tables.put(&Kind::DestinationRule.read(&object).expect("legal"), 1, &mut reading));
        }
        let key = ObjectKey { namespace: "shop".into(), name: "web".into() };
        let hostname = HostName::parse("web.shop.svc.cluster.local").expect("legal");
        ruled(&tables, &key, &hostname).subsets.keys().map(|name| &**name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn subsets_come_from_the_rules_that_istiod_takes() {
        let whole = r#""host":"web.shop.svc.cluster.local""#;
        let system = ("istio-system", "system", whole);
        let in_system = |rules: &[(&str, &str, &str)]| subsets_of("istio-system", rules);
        assert_eq!(in_system(&[system]), "system");
        assert_eq!(in_system(&[system, ("shop", "a", whole), ("shop", "b", r#""host":"web""#)]), "a b");
        assert_eq!(in_system(&[system, ("shop", "other", r#""host":"other""#)]), "system");
        assert_eq!(in_system(&[("istio-system", "a", r#""host":"web""#), ("pay", "b", whole)]), "");
        assert_eq!(
            in_system(&[("shop", "a", r#""host":"web.shop""#), ("shop", "b", r#""host":"web.shop.svc""#)]),
            ""
        );
        let (wide, near) = (
            ("shop", "wide", r#""host":"*.local""#),
            ("shop", "near", r#""host":"*.shop.svc.cluster.local""#),
        );
        assert_eq!(in_system(&[system, wide]), "wide", "one of the service's own namespace");
        assert_eq!(in_system(&[wide, near]), "near");
        assert_eq!(in_system(&[wide, near, ("shop", "a", whole)]), "a");
        let more = |more: &str| format!("{whole},{more}");
        for hidden in [
            r#""exportTo":["."]"#,
            r#""exportTo":["pay"]"#,
            r#""workloadSelector":{"matchLabels":{"a":"b"}}"#,
        ] {
            assert_eq!(in_system(&[("shop", "a", &more(hidden)), system]), "system", "{hidden}");
        }
        for shown in [r#""exportTo":["*"]"#, r#""exportTo":["pay","istio-system"]"#, r#""exportTo":null"#] {
            assert_eq!(in_system(&[("shop", "a", &more(shown)), system]), "a", "{shown}");
        }
        assert_eq!(in_system(&[("istio-system", "a", &more(r#""exportTo":["."]"#))]), "a");
        let edge = ("edge", "edge", whole);
        assert_eq!(subsets_of("edge", &[edge, ("shop", "a", whole), system]), "edge");
        assert_eq!(in_system(&[edge]), "");
    }
}
