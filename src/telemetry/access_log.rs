//! The record of a connection as a line of the access log, and as the fields of the admin API.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::clock::rfc3339;
use isthmus_api::connection::Connection;
use isthmus_model::record::ConnectionRecord;

/// The destination of the access log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessLog {
    /// There is no access log.
    Off,
    /// Lines are written to a sink.
    To {
        /// The output that lines are written to.
        sink: Sink,
        /// The format of the lines.
        format: Format,
    },
}

/// The output that lines are written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sink {
    /// The standard output.
    Stdout,
    /// The standard error.
    Stderr,
    /// A file; lines are appended.
    File(PathBuf),
}

/// The format of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One JSON object.
    Json,
    /// Pairs `key=value`, separated by single spaces.
    Text,
}

impl Format {
    /// All formats, in the order of the documentation.
    pub const ALL: [Self; 2] = [Self::Json, Self::Text];

    /// Returns the format as written in the config file.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Text => "text",
        }
    }
}

isthmus_model::words!(Format);

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

/// The fields that a record can have, in the order of a line, each with its meaning: the table of `docs/access-log.md`.
pub const FIELDS: &[(&str, &str)] = &[
    (
        "time",
        "When the connection was accepted (RFC 3339, UTC, milliseconds); its end is `time` + `duration_ms`.",
    ),
    ("id", "A number that is unique in this process."),
    ("listener", "The name of the listener."),
    (
        "protocol",
        "`sni`, or `hbone` once the TLS handshake of HBONE has begun; each CONNECT stream has a line of its own.",
    ),
    (
        "source",
        "The client's address and port; behind a load balancer, the address and port that the PROXY header announces.",
    ),
    ("proxy", "The address and port of the load balancer that announced `source` by a PROXY header."),
    ("source_network", "The network whose `cidrs` hold the client's address."),
    ("local", "The address and port of this gateway that the client connected to."),
    ("sni", "The server name as received, escaped."),
    ("authority", "The `:authority` of a CONNECT as received."),
    ("alpn", "The protocols that the client offered, comma-separated, escaped."),
    ("route", "The rule that matched: the key of a route, or the host name of a service."),
    ("service", "The service's host name."),
    ("port", "The service port."),
    ("subset", "The subset of the service."),
    ("endpoint", "The last endpoint dialled."),
    ("endpoint_cluster", "The endpoint's cluster."),
    ("endpoint_locality", "The endpoint's locality."),
    ("attempts", "The number of endpoints dialled; absent if there was none."),
    ("source_identity", "The SPIFFE ID that the caller has proven by its certificate."),
    ("peer", "The peer to which the caller belongs, by the identity or the address of the caller."),
    ("source_claimed", "`cluster/namespace/workload` that the caller claims, without proof."),
    ("unique_id", "The id in the PROXY header of version 2 that the gateway sent to the endpoint."),
    (
        "reason",
        "Why the connection ended: one word of [reasons](reasons.md); absent in `connections`, which lists live ones.",
    ),
    ("detail", "The cause in detail, if the reason alone does not say it."),
    (
        "ended_by",
        "`client` if it closed or reset first, `endpoint` if it closed, refused or reset first, else `gateway`.",
    ),
    ("duration_ms", "Time from accept to the end; of an open connection, time since accept."),
    ("hello_ms", "Time from accept until the whole hello had arrived."),
    ("connect_ms", "Time from the first connection attempt until an endpoint accepted."),
    ("first_byte_ms", "Time from accept until the endpoint's first byte."),
    ("bytes_up", "Bytes from client to endpoint."),
    ("bytes_down", "Bytes from endpoint to client."),
    (
        "trace_id",
        "The id of the trace of the connection. A CONNECT with `traceparent` keeps the trace id of the caller. For TLS the id \
         is the last 16 bytes of the random of the ClientHello, which are the same on every gateway on the path. The client \
         chooses either value.",
    ),
    ("gateway", "`node.name` of the gateway that wrote the line."),
    ("gateway_network", "`node.network` of the gateway that wrote the line."),
    ("gateway_cluster", "`node.cluster` of the gateway that wrote the line."),
];

/// Returns a record in the form of the admin API, with the members of SPEC §11.
pub fn connection(record: &ConnectionRecord, gateway: &GatewayName) -> Connection {
    let text = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
    let milliseconds = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
    let bytes = |bytes: &Option<Box<[u8]>>| bytes.as_ref().map(|bytes| bytes.escape_ascii().to_string());
    Connection {
        time: rfc3339(record.time),
        id: record.id,
        listener: record.listener.to_string(),
        protocol: record.protocol.text().to_owned(),
        source: record.source.to_string(),
        proxy: record.proxy.map(|proxy| proxy.to_string()),
        source_network: record.source_network.to_string(),
        local: record.local.map(|local| local.to_string()),
        sni: bytes(&record.sni),
        authority: text(record.authority.as_deref()),
        alpn: bytes(&record.alpn),
        route: text(record.route.as_deref()),
        service: text(record.service.as_deref()),
        port: record.port,
        subset: text(record.subset.as_deref()),
        endpoint: record.endpoint.map(|endpoint| endpoint.to_string()),
        endpoint_cluster: record.endpoint_cluster.to_string(),
        endpoint_locality: record.endpoint_locality.to_string(),
        attempts: record.attempts,
        source_identity: text(record.source_identity.as_deref()),
        peer: text(record.peer.as_deref()),
        source_claimed: text(record.source_claimed.as_deref()),
        unique_id: text(record.unique_id.as_deref()),
        reason: record.reason.map(|reason| reason.text().to_owned()),
        detail: text(record.detail.as_deref()),
        ended_by: record.ended_by.map(|side| side.text().to_owned()),
        duration_ms: milliseconds(record.duration),
        hello_ms: record.hello.map(milliseconds),
        connect_ms: record.connect.map(milliseconds),
        first_byte_ms: record.first_byte.map(milliseconds),
        bytes_up: record.bytes_up,
        bytes_down: record.bytes_down,
        trace_id: record.trace_id().map(|trace| trace.to_string()),
        gateway: gateway.name.to_string(),
        gateway_network: gateway.network.to_string(),
        gateway_cluster: gateway.cluster.to_string(),
    }
}

