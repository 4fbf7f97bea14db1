//! Endpoints of services and routes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::table::{Column, Listed, optional, text};
use super::text::rate;

/// An endpoint of a service, or of a route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    /// The key of the endpoint's route; absent for endpoints of services.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The endpoint's address or host name; for endpoints of routes, with the port.
    pub address: String,
    /// The endpoint's own port for each service port, by the name of the service port; absent for endpoints of routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<BTreeMap<String, u16>>,
    /// The cluster of the endpoint's registry.
    pub cluster: String,
    /// The state of the endpoint's registry; absent for endpoints of routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standing: Option<String>,
    /// The endpoint's network.
    pub network: String,
    /// The endpoint's locality.
    pub locality: String,
    /// The endpoint's weight.
    pub weight: u32,
    /// True if the endpoint is chosen only while no other can be used; absent if false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub backup: bool,
    /// The largest number of concurrent connections to the endpoint; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<u32>,
    /// The number of connections to the endpoint, if `max_connections` limits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// The health that the endpoint's registry gives.
    pub health: String,
    /// The kind of TLS that the endpoint terminates, if the registry gives it: `mesh`, `own` or `none`.
    pub tls: Option<String>,
    /// The tunnel that the endpoint accepts, `none` or `hbone`; absent for endpoints of routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<String>,
    /// The endpoint's SPIFFE ID.
    pub identity: Option<String>,
    /// The endpoint's state, the first that holds: `disabled`, `draining`, `unresolved`, `unhealthy`, `ejected`, `not_tls`, `silent`,
    /// `failing`, `slow`, `healthy`.
    pub state: String,
    /// The endpoint's last failure.
    pub last_failure: Option<LastFailure>,
    /// The time at which the endpoint last answered a ClientHello with bytes that are not TLS.
    pub not_tls: Option<String>,
    /// The connections to the endpoint; `null` if it was not used for a minute.
    pub calls: Option<Calls>,
    /// The times until the endpoint accepted recent connections, if there were any.
    pub connect: Option<Times>,
    /// The longest waits of recent connections for a byte of the endpoint, if there were any.
    pub answer: Option<Times>,
    /// The host name of the endpoint's service; absent for endpoints of routes, and in the list of one service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
}

/// The connections of a service or route to an endpoint, the sums over its ports. They count from the first use: an endpoint without
/// connections is forgotten after a minute, after ten if the last failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Calls {
    /// The number of open connections.
    pub active: u64,
    /// The largest number of open connections.
    pub active_max: u64,
    /// The number of new connections per second in the last 5 seconds.
    pub per_second: f64,
    /// The highest of these rates.
    pub per_second_max: f64,
    /// The number of connections that were dialled.
    pub dialled: u64,
    /// The number of connections that failed at the endpoint.
    pub failed: u64,
}

impl Calls {
    /// Returns the number of open connections and the largest one: `3 (max 9)`.
    pub fn open(&self) -> String {
        format!("{} (max {})", self.active, self.active_max)
    }

    /// Returns the rate of new connections and the highest one: `0.4/s (max 2.0/s)`.
    pub fn rates(&self) -> String {
        format!("{} (max {})", rate(self.per_second), rate(self.per_second_max))
    }
}

/// Percentiles of recent times in milliseconds; they are at most 41 % too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    /// The median.
    pub p50_ms: f64,
    /// The 99th percentile.
    pub p99_ms: f64,
}

impl Times {
    /// Returns the median and the 99th percentile: `0.4/12.8 ms`.
    pub fn text(&self) -> String {
        format!("{:.1}/{:.1} ms", self.p50_ms, self.p99_ms)
    }
}

/// The last failed attempt to connect to an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastFailure {
    /// The reason of the failure.
    pub reason: String,
    /// The endpoint's answer to the ClientHello of a check, where the reason alone does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The time of the failure.
    pub time: String,
    /// The number of failures in a row; 0 after the endpoint has accepted a connection again.
    pub in_a_row: u32,
    /// The kind of attempt that failed: `connection` or `check`.
    pub by: String,
}

impl Listed for Endpoint {
    const COLUMNS: &'static [Column<Self>] = &[
        ("SERVICE OR ROUTE", |endpoint| optional(endpoint.service.as_ref().or(endpoint.route.as_ref()))),
        ("ADDRESS", |endpoint| text(&endpoint.address)),
        ("CLUSTER", |endpoint| text(&endpoint.cluster)),
        ("NETWORK", |endpoint| text(&endpoint.network)),
        ("LOCALITY", |endpoint| text(&endpoint.locality)),
        ("WEIGHT", |endpoint| endpoint.weight.to_string()),
        ("STATE", |endpoint| text(&endpoint.state)),
        ("STANDING", |endpoint| optional(endpoint.standing.as_ref())),
        ("OPEN", |endpoint| optional(endpoint.calls.map(|calls| calls.open()).as_ref())),
        ("NEW", |endpoint| optional(endpoint.calls.map(|calls| calls.rates()).as_ref())),
        ("FAILED", |endpoint| optional(endpoint.calls.map(|calls| calls.failed).as_ref())),
        ("CONNECT", |endpoint| times(endpoint.connect)),
        ("ANSWER", |endpoint| times(endpoint.answer)),
        ("LAST FAILURE", |endpoint| failure(endpoint.last_failure.as_ref())),
    ];
}

/// Returns times as a cell: `0.4/12.8 ms`, the median and the 99th percentile.
fn times(times: Option<Times>) -> String {
    optional(times.map(|times| times.text()).as_ref())
}

/// Returns the last failure of an endpoint as a cell: `endpoint_refused, 8 in a row, at 2026-…`.
pub(super) fn failure(last: Option<&LastFailure>) -> String {
    let cell = |last: &LastFailure| {
        let detail = last.detail.as_ref().map_or(String::new(), |detail| format!(": {detail}"));
        format!("{}{detail}, {} in a row, at {}", last.reason, last.in_a_row, last.time)
    };
    optional(last.map(cell).as_ref())
}
