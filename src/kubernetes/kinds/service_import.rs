//! ServiceImports: the addresses of services that several clusters export, and the imports that this program writes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::own_object::{IMPORT_KIND, MANAGED_BY, OwnObject};
use super::selector::{Label, Selector};
use super::service::SessionAffinityConfig;
use super::{Facts, Kind, Reading, Tables, Watched};
use crate::objects::{Meta, Port, Texts, ip, objects, port};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_registry::change::ExportedPort;

/// The labels of the imports that this program writes.
const OWN: Selector = Selector(&[Label::Is(MANAGED_BY.0, MANAGED_BY.1)]);
/// The annotation with the names of the labels and annotations that the ServiceExport has given an import ([`ExportedNames`]).
const EXPORTED: &str = "isthmus.io/exported";
/// The type of the condition that says whether pods of the cluster can call the service.
const READY: &str = "Ready";
/// The fields of the `spec` that an import may lack.
const OPTIONAL: [&str; 5] =
    ["ips", "ipFamilies", "sessionAffinityConfig", "trafficDistribution", "internalTrafficPolicy"];

objects! {
    /// `ServiceImport` of `multicluster.x-k8s.io`.
    ServiceImport { metadata: Meta, spec: ImportSpec, status: ImportStatus, }
    ImportSpec {
        #[serde(rename = "type")]
        kind: String,
        ips: Vec<String>,
        ip_families: Vec<String>,
        ports: Vec<Port>,
        session_affinity: String,
        session_affinity_config: SessionAffinityConfig,
        traffic_distribution: String,
        internal_traffic_policy: String,
    }
    ImportStatus { clusters: Vec<ImportCluster>, conditions: Vec<StatusCondition>, }
    ImportCluster { cluster: String, }
    /// `metav1.Condition`, with all fields, so that the conditions of other programs can be written back.
    StatusCondition {
        #[serde(rename = "type")]
        kind: String,
        status: String,
        reason: String,
        message: String,
        last_transition_time: String,
        observed_generation: i64,
    }
}

impl Watched for ServiceImport {
    const FACTS: Facts = Facts {
        plural: "serviceimports",
        versions: &["apis/multicluster.x-k8s.io/v1beta1", "apis/multicluster.x-k8s.io/v1alpha1"],
        is_custom: true,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, ImportRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<ImportRecord> {
        let is_writer = reading.spec.import_writer.is_some();
        let own = self.content();
        let ips = self.spec.ips.iter().filter(|_| own.is_none());
        Some(ImportRecord {
            ips: ips.filter_map(|text| ip(text)).collect(),
            ports: self.spec.ports.iter().filter_map(|found| port(found.port)).collect(),
            own: own.filter(|_| is_writer).map(Arc::new),
        })
    }

    fn touch(touched: Touched<ObjectKey, ImportRecord>, tables: &mut Tables) {
        let Touched { key, before } = touched;
        let (before, now) = (before.as_ref(), tables.imports.get(&key));
        let ips_differ = before.map(|import| &import.ips) != now.map(|import| &import.ips);
        let ports_differ = before.map(|import| &import.ports) != now.map(|import| &import.ports);
        if ips_differ || ports_differ {
            tables.mark_backend(&key);
        }
        if ips_differ {
            tables.dirty.services.insert(key);
        }
    }
}

/// A ServiceImport.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ImportRecord {
    /// The virtual addresses of an import of another program. Those of an import of this program are read from the services
    /// themselves, and two names with one virtual address would be a conflict for clients.
    pub(crate) ips: Vec<IpAddr>,
    /// The numbers of the ports; none: they are not known.
    pub(crate) ports: Vec<u16>,
    /// The content of an import that this program writes; `None` for imports of other programs, and if the registry writes none.
    pub(crate) own: Option<Arc<ImportContent>>,
}

