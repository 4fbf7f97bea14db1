//! The identities that may serve a service port by mutual TLS, and the roots that verify their certificates. Envoy matches the
//! server's SPIFFE URI against the identities.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dashmap::DashMap;

use isthmus_model::endpoint::TlsMode;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::name::HostName;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::peer::Peer;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The identities of one service port, in all clusters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// True if an endpoint speaks mutual TLS, or if mutual TLS is the default for the port's protocol.
    pub any: bool,
    /// The SPIFFE IDs that the registries declare for the endpoints.
    pub identities: BTreeSet<Identity>,
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
    Secret,
    /// The roots in PEM of each trust domain that the identities name. The roots of one domain verify no server of another.
    ByDomain(BTreeMap<Arc<str>, Arc<str>>),
    /// No roots are known, so that no server can be verified.
    Unknown,
}

impl Peers {
    /// Collects the identities of a service port.
    pub fn of(snapshot: &Snapshot, service: &ServiceView, port: &PortView) -> Self {
        let mut peers = Self { any: port.protocol.default_tls() == TlsMode::Mesh, ..Self::default() };
        let mut nameless = false;
        let endpoints = service.endpoints_of(port, "", snapshot.networks()).into_iter().flatten();
        for found in endpoints.filter(|found| found.tls == TlsMode::Mesh) {
            peers.any = true;
            peers.endpoints += 1;
            match &found.endpoint.template.identity {
                Some(identity) => drop(peers.identities.insert(identity.clone())),
                None => nameless = true,
            }
        }
        nameless |= peers.identities.is_empty();
        if peers.any {
            peers.identities.extend(service.lost_identities().cloned());
        }
        let prefix = |domain: &TrustDomain, namespace: &str| -> Arc<str> {
            format!("spiffe://{}/ns/{namespace}/", domain.as_str()).into()
        };
        if let Some(import) = &service.import {
            let known = peer(snapshot, &import.peer).and_then(|peer| Some((peer, peer.who.as_ref()?)));
            // The trust domain of the identities is replaced by the one that the peer's certificates name.
            let named = |identity: &Identity| Some(identity.in_domain(&known?.1.trust_domain));
            peers.identities = peers.identities.iter().filter_map(named).collect();
            peers.prefix = known
                .filter(|_| nameless)
                .map(|(peer, who)| prefix(&who.trust_domain, peer.namespace_of(&service.namespace)));
        } else if nameless {
            peers.prefix = Some(prefix(&snapshot.policy.mesh.trust_domain, &service.namespace));
        }
        peers.roots = peers.known_roots(snapshot, service);
        peers
    }

    /// Returns the roots that verify servers with these identities, as the snapshot knows them.
    fn known_roots(&self, snapshot: &Snapshot, service: &ServiceView) -> Roots {
        match &service.import {
            Some(import) => roots_of_peer(snapshot, &import.peer),
            None => self.roots_of_mesh(snapshot),
        }
    }

    /// Returns the roots of each trust domain, or the client's own roots if this mesh's trust domain is the only one. The client's
    /// own roots also verify the servers if the roots of one of the domains are unknown: the operator may have put the roots of
    /// all domains into the client's secret.
    fn roots_of_mesh(&self, snapshot: &Snapshot) -> Roots {
        let own = snapshot.policy.mesh.trust_domain.as_str();
        let of_prefix = self.prefix.iter().map(|_| own);
        let domains: BTreeSet<&str> =
            self.identities.iter().map(Identity::trust_domain).chain(of_prefix).collect();
        if domains.iter().all(|domain| *domain == own) {
            return Roots::Secret;
        }
        let known = |domain: &str| Some((domain.into(), snapshot.trust_roots.of(domain)?.clone()));
        let all: Option<BTreeMap<_, _>> = domains.into_iter().map(known).collect();
        all.map_or(Roots::Secret, Roots::ByDomain)
    }

    /// Returns true if `before` allows all of these identities.
    fn are_known(&self, before: &Self) -> bool {
        self.endpoints == 0 && before.endpoints > 0
            || (self.any == before.any
                && self.identities.is_subset(&before.identities)
                && (self.prefix.is_none() || self.prefix == before.prefix))
    }
}

/// Returns the roots of a peer's trust domain; [`Roots::Unknown`] until the peer is enrolled.
fn roots_of_peer(snapshot: &Snapshot, name: &str) -> Roots {
    let roots = peer(snapshot, name).and_then(|peer| {
        let who = peer.who.as_ref()?;
        let roots = snapshot.trust_roots.of(who.alias.as_str())?;
        Some((who.trust_domain.as_str().into(), roots.clone()))
    });
    roots.map_or(Roots::Unknown, |roots| Roots::ByDomain([roots].into()))
}

fn peer<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a Peer> {
    snapshot.policy.peers.iter().find(|known| &*known.name == name).map(|peer| &**peer)
}

/// The identities with which the clusters of each service port were last rendered. Envoy drains the connections of a cluster
/// that changes. The removal of a pod therefore does not change the cluster: the pod's identity is removed with the first
/// addition after it has ceased to be a recent one of the service.
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
            let same_roots = entry.peers.known_roots(snapshot, service) == entry.peers.roots;
            if !same_roots || !peers.are_known(&entry.peers) {
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
    use crate::session::tests::snapshot;
    use isthmus_snapshot::recent::Recent;
    use isthmus_snapshot::testing::policy_of;

    #[test]
    fn an_identity_that_was_lost_a_short_time_ago_stays_when_another_comes() {
        let policy = Arc::new(policy_of("east", "east"));
        let history = SanHistory::default();
        let count = |generation, hosts: &[u8], lost: &[&str]| {
            let world = snapshot(&policy, generation, &[("a", hosts)]);
            let mut service = ServiceView::clone(world.service("a").expect("a service"));
            let lost = lost.iter().map(|text| Identity::parse(text).expect("legal")).collect();
            service.recent = Some(Arc::new(Recent { lost, ..Recent::default() }));
            history.peers(&world, &service, &service.ports[0]).identities.len()
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
        let history = SanHistory::default();
        let ends = |world: &Snapshot| {
            let service = world.service("a").expect("a service");
            let peers = history.peers(world, service, &service.ports[0]);
            peers
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
