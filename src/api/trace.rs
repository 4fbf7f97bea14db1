//! The answer to `traces/{trace}`.

use serde::{Deserialize, Serialize};

use super::connection::Connection;
use super::explanation::Explanation;

/// The recorded connections of a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trace {
    /// The trace id, 32 hexadecimal digits.
    pub trace_id: String,
    /// The connections: first the open ones, then the closed ones, newest first.
    pub connections: Vec<TracedConnection>,
}

/// A connection of a trace, with the decision on the name that it asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TracedConnection {
    /// The connection, as in the access log.
    pub connection: Connection,
    /// The decision that the gateway would make about this connection at the time of the API's answer. It is absent if the
    /// connection ended before a decision, or if its listener was removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<Explanation>,
}