/// Returns the members of a record by name, without those that have no value.
pub fn fields(record: &ConnectionRecord, gateway: &GatewayName) -> Map<String, Value> {
    match serde_json::to_value(connection(record, gateway)) {
        Ok(Value::Object(members)) => members,
        // This cannot happen: a connection is an object of texts and numbers.
        Ok(_) | Err(_) => Map::new(),
    }
}

/// Returns a line of the log, including its line feed.
pub fn line(record: &ConnectionRecord, gateway: &GatewayName, format: Format) -> String {
    let mut line = match format {
        // Writing cannot fail, because a connection is an object of texts and numbers.
        Format::Json => serde_json::to_string(&connection(record, gateway)).unwrap_or_default(),
        Format::Text => {
            let fields = fields(record, gateway);
            let pairs = fields.iter().map(|(name, value)| match value {
                // A value with a space, a quote or an equals sign is quoted as in JSON.
                Value::String(text) if !text.contains([' ', '"', '=']) => format!("{name}={text}"),
                value => format!("{name}={value}"),
            });
            pairs.collect::<Vec<_>>().join(" ")
        }
    };
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use super::*;
    use isthmus_model::reason::Reason;
    use isthmus_model::testing::record;

    #[test]
    fn names_cannot_break_out_of_their_line() {
        let hostile = b"a\n\x1b[31m\"} {\"reason\":\"ok\"\0\xff b=c";
        for format in [Format::Json, Format::Text] {
            let line = line(&record(Reason::SniInvalid, hostile), &GatewayName::default(), format);
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(line.trim_end().bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{line:?}");
        }
        let json: Value =
            serde_json::from_str(&of(&record(Reason::SniInvalid, hostile), Format::Json)).expect("JSON");
        assert_eq!((&json["reason"], &json["duration_ms"]), (&"sni_invalid".into(), &1.5.into()));
        let text = of(&record(Reason::SniInvalid, b"a.b"), Format::Text);
        assert!(text.contains(" sni=a.b reason=sni_invalid "), "{text}");
    }

    fn of(record: &ConnectionRecord, format: Format) -> String {
        line(record, &GatewayName::default(), format)
    }

    #[test]
    fn a_whole_record_has_every_field_of_the_table_in_its_order() {
        let some = || Some("x".into());
        let address = SocketAddr::from(([10, 0, 0, 1], 4000));
        let trace = isthmus_model::trace::TraceParent::parse(
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        );
        let whole = ConnectionRecord {
            source_network: "n".into(),
            local: Some(address),
            proxy: Some(address),
            authority: some(),
            alpn: Some((*b"h2").into()),
            route: Some("r".into()),
            service: Some("s".into()),
            port: Some(1),
            subset: Some("v1".into()),
            endpoint: Some(address),
            endpoint_cluster: "c".into(),
            endpoint_locality: "l".into(),
            attempts: 1,
            source_identity: Some("i".into()),
            peer: some().map(|text: Box<str>| text.into()),
            source_claimed: some(),
            trace,
            unique_id: some(),
            detail: some(),
            ended_by: Some(isthmus_model::record::Side::Client),
            hello: Some(Duration::ZERO),
            connect: Some(Duration::ZERO),
            first_byte: Some(Duration::ZERO),
            ..record(Reason::Ok, b"a.b")
        };
        let gateway = GatewayName { name: "g".into(), network: "n".into(), cluster: "c".into() };
        let mut written: Vec<String> = fields(&whole, &gateway).into_iter().map(|(name, _)| name).collect();
        let mut table: Vec<&str> = FIELDS.iter().map(|(name, _)| *name).collect();
        written.sort_unstable();
        table.sort_unstable();
        assert_eq!(written, table);
    }

    #[test]
    fn a_line_names_the_gateway_that_wrote_it() {
        let gateway = GatewayName { name: "gw-0".into(), network: "net-east".into(), cluster: "east".into() };
        let text = line(&record(Reason::Ok, b"a.b"), &gateway, Format::Text);
        assert!(text.ends_with(" gateway=gw-0 gateway_network=net-east gateway_cluster=east\n"), "{text}");
    }
}
