//! The messages of an upgrade. The process that serves is the *old* one, the process that it started is the *new* one.
//!
//! ```text
//!  new                                    old
//!   │── Hello ────────────────────────────▶│
//!   │◀──────── Welcome, Sockets…, Offered ─│   both hold every listening socket, and know the same
//!   │  reads config, registries, identity  │
//!   │── Ready (or Failed) ────────────────▶│
//!   │◀──────────────────── Counters…, Go ──│
//!   │── Serving ──────────────────────────▶│   the new process accepts; the old one stops to accept
//!   │◀───────────────────────── Committed ─│   the state folder, links and clients belong to the new one
//!   │◀─────────────────────── Connections ─│   at most 120, with their sockets
//!   │── Taken ────────────────────────────▶│   from here on each connection belongs to one process
//!   │◀─────────── Passed, Counters, … Left ─│   until the old process is empty
//! ```
//!
//! Before `Serving`, an error or the end of either process changes nothing in the other. After it, the new process may send `Stopping`
//! at any time; if it dies without, the old one starts another new process with the sockets. Members that a process does not know
//! are ignored in all messages but the records of connections.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the messages.
pub const PROTOCOL: u32 = 1;
/// The largest number of connections of one message.
pub const CONNECTIONS_MAX: usize = 120;
/// The largest number of counters of one message.
pub const COUNTERS_MAX: usize = 4_096;

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Message {
    /// The new process asks for the sockets.
    Hello {
        /// The version of the messages.
        protocol: u32,
        /// The version of the program.
        version: String,
    },
    /// The old process agrees.
    Welcome {
        /// The version of the messages.
        protocol: u32,
        /// The version of the program.
        version: String,
        /// The id of the process. The credentials of the socket name the process that has opened it, which may be an earlier one.
        process: u32,
        /// The name of the process among the replicas of the gateway, which the new process inherits.
        instance: String,
    },
    /// Listening sockets, one descriptor each.
    Sockets {
        /// The sockets, in the order of the descriptors.
        sockets: Vec<SocketName>,
    },
    /// There are no more listening sockets.
    Offered {
        /// The [beliefs](super::belief) of the old process, which are read one by one. `None` if it does not tell them.
        #[serde(default)]
        beliefs: Option<Vec<Value>>,
    },
    /// The new process could serve at once.
    Ready {
        /// The room that the new process has; `None` if an older program did not send it.
        #[serde(default)]
        room: Option<Room>,
    },
    /// The new process cannot serve.
    Failed {
        /// The reason.
        why: String,
    },
    /// The old process goes on alone; the new one ends.
    Abort {
        /// The reason.
        why: String,
    },
    /// The increases of metrics since the last message, or since the start of the process.
    Counters {
        /// The counters.
        counters: Vec<Counted>,
        /// The histograms.
        histograms: Vec<Measured>,
    },
    /// The new process begins to accept.
    Go {
        /// An id that no connection of the old process has reached.
        next_id: u64,
        /// The endpoints that operators have taken out of service.
        #[serde(default)]
        withdrawn: Vec<Withdrawn>,
        /// The documents of the planned drains that operators have ordered; `None`: those in the state folder.
        #[serde(default)]
        drains: Option<Vec<String>>,
        /// The beliefs about endpoints, which change with each connection, and about drains, in the place of those of `Offered`.
        #[serde(default)]
        beliefs: Vec<Value>,
    },
    /// The new process accepts connections.
    Serving {
        /// The sockets of the old process that the new one uses.
        taken: Vec<SocketName>,
    },
    /// The old process accepts no more connections, and writes no more state.
    Committed {},
    /// Live connections. The descriptors are the client's and the endpoint's socket of each.
    Connections {
        /// The [records](super::record::Record), which are read one by one: a record that cannot be read concerns no other.
        records: Vec<Value>,
        /// The numbers of bytes in the tail that each connection holds, upward and downward.
        held: Vec<[usize; 2]>,
    },
    /// The answer to `Connections`.
    Taken {
        /// For each record in its order `null`, or why the connection stays in the old process.
        stays: Vec<Option<String>>,
    },
    /// Every connection that can be moved was moved.
    Passed {
        /// The number of moved connections.
        moved: u64,
        /// The number of connections and CONNECT streams that end in the old process.
        left: u64,
    },
    /// The old process is empty and ends.
    Left {},
    /// The new process was ordered to stop. The old one must not replace it.
    Stopping {},
}

