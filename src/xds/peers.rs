//! The identities that may serve a service port by mutual TLS, and the roots that verify their certificates. Envoy matches the
//! server's SPIFFE URI against the identities.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use isthmus_model::endpoint::TlsMode;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_settings::peer::Peer;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The identities of one service port, in all clusters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// True if an endpoint speaks mutual TLS.
    pub any: bool,
    /// The SPIFFE IDs that the registries declare for the endpoints.
    pub identities: BTreeSet<Identity>,
    /// The SPIFFE prefix accepted for endpoints without a known identity.
    pub prefix: Option<Arc<str>>,
    /// The roots that verify the servers.
    pub roots: Roots,
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
        let mut peers = Self::default();
        let mut nameless = false;
        let endpoints = service.endpoints_of(port, "", snapshot.networks()).into_iter().flatten();
        for found in endpoints.filter(|found| found.tls == TlsMode::Mesh) {
            peers.any = true;
            match &found.endpoint.template.identity {
                Some(identity) => drop(peers.identities.insert(identity.clone())),
                // The identities that its registry writes for the service stand for the endpoint.
                None => {
                    let mut own = service.own_identities_of(found.origin).peekable();
                    nameless |= own.peek().is_none();
                    peers.identities.extend(own.cloned());
                }
            }
        }
        nameless |= !peers.any;
        let prefix = |domain: &TrustDomain, namespace: &str| -> Arc<str> {
            format!("spiffe://{}/ns/{namespace}/", domain.as_str()).into()
        };
        let (known, unknown) = peers.of_service(snapshot, service);
        peers.identities.extend(known);
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
        if peers.roots == Roots::Secret {
            peers.identities.extend(unknown);
        }
        peers
    }

    /// Returns the identities of the service itself that clients accept besides those that stand for its endpoints: further ones that
    /// registries write for the service, and those that left a short time ago. The second set has those of trust domains whose roots are unknown: they
    /// can be verified only by the client's own roots, and are no reason to verify the endpoints by these.
    fn of_service(
        &self,
        snapshot: &Snapshot,
        service: &ServiceView,
    ) -> (BTreeSet<Identity>, BTreeSet<Identity>) {
        let all = service.own_identities().chain(service.lost_identities()).filter(|_| self.any);
        let has_roots = |identity: &Identity| {
            service.import.is_some() || snapshot.trust_roots.of(identity.trust_domain()).is_some()
        };
        all.cloned().partition(has_roots)
    }

    /// Returns the roots that verify servers with these identities, as the snapshot knows them.
    pub(super) fn known_roots(&self, snapshot: &Snapshot, service: &ServiceView) -> Roots {
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
    pub(super) fn are_known(&self, before: &Self) -> bool {
        !self.any && before.any
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
