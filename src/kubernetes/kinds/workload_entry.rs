//! WorkloadEntries: workloads outside of pods, such as virtual machines. ServiceEntries have endpoints of the same form.
//! `entries` finds the services that have them as endpoints.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::claimed::Claimant;
use super::pod::by_labels;
use super::{Facts, Reading, Tables, Watched};
use crate::interner::PodTemplate;
use crate::objects::{Meta, Texts, is_true, objects, port};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::address::Host;
use isthmus_model::endpoint::{Health, Labels, OwnPorts, Weight};
use isthmus_model::identity::Identity;
use isthmus_model::place::{Locality, Network};

/// The annotation of WorkloadEntries whose health is checked. Entries without the annotation are healthy.
const HEALTH_CHECKS: &str = "proxy.istio.io/health-checks-enabled";

objects! {
    /// `WorkloadEntry` of `networking.istio.io/v1`.
    WorkloadEntry { metadata: Meta, spec: WorkloadSpec, status: WorkloadStatus, }
    /// The workload of a WorkloadEntry, or an endpoint of a ServiceEntry.
    WorkloadSpec {
        address: String,
        ports: BTreeMap<String, i64>,
        labels: Texts,
        network: String,
        locality: String,
        weight: i64,
        service_account: String,
    }
    WorkloadStatus { conditions: Vec<WorkloadCondition>, }
    WorkloadCondition {
        #[serde(rename = "type")]
        kind: String,
        status: String,
    }
}

impl Watched for WorkloadEntry {
    const FACTS: Facts = Facts {
        plural: "workloadentries",
        versions: &["apis/networking.istio.io/v1"],
        is_custom: true,
        is_wanted: |spec| spec.service_entries || spec.destination_rules,
        is_required: |spec| spec.service_entries,
        ..Facts::CORE
    };

    /// The records are boxed, because the nodes of a B-tree are often half empty.
    type Rows = Table<ObjectKey, Box<WorkloadRecord>>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<Box<WorkloadRecord>> {
        let Self { metadata, spec, status } = self;
        let mut labels = spec.labels.clone();
        labels.extend(metadata.labels.clone());
        let mut record = WorkloadRecord::read(spec, &labels, &metadata.namespace, reading);
        let is_checked = metadata.annotations.get(HEALTH_CHECKS).is_some_and(|text| is_true(text));
        let healthy = status.conditions.iter().find(|condition| condition.kind == "Healthy");
        if is_checked && healthy.is_none_or(|condition| condition.status != "True") {
            record.health = Health::Unhealthy;
        }
        Some(Box::new(record))
    }

    /// Marks the services that select the workload, or have selected it.
    fn touch(touched: Touched<ObjectKey, Box<WorkloadRecord>>, tables: &mut Tables) {
        let Touched { key, before } = touched;
        tables.dirty.ignored = true;
        let claimant = Claimant::WorkloadEntry(key.clone());
        let now = tables.workload_entries.get(&key);
        let now_at: Vec<IpAddr> = now.and_then(|now| now.ip()).into_iter().collect();
        let labels = before.iter().chain(now).map(|record| record.template.labels.clone());
        let labels: Vec<Labels> = labels.collect();
        if let Some(ip) = before.and_then(|before| before.ip()) {
            tables.claims.forget(ip, &claimant);
        }
        now_at.into_iter().for_each(|ip| tables.claims.add(ip, claimant.clone()));
        labels.iter().for_each(|labels| tables.mark_selecting(&key.namespace, labels));
    }
}

/// A workload outside of pods.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WorkloadRecord {
    /// The address or name; without addresses, the workload is reached only through the gateways of its network. `None`: a Unix domain
    /// socket, or no legal name.
    pub(crate) host: Option<Host>,
    /// The ports on which the workload listens, by the name of a service port.
    pub(crate) ports: OwnPorts,
    pub(crate) weight: Weight,
    pub(crate) health: Health,
    pub(crate) template: Arc<PodTemplate>,
}

impl WorkloadRecord {
    /// Reads a workload of a namespace with these labels.
    pub(super) fn read(
        spec: &WorkloadSpec,
        labels: &Texts,
        namespace: &str,
        reading: &mut Reading<'_>,
    ) -> Self {
        let (trust_domain, texts) = (reading.trust_domain, &mut *reading.texts);
        let host = match spec.address.as_str() {
            "" => Some(Host::Ips(Arc::default())),
            address => Host::parse(address).ok(),
        };
        let account = &spec.service_account;
        let identity = format!("spiffe://{trust_domain}/ns/{namespace}/sa/{account}");
        let of_labels = by_labels(labels);
        let is_meshed = match labels.contains_key("security.istio.io/tlsMode") {
            true => of_labels.is_meshed,
            false => !account.is_empty(),
        };
        let template = PodTemplate {
            namespace: texts.text(namespace),
            labels: texts.labels(labels),
            network: Some(spec.network.as_str())
                .filter(|text| !text.is_empty())
                .map(Network::new)
                .or(of_labels.network),
            identity: Some(identity).filter(|_| !account.is_empty()).and_then(|id| Identity::parse(&id).ok()),
            is_meshed,
            locality: Some(spec.locality.as_str())
                .filter(|text| !text.is_empty())
                .and_then(Locality::parse)
                .or(of_labels.locality),
            ..of_labels
        };
        let ports = spec.ports.iter().filter_map(|(name, number)| Some((texts.text(name), port(*number)?)));
        let ports = ports.collect();
        Self {
            host,
            ports,
            weight: u32::try_from(spec.weight).ok().and_then(Weight::new).unwrap_or(Weight::ONE),
            health: Health::Healthy,
            template: texts.template(template),
        }
    }

    /// Returns the address of the workload, if it has one.
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        match self.host {
            Some(Host::Ip(ip)) => Some(ip),
            _ => None,
        }
    }

    /// Returns true if the workload has a name in place of an address.
    pub(crate) fn is_named(&self) -> bool {
        matches!(self.host, Some(Host::Name(_)))
    }
}
