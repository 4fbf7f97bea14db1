//! The settings of the aggregator.

use std::path::PathBuf;
use std::time::Duration;

use super::resolver;
use isthmus_snapshot::virtual_addresses::Ranges;

/// The time limits of registries, the state folder, and the settings of name look-ups and virtual addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The time after which a registry that cannot be read is demoted.
    pub stale_after: Duration,
    /// The time after which the endpoints of a registry that cannot be read are withdrawn; `None`: never.
    pub expire_after: Option<Duration>,
    /// How long a suspicious withdrawal must persist before it is applied; zero: it is applied at once.
    pub withdrawal_hold: Duration,
    /// How long the start of the gateway waits for registries to be read.
    pub start_timeout: Duration,
    /// The folder of last good copies; `None`: there are no copies.
    pub state: Option<PathBuf>,
    /// The settings of name look-ups.
    pub dns: resolver::Options,
    /// The ranges of virtual addresses for imported services; `None`: imported services get no virtual addresses. A change
    /// takes effect after a restart.
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