/// The content of an import that this program writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ImportContent {
    pub(crate) is_headless: bool,
    pub(crate) ips: Vec<String>,
    pub(crate) ip_families: Vec<String>,
    pub(crate) ports: Vec<ExportedPort>,
    pub(crate) session_affinity: String,
    /// The timeout of the session affinity in seconds; 0: none is given.
    pub(crate) session_seconds: i64,
    pub(crate) traffic_distribution: String,
    /// `Cluster` for a service with a virtual address: a ServiceExport does not export services with `Local`.
    pub(crate) internal_traffic_policy: String,
    /// The labels and annotations that the ServiceExport gives.
    pub(crate) labels: Texts,
    pub(crate) annotations: Texts,
    /// The clusters that export the service.
    pub(crate) clusters: BTreeSet<String>,
    /// The condition [`READY`]; `None`: the import has none.
    pub(crate) ready: Option<Ready>,
}

/// The condition [`READY`] of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    /// `True` or `False`.
    pub(crate) status: String,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl Ready {
    /// The reason if pods outside the mesh reach all ports.
    pub(crate) const ALL: &str = "Ready";
    /// The reason if pods outside the mesh reach some ports.
    pub(crate) const SOME: &str = "SomePorts";
    /// The reason if pods outside the mesh reach no port.
    pub(crate) const NONE: &str = "Pending";
    /// The reason if another program has a Service of the name that the derived one would have.
    pub(crate) const NAME_TAKEN: &str = "ServiceNameTaken";
}

/// The names of the labels and annotations that a ServiceExport has given an import, so that those that it does not give any more are
/// removed, and those of other programs stay.
#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
struct ExportedNames {
    labels: BTreeSet<String>,
    annotations: BTreeSet<String>,
}

impl ExportedNames {
    fn of(annotations: &Texts) -> Self {
        annotations.get(EXPORTED).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}

impl OwnObject for ServiceImport {
    type Content = ImportContent;

    const KIND: Kind = Kind::ServiceImport;
    const NAME: &'static str = IMPORT_KIND;

    fn metadata(&self) -> &Meta {
        &self.metadata
    }

    fn content(&self) -> Option<ImportContent> {
        let Self { metadata, spec, status } = self;
        if !OWN.matches(&metadata.labels) {
            return None;
        }
        let names = ExportedNames::of(&metadata.annotations);
        let exported = |names: &BTreeSet<String>, all: &Texts| {
            let named = all.iter().filter(|(name, _)| names.contains(*name));
            named.map(|(name, value)| (name.clone(), value.clone())).collect()
        };
        let ports = spec.ports.iter().filter_map(|found| {
            Some(ExportedPort {
                name: found.name.as_str().into(),
                port: port(found.port)?,
                protocol: if found.protocol.is_empty() { "TCP" } else { &*found.protocol }.into(),
                app_protocol: found.app_protocol.as_str().into(),
            })
        });
        Some(ImportContent {
            is_headless: spec.kind == "Headless",
            ips: spec.ips.clone(),
            ip_families: spec.ip_families.clone(),
            ports: ports.collect(),
            session_affinity: spec.session_affinity.clone(),
            session_seconds: spec.session_affinity_config.client_ip.timeout_seconds,
            traffic_distribution: spec.traffic_distribution.clone(),
            internal_traffic_policy: spec.internal_traffic_policy.clone(),
            labels: exported(&names.labels, &metadata.labels),
            annotations: exported(&names.annotations, &metadata.annotations),
            clusters: status.clusters.iter().map(|one| one.cluster.clone()).collect(),
            ready: status.conditions.iter().find(|found| found.kind == READY).map(|found| Ready {
                status: found.status.clone(),
                reason: found.reason.clone(),
                message: found.message.clone(),
            }),
        })
    }

    fn new_object(key: &ObjectKey, content: &ImportContent) -> Value {
        let labels = OWN.labels(content.labels.iter().map(|(name, value)| (&**name, &**value)));
        let mut annotations = content.annotations.clone();
        annotations.extend(content.names().map(|names| (EXPORTED.to_owned(), names)));
        json!({
            "metadata":
                {"namespace": &*key.namespace, "name": &*key.name, "labels": labels, "annotations": annotations},
            "spec": content.spec(),
        })
    }

