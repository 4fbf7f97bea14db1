//! The record of one connection. The data plane fills it in as the values become known; the metrics, the log line, the span, the
//! failures list and the connections list are all written from this one value.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::limits::ServiceLimitKey;
use super::reason::Reason;
use super::side::Side;
use super::trace::{Span, TraceId, TraceParent};

/// The protocol of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConnectionProtocol {
    /// TLS, routed by its SNI.
    #[default]
    Sni,
    /// HBONE: a CONNECT stream, or the HTTP/2 connection that carries streams.
    Hbone,
    /// Bytes of any kind, from which no hello is read: those of a listener of protocol `tcp`, or those of its `fallback`.
    Tcp,
}

impl ConnectionProtocol {
    /// Returns the protocol as logs and labels write it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
            Self::Tcp => "tcp",
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

/// The proxy that announced a connection's source by a PROXY header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proxied {
    /// The proxy's address and port.
    pub proxy: SocketAddr,
    /// The address and port that the client connected to, as the proxy announced them.
    pub destination: SocketAddr,
}

/// The head of a CONNECT stream, as the caller sent it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamHead {
    /// The authority.
    pub authority: Box<str>,
    /// The `cluster/namespace/workload` that the caller claims; unverified.
    pub source_claimed: Option<Box<str>>,
    /// The trace context (`traceparent`).
    pub trace: Option<TraceParent>,
    /// The `tracestate` that belongs to `trace`.
    pub trace_state: Option<Box<str>>,
}

/// The record of a connection or of one CONNECT stream. A field is empty as long as its value is not known.
///
/// Each live connection has a record in memory, so values that few connections have are boxed. An upgrade carries the record to the
/// new process in the form that is derived here, so a new field is carried without further code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// The proxy that announced `source`; `None` if the client connected itself.
    pub proxied: Option<Box<Proxied>>,
    /// The local address and port to which the client connected.
    pub local: Option<SocketAddr>,
    /// The network whose CIDR holds the source.
    pub source_network: Option<Arc<str>>,
    /// The SNI as received; may hold any byte.
    #[serde(default, with = "hex_bytes")]
    pub sni: Option<Box<[u8]>>,
    /// The head of a CONNECT stream; `None` for a connection.
    pub stream: Option<Box<StreamHead>>,
    /// The protocols that the client offered by ALPN, comma-separated, as received; may hold any byte.
    #[serde(default, with = "hex_bytes")]
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
    pub endpoint_cluster: Option<Arc<str>>,
    /// The locality of the endpoint that was dialled last; empty if unknown.
    pub endpoint_locality: Option<Arc<str>>,
    /// The number of endpoints that were dialled.
    pub attempts: u8,
    /// The SPIFFE ID of the client's certificate.
    pub source_identity: Option<Arc<str>>,
    /// The name of the peer that the caller belongs to.
    pub peer: Option<Arc<str>>,
    /// The trace that begins with the connection's hello.
    pub hello_trace: Option<TraceId>,
    /// The span of this connection; `None` if the trace is not sampled.
    pub span: Option<Box<Span>>,
    /// The id in the PROXY header of version 2 that the endpoint got.
    pub unique_id: Option<Box<str>>,
    /// The exact fault, if the reason alone does not say it.
    pub detail: Option<Box<str>>,
    /// True if the caller cancelled the stream after it was answered, which is not a fault.
    pub cancelled: bool,
    /// The reason why the connection ended; `None` while it is open.
    #[serde(skip)]
    pub reason: Option<Reason>,
    /// The party that ended the connection; `None` while it is open.
    #[serde(skip)]
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
    /// Creates the record of a connection that was accepted at this time.
    pub fn new(id: u64, time: SystemTime, listener: Arc<str>, source: SocketAddr) -> Self {
        Self {
            id,
            time,
            listener,
            protocol: ConnectionProtocol::Sni,
            source,
            proxied: None,
            local: None,
            source_network: None,
            sni: None,
            stream: None,
            alpn: None,
            route: None,
            service: None,
            service_namespace: None,
            port: None,
            subset: None,
            endpoint: None,
            endpoint_cluster: None,
            endpoint_locality: None,
            attempts: 0,
            source_identity: None,
            peer: None,
            hello_trace: None,
            span: None,
            unique_id: None,
            detail: None,
            cancelled: false,
            reason: None,
            ended_by: None,
            duration: Duration::ZERO,
            hello: None,
            connect: None,
            first_byte: None,
            bytes_up: 0,
            bytes_down: 0,
        }
    }

    /// Returns the authority of a CONNECT.
    pub fn authority(&self) -> Option<&str> {
        self.stream.as_ref().map(|stream| &*stream.authority)
    }

    /// Returns the trace context that the caller of a CONNECT stream sent.
    pub fn caller_trace(&self) -> Option<TraceParent> {
        self.stream.as_ref().and_then(|stream| stream.trace)
    }

    /// Returns the name under which metrics count the connection: the service, or the route if there is none.
    pub fn destination(&self) -> Option<&Arc<str>> {
        self.service.as_ref().or(self.route.as_ref())
    }

    /// Returns the key under which the limit per service counts the connection; `None` if no rule matched.
    pub fn limit_key(&self) -> Option<ServiceLimitKey> {
        ServiceLimitKey::of(self.service.as_ref(), self.route.as_ref())
    }

    /// Returns the id of the connection's trace, as log lines name it.
    pub fn trace_id(&self) -> Option<TraceId> {
        let of_caller = || self.caller_trace().map(|caller| caller.trace);
        self.span.as_ref().map(|span| span.trace).or_else(of_caller).or(self.hello_trace)
    }

    /// Returns true if an operator may want to know why the connection ended.
    pub fn is_fault(&self) -> bool {
        self.reason.is_some_and(|reason| reason != Reason::Ok) && !self.cancelled
    }
}

/// The form of bytes that a client has chosen: hexadecimal digits.
mod hex_bytes {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::hex::{Hex, parse};

    #[expect(clippy::ref_option, reason = "serde calls it so")]
    pub(super) fn serialize<S: Serializer>(bytes: &Option<Box<[u8]>>, to: S) -> Result<S::Ok, S::Error> {
        bytes.as_deref().map(|bytes| Hex(bytes).to_string()).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Box<[u8]>>, D::Error> {
        let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
        let bytes = parse(text.as_bytes()).ok_or_else(|| D::Error::custom("malformed hexadecimal digits"))?;
        Ok(Some(bytes.into()))
    }
}
