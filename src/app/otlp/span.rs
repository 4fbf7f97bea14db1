//! The messages to a collector: one span per connection, with the node as the resource. The attributes of a span are the fields
//! of the access log with the prefix `isthmus.`, and those attributes of OpenTelemetry's semantic conventions that apply.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, SpanFlags, Status};

use isthmus_model::record::{ConnectionProtocol, ConnectionRecord, GatewayName};
use isthmus_settings::policy::Node;
use isthmus_telemetry::access_log::fields;

/// The largest attribute text in bytes. Longer texts are cut, because clients choose the length of some of them.
const TEXT_BYTES_MAX: usize = 1_024;
/// Fields of the access log that have their own field in a span.
const NOT_ATTRIBUTES: [&str; 3] = ["time", "duration_ms", "trace_id"];
/// The flag `sampled` (W3C Trace Context §3.3).
const SAMPLED: u32 = 1;

/// Creates the request for a batch.
pub(super) fn request<'r>(
    node: &Node,
    records: impl Iterator<Item = &'r Arc<ConnectionRecord>>,
) -> ExportTraceServiceRequest {
    let scope = InstrumentationScope {
        name: "isthmus".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let spans = records.filter_map(|record| span(record, node)).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, schema_url: String::new() }];
    let resource = Some(resource(node));
    let resource_spans = vec![ResourceSpans { resource, scope_spans, schema_url: String::new() }];
    ExportTraceServiceRequest { resource_spans }
}

/// Returns the attributes that describe this gateway.
fn resource(node: &Node) -> Resource {
    let attributes = [
        ("service.name", "isthmus"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", &node.name),
        ("k8s.cluster.name", node.cluster.as_str()),
        ("k8s.namespace.name", &node.namespace),
        ("isthmus.network", node.network.as_str()),
    ];
    let known = attributes.into_iter().filter(|(_, value)| !value.is_empty());
    Resource { attributes: known.map(|(key, value)| text(key, value)).collect(), ..Resource::default() }
}

/// Creates the span of a connection; `None` if its trace is not sampled.
fn span(record: &ConnectionRecord, node: &Node) -> Option<Span> {
    let place = record.span.as_deref()?;
    let name = match record.protocol {
        ConnectionProtocol::Sni => "isthmus sni",
        ConnectionProtocol::Hbone => "isthmus hbone",
        ConnectionProtocol::Tcp => "isthmus tcp",
    };
    let trace_state = record.stream.as_ref().and_then(|stream| stream.trace_state.as_deref());
    let remote = if place.parent.is_some() { SpanFlags::ContextIsRemoteMask as u32 } else { 0 };
    Some(Span {
        trace_id: place.trace.0.into(),
        span_id: place.id.0.into(),
        trace_state: trace_state.unwrap_or_default().to_owned(),
        parent_span_id: place.parent.map(|parent| parent.0.into()).unwrap_or_default(),
        flags: SAMPLED | SpanFlags::ContextHasIsRemoteMask as u32 | remote,
        name: name.to_owned(),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: nanoseconds(record.time),
        end_time_unix_nano: nanoseconds(record.time + record.duration),
        attributes: attributes(record, node),
        status: status(record),
        ..Span::default()
    })
}

/// Returns the status of a faulty connection; `None` if the connection ended well, because OpenTelemetry requires that a server
/// leaves the status of such a span unset.
fn status(record: &ConnectionRecord) -> Option<Status> {
    let reason = record.reason.filter(|_| record.is_fault())?;
    Some(Status { code: StatusCode::Error.into(), message: reason.text().to_owned() })
}

fn attributes(record: &ConnectionRecord, node: &Node) -> Vec<KeyValue> {
    // The fields about the gateway are empty here, since the resource already has them.
    let own = fields(record, &GatewayName::default())
        .into_iter()
        .filter(|(name, _)| !NOT_ATTRIBUTES.contains(&name.as_str()));
    let own = own.filter_map(|(name, value)| {
        let value = match value {
            serde_json::Value::String(text) => Value::StringValue(shortened(text)),
            serde_json::Value::Number(number) => match number.as_i64() {
                Some(whole) => Value::IntValue(whole),
                None => Value::DoubleValue(number.as_f64()?),
            },
            _ => return None,
        };
        Some(attribute(&format!("isthmus.{name}"), value))
    });
    let network = (!node.network.as_str().is_empty()).then(|| text("isthmus.network", node.network.as_str()));
    own.chain(network).chain(conventional(record)).collect()
}

/// Returns the attributes that are named by OpenTelemetry's semantic conventions.
fn conventional(record: &ConnectionRecord) -> Vec<KeyValue> {
    let mut all = vec![
        text("network.transport", "tcp"),
        text("client.address", &record.source.ip().to_string()),
        attribute("client.port", Value::IntValue(record.source.port().into())),
    ];
    all.extend(record.service.as_deref().map(|service| text("server.address", service)));
    all.extend(record.port.map(|port| attribute("server.port", Value::IntValue(port.into()))));
    all
}

fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(value.to_owned()))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn shortened(mut text: String) -> String {
    let end = (0..=TEXT_BYTES_MAX.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or_default());
    text
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
