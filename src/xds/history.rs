//! The properties with which the clusters of each service port were last rendered. Envoy drains the connections of a cluster that
//! changes, and forgets which endpoints it has ejected, so these properties change more seldom than the snapshots.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use tokio::time::Instant;

use super::connect_timeout::{self, Held};
use super::peers::Peers;
use isthmus_model::name::HostName;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The properties with which the clusters of each service port were last rendered: the identities that may serve the port, and the
/// connect timeout. The removal of a pod does not change a cluster: the pod's identity is removed with the first addition after it has
/// ceased to be a recent one of the service.
///
/// Two replicas may differ in this state: each lists the present identities, and perhaps some that were removed while the
/// replica ran (SECURITY.md). There are never more entries than services.
#[derive(Debug, Default)]
pub struct ClusterHistory(DashMap<HostName, BTreeMap<u16, Entry>>);

/// The properties to render for the clusters of a service port.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The identities that may serve the port.
    pub peers: Arc<Peers>,
    /// The connect timeout.
    pub connect_timeout: Duration,
}

#[derive(Debug, Default)]
struct Entry {
    /// The generation of the newest snapshot from which the entry was updated.
    generation: u64,
    peers: Arc<Peers>,
    connect_timeout: Held,
}

impl ClusterHistory {
    /// Returns the properties to render for a service port, and updates the history.
    pub fn keep(&self, snapshot: &Snapshot, service: &ServiceView, port: &PortView, now: Instant) -> Kept {
        let peers = Peers::of(snapshot, service, port);
        let is_fresh = self.0.get(&service.key.hostname).is_some_and(|ports| {
            ports.get(&port.port).is_some_and(|entry| entry.connect_timeout.is_fresh(now))
        });
        let timeout = connect_timeout::wanted(snapshot, service, port, is_fresh);
        let mut ports = self.0.entry(service.key.hostname.clone()).or_default();
        let entry = ports.entry(port.port).or_default();
        // An older snapshot does not override a newer one.
        if snapshot.generation >= entry.generation {
            entry.generation = snapshot.generation;
            let same_roots = entry.peers.have_roots_of(snapshot, service);
            if !same_roots || !peers.are_known(&entry.peers) {
                entry.peers = Arc::new(peers);
            }
            entry.connect_timeout.note(timeout, now);
        }
        Kept { peers: entry.peers.clone(), connect_timeout: entry.connect_timeout.value() }
    }

    /// Returns the services with a connect timeout that may change if they are rendered now.
    pub fn due(&self, now: Instant) -> Vec<HostName> {
        let is_due = |entry: &Entry| entry.connect_timeout.is_due(now);
        let due = self.0.iter().filter(|ports| ports.value().values().any(is_due));
        due.map(|ports| ports.key().clone()).collect()
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
    use crate::session::tests::snapshot;
    use isthmus_model::identity::Identity;
    use isthmus_snapshot::recent::Recent;
    use isthmus_snapshot::testing::policy_of;

    #[test]
    fn an_identity_that_was_lost_a_short_time_ago_stays_when_another_comes() {
        let policy = Arc::new(policy_of("east", "east"));
        let history = ClusterHistory::default();
        let count = |generation, hosts: &[u8], lost: &[&str]| {
            let world = snapshot(&policy, generation, &[("a", hosts)]);
            let mut service = ServiceView::clone(world.service("a").expect("a service"));
            let lost = lost.iter().map(|text| Identity::parse(text).expect("legal")).collect();
            service.recent = Some(Arc::new(Recent { lost, ..Recent::default() }));
            history.keep(&world, &service, &service.ports[0], Instant::now()).peers.identities.len()
        };
        let lost = ["spiffe://cluster.local/ns/n/sa/s102"];
        assert_eq!(count(1, &[101, 102], &[]), 2);
        assert_eq!(count(2, &[101], &lost), 2);
        assert_eq!(count(3, &[101, 103], &lost), 3);
        assert_eq!(count(4, &[101, 103], &[]), 3, "it is no reason to change a cluster");
        assert_eq!(count(5, &[101, 104], &[]), 2);
    }

    #[test]
    fn an_identity_leaves_together_with_the_next_one_that_comes() {
        let policy = Arc::new(policy_of("east", "east"));
        let history = ClusterHistory::default();
        let ends = |world: &Snapshot| {
            let service = world.service("a").expect("a service");
            let kept = history.keep(world, service, &service.ports[0], Instant::now());
            kept.peers
                .identities
                .iter()
                .map(|identity| identity.as_str()[identity.as_str().len() - 4..].to_owned())
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
