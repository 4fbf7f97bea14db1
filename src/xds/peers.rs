//! The identities that may serve a service port by mutual TLS, and the roots that verify their certificates. Envoy matches the
//! server's SPIFFE URI against the identities.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use isthmus_model::endpoint::TlsMode;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::import::Import;
use isthmus_model::name::HostName;
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
    /// The servers of services that are joined with the name, by peer. Each peer has a transport socket of its own, so that the roots
    /// of one organisation verify no server of another.
    pub joined: BTreeMap<Arc<str>, Joined>,
}

/// The servers of a peer's service that is joined with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The name under which the peer exports the service, which clients send.
    pub exported_name: HostName,
    /// The servers; `joined` of these is empty.
    pub peers: Peers,
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
        let (known, unknown) = peers.of_service(snapshot, service);
        peers.identities.extend(known);
        if let Some(import) = &service.import {
            peers.become_those_of(snapshot, import, nameless.then_some(&service.namespace));
        } else if nameless {
            peers.prefix = Some(prefix(&snapshot.policy.mesh.trust_domain, &service.namespace));
        }
        peers.roots = peers.known_roots(snapshot, service);
        if peers.roots == Roots::Secret {
            peers.identities.extend(unknown);
        }
        peers.joined = joined(snapshot, service, port);
        peers
    }

    /// Replaces the trust domain of the identities by the one that a peer's certificates name. `nameless` is the namespace of endpoints
    /// without a known identity, if there are any.
    fn become_those_of(&mut self, snapshot: &Snapshot, import: &Import, nameless: Option<&Arc<str>>) {
        let known = peer(snapshot, &import.peer).and_then(|peer| Some((peer, peer.who.as_ref()?)));
        let named = |identity: &Identity| Some(identity.in_domain(&known?.1.trust_domain));
        self.identities = self.identities.iter().filter_map(named).collect();
        let of_peer = known.zip(nameless);
        self.prefix =
            of_peer.map(|((peer, who), namespace)| prefix(&who.trust_domain, peer.namespace_of(namespace)));
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

    /// Returns true if the roots are those that the snapshot has, for the owner of the name and for each joined peer.
    pub(super) fn have_roots_of(&self, snapshot: &Snapshot, service: &ServiceView) -> bool {
        let of_joined =
            |(peer, joined): (&Arc<str>, &Joined)| joined.peers.roots == roots_of_peer(snapshot, peer);
        self.roots == self.known_roots(snapshot, service) && self.joined.iter().all(of_joined)
    }

    /// Returns true if `before` allows all of these identities.
    pub(super) fn are_known(&self, before: &Self) -> bool {
        let is_known = |(peer, joined): (&Arc<str>, &Joined)| {
            let before = before.joined.get(peer);
            before.is_some_and(|before| {
                joined.exported_name == before.exported_name && joined.peers.are_known(&before.peers)
            })
        };
        let are_known = !self.any && before.any
            || (self.any == before.any
                && self.identities.is_subset(&before.identities)
                && (self.prefix.is_none() || self.prefix == before.prefix));
        are_known && self.joined.iter().all(is_known)
    }
}

/// Collects the servers of the services that are joined with a name, for the peers that have an endpoint with mutual TLS.
fn joined(snapshot: &Snapshot, service: &ServiceView, port: &PortView) -> BTreeMap<Arc<str>, Joined> {
    let mut all: BTreeMap<Arc<str>, (&Import, Peers, bool)> = BTreeMap::new();
    let endpoints = service.joined_endpoints_of(port, snapshot.networks());
    for (found, import) in endpoints.filter(|(found, _)| found.tls == TlsMode::Mesh) {
        let (_, peers, nameless) =
            all.entry(import.peer.clone()).or_insert_with(|| (import, Peers::default(), false));
        peers.any = true;
        match &found.endpoint.template.identity {
            Some(identity) => drop(peers.identities.insert(identity.clone())),
            None => *nameless = true,
        }
    }
    let namespace = |import: &Import| {
        let mut parts = service.joined.iter().map(|part| &part.service);
        let found = parts.find(|one| one.import.as_ref().is_some_and(|own| own.peer == import.peer));
        found.map(|one| &one.key.namespace)
    };
    let made = all.into_iter().map(|(name, (import, mut peers, nameless))| {
        peers.become_those_of(snapshot, import, namespace(import).filter(|_| nameless));
        peers.roots = roots_of_peer(snapshot, &import.peer);
        (name, Joined { exported_name: import.exported_name.clone(), peers })
    });
    made.collect()
}

/// Returns the beginning of the SPIFFE IDs of a namespace.
fn prefix(domain: &TrustDomain, namespace: &str) -> Arc<str> {
    format!("spiffe://{}/ns/{namespace}/", domain.as_str()).into()
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
