//! The answer of `traces/{trace}`.

use serde::{Deserialize, Serialize};

use super::connection::Connection;
use super::explanation::Explanation;

/// The connections of a trace that this gateway remembers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trace {
    /// The trace id, 32 hexadecimal digits.
    pub trace_id: String,
    /// The connections, live ones first, then the newest.
    pub connections: Vec<TracedConnection>,
}

/// A connection of a trace, with the decision on its name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TracedConnection {
    /// The connection, as in the access log.
    pub connection: Connection,
    /// The decision on the same question at the time of the answer; absent if the connection ended before it was decided on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision: Option<Explanation>,
}
