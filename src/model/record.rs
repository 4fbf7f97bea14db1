//! One connection's story. The metric, the log line, the failures list and the connections list are
//! all written from this one value.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::reason::Reason;
use super::trace::{Span, TraceParent};

/// How a connection came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Protocol {
    #[default]
    Sni,
    Hbone,
}

impl Protocol {
    pub fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
        }
    }
}

/// One of the three that a connection is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Client,
    Endpoint,
    Gateway,
}

impl Side {
    pub fn text(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Endpoint => "endpoint",
            Self::Gateway => "gateway",
        }
    }

    /// Returns the side that ended a connection with this reason; `first` is the side that ended its direction first
    /// where both ended in order.
    pub fn of(reason: Reason, first: Option<Self>) -> Option<Self> {
        match reason {
            Reason::Ok => first,
            Reason::ClientGone | Reason::ClientReset => Some(Self::Client),
            Reason::EndpointRefused | Reason::EndpointReset => Some(Self::Endpoint),
            _ => Some(Self::Gateway),
        }
    }
}

/// What is known of a connection, or of one CONNECT stream; fields stay empty where it ended before they were known.
#[derive(Clone, Debug)]
pub struct ConnectionRecord {
    /// Unique in this process.
    pub id: u64,
    /// When it was accepted.
    pub time: SystemTime,
    pub listener: Arc<str>,
    pub protocol: Protocol,
    pub source: SocketAddr,
    /// The address of the gateway that the client connected to.
    pub local: Option<SocketAddr>,
    pub source_network: Arc<str>,
    /// As received; may hold any byte.
    pub sni: Option<Box<[u8]>>,
    /// As received, of a CONNECT.
    pub authority: Option<Box<str>>,
    /// The protocols the client offered, comma-separated, as received; may hold any byte.
    pub alpn: Option<Box<[u8]>>,
    /// The rule that matched: a route's key, or the service's host name.
    pub route: Option<Arc<str>>,
    pub service: Option<Arc<str>>,
    pub service_namespace: Option<Arc<str>>,
    pub port: Option<u16>,
    pub subset: Option<Arc<str>>,
    pub endpoint: Option<SocketAddr>,
    pub endpoint_cluster: Arc<str>,
    pub endpoint_locality: Arc<str>,
    /// Endpoints that were dialled.
    pub attempts: u8,
    /// From the caller's certificate.
    pub source_identity: Option<Arc<str>>,
    /// What the caller says of itself, unproven: `cluster/namespace/workload`.
    pub source_claimed: Option<Box<str>>,
    /// Where the caller stands in a trace.
    pub trace: Option<TraceParent>,
    /// What others have noted of that trace (`tracestate`).
    pub trace_state: Option<Box<str>>,
    /// Where it stands there itself, if it is told of.
    pub span: Option<Span>,
    /// What exactly was wrong, where one word is not enough.
    pub detail: Option<Box<str>>,
    /// Whether the caller cancelled the stream after it was answered: it wanted no more, which is no fault.
    pub cancelled: bool,
    /// `None` while the connection lives.
    pub reason: Option<Reason>,
    /// The side that ended it; `None` while it lives.
    pub ended_by: Option<Side>,
    /// From accept to the end, or to now.
    pub duration: Duration,
    /// From accept to the whole hello.
    pub hello: Option<Duration>,
    /// From the first dial to the endpoint that took the connection.
    pub connect: Option<Duration>,
    /// From accept to the endpoint's first byte.
    pub first_byte: Option<Duration>,
    /// Client to endpoint.
    pub bytes_up: u64,
    /// Endpoint to client.
    pub bytes_down: u64,
}

impl ConnectionRecord {
    /// Returns true if an operator may want its end explained.
    pub fn is_fault(&self) -> bool {
        self.reason.is_some_and(|reason| reason != Reason::Ok) && !self.cancelled
    }
}
