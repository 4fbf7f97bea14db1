//! What a snapshot says otherwise than the one before it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::service_view::ServiceView;
use crate::model::name::HostName;
use crate::model::place::Network;

/// The difference of a snapshot from its predecessor, for readers who would otherwise compare worlds.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    /// Of the snapshot that it leads to.
    pub generation: u64,
    /// The policy says something else of services: any of them may differ, and the other fields do not say which.
    pub everything: bool,
    /// The services that were merged anew, as they are now; `None`: gone.
    pub services: BTreeMap<HostName, Option<Arc<ServiceView>>>,
    /// Networks with other gateways or another way of access.
    pub networks: BTreeSet<Network>,
}
