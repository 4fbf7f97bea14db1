//! The access log: its settings, and the record of a connection as a line. The members of a line are listed in
//! [`isthmus_api::connection`].

use std::path::PathBuf;

use serde_json::{Map, Value};

use isthmus_api::connection::Connection;
use isthmus_model::record::{ConnectionRecord, GatewayName};

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

/// Returns the members of a record by name, without those that have no value.
pub fn fields(record: &ConnectionRecord, gateway: &GatewayName) -> Map<String, Value> {
    match serde_json::to_value(Connection::of(record, gateway)) {
        Ok(Value::Object(members)) => members,
        // This cannot happen: a connection is an object of texts and numbers.
        Ok(_) | Err(_) => Map::new(),
    }
}

/// Returns a line of the log, including its line feed.
pub fn line(record: &ConnectionRecord, gateway: &GatewayName, format: Format) -> String {
    let mut line = match format {
        // Writing cannot fail, because a connection is an object of texts and numbers.
        Format::Json => serde_json::to_string(&Connection::of(record, gateway)).unwrap_or_default(),
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
    use isthmus_api::connection::FIELDS;
    use isthmus_model::reason::Reason;
    use isthmus_model::record::{Proxied, StreamHead};
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
            source_network: Some("n".into()),
            local: Some(address),
            proxied: Some(Box::new(Proxied { proxy: address, destination: address })),
            stream: Some(Box::new(StreamHead {
                authority: "x".into(),
                source_claimed: some(),
                trace,
                trace_state: None,
            })),
            alpn: Some((*b"h2").into()),
            route: Some("r".into()),
            service: Some("s".into()),
            port: Some(1),
            subset: Some("v1".into()),
            endpoint: Some(address),
            endpoint_cluster: Some("c".into()),
            endpoint_locality: Some("l".into()),
            attempts: 1,
            source_identity: Some("i".into()),
            peer: some().map(|text: Box<str>| text.into()),
            unique_id: some(),
            detail: some(),
            ended_by: Some(isthmus_model::side::Side::Client),
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
