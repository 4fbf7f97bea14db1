//! EndpointSlices. A slice marks its service, and its pods have to know the slices that name them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::derived_service::IMPORT;
use super::selector::{Label, Selector};
use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::interner::{EndpointNames, Interner};
use crate::objects::{Meta, Port, ip, objects, port};
use crate::table::{ObjectKey, Table, Touched, Uid};
use isthmus_model::endpoint::Health;

/// The label with the name of the Service whose endpoints a slice has, by which kube-proxy finds the slice.
pub(super) const SERVICE: &str = "kubernetes.io/service-name";

objects! {
    /// `EndpointSlice` of `discovery.k8s.io/v1`.
    EndpointSlice { metadata: Meta, address_type: String, ports: Vec<Port>, endpoints: Vec<EndpointObject>, }
    EndpointObject {
        addresses: Vec<String>,
        conditions: Conditions,
        hostname: String,
        node_name: String,
        zone: String,
        target_ref: Reference,
    }
    /// Absent conditions mean: ready, serving, not terminating.
    Conditions { ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>, }
    Reference { kind: String, namespace: String, name: String, uid: String, }
}

/// The slices of a cluster. Their keys are shared with [`Tables::slices_of`] and with the pods.
type Slices = Table<Arc<ObjectKey>, SliceRecord>;

impl Watched for EndpointSlice {
    const FACTS: Facts = Facts {
        plural: "endpointslices",
        versions: &["apis/discovery.k8s.io/v1"],
        is_needed: true,
        namespaces: Namespaces::OfServicesAndGateways,
        // Slices of imported services have the endpoints of other clusters, so they are not read.
        labels: Selector(&[Label::Present(SERVICE), Label::Absent(IMPORT)]),
        ..Facts::CORE
    };

    type Rows = Slices;

    fn record(&self, reading: &mut Reading<'_>) -> Option<SliceRecord> {
        SliceRecord::read(self, reading.texts)
    }

    fn touch(touched: Touched<Arc<ObjectKey>, SliceRecord>, tables: &mut Tables) {
        let Touched { key, before } = touched;
        let service =
            |slice: &SliceRecord| ObjectKey { namespace: key.namespace.clone(), name: slice.service.clone() };
        if let Some(before) = before {
            let service = service(&before);
            if let Some(slices) = tables.slices_of.get_mut(&service) {
                slices.remove(&key);
                if slices.is_empty() {
                    tables.slices_of.remove(&service);
                }
            }
            before.uids().iter().for_each(|uid| tables.pods.remove_slice(uid, &key));
            tables.mark_endpoints(service);
        }
        if let Some(now) = tables.slices.get(&key) {
            let service = service(now);
            now.uids().into_iter().for_each(|uid| tables.pods.add_slice(uid, key.clone()));
            tables.slices_of.entry(service.clone()).or_default().insert(key.clone());
            tables.mark_endpoints(service);
        }
    }
}

/// An EndpointSlice.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SliceRecord {
    /// The name of the slice's service, which is in the same namespace.
    pub(crate) service: Arc<str>,
    /// The port numbers of the endpoints, by port name.
    pub(crate) ports: Box<[(Arc<str>, u16)]>,
    pub(crate) endpoints: Box<[SliceEndpoint]>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SliceEndpoint {
    pub(crate) address: IpAddr,
    /// The UID of the pod that the endpoint names. Outer `None`: the endpoint names no pod; inner `None`: the UID is malformed.
    pub(crate) pod: Option<Option<Uid>>,
    pub(crate) health: Health,
    pub(crate) names: Arc<EndpointNames>,
}

impl SliceRecord {
    /// Reads a slice; `None` if it has no service, or has names instead of addresses.
    fn read(object: &EndpointSlice, texts: &mut Interner) -> Option<Self> {
        let service = texts.text(object.metadata.labels.get(SERVICE)?);
        if !matches!(object.address_type.as_str(), "IPv4" | "IPv6") {
            return None;
        }
        let ports = object.ports.iter().filter(|port| matches!(port.protocol.as_str(), "" | "TCP"));
        let ports = ports.filter_map(|found| Some((texts.text(&found.name), port(found.port)?))).collect();
        let endpoints = object.endpoints.iter().filter_map(|found| {
            let target = &found.target_ref;
            let is_pod = target.kind == "Pod" || (target.kind.is_empty() && !target.uid.is_empty());
            Some(SliceEndpoint {
                // Kubernetes gives only the first address a meaning.
                address: ip(found.addresses.first()?)?,
                pod: is_pod.then(|| Uid::parse(&target.uid)),
                health: health(&found.conditions)?,
                names: names(found, texts),
            })
        });
        Some(Self { service, ports, endpoints: endpoints.collect() })
    }

    /// Returns the UIDs of the pods that the slice names, each once.
    fn uids(&self) -> BTreeSet<Uid> {
        self.endpoints.iter().filter_map(|endpoint| endpoint.pod.flatten()).collect()
    }
}

/// Returns the names of an endpoint, shared.
fn names(found: &EndpointObject, texts: &mut Interner) -> Arc<EndpointNames> {
    let hostname = texts.optional(&found.hostname);
    let (node, zone) = (texts.optional(&found.node_name), texts.optional(&found.zone));
    texts.names(EndpointNames { hostname, node, zone })
}

/// Returns the health of an endpoint; `None` if it takes no connections any more. Readiness comes from the slice, because a
/// service may publish pods that are not ready.
fn health(conditions: &Conditions) -> Option<Health> {
    let ready = conditions.ready.unwrap_or(true);
    let serving = conditions.serving.unwrap_or(ready);
    let terminating = conditions.terminating.unwrap_or(false);
    match (ready, serving, terminating) {
        (true, _, _) => Some(Health::Healthy),
        (false, true, true) => Some(Health::Draining),
        (false, false, true) => None,
        (false, _, false) => Some(Health::Unhealthy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>) -> Option<Health> {
        health(&Conditions { ready, serving, terminating })
    }

    #[test]
    fn conditions_become_health() {
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(conditions(None, None, None), Some(Health::Healthy));
        assert_eq!(conditions(yes, yes, no), Some(Health::Healthy));
        assert_eq!(conditions(yes, no, yes), Some(Health::Healthy), "publishNotReadyAddresses");
        assert_eq!(conditions(no, yes, yes), Some(Health::Draining));
        assert_eq!(conditions(no, no, yes), None);
        assert_eq!(conditions(no, no, no), Some(Health::Unhealthy));
        assert_eq!(conditions(no, None, None), Some(Health::Unhealthy));
    }
}
