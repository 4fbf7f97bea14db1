//! DestinationRules: the subsets of services, and whether clients use the mesh's mutual TLS. A rule counts if it is meant for all
//! proxies, and a proxy in the gateway's namespace may look it up.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::IgnoredAny;

use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_model::endpoint::Labels;
use isthmus_model::name::HostName;

objects! {
    /// `DestinationRule` of `networking.istio.io/v1`.
    DestinationRule { metadata: Meta, spec: DestinationSpec, }
    DestinationSpec {
        host: String,
        subsets: Vec<Subset>,
        export_to: Vec<String>,
        workload_selector: Option<IgnoredAny>,
        traffic_policy: Option<TrafficPolicy>,
    }
    Subset { name: String, labels: Texts, traffic_policy: Option<TrafficPolicy>, }
    TrafficPolicy { tls: Option<TlsSettings>, port_level_settings: Vec<PortSettings>, }
    PortSettings { port: PortSelector, tls: Option<TlsSettings>, }
    PortSelector { number: u16, }
    TlsSettings { mode: String, }
}

impl Watched for DestinationRule {
    const FACTS: Facts = Facts {
        plural: "destinationrules",
        versions: &["apis/networking.istio.io/v1"],
        is_custom: true,
        namespaces: Namespaces::OfServicesAndSystem,
        is_wanted: |spec| spec.destination_rules,
        is_required: |spec| spec.destination_rules,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, RuleRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<RuleRecord> {
        let (spec, texts) = (reading.spec, &mut *reading.texts);
        if self.spec.workload_selector.is_some() {
            return None;
        }
        let reach = Reach::of(&self.spec.export_to, &self.metadata.namespace, spec)?;
        let subsets = self.spec.subsets.iter().map(|subset| {
            let tls = subset.traffic_policy.as_ref().map(TlsPolicy::read).filter(|tls| !tls.is_empty());
            (
                texts.text(&subset.name),
                RuleSubset { labels: texts.labels(&subset.labels), tls: tls.map(Box::new) },
            )
        });
        let subsets = subsets.collect();
        let tls = self.spec.traffic_policy.as_ref().map(TlsPolicy::read);
        let created = texts.text(&self.metadata.creation_timestamp);
        Some(RuleRecord {
            host: texts.text(&self.spec.host),
            created,
            reach,
            tls: tls.map(Box::new),
            subsets,
        })
    }

    fn touch(touched: Touched<ObjectKey, RuleRecord>, tables: &mut Tables) {
        let Touched { key, before } = touched;
        let hosts = before.iter().chain(tables.rules.get(&key)).map(|rule| rule.host.clone());
        for host in hosts.collect::<Vec<_>>() {
            mark_host(&host, &key.namespace, tables);
        }
    }
}

/// Marks the services that the host of a rule in this namespace names. For each of them, the rule that
/// counts is then found again.
fn mark_host(host: &str, rule_namespace: &Arc<str>, tables: &mut Tables) {
    if let Some(suffix) = host.strip_prefix('*') {
        let domain = &tables.spec.cluster_domain;
        let is_named =
            |key: &ObjectKey| format!("{}.{}.svc.{domain}", key.name, key.namespace).ends_with(suffix);
        let named = tables.services.iter().map(|(key, _)| key).filter(|key| is_named(key));
        tables.dirty.services.extend(named.cloned());
        let hosts: Vec<_> =
            tables.claims.hosts().filter(|host| host.as_str().ends_with(suffix)).cloned().collect();
        tables.mark_hosts(&hosts);
        return;
    }
    let mut labels = host.split('.');
    let name = labels.next().unwrap_or_default();
    let namespace = labels.next().unwrap_or(rule_namespace);
    let service = ObjectKey { namespace: namespace.into(), name: name.into() };
    if tables.services.get(&service).is_some() {
        tables.dirty.services.insert(service);
    }
    let short = format!("{host}.{rule_namespace}.svc.{}", tables.spec.cluster_domain);
    let hosts: Vec<_> = [host, &short].into_iter().filter_map(|host| HostName::parse(host).ok()).collect();
    let hosts: Vec<_> = hosts.into_iter().filter(|host| tables.claims.has_host(host)).collect();
    tables.mark_hosts(&hosts);
}

/// A DestinationRule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RuleRecord {
    pub(crate) host: Arc<str>,
    pub(crate) created: Arc<str>,
    pub(crate) reach: Reach,
    /// The rule's `trafficPolicy`; `None`: it has none, so that a younger rule for the same host may have one.
    pub(crate) tls: Option<Box<TlsPolicy>>,
    pub(crate) subsets: BTreeMap<Arc<str>, RuleSubset>,
}

/// A subset of a DestinationRule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RuleSubset {
    pub(crate) labels: Labels,
    /// The subset's own TLS modes; `None`: those of the rule apply.
    pub(crate) tls: Option<Box<TlsPolicy>>,
}

/// The proxies that may look up a DestinationRule, as `exportTo` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The proxies of the rule's own namespace, which is the gateway's and the system namespace.
    Private,
    /// The gateway, among others.
    Shown,
    /// Others than the gateway. The rule takes the place of less specific rules in its namespace nevertheless.
    Hidden,
}

impl Reach {
    /// Returns the reach of a rule in `namespace`; `None` if it has no effect on a gateway in the spec's namespace.
    fn of(export_to: &[String], namespace: &str, spec: &KubernetesSpec) -> Option<Self> {
        let (viewer, has) = (&*spec.viewer, |wanted: &str| export_to.iter().any(|one| one == wanted));
        let is_public = export_to.is_empty() || has("*");
        let is_own = |one: &String| one == "." || one == namespace;
        let is_private = !export_to.is_empty()
            && export_to.iter().all(is_own)
            && export_to.iter().all(|one| *one == export_to[0]);
        let is_shown = is_public || has(viewer);
        match (namespace == viewer, viewer == &*spec.system_namespace) {
            (true, true) if is_private => Some(Self::Private),
            (true, false) if is_shown || has(".") => Some(Self::Shown),
            (false, _) if is_private => None,
            _ => Some(if is_shown { Self::Shown } else { Self::Hidden }),
        }
    }
}

/// Tells whether clients use the mesh's mutual TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientTls {
    /// The mode `ISTIO_MUTUAL`.
    Mesh,
    /// Any other mode.
    Other,
}

/// The TLS modes of a `trafficPolicy`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TlsPolicy {
    /// The mode of ports that have none of their own; `None`: the policy does not say.
    mode: Option<ClientTls>,
    /// The modes of single ports, by the number of the service port. Of several for one port the first counts.
    ports: Box<[(u16, ClientTls)]>,
}

impl TlsPolicy {
    fn read(policy: &TrafficPolicy) -> Self {
        let mode = |tls: &TlsSettings| match tls.mode.as_str() {
            "ISTIO_MUTUAL" => ClientTls::Mesh,
            _ => ClientTls::Other,
        };
        let ports = policy.port_level_settings.iter();
        let ports = ports.filter_map(|own| Some((own.port.number, mode(own.tls.as_ref()?))));
        Self { mode: policy.tls.as_ref().map(mode), ports: ports.collect() }
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the mode of a service port.
    pub(crate) fn mode_of(&self, port: u16) -> Option<ClientTls> {
        let own = self.ports.iter().find(|(number, _)| *number == port);
        own.map(|(_, mode)| *mode).or(self.mode)
    }
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
