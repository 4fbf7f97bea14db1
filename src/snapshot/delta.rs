//! The difference of a snapshot from the one before it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::service_view::ServiceView;
use crate::model::name::HostName;
use crate::model::place::Network;

/// The difference of a snapshot from its predecessor, so that readers need not compare snapshots.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    /// The generation of the later snapshot.
    pub generation: u64,
    /// True if the policy changes services: any of them may differ, and the other fields do not say which.
    pub everything: bool,
    /// The services that were merged again, in their new state; `None`: removed.
    pub services: BTreeMap<HostName, Option<Arc<ServiceView>>>,
    /// Networks whose gateways or access changed.
    pub networks: BTreeSet<Network>,
}
