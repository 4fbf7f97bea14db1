//! A connection or CONNECT stream, as in the access log and in the answers of `connections` and `failures`, and as the attributes
//! of its span. The table at the end of this file is the only list of the members: the JSON, the line of text, the span and
//! `docs/access-log.md` are made from it.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

use super::table::{self, Column, Listed, optional};
use super::text::milliseconds;
use isthmus_model::record::{ConnectionRecord, GatewayName};
use isthmus_model::side::Side;
use isthmus_model::time::rfc3339;

/// A value of a member. A member without a value is left out.
trait Member {
    fn is_absent(&self) -> bool;
}

impl Member for String {
    fn is_absent(&self) -> bool {
        self.is_empty()
    }
}

impl<T> Member for Option<T> {
    fn is_absent(&self) -> bool {
        self.is_none()
    }
}

impl Member for u64 {
    fn is_absent(&self) -> bool {
        false
    }
}

impl Member for f64 {
    fn is_absent(&self) -> bool {
        false
    }
}

/// Defines the members. Each row has the name, the type and the value of a member, and its meaning for the documentation. The
/// values are expressions of the record and of the gateway, for which the first line has the names.
macro_rules! members {
    (|$record:ident, $gateway:ident| $($name:ident: $type:ty = $value:expr, $meaning:literal;)+) => {
        /// A connection or CONNECT stream.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct Connection {
            $(
                #[doc = $meaning]
                #[serde(skip_serializing_if = "Member::is_absent")]
                pub $name: $type,
            )+
        }

        /// The members of a connection in their order, each with its meaning: the table of `docs/access-log.md`.
        pub const FIELDS: &[(&str, &str)] = &[$((stringify!($name), $meaning)),+];

        impl Connection {
            /// Returns the record of a connection as `gateway` shows it.
            pub fn of($record: &ConnectionRecord, $gateway: &GatewayName) -> Self {
                Self { $($name: $value),+ }
            }
        }
    };
}

impl Connection {
    /// Returns the server name or the authority that the client asked for.
    pub fn name(&self) -> Option<&str> {
        self.sni.as_deref().or(self.authority.as_deref())
    }
}

/// Returns a value as text; `None` if there is no value or the text is empty.
fn text(value: Option<impl Display>) -> Option<String> {
    value.map(|value| value.to_string()).filter(|text| !text.is_empty())
}

/// Returns bytes of the client as text.
fn escaped(bytes: Option<&[u8]>) -> Option<String> {
    bytes.map(|bytes| bytes.escape_ascii().to_string())
}