    fn patch(&self, wanted: &ImportContent) -> Option<Value> {
        let without_status =
            |content: ImportContent| ImportContent { clusters: BTreeSet::new(), ready: None, ..content };
        if self.content().map(without_status) == Some(without_status(wanted.clone())) {
            return None;
        }
        let names = self.exported();
        let texts = |own: &Texts, stale: BTreeSet<String>| {
            let stale = stale.into_iter().map(|name| (name, Value::Null));
            let own = own.iter().map(|(name, value)| (name.clone(), value.as_str().into()));
            stale.chain(own).collect::<Map<String, Value>>()
        };
        let labels = texts(&wanted.labels, names.labels);
        let mut annotations = texts(&wanted.annotations, names.annotations);
        annotations.insert(EXPORTED.to_owned(), wanted.names().into());
        let mut spec = wanted.spec();
        for name in OPTIONAL {
            spec.entry(name).or_insert(Value::Null);
        }
        let version = &self.metadata.resource_version;
        Some(json!({
            "metadata": {"resourceVersion": version, "labels": labels, "annotations": annotations},
            "spec": spec,
        }))
    }

    fn status_patch(&self, wanted: &ImportContent, now: &str) -> Option<Value> {
        let has = self.content()?;
        if (&has.clusters, &has.ready) == (&wanted.clusters, &wanted.ready) {
            return None;
        }
        let clusters: Vec<Value> = wanted.clusters.iter().map(|name| json!({"cluster": name})).collect();
        let mut status = json!({"clusters": clusters});
        if has.ready != wanted.ready {
            status["conditions"] = self.conditions(wanted.ready.as_ref(), now);
        }
        Some(json!({"metadata": {"resourceVersion": self.metadata.resource_version}, "status": status}))
    }
}

impl ServiceImport {
    /// Returns the conditions of the status with this one, and those of other programs as they are.
    fn conditions(&self, ready: Option<&Ready>, now: &str) -> Value {
        let all = &self.status.conditions;
        let others = all.iter().filter(|found| found.kind != READY).map(StatusCondition::json);
        let own = ready.map(|Ready { status, reason, message }| {
            let before = all.iter().find(|found| found.kind == READY && found.status == *status);
            let since = before.map(|found| found.last_transition_time.clone());
            StatusCondition {
                kind: READY.to_owned(),
                status: status.clone(),
                reason: reason.clone(),
                message: message.clone(),
                last_transition_time: since.unwrap_or_else(|| now.to_owned()),
                observed_generation: self.metadata.generation,
            }
        });
        others.chain(own.as_ref().map(StatusCondition::json)).collect()
    }

    /// Returns the names of the labels and annotations that a ServiceExport has given.
    fn exported(&self) -> ExportedNames {
        ExportedNames::of(&self.metadata.annotations)
    }
}

impl StatusCondition {
    fn json(&self) -> Value {
        let Self { kind, status, reason, message, last_transition_time, observed_generation } = self;
        json!({
            "type": kind, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": last_transition_time, "observedGeneration": observed_generation,
        })
    }
}

impl ImportContent {
    /// Returns the value of the annotation [`EXPORTED`]; `None` without exported labels and annotations.
    fn names(&self) -> Option<String> {
        let names = |texts: &Texts| texts.keys().cloned().collect();
        let names = ExportedNames { labels: names(&self.labels), annotations: names(&self.annotations) };
        let is_any = !names.labels.is_empty() || !names.annotations.is_empty();
        is_any.then(|| json!(names).to_string())
    }

