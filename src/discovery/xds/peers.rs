//! Who may answer for a service port by mutual TLS: what Envoy matches the server's SPIFFE URI against.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dashmap::DashMap;

use crate::model::endpoint::TlsMode;
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::snapshot::service_view::{PortView, ServiceView};

/// Those who answer for one service port, in whatever cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// Whether any endpoint speaks mutual TLS, or would by default.
    pub any: bool,
    pub identities: BTreeSet<Arc<str>>,
    /// What the identity of those begins with whose identity nobody has told of.
    pub prefix: Option<Arc<str>>,
    endpoints: usize,
}

impl Peers {
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
        if nameless || peers.identities.is_empty() {
            let domain = snapshot.policy.mesh.trust_domain.as_str();
            peers.prefix = Some(format!("spiffe://{domain}/ns/{}/", service.namespace).into());
        }
        peers
    }

    /// Whether all of these were already allowed before.
    fn are_known(&self, before: &Self) -> bool {
        self.endpoints == 0 && before.endpoints > 0
            || (self.any == before.any
                && self.identities.is_subset(&before.identities)
                && (self.prefix.is_none() || self.prefix == before.prefix))
    }
}

/// The identities that the clusters of each service port were last rendered with. Envoy drains the connections of a
/// cluster that changes, so pods that go do not change it: an identity leaves together with the next one that comes.
///
/// It is state, which two replicas need not have in common: each lists what the world says now, and may list besides what
/// left while it ran (SECURITY.md). No larger than the services that there are.
#[derive(Debug, Default)]
pub struct SanHistory(DashMap<HostName, BTreeMap<u16, Entry>>);

#[derive(Debug, Default)]
struct Entry {
    /// Of the newest world that it was held against.
    generation: u64,
    peers: Arc<Peers>,
}

impl SanHistory {
    pub fn peers(&self, snapshot: &Snapshot, service: &ServiceView, port: &PortView) -> Arc<Peers> {
        let peers = Peers::of(snapshot, service, port);
        let mut ports = self.0.entry(service.key.hostname.clone()).or_default();
        let entry = ports.entry(port.port).or_default();
        // An older world has no say after a newer one.
        if snapshot.generation >= entry.generation {
            entry.generation = snapshot.generation;
            if !peers.are_known(&entry.peers) {
                entry.peers = Arc::new(peers);
            }
        }
        entry.peers.clone()
    }

    /// Forgets services, and ports of them, that a world does not have.
    pub fn keep_those_of(&self, snapshot: &Snapshot) {
        self.0.retain(|hostname, ports| keep_ports(snapshot, hostname, ports));
    }

    /// Forgets a service, or ports of it, that a world does not have.
    pub fn keep_ports_of(&self, snapshot: &Snapshot, hostname: &HostName) {
        self.0.remove_if_mut(hostname, |hostname, ports| !keep_ports(snapshot, hostname, ports));
    }
}

/// Keeps the ports that a service has; returns false if there is no such service.
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
        // A resource that is still rendered from an older world takes nothing back.
        assert_eq!(ends(&first), ["s101", "s103"]);
        let hostname = HostName::parse("a").expect("legal");
        history.keep_ports_of(&other, &hostname);
        assert_eq!(history.0.len(), 1);
        history.keep_ports_of(&snapshot(&policy, 4, &[]), &hostname);
        assert!(history.0.is_empty());
    }
}
