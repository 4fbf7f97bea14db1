//! A connection's record as a line of the access log, and as the fields of the admin API.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::clock::rfc3339;
use crate::model::record::ConnectionRecord;

/// The destination of the access log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessLog {
    /// No access log.
    Off,
    /// Lines are written.
    To {
        /// Where.
        sink: Sink,
        /// In which form.
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
    /// A file, which is appended to.
    File(PathBuf),
}

/// The form of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One JSON object.
    Json,
    /// `key=value`, one space between.
    Text,
}

impl Format {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Json, Self::Text];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Text => "text",
        }
    }
}

/// The names of this gateway in its access log; empty ones are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayName {
    /// `node.name` of the config.
    pub name: Arc<str>,
    /// `node.network` of the config.
    pub network: Arc<str>,
    /// `node.cluster` of the config.
    pub cluster: Arc<str>,
}

/// The names that a record can have, in the order of a line, each with its meaning: the table of `docs/access-log.md`.
pub const FIELDS: &[(&str, &str)] = &[
    (
        "time",
        "When the connection was accepted (RFC 3339, UTC, milliseconds); its end is `time` + `duration_ms`.",
    ),
    ("id", "A number that is unique in this process."),
    ("listener", "The name of the listener."),
    ("protocol", "`sni` or `hbone`; each CONNECT stream has a line of its own."),
    ("source", "The client's address and port."),
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
    ("attempts", "The number of endpoints dialled; 0 and absent where none was."),
    ("source_identity", "The SPIFFE ID that the caller has proven by its certificate."),
    ("source_claimed", "`cluster/namespace/workload` as the caller says itself, unproven."),
    (
        "reason",
        "Why the connection ended: one word of [reasons](reasons.md); absent in `connections`, which lists live ones.",
    ),
    ("detail", "What exactly was wrong, where one word is not enough."),
    (
        "ended_by",
        "`client` if it closed or reset first, `endpoint` if it closed, refused or reset first, else `gateway`.",
    ),
    ("duration_ms", "From accept to the end, or to now."),
    ("hello_ms", "From accept to the whole hello."),
    ("connect_ms", "From the first dial to the endpoint that took the connection."),
    ("first_byte_ms", "From accept to the endpoint's first byte."),
    ("bytes_up", "Bytes from client to endpoint."),
    ("bytes_down", "Bytes from endpoint to client."),
    ("trace_id", "The trace that the connection is in."),
    ("gateway", "`node.name` of the gateway that wrote the line."),
    ("gateway_network", "Its `node.network`."),
    ("gateway_cluster", "Its `node.cluster`."),
];

/// Returns the fields of a record by the names of SPEC §11; unknown ones are left out.
pub fn fields(record: &ConnectionRecord, gateway: &GatewayName) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    let text = |text: &str| (!text.is_empty()).then(|| Value::from(text));
    let milliseconds = |time: std::time::Duration| Value::from((time.as_secs_f64() * 1e6).round() / 1e3);
    let bytes =
        |bytes: &Option<Box<[u8]>>| bytes.as_ref().map(|bytes| Value::from(bytes.escape_ascii().to_string()));
    put("time", Some(rfc3339(record.time).into()));
    put("id", Some(record.id.into()));
    put("listener", text(&record.listener));
    put("protocol", Some(record.protocol.text().into()));
    put("source", Some(record.source.to_string().into()));
    put("source_network", text(&record.source_network));
    put("local", record.local.map(|local| local.to_string().into()));
    put("sni", bytes(&record.sni));
    put("authority", record.authority.as_deref().and_then(text));
    put("alpn", bytes(&record.alpn));
    put("route", record.route.as_deref().and_then(text));
    put("service", record.service.as_deref().and_then(text));
    put("port", record.port.map(Value::from));
    put("subset", record.subset.as_deref().and_then(text));
    put("endpoint", record.endpoint.map(|endpoint| endpoint.to_string().into()));
    put("endpoint_cluster", text(&record.endpoint_cluster));
    put("endpoint_locality", text(&record.endpoint_locality));
    put("attempts", (record.attempts > 0).then(|| record.attempts.into()));
    put("source_identity", record.source_identity.as_deref().and_then(text));
    put("source_claimed", record.source_claimed.as_deref().and_then(text));
    put("reason", record.reason.map(|reason| reason.text().into()));
    put("detail", record.detail.as_deref().and_then(text));
    put("ended_by", record.ended_by.map(|side| side.text().into()));
    put("duration_ms", Some(milliseconds(record.duration)));
    put("hello_ms", record.hello.map(milliseconds));
    put("connect_ms", record.connect.map(milliseconds));
    put("first_byte_ms", record.first_byte.map(milliseconds));
    put("bytes_up", Some(record.bytes_up.into()));
    put("bytes_down", Some(record.bytes_down.into()));
    let trace = record.span.map(|span| span.trace).or_else(|| record.trace.map(|parent| parent.trace));
    put("trace_id", trace.map(|trace| trace.to_string().into()));
    put("gateway", text(&gateway.name));
    put("gateway_network", text(&gateway.network));
    put("gateway_cluster", text(&gateway.cluster));
    fields
}

/// Returns a line of the log, with its line feed.
pub fn line(record: &ConnectionRecord, gateway: &GatewayName, format: Format) -> String {
    let fields = fields(record, gateway);
    let mut line = match format {
        Format::Json => Value::from(fields).to_string(),
        Format::Text => {
            let pairs = fields.iter().map(|(name, value)| match value {
                // Values with a space or a quote are quoted, as JSON would.
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
pub(crate) mod tests {
    use std::net::SocketAddr;
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::model::reason::Reason;
    use crate::model::record::ConnectionProtocol;

    pub(crate) fn record(reason: Reason, sni: &[u8]) -> ConnectionRecord {
        ConnectionRecord {
            id: 7,
            time: UNIX_EPOCH,
            listener: "l".into(),
            protocol: ConnectionProtocol::Sni,
            authority: None,
            source_claimed: None,
            trace: None,
            trace_state: None,
            span: None,
            detail: None,
            cancelled: false,
            source: SocketAddr::from(([10, 0, 0, 1], 4000)),
            local: None,
            attempts: 0,
            ended_by: None,
            first_byte: None,
            source_network: "".into(),
            sni: Some(sni.into()),
            alpn: None,
            route: None,
            service: None,
            service_namespace: None,
            port: None,
            subset: None,
            endpoint: None,
            endpoint_cluster: "".into(),
            endpoint_locality: "".into(),
            source_identity: None,
            reason: Some(reason),
            duration: Duration::from_micros(1_500),
            hello: None,
            connect: None,
            bytes_up: 0,
            bytes_down: 0,
        }
    }

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
        let trace = crate::model::trace::TraceParent::parse(
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        );
        let whole = ConnectionRecord {
            source_network: "n".into(),
            local: Some(address),
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
            source_claimed: some(),
            trace,
            detail: some(),
            ended_by: Some(crate::model::record::Side::Client),
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