    fn spec(&self) -> Map<String, Value> {
        let port = |port: &ExportedPort| {
            let mut object = json!({"port": port.port, "protocol": &*port.protocol});
            for (name, text) in [("name", &port.name), ("appProtocol", &port.app_protocol)] {
                if !text.is_empty() {
                    object[name] = (**text).into();
                }
            }
            object
        };
        let mut spec = Map::new();
        let mut set = |name: &str, value: Value| drop(spec.insert(name.to_owned(), value));
        set("type", if self.is_headless { "Headless" } else { "ClusterSetIP" }.into());
        set("ports", self.ports.iter().map(port).collect());
        set("sessionAffinity", self.session_affinity.as_str().into());
        if self.session_seconds > 0 {
            set("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": self.session_seconds}}));
        }
        if !self.ips.is_empty() {
            set("ips", json!(self.ips));
        }
        if !self.ip_families.is_empty() {
            set("ipFamilies", json!(self.ip_families));
        }
        for (name, text) in [
            ("trafficDistribution", &self.traffic_distribution),
            ("internalTrafficPolicy", &self.internal_traffic_policy),
        ] {
            if !text.is_empty() {
                set(name, text.as_str().into());
            }
        }
        spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content() -> ImportContent {
        let texts = |name: &str| Texts::from([(name.to_owned(), "v".to_owned())]);
        ImportContent {
            ips: vec!["240.250.0.1".into()],
            ip_families: vec!["IPv4".into()],
            ports: vec![ExportedPort {
                name: "dns".into(),
                port: 53,
                protocol: "UDP".into(),
                app_protocol: "".into(),
            }],
            session_affinity: "ClientIP".into(),
            session_seconds: 60,
            traffic_distribution: "PreferClose".into(),
            internal_traffic_policy: "Cluster".into(),
            labels: texts("team"),
            annotations: texts("note"),
            ..ImportContent::default()
        }
    }

    fn key() -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: "web".into() }
    }

    fn read(object: &Value) -> ServiceImport {
        serde_json::from_value(object.clone()).expect("an import")
    }

    #[test]
    fn an_import_that_was_written_reads_back_as_it_was_meant() {
        let headless = ImportContent { is_headless: true, ..ImportContent::default() };
        for wanted in [content(), ImportContent::default(), headless] {
            assert_eq!(read(&ServiceImport::new_object(&key(), &wanted)).content(), Some(wanted));
        }
    }

    #[test]
    fn an_import_without_the_label_is_another_programs() {
        let mut object = ServiceImport::new_object(&key(), &content());
        object["metadata"]["labels"][MANAGED_BY.0] = "other".into();
        assert_eq!(read(&object).content(), None);
        object["metadata"]["labels"] = Value::Null;
        assert_eq!(read(&object).content(), None);
    }

    #[test]
    fn a_condition_keeps_its_time_while_its_status_stays_and_those_of_others_stay() {
        let (first, second) = ("2026-11-22T18:40:11Z", "2026-11-22T18:41:11Z");
        let ready = |status: &str, reason: &str| Ready {
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: "m".to_owned(),
        };
        let wanted = |ready: Option<Ready>| ImportContent { ready, ..content() };
        let mut object = ServiceImport::new_object(&key(), &content());
        let theirs = json!({"type": "Theirs", "status": "True", "reason": "R", "message": "",
            "lastTransitionTime": first, "observedGeneration": 0});
        object["status"] = json!({"conditions": [theirs]});
        assert_eq!(read(&object).status_patch(&wanted(None), first), None);
        let mut written = |status: Option<Ready>, now: &str| {
            let patch = read(&object).status_patch(&wanted(status.clone()), now).expect("it differs");
            object["status"]["conditions"] = patch["status"]["conditions"].clone();
            assert_eq!(read(&object).content(), Some(wanted(status)));
            assert_eq!(object["status"]["conditions"][0], theirs);
            object["status"]["conditions"][1]["lastTransitionTime"].clone()
        };
        assert_eq!(written(Some(ready("True", Ready::ALL)), first), first);
        assert_eq!(written(Some(ready("True", Ready::SOME)), second), first);
        assert_eq!(written(Some(ready("False", Ready::NONE)), second), second);
        assert_eq!(written(None, second), Value::Null);
    }

    #[test]
    fn a_patch_removes_what_is_not_exported_any_more_and_nothing_of_others() {
        let mut object = ServiceImport::new_object(&key(), &content());
        object["metadata"]["labels"]["theirs"] = "x".into();
        object["metadata"]["annotations"]["theirs"] = "x".into();
        let patch = read(&object).patch(&ImportContent::default()).expect("it differs");
        assert_eq!(patch["metadata"]["labels"], json!({"team": null}));
        assert_eq!(patch["metadata"]["annotations"], json!({"note": null, EXPORTED: null}));
        for gone in OPTIONAL {
            assert!(patch["spec"].as_object().expect("a map").get(gone) == Some(&Value::Null), "{gone}");
        }
        // Another program may write anything into the annotation of names.
        object["metadata"]["annotations"][EXPORTED] = "[".into();
        let patch = read(&object).patch(&content()).expect("it differs");
        assert_eq!(patch["metadata"]["labels"], json!({"team": "v"}));
    }
}
