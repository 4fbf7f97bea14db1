//! DestinationRules: the subsets of services. A rule counts if it is visible in the gateway's namespace and is meant for all proxies.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::IgnoredAny;

use super::service::names_viewer;
use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;

objects! {
    /// `DestinationRule` of `networking.istio.io/v1`.
    DestinationRule { metadata: Meta, spec: DestinationSpec, }
    DestinationSpec {
        host: String,
        subsets: Vec<Subset>,
        export_to: Vec<String>,
        workload_selector: Option<IgnoredAny>,
    }
    Subset { name: String, labels: Texts, }
}

impl Watched for DestinationRule {
    const FACTS: Facts = Facts {
        plural: "destinationrules",
        versions: &["apis/networking.istio.io/v1"],
        is_custom: true,
        is_wanted: |spec| spec.destination_rules,
        is_required: |spec| spec.destination_rules,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, RuleRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<RuleRecord> {
        let (viewer, texts) = (&*reading.spec.viewer, &mut *reading.texts);
        let export_to = self.spec.export_to.iter().map(String::as_str);
        let is_visible =
            self.spec.export_to.is_empty() || names_viewer(export_to, &self.metadata.namespace, viewer);
        if self.spec.workload_selector.is_some() || !is_visible {
            return None;
        }
        let subsets = self.spec.subsets.iter();
        let subsets =
            subsets.map(|subset| (texts.text(&subset.name), texts.labels(&subset.labels))).collect();
        let created = texts.text(&self.metadata.creation_timestamp);
        Some(RuleRecord { host: texts.text(&self.spec.host), created, subsets })
    }

    fn touch(touched: Touched<ObjectKey, RuleRecord>, tables: &mut Tables) {
        let Touched { key, before } = touched;
        let hosts = before.iter().chain(tables.rules.get(&key)).map(|rule| rule.host.clone());
        for host in hosts.collect::<Vec<_>>() {
            mark_host(&host, &key.namespace, tables);
        }
    }
}

/// Marks the services that the host of a rule in this namespace names. Which of the rules for a service counts is found again for each
/// of them.
fn mark_host(host: &str, namespace: &Arc<str>, tables: &mut Tables) {
    if host.starts_with('*') {
        tables.dirty.is_all = true;
        return;
    }
    let mut labels = host.split('.');
    let name = labels.next().unwrap_or_default();
    let namespace = labels.next().unwrap_or(namespace);
    let service = ObjectKey { namespace: namespace.into(), name: name.into() };
    if tables.services.get(&service).is_some() {
        tables.dirty.services.insert(service);
    }
}

/// The subsets of a DestinationRule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RuleRecord {
    pub(crate) host: Arc<str>,
    pub(crate) created: Arc<str>,
    pub(crate) subsets: BTreeMap<Arc<str>, Labels>,
}

impl RuleRecord {
    /// Returns how closely the rule's host names a service, of which `short` is the name in the rule's own namespace; `None` if it
    /// does not. A host without a dot is such a name; `*` at the start of a host stands for any text.
    pub(crate) fn closeness(&self, hostname: &str, short: Option<&str>) -> Option<usize> {
        if *self.host == *hostname || short == Some(&*self.host) {
            return Some(usize::MAX);
        }
        self.host.strip_prefix('*').filter(|suffix| hostname.ends_with(suffix)).map(str::len)
    }
}
