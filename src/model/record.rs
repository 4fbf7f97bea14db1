//! The record of one connection. The metric, the log line, the failures list and the connections list are all written from this
//! one value.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::reason::Reason;
use super::trace::{Span, TraceId, TraceParent};

/// The protocol of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ConnectionProtocol {
    /// TLS, routed by its SNI.
    #[default]
    Sni,
    /// HBONE: a CONNECT stream, or the HTTP/2 connection that carries streams.
    Hbone,
}

impl ConnectionProtocol {
    /// Returns the protocol as logs and labels write it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
        }
    }
}

/// A party of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The party that connected to the gateway.
    Client,
    /// The party to which the gateway connected.
    Endpoint,
    /// This gateway.
    Gateway,
}

impl Side {
    /// Returns the party as the access log writes it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Endpoint => "endpoint",
            Self::Gateway => "gateway",
        }
    }

    /// Returns the party that ended a connection with this reason. If the connection ended normally, returns `first`, the party
    /// that ended its direction first.
    pub fn of(reason: Reason, first: Option<Self>) -> Option<Self> {
        match reason {
            Reason::Ok => first,
            Reason::ClientGone | Reason::ClientReset => Some(Self::Client),
            Reason::EndpointRefused | Reason::EndpointReset => Some(Self::Endpoint),
            _ => Some(Self::Gateway),
        }
    }
}

/// The names of this gateway in its access log; empty names are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayName {
    /// `node.name` of the config.
    pub name: Arc<str>,
    /// `node.network` of the config.
    pub network: Arc<str>,
    /// `node.cluster` of the config.
    pub cluster: Arc<str>,
}

/// The record of a connection or of one CONNECT stream. A field is empty if the connection ended before its value was known.
#[derive(Clone, Debug)]
pub struct ConnectionRecord {
    /// The number of the connection, unique in this process.
    pub id: u64,
    /// The time of the accept.
    pub time: SystemTime,
    /// The name of the listener.
    pub listener: Arc<str>,
    /// The protocol of the connection.
    pub protocol: ConnectionProtocol,
    /// The address and port of the client.
    pub source: SocketAddr,
    /// The address and port of the proxy that announced `source` by a PROXY header; `None` if the client connected itself.
    pub proxy: Option<SocketAddr>,
    /// The local address and port to which the client connected.
    pub local: Option<SocketAddr>,
    /// The network whose CIDR holds the source; empty if unknown.
    pub source_network: Arc<str>,
    /// The SNI as received; may hold any byte.
    pub sni: Option<Box<[u8]>>,
    /// The authority of a CONNECT, as received.
    pub authority: Option<Box<str>>,
    /// The protocols that the client offered by ALPN, comma-separated, as received; may hold any byte.
    pub alpn: Option<Box<[u8]>>,
    /// The rule that matched: the key of a route, or the host name of a service.
    pub route: Option<Arc<str>>,
    /// The host name of the service.
    pub service: Option<Arc<str>>,
    /// The namespace of the service.
    pub service_namespace: Option<Arc<str>>,
    /// The service port.
    pub port: Option<u16>,
    /// The subset of the service; empty for all endpoints.
    pub subset: Option<Arc<str>>,
    /// The endpoint that was dialled last.
    pub endpoint: Option<SocketAddr>,
    /// The cluster of the endpoint that was dialled last; empty if unknown.
    pub endpoint_cluster: Arc<str>,
    /// The locality of the endpoint that was dialled last; empty if unknown.
    pub endpoint_locality: Arc<str>,
    /// The number of endpoints that were dialled.
    pub attempts: u8,
    /// The SPIFFE ID of the client's certificate.
    pub source_identity: Option<Arc<str>>,
    /// The name of the peer that the caller belongs to.
    pub peer: Option<Arc<str>>,
    /// The `cluster/namespace/workload` that the client claims; unverified.
    pub source_claimed: Option<Box<str>>,
    /// The trace context that the client sent (`traceparent`).
    pub trace: Option<TraceParent>,
    /// The `tracestate` that the client sent with the trace context.
    pub trace_state: Option<Box<str>>,
    /// The trace that begins with the connection's hello, if the client sent no trace context.
    pub hello_trace: Option<TraceId>,
    /// The span of this connection; `None` if the trace is not sampled.
    pub span: Option<Span>,
    /// The id in the PROXY header of version 2 that the endpoint got.
    pub unique_id: Option<Box<str>>,
    /// The exact fault, if the reason alone does not say it.
    pub detail: Option<Box<str>>,
    /// True if the caller cancelled the stream after it was answered, which is not a fault.
    pub cancelled: bool,
    /// The reason why the connection ended; `None` while it is open.
    pub reason: Option<Reason>,
    /// The party that ended the connection; `None` while it is open.
    pub ended_by: Option<Side>,
    /// The time from accept to the end, or until the record was written.
    pub duration: Duration,
    /// The time from accept to the complete ClientHello.
    pub hello: Option<Duration>,
    /// The time from the first dial until an endpoint accepted the connection.
    pub connect: Option<Duration>,
    /// The time from accept to the endpoint's first byte.
    pub first_byte: Option<Duration>,
    /// The number of bytes from client to endpoint.
    pub bytes_up: u64,
    /// The number of bytes from endpoint to client.
    pub bytes_down: u64,
}

impl ConnectionRecord {
    /// Returns the id of the connection's trace, as log lines name it.
    pub fn trace_id(&self) -> Option<TraceId> {
        let of_caller = || self.trace.map(|caller| caller.trace);
        self.span.map(|span| span.trace).or_else(of_caller).or(self.hello_trace)
    }

    /// Returns true if an operator may want to know why the connection ended.
    pub fn is_fault(&self) -> bool {
        self.reason.is_some_and(|reason| reason != Reason::Ok) && !self.cancelled
    }
}
