//! The services of the cluster set (KEP-1645), as a ServiceImport describes them: merged from all clusters that export one. The
//! endpoints are those of the service's view; the differences between the clusters are found in `clusterset`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::Snapshot;
use super::clusterset::{DOMAIN, exported_ports};
use super::service_view::{Part, ServiceView};
use isthmus_model::endpoint::{Endpoint, Health};
use isthmus_model::place::{ClusterId, Network};
use isthmus_registry::change::{Export, ExportedPort};

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
    /// The merged service.
    pub view: &'s ServiceView,
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
            view,
        })
    }

    /// Returns the endpoints on a network in the clusters that export the service, by cluster and address.
    pub fn endpoints_on(
        &self,
        snapshot: &'s Snapshot,
        network: &Network,
    ) -> BTreeMap<(&'s ClusterId, IpAddr), ClusterSetEndpoint<'s>> {
        let mut all = BTreeMap::new();
        for port in &self.view.ports {
            let endpoints = self.view.endpoints_of(port, "", snapshot.networks()).into_iter().flatten();
            for found in endpoints {
                let cluster = &found.origin.cluster;
                if found.network != network || !self.clusters.contains(cluster) {
                    continue;
                }
                let Endpoint { health, locality, .. } = found.endpoint;
                for ip in found.addresses(&snapshot.resolved).iter() {
                    let new =
                        || ClusterSetEndpoint { ports: Vec::new(), health: *health, zone: locality.zone() };
                    let endpoint = all.entry((cluster, *ip)).or_insert_with(new);
                    endpoint.ports.push((&*port.name, found.port));
                }
            }
        }
        all
    }

    /// Returns the host name, which is the server name of TLS clients.
    pub fn hostname(&self) -> &'s str {
        &self.view.name
    }

    /// Returns the addresses by which clients in a cluster reach the service: those that the cluster itself gives it, if it
    /// exports the service, or those that this gateway gives the service of a peer. A cluster that only imports the service has
    /// none, because the addresses of other clusters have no meaning there.
    pub fn addresses_in(&self, snapshot: &'s Snapshot, cluster: &ClusterId) -> Vec<IpAddr> {
        if self.view.import.is_some() {
            return self.view.addresses.clone();
        }
        // The name of the cluster set stands for the service, and has no addresses of its own.
        let original = snapshot.service(&self.view.export_name).filter(|_| self.clusters.contains(cluster));
        let parts = original.iter().flat_map(|service| &service.parts);
        let own = parts.filter(|part| part.origin.cluster == *cluster);
        own.flat_map(|part| part.service.addresses.iter().copied()).collect()
    }
}

/// The endpoint of a service of the cluster set at one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterSetEndpoint<'s> {
    /// The names and numbers of the TCP ports on which the endpoint listens.
    pub ports: Vec<(&'s str, u16)>,
    /// The health that the registry declares.
    pub health: Health,
    /// The zone; empty if the registry declares none.
    pub zone: &'s str,
}

/// Returns the ports with which a registry gives a service.
fn ports_of(part: &Part) -> Vec<ExportedPort> {
    exported_ports(part.exported().map(|exported| exported.export), &part.service.ports)
}

impl Snapshot {
    /// Returns the service of the cluster set with this host name.
    pub fn of_cluster_set(&self, hostname: &str) -> Option<ClusterSetService<'_>> {
        ClusterSetService::of(self.services.get(hostname)?)
    }

    /// Returns the services of the cluster set, in no particular order.
    pub fn cluster_set(&self) -> impl Iterator<Item = ClusterSetService<'_>> {
        self.services.iter().filter_map(|(_, view)| ClusterSetService::of(view))
    }
}
