//! The outcomes of the probes of gateways: how a gateway answered a hello, and how a probe failed.

use serde::{Deserialize, Serialize};

/// The answer of a gateway to the hello of a probe, the worst first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// No answer within the time.
    #[default]
    None,
    /// The connection was closed or reset, as Istio's gateways do with names that they do not have.
    Closed,
    /// There were bytes: an alert, or the begin of a handshake.
    Bytes,
}

/// The fault of a gateway that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The connection was refused.
    Refused,
    /// There was no connection within a second.
    Unconnected,
    /// The connection was accepted, and the hello not answered as before.
    Mute,
    /// The link with the gateway's process has answered no heartbeats, and no hello was answered either.
    Heartbeats,
}
