//! What is remembered of endpoints that were lost, as the aggregator gives it to the build.

use std::collections::BTreeMap;
use std::sync::Arc;

use isthmus_model::name::HostName;
use isthmus_model::place::Network;

/// The numbers of endpoints that services had a short time ago, less with time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remembered(pub BTreeMap<HostName, Arc<BTreeMap<Network, u64>>>);

impl Remembered {
    /// Returns the services for which `self` and `other` differ.
    pub(super) fn apart(&self, other: &Self) -> Vec<HostName> {
        let only = |one: &Self, other: &Self| -> Vec<HostName> {
            let differing = one.0.iter().filter(|(name, numbers)| other.0.get(*name) != Some(*numbers));
            differing.map(|(name, _)| name.clone()).collect()
        };
        let mut all = only(self, other);
        all.extend(only(other, self));
        all
    }
}
