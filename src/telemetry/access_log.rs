//! A connection's record as a line of the access log, and as the fields of the admin API.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::clock::rfc3339;
use crate::model::record::ConnectionRecord;

/// Where the access log goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessLog {
    Off,
    To { sink: Sink, format: Format },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sink {
    Stdout,
    Stderr,
    File(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Json,
    /// `key=value`, one space between.
    Text,
}

/// The fields of a record by the names of SPEC §11; what is not known is left out.
pub fn fields(record: &ConnectionRecord) -> Map<String, Value> {
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
    put("source_identity", record.source_identity.as_deref().and_then(text));
    put("source_claimed", record.source_claimed.as_deref().and_then(text));
    put("reason", record.reason.map(|reason| reason.text().into()));
    put("duration_ms", Some(milliseconds(record.duration)));
    put("hello_ms", record.hello.map(milliseconds));
    put("connect_ms", record.connect.map(milliseconds));
    put("bytes_up", Some(record.bytes_up.into()));
    put("bytes_down", Some(record.bytes_down.into()));
    let trace = record.span.map(|span| span.trace).or_else(|| record.trace.map(|parent| parent.trace));
    put("trace_id", trace.map(|trace| trace.to_string().into()));
    put("detail", record.detail.as_deref().and_then(text));
    fields
}

/// A line of the log, with its line feed.
pub fn line(record: &ConnectionRecord, format: Format) -> String {
    let fields = fields(record);
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
    use crate::model::record::Protocol;

    pub(crate) fn record(reason: Reason, sni: &[u8]) -> ConnectionRecord {
        ConnectionRecord {
            id: 7,
            time: UNIX_EPOCH,
            listener: "l".into(),
            protocol: Protocol::Sni,
            authority: None,
            source_claimed: None,
            trace: None,
            trace_state: None,
            span: None,
            detail: None,
            source: SocketAddr::from(([10, 0, 0, 1], 4000)),
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
            let line = line(&record(Reason::SniInvalid, hostile), format);
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(line.trim_end().bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{line:?}");
        }
        let json: Value =
            serde_json::from_str(&line(&record(Reason::SniInvalid, hostile), Format::Json)).expect("JSON");
        assert_eq!((&json["reason"], &json["duration_ms"]), (&"sni_invalid".into(), &1.5.into()));
        let text = line(&record(Reason::SniInvalid, b"a.b"), Format::Text);
        assert!(text.contains(" sni=a.b reason=sni_invalid "), "{text}");
    }
}