members! { |record, gateway|
    time: String = rfc3339(record.time),
        "When the connection was accepted (RFC 3339, UTC, milliseconds); its end is `time` + `duration_ms`.";
    id: u64 = record.id,
        "A number that is unique in this process.";
    listener: String = record.listener.to_string(),
        "The name of the listener.";
    protocol: String = record.protocol.text().to_owned(),
        "`sni`; `tcp` if no hello was read (`protocol: tcp`, `fallback`); `hbone` once the TLS handshake of HBONE has begun, where each CONNECT \
         stream has a line of its own.";
    source: String = record.source.to_string(),
        "The client's address and port; behind a load balancer, the address and port that the PROXY header announces.";
    proxy: Option<String> = text(record.proxied.as_ref().map(|proxied| proxied.proxy)),
        "The address and port of the load balancer that announced `source` by a PROXY header.";
    source_network: Option<String> = text(record.source_network.as_deref()),
        "The network whose `cidrs` hold the client's address.";
    local: Option<String> = text(record.local),
        "The address and port of this gateway that the client connected to.";
    sni: Option<String> = escaped(record.sni.as_deref()),
        "The server name as received, escaped.";
    authority: Option<String> = text(record.authority()),
        "The `:authority` of a CONNECT as received.";
    alpn: Option<String> = escaped(record.alpn.as_deref()),
        "The protocols that the client offered, comma-separated, escaped.";
    route: Option<String> = text(record.route.as_deref()),
        "The rule that matched: the key of a route, or the host name of a service. `LISTENER/KEY` is a route of one listener, with \
         `target` and `fallback` as further keys; `KEY#PROTOCOL` is one of `byAlpn`.";
    service: Option<String> = text(record.service.as_deref()),
        "The service's host name.";
    port: Option<u16> = record.port,
        "The service port.";
    subset: Option<String> = text(record.subset.as_deref()),
        "The subset of the service.";
    endpoint: Option<String> = text(record.endpoint),
        "The last endpoint dialled.";
    endpoint_cluster: Option<String> = text(record.endpoint_cluster.as_deref()),
        "The endpoint's cluster.";
    endpoint_locality: Option<String> = text(record.endpoint_locality.as_deref()),
        "The endpoint's locality.";
    attempts: Option<u8> = Some(record.attempts).filter(|attempts| *attempts > 0),
        "The number of endpoints dialled; absent if there was none.";
    source_identity: Option<String> = text(record.source_identity.as_deref()),
        "The SPIFFE ID that the caller has proven by its certificate.";
    peer: Option<String> = text(record.peer.as_deref()),
        "The peer to which the caller belongs, by the identity or the address of the caller.";
    source_claimed: Option<String> = text(record.stream.as_ref().and_then(|stream| stream.source_claimed.as_deref())),
        "`cluster/namespace/workload` that the caller claims, without proof.";
    unique_id: Option<String> = text(record.unique_id.as_deref()),
        "The id in the PROXY header of version 2 that the gateway sent to the endpoint.";
    reason: Option<String> = text(record.reason),
        "Why the connection ended: one word of [reasons](reasons.md); absent in `connections`, which lists live ones.";
    detail: Option<String> = text(record.detail.as_deref()),
        "The cause in detail, if the reason alone does not say it.";
    ended_by: Option<String> = text(record.ended_by.map(Side::text)),
        "`client` if it closed or reset first, `endpoint` if it closed, refused or reset first, else `gateway`.";
    duration_ms: f64 = milliseconds(record.duration),
        "Time from accept to the end; of an open connection, time since accept.";
    hello_ms: Option<f64> = record.hello.map(milliseconds),
        "Time from accept until the whole hello had arrived.";
    connect_ms: Option<f64> = record.connect.map(milliseconds),
        "Time from the first connection attempt until an endpoint accepted.";
    first_byte_ms: Option<f64> = record.first_byte.map(milliseconds),
        "Time from accept until the endpoint's first byte.";
    bytes_up: u64 = record.bytes_up,
        "Bytes from client to endpoint.";
    bytes_down: u64 = record.bytes_down,
        "Bytes from endpoint to client.";
    trace_id: Option<String> = text(record.trace_id()),
        "The id of the trace of the connection. A CONNECT with `traceparent` keeps the trace id of the caller. For TLS the id \
         is the last 16 bytes of the random of the ClientHello, which are the same on every gateway on the path. The client \
         chooses either value.";
    gateway: String = gateway.name.to_string(),
        "`node.name` of the gateway that wrote the line.";
    gateway_network: String = gateway.network.to_string(),
        "`node.network` of the gateway that wrote the line.";
    gateway_cluster: String = gateway.cluster.to_string(),
        "`node.cluster` of the gateway that wrote the line.";
}

const ID: Column<Connection> = ("ID", |connection| connection.id.to_string());
const TIME: Column<Connection> = ("TIME", |connection| table::text(&connection.time));
const REASON: Column<Connection> = ("REASON", |connection| optional(connection.reason.as_ref()));
const LISTENER: Column<Connection> = ("LISTENER", |connection| table::text(&connection.listener));
const SOURCE: Column<Connection> = ("SOURCE", |connection| table::text(&connection.source));
const CALLER: Column<Connection> = ("CALLER", |connection| optional(connection.source_identity.as_ref()));
/// The server name or authority of a connection.
const NAME: Column<Connection> = ("NAME", |connection| table::text(connection.name().unwrap_or_default()));
const ROUTE: Column<Connection> = ("ROUTE", |connection| optional(connection.route.as_ref()));
const ENDPOINT: Column<Connection> = ("ENDPOINT", |connection| optional(connection.endpoint.as_ref()));
const DURATION: Column<Connection> = ("MS", |connection| format!("{:?}", connection.duration_ms));
const DETAIL: Column<Connection> = ("DETAIL", |connection| optional(connection.detail.as_ref()));
const UP: Column<Connection> = ("UP", |connection| connection.bytes_up.to_string());
const DOWN: Column<Connection> = ("DOWN", |connection| connection.bytes_down.to_string());

impl Connection {
    /// The columns of failed connections.
    pub const FAILED: &'static [Column<Self>] =
        &[TIME, REASON, LISTENER, SOURCE, CALLER, NAME, ROUTE, ENDPOINT, DURATION, DETAIL];
}

impl Listed for Connection {
    const COLUMNS: &'static [Column<Self>] =
        &[ID, TIME, LISTENER, SOURCE, CALLER, NAME, ROUTE, ENDPOINT, DURATION, UP, DOWN];
}
