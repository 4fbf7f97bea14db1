//! The texts and values that the records of a cluster share. A cluster may have a million pods, which differ little.

use std::collections::HashSet;
use std::sync::Arc;

use super::objects::Texts;
use isthmus_model::ambient::WorkloadNames;
use isthmus_model::endpoint::{Encapsulation, EndpointTemplate, Health, Labels, OwnPorts};
use isthmus_model::identity::Identity;
use isthmus_model::place::{Locality, Network};

/// The number of values below which no sweep is worth its cost.
const SWEEP_MIN: usize = 10_000;

/// Shares equal texts, and equal values made from them.
#[derive(Debug, Default)]
pub(super) struct Interner {
    texts: HashSet<Arc<str>>,
    templates: HashSet<Arc<PodTemplate>>,
    endpoint_templates: HashSet<Arc<EndpointTemplate>>,
    names: HashSet<Arc<EndpointNames>>,
    node_names: HashSet<Arc<Arc<str>>>,
    workload_names: HashSet<Arc<WorkloadNames>>,
    /// The number of values after the last sweep.
    swept: usize,
}

impl Interner {
    pub(super) fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return known.clone();
        }
        let new: Arc<str> = text.into();
        self.texts.insert(new.clone());
        new
    }

    pub(super) fn template(&mut self, template: PodTemplate) -> Arc<PodTemplate> {
        shared(&mut self.templates, template)
    }

    pub(super) fn endpoint_template(&mut self, template: EndpointTemplate) -> Arc<EndpointTemplate> {
        shared(&mut self.endpoint_templates, template)
    }

    pub(super) fn names(&mut self, names: EndpointNames) -> Arc<EndpointNames> {
        shared(&mut self.names, names)
    }

    pub(super) fn workload_names(&mut self, names: WorkloadNames) -> Arc<WorkloadNames> {
        shared(&mut self.workload_names, names)
    }

    pub(super) fn node_name(&mut self, name: &str) -> Option<Arc<Arc<str>>> {
        let text = self.optional(name)?;
        Some(shared(&mut self.node_names, text))
    }

    /// Drops the values that nothing else uses, once there are twice as many values as after the last sweep.
    pub(super) fn sweep(&mut self) {
        let count = |all: &Self| {
            let templates = all.templates.len() + all.endpoint_templates.len();
            all.texts.len() + templates + all.names.len() + all.node_names.len() + all.workload_names.len()
        };
        if count(self) < self.swept.saturating_mul(2).max(SWEEP_MIN) {
            return;
        }
        self.endpoint_templates.retain(|value| Arc::strong_count(value) > 1);
        self.templates.retain(|value| Arc::strong_count(value) > 1);
        self.names.retain(|value| Arc::strong_count(value) > 1);
        self.workload_names.retain(|value| Arc::strong_count(value) > 1);
        self.node_names.retain(|value| Arc::strong_count(value) > 1);
        self.texts.retain(|value| Arc::strong_count(value) > 1);
        self.swept = count(self);
    }

    pub(super) fn labels(&mut self, labels: &Texts) -> Labels {
        labels.iter().map(|(key, value)| (self.text(key), self.text(value))).collect()
    }

    /// Returns the shared text; `None` for an empty text.
    pub(super) fn optional(&mut self, text: &str) -> Option<Arc<str>> {
        (!text.is_empty()).then(|| self.text(text))
    }
}

/// Returns the known value that equals `value`, or else makes `value` known.
fn shared<T: Eq + std::hash::Hash>(known: &mut HashSet<Arc<T>>, value: T) -> Arc<T> {
    if let Some(known) = known.get(&value) {
        return known.clone();
    }
    let new = Arc::new(value);
    known.insert(new.clone());
    new
}

/// The fields that pods of one deployment, or workloads outside of pods, share.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct PodTemplate {
    pub(super) namespace: Arc<str>,
    pub(super) labels: Labels,
    pub(super) network: Option<Network>,
    pub(super) identity: Option<Identity>,
    pub(super) is_meshed: bool,
    /// True if the label `istio.io/draining` asks for no new connections to the pod.
    pub(super) is_draining: bool,
    pub(super) encapsulation: Encapsulation,
    /// The locality of the label `istio-locality`.
    pub(super) locality: Option<Locality>,
    /// The health of the pod as an endpoint that a ServiceEntry selects; `None`: it is none.
    pub(super) selectable: Option<Health>,
    /// The numbers of the pod's named ports, if ServiceEntries are read.
    pub(super) ports: OwnPorts,
}

/// The names that a slice gives for an endpoint. Endpoints of a node share them, unless they have host names.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct EndpointNames {
    /// The host name of the endpoint within its service.
    pub(super) hostname: Option<Arc<str>>,
    pub(super) node: Option<Arc<str>>,
    pub(super) zone: Option<Arc<str>>,
}
