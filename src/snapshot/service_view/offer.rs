//! The part of a service that rules for exports and for peers offer: the clusters that do not hide it, and the least that a rule must name.

use super::{Part, ServiceView};
use crate::exports::{Offer, OfferedClusters, cluster_local, is_hidden};
use isthmus_model::place::ClusterId;
use isthmus_settings::export_tls::Guard;
use isthmus_settings::peer::{Peer, PeerExport};

impl Part {
    /// Returns what rules have to name to offer the service; `None`: nothing more than the service.
    pub(super) fn guard(&self) -> Option<Guard<'_>> {
        let namespace = &*self.service.key.namespace;
        let of_namespace = || self.origin.tls.guards(namespace).then_some(Guard::Namespace(namespace));
        cluster_local(&self.marks).map(Guard::ClusterLocal).or_else(of_namespace)
    }
}

impl ServiceView {
    /// Returns the clusters whose endpoints a peer's rule offers: those that do not hide the service from the gateway, and whose guard
    /// the rule names; `None`: all.
    pub fn clusters_for(&self, rule: &PeerExport) -> OfferedClusters {
        let is_named = |guard: Guard<'_>| guard.is_named(&rule.services, self.key.hostname.as_str());
        let is_shut =
            |part: &&Part| is_hidden(&part.marks) || part.guard().is_some_and(|guard| !is_named(guard));
        self.parts.iter().find(is_shut)?;
        let offered = self.parts.iter().filter(|part| !is_shut(part));
        Some(offered.map(|part| part.origin.cluster.clone()).collect())
    }

    /// Returns true if a cluster does not hide the service from the gateway.
    pub(crate) fn is_visible(&self) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|part| !is_hidden(&part.marks))
    }

    /// Returns what rules have to name to offer the service; `None` if they need to name nothing more in a cluster that does not hide
    /// the service.
    pub fn guard(&self) -> Option<Guard<'_>> {
        let visible = self.parts.iter().filter(|part| !is_hidden(&part.marks));
        let guards: Option<Vec<Guard<'_>>> = visible.map(Part::guard).collect();
        guards.map(|guards| guards.first().copied().unwrap_or(Guard::Namespace(&self.namespace)))
    }

    /// Returns the clusters that keep the service to their own callers.
    pub fn local_clusters(&self) -> impl Iterator<Item = &ClusterId> {
        let local = self.parts.iter().filter(|part| cluster_local(&part.marks).is_some());
        local.map(|part| &part.origin.cluster)
    }

    /// Returns the rule that offers the service to a peer.
    pub fn rule_for<'p>(&self, peer: &'p Peer) -> Option<&'p PeerExport> {
        peer.export_of(&self.key.hostname, self.guard())
    }

    /// Returns the endpoints that a peer's rule offers.
    pub fn offer_for(&self, rule: &PeerExport) -> Offer {
        Offer::of(self.clusters_for(rule), rule.tls())
    }
}
