//! The services of the cluster set (KEP-1645), as a ServiceImport describes them: merged from all clusters that export one. The
//! endpoints are those of the service's view; the differences between the clusters are found in `clusterset`.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::Snapshot;
use super::change::{Export, ExportedPort};
use super::clusterset::DOMAIN;
use super::service_view::{Part, ServiceView};
use isthmus_model::place::ClusterId;
use isthmus_model::service::ServicePort;

/// A service of the cluster set, merged from the clusters that export it.
#[derive(Clone, Debug)]
pub struct ClusterSetService<'s> {
    /// The name.
    pub name: &'s str,
    /// The namespace of the name.
    pub namespace: &'s str,
    /// The export that applies where clusters differ: the oldest one. `None` for a service that only peers have.
    pub oldest: Option<&'s Export>,
    /// The ports of all exports; of two with one name or number, that of the older export.
    pub ports: Vec<ExportedPort>,
    /// The clusters that export the service.
    pub clusters: BTreeSet<&'s ClusterId>,
    /// The virtual addresses that this gateway gives a service of a peer.
    pub addresses: &'s [IpAddr],
}

impl<'s> ClusterSetService<'s> {
    /// Returns the service of the cluster set that this is; `None` if it is none.
    pub(super) fn of(view: &'s ServiceView) -> Option<Self> {
        let place = view.name.strip_suffix(DOMAIN)?.strip_suffix(".svc.")?;
        let (name, namespace) = place.split_once('.').filter(|(_, namespace)| !namespace.contains('.'))?;
        let is_exported = |part: &&Part| part.exported().is_some() || part.service.import.is_some();
        let parts = || view.parts.iter().filter(is_exported);
        parts().next()?;
        let mut ports: Vec<ExportedPort> = Vec::new();
        for port in parts().flat_map(ports_of) {
            let is_taken = |known: &ExportedPort| {
                known.name == port.name || (known.port, &known.protocol) == (port.port, &port.protocol)
            };
            if !ports.iter().any(is_taken) {
                ports.push(port);
            }
        }
        Some(Self {
            name,
            namespace,
            oldest: parts().find_map(|part| Some(part.exported()?.export)),
            ports,
            clusters: parts().map(|part| &part.origin.cluster).collect(),
            addresses: if view.import.is_some() { &view.addresses } else { &[] },
        })
    }
}

/// Returns the ports with which a registry gives a service.
fn ports_of(part: &Part) -> Vec<ExportedPort> {
    match part.exported() {
        Some(exported) if !exported.export.ports.is_empty() => exported.export.ports.to_vec(),
        _ => {
            let port = |port: &ServicePort| ExportedPort {
                name: port.name.clone(),
                port: port.port,
                protocol: "TCP".into(),
                app_protocol: "".into(),
            };
            part.service.ports.iter().map(port).collect()
        }
    }
}

impl Snapshot {
    /// Returns the services of the cluster set, in no particular order.
    pub fn cluster_set(&self) -> impl Iterator<Item = ClusterSetService<'_>> {
        self.services.iter().filter_map(|(_, view)| ClusterSetService::of(view))
    }
}
