//! The state of each registry, for readiness and operators.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Network};
use isthmus_net::lookup::Cause;
use isthmus_registry::change::Report;
use isthmus_registry::shard::Counts;
use isthmus_snapshot::virtual_addresses::{Counts as LeaseCounts, Ranges};

/// The state of a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistryState {
    /// The registry was never read.
    Missing,
    /// The newest state of the registry is in use.
    Live,
    /// The registry cannot be read or parsed; its last good state stays in use.
    Stale,
    /// The registry has been unreadable for so long that its endpoints are used only where no live registry has a ready one.
    Demoted,
    /// The registry cannot be read for so long that its endpoints are withdrawn.
    Expired,
    /// The newest update of the registry would remove too much at once, and is held back.
    Held,
}

impl RegistryState {
    /// All values, in the order in which documents list them.
    pub const ALL: [Self; 6] =
        [Self::Missing, Self::Live, Self::Stale, Self::Demoted, Self::Expired, Self::Held];

    /// Returns the value as the status and the metrics write it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Live => "live",
            Self::Stale => "stale",
            Self::Demoted => "demoted",
            Self::Expired => "expired",
            Self::Held => "held",
        }
    }
}

/// The kind of an error of a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RegistryError {
    /// The registry cannot be read or parsed.
    Unreadable,
    /// An object of the registry has mistakes.
    Flawed,
    /// An update removes too much at once.
    MassWithdrawal,
    /// The registry has sent changes before a listing.
    OutOfOrder,
    /// This program panicked while it handled items of the registry.
    Internal,
}

impl RegistryError {
    /// All values, in the order in which documents list them.
    pub const ALL: [Self; 5] =
        [Self::Unreadable, Self::Flawed, Self::MassWithdrawal, Self::OutOfOrder, Self::Internal];

    /// Returns the value as the metrics write it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::Flawed => "flawed",
            Self::MassWithdrawal => "mass_withdrawal",
            Self::OutOfOrder => "out_of_order",
            Self::Internal => "internal",
        }
    }
}

/// The status of one registry.
#[derive(Clone, Debug)]
pub struct RegistryStatus {
    /// The name of the registry.
    pub name: Arc<str>,
    /// The cluster of the registry's services.
    pub cluster: ClusterId,
    /// The network of the registry: the configured one, else the one that its task has discovered.
    pub network: Network,
    /// True for the registry of a peer. The start does not wait for such a registry, because the link may need this gateway's
    /// own listeners.
    pub is_peer: bool,
    /// The state of the registry.
    pub state: RegistryState,
    /// When the registry entered the state.
    pub since: SystemTime,
    /// When the items in use were read, perhaps by an earlier process; `None`: the registry was never read.
    pub read: Option<SystemTime>,
    /// The problems with reading the registry, a line each.
    pub problems: Vec<String>,
    /// Why the copy of the registry in the state folder cannot be read or written.
    pub copy_problem: Option<String>,
    /// The problems of each flawed object, a line each; the last good state of these objects is in use.
    pub flaws: Vec<Arc<[String]>>,
    /// The report on how the registry is read; `None` if its kind sends no report.
    pub report: Option<Arc<Report>>,
    /// The numbers of items in use, and of items that the registry's scope keeps out.
    pub items: Counts,
    /// Changes received since the process started.
    pub changes: u64,
    /// Errors since the process started, by kind.
    pub errors: BTreeMap<RegistryError, u64>,
}

#[cfg(any(test, feature = "testing"))]
impl RegistryStatus {
    /// Returns the status of a registry that has no items and no problems.
    pub fn of(name: &str, state: RegistryState) -> Self {
        Self {
            name: name.into(),
            cluster: ClusterId::new(name),
            network: Network::default(),
            is_peer: false,
            state,
            since: SystemTime::UNIX_EPOCH,
            read: None,
            problems: Vec::new(),
            copy_problem: None,
            flaws: Vec::new(),
            report: None,
            items: Counts::default(),
            changes: 0,
            errors: BTreeMap::new(),
        }
    }
}

/// The status of the virtual addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualAddressStatus {
    /// The ranges of virtual addresses.
    pub ranges: Ranges,
    /// The numbers of leases, by their state.
    pub counts: LeaseCounts,
    /// The first services that have no address because the ranges are full.
    pub without: Vec<HostName>,
    /// Why the leases on disk cannot be read or written.
    pub problem: Option<String>,
}

/// The status of the aggregator.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The registries in order of precedence, without the config file's own services.
    pub registries: Vec<RegistryStatus>,
    /// Registries that were never read: clients that reconnect keep the endpoints that these registries may have.
    pub unread: Vec<Arc<str>>,
    /// The number of names without any result yet, not even a failure, nor addresses of an earlier process.
    pub looking_up: usize,
    /// The number of names whose addresses are those of an earlier process, because no name server has answered yet.
    pub recalled: usize,
    /// Names that have no addresses, each with what its last look-up said.
    pub unresolved: Vec<(HostName, Cause)>,
    /// Names whose addresses in use the last look-up does not confirm, each with what it said.
    pub stale: Vec<(HostName, Cause)>,
    /// The virtual addresses of imported services; `None`: imported services have no virtual addresses.
    pub virtual_addresses: Option<VirtualAddressStatus>,
}