/// The name of a listening socket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SocketName {
    /// The part of the gateway that listens: `listener`, `passed`, `admin`, `metrics`, `health`, `xds`, `dns`, `dns-udp`, `upgrade`.
    pub kind: String,
    /// The address of the config, or the name under which the service manager has passed the socket.
    pub key: String,
}

/// The room that a process has for connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// The number of descriptors that it may have open.
    pub descriptors: u64,
    /// The number of connections that they suffice for.
    pub connections: u64,
    /// The bytes of its memory budget that are left.
    pub memory: u64,
}

/// The memory in bytes that one connection needs, its record while it moves included: 1,000 of them raised the use of a cgroup by
/// 6.7 MiB, and 2,000 by 10.8 MiB.
const CONNECTION_BYTES: u64 = 7 << 10;

impl Room {
    /// Returns why this number of connections does not fit; `None` if it does.
    pub fn lacks(&self, connections: u64) -> Option<String> {
        let Self { descriptors, connections: most, memory } = *self;
        if connections > most {
            return Some(format!(
                "it may open {descriptors} descriptors, which suffice for {most} connections, and {connections} are open; raise its \
                 limit (`ulimit -n`, LimitNOFILE=)"
            ));
        }
        let needed = connections.saturating_mul(CONNECTION_BYTES);
        (needed > memory).then(|| {
            format!(
                "it has {memory} bytes of its memory budget left, and {connections} connections need about {needed}; raise the memory \
                 limit of its cgroup, or `limits.memory`"
            )
        })
    }
}

/// An operator's order that takes an endpoint out of service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withdrawn {
    /// The address, with or without a port.
    pub address: String,
    /// The host name of the service, or the key of the route; `None` for all.
    pub service: Option<String>,
    /// True if its connections were closed.
    pub disabled: bool,
    /// The time of the order; `None` if an older program did not send it.
    #[serde(default)]
    pub since: Option<SystemTime>,
}

/// The increase of a counter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// The name of the metric.
    pub name: String,
    /// The labels.
    pub labels: Vec<(String, String)>,
    /// The increase.
    pub by: u64,
}

/// The increase of a histogram.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The name of the metric.
    pub name: String,
    /// The labels.
    pub labels: Vec<(String, String)>,
    /// The increase of each bucket.
    pub counts: Vec<u64>,
    /// The increase of the sum, in nanoseconds.
    pub nanoseconds: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_fit_if_descriptors_and_memory_suffice() {
        let room = Room { descriptors: 1_000, connections: 375, memory: 300 * CONNECTION_BYTES };
        assert_eq!((room.lacks(0), room.lacks(300)), (None, None));
        let memory = room.lacks(301).expect("too many");
        assert!(memory.contains("2150400 bytes") && memory.contains("301 connections"), "{memory}");
        let descriptors = room.lacks(376).expect("too many");
        assert!(
            descriptors.contains("1000 descriptors") && descriptors.contains("376 are open"),
            "{descriptors}"
        );
        assert_eq!(
            serde_json::from_str::<Message>(r#"{"type": "ready"}"#).expect("of an older program"),
            Message::Ready { room: None }
        );
    }

    #[test]
    fn a_later_member_of_a_message_is_ignored_and_an_unknown_message_is_not() {
        let hello = r#"{"type": "hello", "protocol": 1, "version": "9.0.0", "later": [1]}"#;
        assert_eq!(
            serde_json::from_str::<Message>(hello).expect("read"),
            Message::Hello { protocol: 1, version: "9.0.0".to_owned() }
        );
        for unknown in [r#"{"type": "greet"}"#, r#"{"type": "hello"}"#, "[]", ""] {
            assert!(serde_json::from_str::<Message>(unknown).is_err(), "{unknown}");
        }
    }
}
