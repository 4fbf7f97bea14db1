//! Decides whether clients use the mesh's mutual TLS on a service's ports, as istiod does for its gateway: by the DestinationRules of the
//! service, else by the PeerAuthentications of the workload; and on which ports the workload refuses clients without it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::authorization::MutualTls;
use super::kinds::Tables;
use super::kinds::destination_rule::{ClientTls, TlsPolicy};
use super::kinds::peer_authentication::PeerRecord;
use super::table::{ObjectKey, Rows as _};
use isthmus_model::endpoint::{Labels, MeshTlsOff, PortMeshTls};

/// The PeerAuthentications that apply to the workloads of one namespace.
#[derive(Default)]
pub(super) struct PeerModes<'a> {
    /// The mode of workloads that no PeerAuthentication selects.
    inherited: MutualTls,
    /// The PeerAuthentications that select workloads, oldest first.
    of_workloads: Vec<(&'a ObjectKey, &'a PeerRecord)>,
}

impl<'a> PeerModes<'a> {
    pub(super) fn of(tables: &'a Tables, namespace: &'a Arc<str>) -> Self {
        if tables.peers.len() == 0 {
            return Self::default();
        }
        let root = &tables.spec.system_namespace;
        // The oldest one of a namespace applies.
        let of_all = |namespace: &'a Arc<str>| {
            let of_all = tables.peers.inside(namespace).filter(|(_, record)| record.selector.is_empty());
            of_all
                .min_by_key(|(_, record)| &record.created)
                .map(|(_, record)| record.mode)
                .unwrap_or_default()
        };
        let mut of_workloads: Vec<_> = tables
            .peers
            .inside(namespace)
            .filter(|(key, record)| is_of_workloads(key, record, root))
            .collect();
        of_workloads.sort_by_key(|(_, record)| &record.created);
        Self { inherited: of_all(namespace).or(of_all(root)), of_workloads }
    }

    /// Returns the mode of workloads that no PeerAuthentication selects.
    pub(super) fn inherited(&self) -> MutualTls {
        self.inherited
    }

    /// Returns the mode of a workload with these labels, and the PeerAuthentication that selects it, which may have other modes for
    /// single ports.
    pub(super) fn of_workload(
        &self,
        labels: &Labels,
    ) -> (MutualTls, Option<(&'a ObjectKey, &'a PeerRecord)>) {
        let selected = self.of_workloads.iter().copied().find(|(_, record)| labels.has_all(&record.selector));
        (selected.map_or(self.inherited, |(_, record)| record.mode.or(self.inherited)), selected)
    }

    /// Returns the mode of a workload with these labels on one of its own ports.
    fn on(&self, labels: &Labels, port: u16) -> MutualTls {
        let (mode, selected) = self.of_workload(labels);
        let of_port = selected.and_then(|(_, record)| record.ports.get(&port)).copied().unwrap_or_default();
        of_port.or(mode)
    }
}

/// Returns true if a PeerAuthentication is for single workloads. One in the root namespace is not.
pub(super) fn is_of_workloads(key: &ObjectKey, record: &PeerRecord, root: &Arc<str>) -> bool {
    !record.selector.is_empty() && key.namespace != *root
}

/// The rules for mutual TLS of one service.
#[derive(Default)]
pub(super) struct ServiceTls<'a> {
    /// The policy of the service's DestinationRules.
    pub(super) policy: Option<&'a TlsPolicy>,
    /// The policies of subsets that have their own, by the name of the subset in lower case.
    pub(super) subsets: BTreeMap<Arc<str>, &'a TlsPolicy>,
    pub(super) peers: PeerModes<'a>,
}

impl ServiceTls<'_> {
    /// Returns the ports on which mutual TLS is off, or off for some subsets, for a workload in the mesh with these labels. `ports` are
    /// the name, the number and the workload's own number of each service port.
    pub(super) fn off(
        &self,
        labels: &Labels,
        ports: impl Iterator<Item = (Arc<str>, u16, u16)>,
    ) -> Option<Arc<[PortMeshTls]>> {
        let mut all = Vec::new();
        for (name, number, own) in ports {
            let mode = |policy: &TlsPolicy| policy.mode_of(number);
            let by_rules = self.policy.and_then(mode);
            let off = |by_rules: Option<ClientTls>| match by_rules {
                Some(ClientTls::Mesh) => None,
                Some(ClientTls::Other) => Some(MeshTlsOff::DestinationRule),
                None => (self.peers.on(labels, own) == MutualTls::Disable)
                    .then_some(MeshTlsOff::PeerAuthentication),
            };
            let of_service = off(by_rules);
            let entry =
                |subset: &Arc<str>, off| PortMeshTls { port: name.clone(), subset: subset.clone(), off };
            if of_service.is_some() {
                all.push(entry(&Arc::default(), of_service));
            }
            let of_subsets =
                self.subsets.iter().map(|(subset, policy)| (subset, off(mode(policy).or(by_rules))));
            let other = of_subsets.filter(|(_, off)| *off != of_service);
            all.extend(other.map(|(subset, off)| entry(subset, off)));
        }
        (!all.is_empty()).then(|| all.into())
    }

    /// Returns the names of the ports on which a workload in the mesh with these labels refuses connections without mutual TLS, as far
    /// as PeerAuthentications say so. `ports` are as for [`Self::off`].
    pub(super) fn strict(
        &self,
        labels: &Labels,
        ports: impl Iterator<Item = (Arc<str>, u16, u16)>,
    ) -> Option<Arc<[Arc<str>]>> {
        let strict = ports.filter(|(_, _, own)| self.peers.on(labels, *own) == MutualTls::Strict);
        let names: Vec<Arc<str>> = strict.map(|(name, ..)| name).collect();
        (!names.is_empty()).then(|| names.into())
    }
}

#[cfg(test)]
mod tests;
