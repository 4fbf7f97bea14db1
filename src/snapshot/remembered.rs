//! What is remembered of endpoints that were lost, as the aggregator gives it to the build.

use std::collections::BTreeMap;
use std::sync::Arc;

use isthmus_model::name::HostName;
use isthmus_model::place::Network;

/// The numbers of endpoints that services had a short time ago, less with time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remembered(pub BTreeMap<HostName, Arc<BTreeMap<Network, u64>>>);
