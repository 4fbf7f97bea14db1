//! The difference between a snapshot and the one before it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use isthmus_model::name::HostName;
use isthmus_model::place::Network;

/// The difference between a snapshot and its predecessor, so that readers need not compare snapshots. It has names only: a
/// reader takes the states from the snapshot that it goes on to, and no state is kept in memory for a delta.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    /// The generation of the later snapshot.
    pub generation: u64,
    /// True if a policy change affects services: any service may differ, and the other fields do not list the differences.
    pub everything: bool,
    /// The services that were merged again, or removed.
    pub services: BTreeSet<HostName>,
    /// Networks whose gateways or access changed.
    pub networks: BTreeSet<Network>,
}

impl Delta {
    /// Returns the services that at least one of the deltas names.
    pub fn services_of(deltas: &[Arc<Self>]) -> BTreeSet<&HostName> {
        deltas.iter().flat_map(|delta| &delta.services).collect()
    }
}

/// Returns the services for which two tables differ.
pub(crate) fn services_apart<T: PartialEq>(
    one: &BTreeMap<HostName, T>,
    other: &BTreeMap<HostName, T>,
) -> Vec<HostName> {
    let only = |one: &BTreeMap<HostName, T>, other: &BTreeMap<HostName, T>| -> Vec<HostName> {
        let differing = one.iter().filter(|(name, value)| other.get(*name) != Some(*value));
        differing.map(|(name, _)| name.clone()).collect()
    };
    let mut all = only(one, other);
    all.extend(only(other, one));
    all
}
