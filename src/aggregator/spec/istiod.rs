//! The location of an istiod that is read as a registry.

use std::collections::BTreeSet;
use std::sync::Arc;

use isthmus_model::place::{ClusterId, Network};
use isthmus_tls::source::Istiod;

/// An istiod, and what is read from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IstiodSpec {
    /// The server.
    pub istiod: Istiod,
    /// The name by which the gateway calls itself.
    pub name: Arc<str>,
    /// The namespace that the gateway claims if its token names none.
    pub namespace: Arc<str>,
    /// True if what only ztunnels need is read too: all workloads and the policies.
    pub ambient: bool,
    /// The networks and clusters that other registries read, from which nothing is taken here.
    pub elsewhere: Elsewhere,
}

/// The networks and clusters of other registries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// The networks.
    pub networks: BTreeSet<Network>,
    /// The clusters.
    pub clusters: BTreeSet<ClusterId>,
}
