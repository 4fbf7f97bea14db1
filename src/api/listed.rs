//! The rows of services in the overview, and lists of which the first items are shown.

use serde::{Deserialize, Serialize};

/// The first items of a list, and the length of the whole list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part<T> {
    /// The length of the whole list.
    pub total: usize,
    /// The first items of the list.
    pub shown: Vec<T>,
}

impl<T> Part<T> {
    /// Returns the first items of a list.
    pub fn of(mut all: Vec<T>, most: usize) -> Self {
        let total = all.len();
        all.truncate(most);
        Self { total, shown: all }
    }

    /// Returns the number of items that are not shown.
    pub fn hidden(&self) -> usize {
        self.total.saturating_sub(self.shown.len())
    }
}

/// A service or a route with its traffic and health.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// The host name of the service, or the key of the route.
    pub name: String,
    /// The kind: `service` or `route`.
    pub kind: String,
    /// The health of the service: one of [`states`].
    pub state: String,
    /// True if the service can be reached through a listener.
    pub reachable: bool,
    /// The number of endpoints that this gateway can choose.
    pub endpoints: usize,
    /// The number of endpoints that are healthy, not ejected and not failing.
    pub ready: usize,
    /// The number of open connections and streams.
    pub active: u64,
    /// The number of connections and streams that an endpoint has accepted since the start.
    pub opened: u64,
    /// The number of bytes from clients to endpoints since the start.
    pub bytes_up: u64,
    /// The number of bytes from endpoints to clients since the start.
    pub bytes_down: u64,
    /// The number of connections and streams that ended with a reason other than `ok` since the start.
    pub failed: u64,
    /// The traffic of the last 15 minutes.
    pub past: Past,
}

/// The values of [`Service::state`].
pub mod states {
    /// No endpoint is ready.
    pub const DOWN: &str = "down";
    /// Some endpoints are not ready.
    pub const DEGRADED: &str = "degraded";
    /// All endpoints are ready.
    pub const OK: &str = "ok";
    /// All endpoints are on other networks.
    pub const ELSEWHERE: &str = "elsewhere";
}

/// The traffic of the last 15 minutes in steps of 15 seconds, the oldest first. Each list has as many values as there were steps;
/// it is empty while there was no traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Past {
    /// The number of connections and streams that an endpoint accepted in each step.
    pub opened: Vec<u64>,
    /// The number of connections and streams that ended with a reason other than `ok` in each step.
    pub failed: Vec<u64>,
    /// The number of bytes in both directions in each step.
    pub bytes: Vec<u64>,
    /// The median time in microseconds until the slowest endpoint answered, at the end of each step; 0 if none has answered.
    pub answer_us: Vec<u64>,
}

impl Past {
    /// Returns the sums of `opened` and `failed`.
    pub fn sums(&self) -> (u64, u64) {
        let sum = |values: &[u64]| values.iter().fold(0, |sum: u64, value| sum.saturating_add(*value));
        (sum(&self.opened), sum(&self.failed))
    }
}
