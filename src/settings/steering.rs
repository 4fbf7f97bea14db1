//! The settings by which the calls of viewers are divided among networks. The crate `decisions` divides them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use isthmus_model::place::Network;

/// The settings of steering that hold for all services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steering {
    /// The upper bounds of the rings, by distance; not empty, and each is larger than the one before.
    pub rings: Arc<[Duration]>,
    /// The largest share of a viewer's calls, in percent, that leaves the viewer's network while that has a ready endpoint.
    pub max_remote_percent: u8,
    /// The distance that a cost of 0.01 per GiB adds.
    pub cost_weight: Duration,
}

impl Default for Steering {
    fn default() -> Self {
        let rings = [2, 20, 80].map(Duration::from_millis).into();
        Self { rings, max_remote_percent: 100, cost_weight: Duration::from_millis(10) }
    }
}

/// The settings of steering for one service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceSteering {
    /// The method by which calls are divided.
    pub mode: SteeringMode,
    /// The shares in percent that networks get while they have ready endpoints; at most 100 together.
    pub shares: BTreeMap<Network, u8>,
    /// The networks that calls go to first when they leave their own network, in this order.
    pub failover: Arc<[Network]>,
    /// The networks that calls may go to when they leave their own network; empty: all.
    pub only: BTreeSet<Network>,
}

impl ServiceSteering {
    /// Returns true if the calls to the service are steered.
    pub fn is_on(&self) -> bool {
        self.mode != SteeringMode::Off
    }
}

/// The method by which calls are divided among networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SteeringMode {
    /// In proportion to the ready endpoints of each network.
    #[default]
    Off,
    /// Nearest first: what the ready endpoints of the viewer's network cannot serve goes to the next ring.
    Nearest,
}

impl SteeringMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Off, Self::Nearest];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Nearest => "nearest",
        }
    }
}

/// The cost of traffic, in millionths per GiB of whatever currency the operator uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost(u32);

impl Cost {
    /// Parses a decimal number of at most six decimal places, such as `0.02`; `None` if it is none, or exceeds 4294.
    pub fn parse(text: &str) -> Option<Self> {
        let (whole, places) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(whole) || !is_number(places) || places.len() > 6 {
            return None;
        }
        let millionths: u32 = format!("{places:0<6}").parse().ok()?;
        whole.parse::<u32>().ok()?.checked_mul(1_000_000)?.checked_add(millionths).map(Self)
    }

    /// Returns the distance that the cost adds if a cost of 0.01 adds `weight`.
    pub fn as_distance(self, weight: Duration) -> Duration {
        let nanoseconds = weight.as_nanos().saturating_mul(self.0.into()) / 10_000;
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}
