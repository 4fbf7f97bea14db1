//! The root certificates of trust domains, with which clients in this mesh verify servers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The roots of each trust domain in PEM. The key is our name for the trust domain, which is an alias if the trust domain is that
/// of a peer. A trust domain without known roots has no entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustRoots(pub BTreeMap<Arc<str>, Arc<str>>);

impl TrustRoots {
    /// Returns the roots of a trust domain.
    pub fn of(&self, domain: &str) -> Option<&Arc<str>> {
        self.0.get(domain)
    }

    /// Returns the trust domains whose roots differ between `self` and `other`.
    pub fn differing(&self, other: &Self) -> BTreeSet<Arc<str>> {
        let all = self.0.keys().chain(other.0.keys());
        all.filter(|domain| self.0.get(*domain) != other.0.get(*domain)).cloned().collect()
    }
}
