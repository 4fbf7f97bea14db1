//! How each registry stands, for readiness and for those who look.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use crate::model::place::{ClusterId, Network};
use crate::snapshot::change::Report;
use crate::snapshot::shard::Counts;

/// A registry's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistryState {
    /// Not heard of yet.
    Missing,
    /// Its last word is in use.
    Live,
    /// It cannot be read or understood; its last word stays in use.
    Stale,
    /// The same for so long that its last word counts only where no live registry is ready.
    Demoted,
    /// The same for so long that its endpoints are withdrawn.
    Expired,
    /// Its last word would take away too much at once, and waits.
    Held,
}

impl RegistryState {
    pub const ALL: [Self; 6] =
        [Self::Missing, Self::Live, Self::Stale, Self::Demoted, Self::Expired, Self::Held];

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

/// What can go wrong with a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RegistryError {
    /// It cannot be read or understood.
    Unreadable,
    /// One of its objects has mistakes.
    Flawed,
    /// An update takes too much away at once.
    MassWithdrawal,
    /// It has sent changes before a listing.
    OutOfOrder,
    /// This program has a fault in dealing with what it says.
    Internal,
}

impl RegistryError {
    pub const ALL: [Self; 5] =
        [Self::Unreadable, Self::Flawed, Self::MassWithdrawal, Self::OutOfOrder, Self::Internal];

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

/// One registry.
#[derive(Clone, Debug)]
pub struct RegistryStatus {
    pub name: Arc<str>,
    pub cluster: ClusterId,
    pub network: Network,
    pub state: RegistryState,
    /// Since when it is in this state; the word of a live one is that old.
    pub since: SystemTime,
    /// When its word in use was taken in, perhaps by an earlier process.
    pub read: Option<SystemTime>,
    /// What is wrong, a line each.
    pub problems: Vec<String>,
    /// What is wrong with objects of which the last good state is in use: of each object its lines.
    pub flaws: Vec<Arc<[String]>>,
    /// How it is read, where its kind says more of that.
    pub report: Option<Arc<Report>>,
    /// What of it is in use, and what its scope keeps out.
    pub items: Counts,
    /// Changes that it has sent since the process started.
    pub changes: u64,
    /// What went wrong since the process started, by kind of error.
    pub errors: BTreeMap<RegistryError, u64>,
}

/// The aggregator as a whole.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// In order of precedence; the config file's own services are not among them.
    pub registries: Vec<RegistryStatus>,
    /// Registries that were never read: clients that return keep what these may have.
    pub unread: Vec<Arc<str>>,
    /// Names that no answer has come for yet, not even that they cannot be looked up.
    pub looking_up: usize,
    /// Names that could not be looked up yet.
    pub unresolved: Vec<String>,
}
