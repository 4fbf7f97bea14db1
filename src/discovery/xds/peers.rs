//! The identities that may serve a service port by mutual TLS. Envoy matches the server's SPIFFE URI against them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dashmap::DashMap;

use crate::model::endpoint::TlsMode;
use crate::model::identity::Identity;
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::snapshot::service_view::{PortView, ServiceView};

/// The identities of one service port, in all clusters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// True if an endpoint speaks mutual TLS, or if mutual TLS is the default for the port's protocol.
    pub any: bool,
    /// The SPIFFE IDs that the registries declare for the endpoints.
    pub identities: BTreeSet<Arc<str>>,
    /// The SPIFFE prefix accepted for endpoints without a known identity.
    pub prefix: Option<Arc<str>>,
    /// The roots that verify the servers.
    pub roots: Roots,
    endpoints: usize,
}

/// The roots that verify the servers of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Roots {
    /// The roots in the client's own secret, for services of this mesh.
    #[default]
    Ours,
    /// The roots of a peer, in PEM.
    Peer(Arc<str>),
    /// No roots are known, so that no server can be verified.
    Unknown,
}

impl Peers {
    /// Returns the set with this identity alone.
    pub fn only(identity: &str) -> Self {
        Self { any: true, identities: [identity.into()].into(), ..Self::default() }
    }

    /// Collects the identities of a service port.
    pub fn of(snapshot: &Snapshot, service: &ServiceView, port: &PortView) -> Self {
        let mut peers = Self { any: port.protocol.default_tls() == TlsMode::Mesh, ..Self::default() };
        let mut nameless = false;
        let endpoints = service.endpoints_of(port, "", snapshot.networks()).into_iter().flatten();
        for found in endpoints.filter(|found| found.tls == TlsMode::Mesh) {
            peers.any = true;
            peers.endpoints += 1;
            match &found.endpoint.template.identity {
                Some(identity) => drop(peers.identities.insert(identity.shared())),
                None => nameless = true,
            }
        }
        if let Some(import) = &service.import {
            peers.name_those_of(snapshot, &import.peer);
            return peers;
        }
        if nameless || peers.identities.is_empty() {
            let domain = snapshot.policy.mesh.trust_domain.as_str();
            peers.prefix = Some(format!("spiffe://{domain}/ns/{}/", service.namespace).into());
        }
        peers
    }

    /// Replaces the trust domain of the identities by the one that the peer's certificates name, and sets the peer's roots.
    fn name_those_of(&mut self, snapshot: &Snapshot, peer: &str) {
        let found = snapshot.policy.peers.iter().find(|known| &*known.name == peer);
        let who = found.and_then(|peer| peer.who.as_ref());
        let named = |identity: &Arc<str>| {
            Identity::parse(identity)
                .ok()
                .zip(who)
                .map(|(identity, who)| identity.in_domain(&who.trust_domain).shared())
        };
        self.identities = self.identities.iter().filter_map(named).collect();
        // Without a list of identities, Envoy would accept every certificate that the roots verify. Therefore the roots are not
        // used while there are no identities.
        let usable = who.is_some() && !self.identities.is_empty();
        let roots = who.and_then(|who| snapshot.trust_roots.of(who.alias.as_str())).filter(|_| usable);
        self.roots = roots.map_or(Roots::Unknown, |roots| Roots::Peer(roots.clone()));
    }

    /// Returns true if `before` allows all of these identities.
    fn are_known(&self, before: &Self) -> bool {
        self.roots == before.roots && self.names_are_known(before)
    }

    fn names_are_known(&self, before: &Self) -> bool {
        self.endpoints == 0 && before.endpoints > 0
            || (self.any == before.any
                && self.identities.is_subset(&before.identities)
                && (self.prefix.is_none() || self.prefix == before.prefix))
    }
}

/// The identities with which the clusters of each service port were last rendered. Envoy drains the connections of a cluster
/// that changes. The removal of a pod therefore does not change the cluster: the pod's identity is removed with the next
/// addition.
///
/// Two replicas may differ in this state: each lists the present identities, and perhaps some that were removed while the
/// replica ran (SECURITY.md). There are never more entries than services.
#[derive(Debug, Default)]
pub struct SanHistory(DashMap<HostName, BTreeMap<u16, Entry>>);

#[derive(Debug, Default)]
struct Entry {
    /// The generation of the newest snapshot from which `peers` was updated.
    generation: u64,
    peers: Arc<Peers>,
}

impl SanHistory {
    /// Returns the identities to render for a service port, and updates the history.
    pub fn peers(&self, snapshot: &Snapshot, service: &ServiceView, port: &PortView) -> Arc<Peers> {
        let peers = Peers::of(snapshot, service, port);
        let mut ports = self.0.entry(service.key.hostname.clone()).or_default();
        let entry = ports.entry(port.port).or_default();
        // An older snapshot does not override a newer one.
        if snapshot.generation >= entry.generation {
            entry.generation = snapshot.generation;
            if !peers.are_known(&entry.peers) {
                entry.peers = Arc::new(peers);
            }
        }
        entry.peers.clone()
    }

    /// Removes services and ports that a snapshot does not have.
    pub fn keep_those_of(&self, snapshot: &Snapshot) {
        self.0.retain(|hostname, ports| keep_ports(snapshot, hostname, ports));
    }

    /// Removes a service, or ports of it, that a snapshot does not have.
    pub fn keep_ports_of(&self, snapshot: &Snapshot, hostname: &HostName) {
        self.0.remove_if_mut(hostname, |hostname, ports| !keep_ports(snapshot, hostname, ports));
    }
}

/// Removes the ports that a service does not have; returns false if the service does not exist.
fn keep_ports(snapshot: &Snapshot, hostname: &HostName, ports: &mut BTreeMap<u16, Entry>) -> bool {
    let service = snapshot.service(hostname.as_str());
    ports.retain(|port, _| service.is_some_and(|service| service.port(*port).is_some()));
    service.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::xds::session::tests::snapshot;
    use crate::snapshot::tests::policy_of;

    #[test]
    fn an_identity_leaves_together_with_the_next_one_that_comes() {
        let policy = Arc::new(policy_of("east", "east"));
        let history = SanHistory::default();
        let ends = |world: &Snapshot| {
            let service = world.service("a").expect("a service");
            let peers = history.peers(world, service, &service.ports[0]);
            peers
                .identities
                .iter()
                .map(|identity| identity[identity.len() - 4..].to_owned())
                .collect::<Vec<_>>()
        };
        let [first, fewer, other] = [(1, [101, 102]), (2, [101, 101]), (3, [101, 103])]
            .map(|(generation, hosts)| snapshot(&policy, generation, &[("a", &hosts)]));
        assert_eq!(ends(&first), ["s101", "s102"]);
        assert_eq!(ends(&fewer), ["s101", "s102"]);
        assert_eq!(ends(&other), ["s101", "s103"]);
        // Rendering from an older snapshot removes nothing.
        assert_eq!(ends(&first), ["s101", "s103"]);
        let hostname = HostName::parse("a").expect("legal");
        history.keep_ports_of(&other, &hostname);
        assert_eq!(history.0.len(), 1);
        history.keep_ports_of(&snapshot(&policy, 4, &[]), &hostname);
        assert!(history.0.is_empty());
    }
}
