//! Limits of connections and of HBONE, and the timeouts of dialling and relaying.

use std::time::Duration;

use isthmus_model::limits::{MemoryLimit, SourceLimits};

/// Limits of HBONE connections and their streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HboneLimits {
    /// The largest number of concurrent streams of a connection.
    pub streams: u32,
    /// The receive window of a stream, in bytes: how far a client may send ahead of the endpoint. `None`: a window that fits the
    /// round trip to the client.
    pub stream_window: Option<u32>,
    /// The number of bytes that the streams of a connection may buffer together before a stalled stream is reset, where the
    /// memory budget does not give less.
    pub held_per_connection: usize,
    /// The number of bytes, times the number of workers, that all HBONE connections may buffer together before a stalled stream is
    /// reset; `None`: as many as the memory budget gives.
    pub held_per_worker: Option<usize>,
    /// The time after which a stalled stream is reset, if more than half of a share of the memory budget is held.
    pub stalled: Duration,
    /// The time after which a connection without streams is closed.
    pub idle: Duration,
}

impl Default for HboneLimits {
    fn default() -> Self {
        Self {
            streams: 1_000,
            stream_window: None,
            held_per_connection: 64 << 20,
            held_per_worker: None,
            stalled: Duration::from_secs(10),
            idle: Duration::from_secs(3600),
        }
    }
}

/// Limits of the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of concurrent connections; the number of descriptors may allow fewer.
    pub connections: usize,
    /// The largest number of concurrent connections whose hello is incomplete; `None`: 10,000. The gateway never allows more
    /// than a quarter of the descriptors.
    pub pending_hellos: Option<usize>,
    /// The limits of connections from one source.
    pub per_source: SourceLimits,
    /// The largest number of concurrent connections and CONNECT streams to one service; `None`: no limit.
    pub per_service: Option<usize>,
    /// The bandwidth of one service in each direction, in bytes per second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    /// The memory budget of the process.
    pub memory: MemoryLimit,
}

impl Default for Limits {
    fn default() -> Self {
        let per_source = SourceLimits::default();
        Self {
            connections: 100_000,
            pending_hellos: None,
            per_source,
            per_service: None,
            bytes_per_second: None,
            memory: MemoryLimit::default(),
        }
    }
}

/// Timeouts of dialling and relaying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of one attempt to connect.
    pub connect: Duration,
    /// The time, measured from the first attempt to connect, after which no further attempt begins.
    pub connect_total: Duration,
    /// The time without bytes in either direction after which a connection is closed; `None`: never.
    pub idle: Option<Duration>,
    /// The time without bytes after which a half-closed connection is closed; `None`: never.
    pub half_close: Option<Duration>,
    /// The time after which a connection is closed if a peer is alive but does not read its bytes; `None`: never.
    pub stalled: Option<Duration>,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            connect_total: Duration::from_secs(10),
            idle: None,
            half_close: Some(Duration::from_secs(300)),
            stalled: Some(Duration::from_secs(900)),
        }
    }
}
