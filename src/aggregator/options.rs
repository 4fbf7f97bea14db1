//! The settings of the aggregator.

use std::path::PathBuf;
use std::time::Duration;

use super::resolver;
use crate::snapshot::virtual_addresses::Ranges;

/// How long registries are waited for, when they stop counting, and where names are looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a registry cannot be read before it is demoted.
    pub stale_after: Duration,
    /// How long a registry cannot be read before its endpoints are withdrawn; `None`: forever.
    pub expire_after: Option<Duration>,
    /// How long a suspicious withdrawal must persist; zero: it is applied at once.
    pub withdrawal_hold: Duration,
    /// How long the start waits for registries.
    pub start_timeout: Duration,
    /// The folder of last good copies; `None`: there are no copies.
    pub state: Option<PathBuf>,
    /// The settings of name look-ups.
    pub dns: resolver::Options,
    /// The ranges of virtual addresses for imported services; `None`: they get none. A change takes effect after a restart.
    pub virtual_addresses: Option<Ranges>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            stale_after: Duration::from_secs(120),
            expire_after: None,
            withdrawal_hold: Duration::from_secs(30),
            start_timeout: Duration::from_secs(30),
            state: None,
            dns: resolver::Options::default(),
            virtual_addresses: None,
        }
    }
}
