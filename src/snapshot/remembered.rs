//! The remembered facts about endpoints of services, as the aggregator gives it to the build.

use std::collections::BTreeMap;
use std::sync::Arc;

use isthmus_model::place::Network;
use isthmus_registry::name_index::NameMap;

/// The memories of services by network.
#[derive(Clone, Debug, Default)]
pub struct Remembered(pub NameMap<Arc<BTreeMap<Network, Memory>>>);

/// The memory of a service on one network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The number of endpoints that there were a short time ago, less with time; 0: not more than there are.
    pub number: u64,
    /// The number that the owner of the endpoints said before a larger one for which endpoints have not been there yet; `None`: there
    /// is no such number.
    pub said_before: Option<u64>,
}
