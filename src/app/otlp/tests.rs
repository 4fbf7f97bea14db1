//! The spans that are made from connections, and the times that their export takes.

use std::sync::Arc;
use std::time::Duration;

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;

use super::*;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord, StreamHead};
use isthmus_model::testing::record;
use isthmus_model::trace::{Sampling, TraceParent};
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::access_log::AccessLog;

fn node() -> Node {
    Node {
        name: "gw-0".into(),
        namespace: "istio-system".into(),
        cluster: ClusterId::new("c1"),
        network: Network::new("east"),
        ..Node::default()
    }
}

fn told(record: ConnectionRecord) -> Vec<Span> {
    let records = [Arc::new(record)];
    let request = span::request(&node(), records.iter());
    let [all] = request.resource_spans.as_slice() else { panic!("one resource") };
    let [scope] = all.scope_spans.as_slice() else { panic!("one scope") };
    scope.spans.clone()
}

fn value(span: &Span, key: &str) -> Option<Value> {
    let mut found = span.attributes.iter().filter(|attribute| attribute.key == key);
    let first = found.next()?;
    assert!(found.next().is_none(), "{key} is there twice");
    first.value.clone()?.value
}

fn words(text: &str) -> Option<Value> {
    Some(Value::StringValue(text.to_owned()))
}

#[test]
fn a_span_has_its_place_its_times_and_the_fields_of_the_access_log() {
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let mut record = record(Reason::IdentityDenied, b"a.test");
    let trace = TraceParent::parse(parent);
    record.stream = Some(Box::new(StreamHead {
        trace,
        trace_state: Some("a=1".into()),
        source_claimed: Some("c1/shop/cart".into()),
        ..StreamHead::default()
    }));
    record.span = Sampling::of(0.0).span(trace, None, || 7).map(Box::new);
    record.protocol = ConnectionProtocol::Hbone;
    record.service = Some("a.test".into());
    record.port = Some(443);
    record.connect = Some(Duration::from_micros(2_500));
    record.bytes_up = 12;
    record.duration = Duration::from_millis(5);
    let spans = told(record);
    let [span] = spans.as_slice() else { panic!("one span") };
    assert_eq!(span.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes());
    assert_eq!(span.parent_span_id, 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
    assert_eq!((&*span.span_id, span.flags), (&[0, 0, 0, 0, 0, 0, 0, 7][..], 0x301));
    assert_eq!((&*span.name, span.kind), ("isthmus hbone", 2));
    assert_eq!(span.end_time_unix_nano - span.start_time_unix_nano, 5_000_000);
    assert_eq!(span.trace_state, "a=1");
    let status = span.status.clone().unwrap_or_default();
    assert_eq!((status.code, &*status.message), (2, "identity_denied"));
    for (key, wanted) in [
        ("isthmus.reason", words("identity_denied")),
        ("isthmus.listener", words("l")),
        ("isthmus.service", words("a.test")),
        ("isthmus.source_claimed", words("c1/shop/cart")),
        ("isthmus.network", words("east")),
        ("isthmus.connect_ms", Some(Value::DoubleValue(2.5))),
        ("isthmus.bytes_up", Some(Value::IntValue(12))),
        ("client.address", words("10.0.0.1")),
        ("client.port", Some(Value::IntValue(4000))),
        ("server.address", words("a.test")),
        ("server.port", Some(Value::IntValue(443))),
        ("isthmus.time", None),
        ("isthmus.trace_id", None),
        ("isthmus.endpoint", None),
    ] {
        assert_eq!(value(span, key), wanted, "{key}");
    }
}

#[test]
fn one_that_begins_a_trace_has_no_parent_and_one_that_was_not_chosen_is_none() {
    let mut one = record(Reason::Ok, b"a.test");
    assert_eq!(told(one.clone()), []);
    one.span = Sampling::of(1.0).span(None, None, || 7).map(Box::new);
    let spans = told(one);
    assert_eq!((&*spans[0].name, spans[0].flags, &spans[0].status), ("isthmus sni", 0x101, &None));
    assert!(spans[0].parent_span_id.is_empty());
}

#[test]
fn names_that_clients_choose_are_cut() {
    let mut one = record(Reason::SniInvalid, &[0xff; 16_384]);
    one.span = Sampling::of(1.0).span(None, None, || 7).map(Box::new);
    let Some(Value::StringValue(sni)) = value(&told(one)[0], "isthmus.sni") else { panic!("a text") };
    assert_eq!(sni.len(), 1_024);
}

#[test]
fn who_tells_is_said_once_and_what_is_not_known_is_left_out() {
    let all = |node: &Node| {
        let request = span::request(node, std::iter::empty());
        let attributes = request.resource_spans[0].resource.clone().unwrap_or_default().attributes;
        attributes.into_iter().map(|attribute| attribute.key).collect::<Vec<_>>()
    };
    let known = [
        "service.name",
        "service.version",
        "service.instance.id",
        "k8s.cluster.name",
        "k8s.namespace.name",
        "isthmus.network",
    ];
    assert_eq!(all(&node()), known);
    assert_eq!(all(&Node::default()), known[..2]);
}

#[test]
fn a_stream_that_its_caller_cancelled_is_no_error() {
    let mut record = record(Reason::ClientReset, b"a.test");
    record.span = Sampling::of(1.0).span(None, None, || 7).map(Box::new);
    record.cancelled = true;
    assert_eq!(told(record.clone())[0].status, None);
    record.cancelled = false;
    assert!(told(record)[0].status.is_some());
}

fn spans() -> Spans {
    Telemetry::start(AccessLog::Off.open().expect("no file")).expect("threads").spans
}

/// Returns a task that sends spans, and the address of a collector that accepts connections and says nothing.
async fn to_a_silent_collector() -> (Task, Target, tokio::net::TcpListener) {
    let collector = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = collector.local_addr().expect("bound");
    let target = Target { collector: format!("http://{address}"), node: node() };
    let spans = spans();
    let queue = spans.queue().expect("the first who asks");
    let (_, settings) = watch::channel(Settings { target: Some(target.clone()), finish: false });
    (Task { spans, queue, settings, open: None, scope: Scope::default(), failing: false }, target, collector)
}

#[tokio::test(start_paused = true)]
async fn a_silent_collector_has_three_times_5_s_and_10_s_in_all() {
    let (mut task, target, _collector) = to_a_silent_collector().await;
    let request = span::request(&target.node, std::iter::empty());
    let begun = Instant::now();
    task.deliver(&target, &request).await.expect_err("no answer");
    // The two pauses take 1.5 s, more or less by a fifth.
    assert_eq!(begun.elapsed().as_secs(), 16);
    let begun = Instant::now();
    task.send(&target, &[]).await;
    assert_eq!(begun.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn the_last_spans_hold_up_the_end_for_2_s_at_most() {
    let scope = Scope::default();
    let spans = spans();
    let task = Some(scope.spawn(std::future::pending()));
    let (settings, _) = watch::channel(Settings::default());
    let begun = Instant::now();
    Exporter { spans, settings, task }.finish().await;
    assert_eq!(begun.elapsed().as_secs(), 2);
}
