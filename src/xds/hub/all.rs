//! The lists of all clusters and of all listeners on virtual addresses, for clients with a wildcard subscription. The hub makes
//! a list when the first client subscribes to it, and keeps it up to date afterwards.

use std::sync::{Arc, Mutex};

use super::topic::Value;
use isthmus_ads::resource::Resource;
use isthmus_model::name::HostName;
use isthmus_registry::name_index::NameMap;

/// All resources of a type, by the host name of their service.
pub type Clusters = NameMap<Arc<[Arc<Resource>]>>;

/// The list of all resources of a type.
#[derive(Default)]
pub(crate) struct All {
    pub(super) stage: Stage,
    pub(super) clusters: Arc<Clusters>,
    /// The number of resources in the list.
    pub(super) len: usize,
}

impl Value for Mutex<All> {}

/// The stage of the list of all resources of a type.
///
/// ```text
/// Unwanted ──first client──▶ Wanted ──hub──▶ Listing ──every service once──▶ Whole
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// No client has subscribed to the list, so the list is not made.
    #[default]
    Unwanted,
    Wanted,
    Listing,
    Whole,
}

/// Returns the clusters of one service.
pub(crate) fn clusters_of(all: &Clusters, hostname: &HostName) -> Arc<[Arc<Resource>]> {
    all.get(hostname.as_str()).cloned().unwrap_or_default()
}

/// Replaces the clusters of a service. Only the parts that this list shares with other lists are copied.
pub(crate) fn put_clusters(all: &mut Arc<Clusters>, hostname: HostName, clusters: Arc<[Arc<Resource>]>) {
    let all = Arc::make_mut(all);
    if clusters.is_empty() {
        all.remove(hostname.as_str());
    } else {
        all.insert(hostname, clusters);
    }
}

/// Returns true if two lists have the same shared clusters in the same order.
pub(crate) fn are_same(one: &Arc<[Arc<Resource>]>, other: &Arc<[Arc<Resource>]>) -> bool {
    Arc::ptr_eq(one, other)
        || one.len() == other.len() && one.iter().zip(&**other).all(|(a, b)| Arc::ptr_eq(a, b))
}
