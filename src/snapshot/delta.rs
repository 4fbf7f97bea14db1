//! The difference between a snapshot and the one before it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::service_view::ServiceView;
use crate::model::name::HostName;
use crate::model::place::Network;

/// The difference between a snapshot and its predecessor, so that readers need not compare snapshots.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    /// The generation of the later snapshot.
    pub generation: u64,
    /// True if a policy change affects services: any service may differ, and the other fields do not list the differences.
    pub everything: bool,
    /// The services that were merged again, with the result; `None`: the service was removed.
    pub services: BTreeMap<HostName, Option<Arc<ServiceView>>>,
    /// Networks whose gateways or access changed.
    pub networks: BTreeSet<Network>,
}
