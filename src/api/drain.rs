//! Planned drains.

use serde::{Deserialize, Serialize};

/// A planned drain in force.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Drain {
    /// The kind of the target: `service`, `endpoint`, `gateway`, `network`, `cluster` or `peer`.
    pub kind: String,
    /// The name of the target.
    pub name: String,
    /// The source of the order: `config`, `operator` (an order to this gateway), or `registry NAME`.
    pub source: String,
    /// The operator's reason; may be empty.
    pub reason: String,
    /// When the drain began (RFC 3339); empty: it is at its end from the start.
    pub since: String,
    /// The time over which the weight falls, in seconds.
    pub over_s: u64,
    /// The part of the weight that is left at the end, in percent.
    pub to_percent: u8,
    /// When the drain ends by itself (RFC 3339); `null`: when the order is withdrawn.
    pub until: Option<String>,
    /// The time after `since` from which on existing connections are closed, in seconds; `null`: they are left alone.
    pub close_after_s: Option<u64>,
    /// The part of the weight that is left now, in percent, as clients get it.
    pub left_percent: u8,
    /// The part that goes to the target of all connections through this gateway to the same services, in percent; `null`: there are no such connections.
    pub connections_percent: Option<u8>,
    /// The seconds until the ramp is at its end; 0: it is.
    pub ramp_left_s: u64,
    /// The number of services with an endpoint that is drained.
    pub services: usize,
    /// The number of open connections through this gateway to what is drained.
    pub connections: usize,
    /// The bytes that these connections have carried so far, both directions together.
    pub bytes: u64,
    /// The source addresses of these connections, those with the most connections first; at most 5.
    pub sources: Vec<String>,
}

/// A change that a planned drain would make for the callers of one service port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Planned {
    /// The host name of the service.
    pub service: String,
    /// The service port.
    pub port: u16,
    /// The network of the callers; empty: the unknown network.
    pub network: String,
    /// The shares of the networks before the drain, in percent.
    pub before: Vec<Share>,
    /// The shares of the networks at the end of the drain, in percent.
    pub after: Vec<Share>,
    /// True if callers would be left with nothing but what is drained.
    pub is_emptied: bool,
}

/// The share of the calls that a network gets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Share {
    /// The name of the network.
    pub network: String,
    /// The share in percent.
    pub percent: u8,
}

/// The result of an order to drain, or the plan of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ordered {
    /// The result in one sentence; empty for a plan.
    pub result: String,
    /// The part of its weight that the target has left now, in percent: 100 unless a drain of it is in force.
    pub left_percent: u8,
    /// The part that it has at the end of the drain, in percent.
    pub to_percent: u8,
    /// The changes for the callers of each service port, at most 1,000.
    pub changes: Vec<Planned>,
    /// The number of further changes.
    pub further: usize,
    /// The services whose callers would be left with nothing but what is drained.
    pub emptied: Vec<String>,
}
