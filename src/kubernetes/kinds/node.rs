//! Nodes: the localities of pods, and addresses of gateways.

use std::net::IpAddr;
use std::sync::Arc;

use super::endpoint_slice::SliceEndpoint;
use super::pod::PodRecord;
use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::interner::Interner;
use crate::objects::{Meta, TypedAddress, ip, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;
use isthmus_model::place::Locality;

objects! {
    Node { metadata: Meta, status: NodeStatus, }
    NodeStatus { addresses: Vec<TypedAddress>, }
}

impl Watched for Node {
    const FACTS: Facts = Facts { plural: "nodes", namespaces: Namespaces::None, ..Facts::CORE };

    type Rows = Table<Arc<str>, NodeRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<NodeRecord> {
        Some(NodeRecord::read(self, reading.texts))
    }

    /// Marks the gateways, and the services that have endpoints on the node if its locality has changed.
    fn touch(touched: Touched<Arc<str>, NodeRecord>, tables: &mut Tables) {
        let Touched { key: name, before } = touched;
        tables.dirty.gateways = true;
        let now = tables.nodes.get(&name).map(|node| &node.locality);
        if now == before.as_ref().map(|node| &node.locality) {
            return;
        }
        tables.dirty.all_pods = true;
        let is_on = |endpoint: &SliceEndpoint| {
            let pod = endpoint.pod.flatten().and_then(|uid| tables.pods.get(&uid));
            pod.and_then(PodRecord::node).or(endpoint.names.node.as_ref()) == Some(&name)
        };
        let on_node = tables.slices.iter().filter(|(_, slice)| slice.endpoints.iter().any(is_on));
        let services = on_node
            .map(|(key, slice)| ObjectKey { namespace: key.namespace.clone(), name: slice.service.clone() });
        tables.dirty.services.extend(services);
        let selected = tables.pods.present().filter(|(_, pod)| pod.node() == Some(&name));
        let selected = selected.filter(|_| tables.spec.service_entries);
        let templates: Vec<_> = selected.map(|(_, pod)| pod.template.clone()).collect();
        for template in templates {
            tables.mark_selecting_pods(&template.namespace, &template.labels);
        }
    }
}

/// A node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeRecord {
    pub(crate) labels: Labels,
    pub(crate) locality: Locality,
    /// The addresses with their types, such as `ExternalIP`.
    pub(crate) addresses: Vec<(Arc<str>, IpAddr)>,
}

impl NodeRecord {
    fn read(object: &Node, texts: &mut Interner) -> Self {
        let labels = &object.metadata.labels;
        let first = |names: [&str; 2]| {
            let mut found = names.iter().filter_map(|name| labels.get(*name));
            found.next().map(String::as_str).unwrap_or_default()
        };
        let region = first(["topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"]);
        let zone = first(["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"]);
        let subzone = labels.get("topology.istio.io/subzone").map(String::as_str).unwrap_or_default();
        let addresses = object.status.addresses.iter();
        let addresses = addresses.filter_map(|found| Some((texts.text(&found.kind), ip(&found.address)?)));
        let addresses = addresses.collect();
        Self {
            addresses,
            locality: Locality::parse(&format!("{region}/{zone}/{subzone}")).unwrap_or_default(),
            labels: texts.labels(labels),
        }
    }
}
