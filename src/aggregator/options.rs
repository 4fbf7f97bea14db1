//! What the operator says of the aggregator.

use std::path::PathBuf;
use std::time::Duration;

use super::resolver;

/// How registries are waited for and doubted, and where names are looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// For how long a registry cannot be read before it is demoted.
    pub stale_after: Duration,
    /// For how long before its endpoints are withdrawn; `None`: never.
    pub expire_after: Option<Duration>,
    /// How long a suspicious withdrawal has to persist; zero: not at all.
    pub withdrawal_hold: Duration,
    /// How long registries are waited for at start.
    pub start_timeout: Duration,
    /// Where last good copies are kept; `None`: nowhere.
    pub state: Option<PathBuf>,
    pub dns: resolver::Options,
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
        }
    }
}
