//! One data-plane thread's handles: looked up once per rule, not once per connection.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use metrics::{Counter, Gauge, Histogram};

use super::Telemetry;
use crate::model::reason::Reason;
use crate::model::record::{ConnectionProtocol, ConnectionRecord};

/// Rules whose series one worker keeps; beyond, they are counted together as `_other`.
const RULES_MAX: usize = 20_000;

/// Listener, service or route, reason.
type EndedKey = (Arc<str>, Arc<str>, Reason);
/// Listener, reason.
type EndedTunnelKey = (Arc<str>, Reason);
/// Service or route, cluster of the endpoint, how the client came.
type DestinationKey = (Arc<str>, Arc<str>, ConnectionProtocol);

/// Which way bytes took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayPath {
    Splice,
    Copy,
    /// Through the frames of a CONNECT stream.
    Hbone,
}

/// One worker's telemetry.
pub struct Local {
    telemetry: Telemetry,
    hello: Histogram,
    connect: Histogram,
    splice: Counter,
    copy: Counter,
    hbone: Counter,
    stalled: Gauge,
    /// What this worker has added to it.
    stalled_added: Cell<u64>,
    tunnels_ended: RefCell<HashMap<EndedTunnelKey, Counter>>,
    active: RefCell<HashMap<Arc<str>, Gauge>>,
    ended: RefCell<HashMap<EndedKey, Counter>>,
    destinations: RefCell<HashMap<DestinationKey, Rc<Destination>>>,
}

/// Where a connection leads, as Istio's metrics count it.
pub struct Destination {
    opened: Counter,
    closed: Counter,
    sent: Counter,
    received: Counter,
}

impl Destination {
    pub fn opened(&self) {
        self.opened.increment(1);
    }

    /// Bytes passed on since the last call.
    pub fn moved(&self, up: u64, down: u64) {
        self.received.increment(up);
        self.sent.increment(down);
    }

    pub fn closed(&self) {
        self.closed.increment(1);
    }
}

impl Local {
    pub fn new(telemetry: &Telemetry) -> Self {
        let recorder = &telemetry.recorder;
        let path = |path| recorder.counter("isthmus_relay_bytes_total", &[("path", path)]);
        Self {
            hello: recorder.histogram("isthmus_hello_seconds"),
            connect: recorder.histogram("isthmus_connect_seconds"),
            splice: path("splice"),
            copy: path("copy"),
            hbone: path("hbone"),
            stalled: recorder.gauge("isthmus_stalled_kernel_bytes", &[]),
            stalled_added: Cell::new(0),
            tunnels_ended: RefCell::default(),
            active: RefCell::default(),
            ended: RefCell::default(),
            destinations: RefCell::default(),
            telemetry: telemetry.clone(),
        }
    }

    /// A connection was accepted.
    pub fn accepted(&self, listener: &Arc<str>) {
        self.active(listener, |gauge| gauge.increment(1.0));
    }

    /// A hello was whole.
    pub fn hello(&self, after: Duration) {
        self.hello.record(after.as_secs_f64());
    }

    /// An endpoint took the connection.
    pub fn connected(&self, after: Duration) {
        self.connect.record(after.as_secs_f64());
    }

    /// So much kernel memory is held by connections of this thread whose peers do not read.
    pub fn stalled_memory(&self, bytes: u64) {
        let before = self.stalled_added.replace(bytes);
        if before != bytes {
            self.stalled.increment(bytes as f64 - before as f64);
        }
    }

    /// Bytes were passed on.
    pub fn relayed(&self, path: RelayPath, bytes: u64) {
        match path {
            RelayPath::Splice => self.splice.increment(bytes),
            RelayPath::Copy => self.copy.increment(bytes),
            RelayPath::Hbone => self.hbone.increment(bytes),
        }
    }

    /// A probe ended: a connection that was gone before its first byte. It is counted, neither logged nor listed nor traced.
    pub fn probe_ended(&self, record: &ConnectionRecord) {
        self.active(&record.listener, |gauge| gauge.decrement(1.0));
        self.count_ended(record);
    }

    /// A connection ended. `random` makes the ids of its span, if it gets one.
    pub fn ended(&self, mut record: ConnectionRecord, random: impl FnMut() -> u64) {
        self.active(&record.listener, |gauge| gauge.decrement(1.0));
        self.count_ended(&record);
        record.span =
            self.telemetry.spans.sampling().and_then(|sampling| sampling.span(record.trace, random));
        let record = Arc::new(record);
        if record.span.is_some() {
            self.telemetry.spans.offer(&record);
        }
        self.telemetry.writer.connection(record);
    }

    /// A connection ended of which nothing is told.
    pub fn ended_silently(&self, listener: &Arc<str>) {
        self.active(listener, |gauge| gauge.decrement(1.0));
    }

    /// Counts a connection that carried CONNECT streams, each of which has told its own story.
    pub fn tunnel_ended(&self, listener: &Arc<str>, reason: Reason) {
        let new = || {
            let labels = [("listener", &**listener), ("reason", reason.text())];
            self.telemetry.recorder.counter("isthmus_hbone_connections_total", &labels)
        };
        let mut ended = self.tunnels_ended.borrow_mut();
        ended.entry((listener.clone(), reason)).or_insert_with(new).increment(1);
    }

    /// The counters of a destination: its service (or route) and the cluster of the endpoint.
    pub fn destination(&self, record: &ConnectionRecord) -> Rc<Destination> {
        let name =
            record.service.as_ref().or(record.route.as_ref()).cloned().unwrap_or_else(|| "unknown".into());
        let mut destinations = self.destinations.borrow_mut();
        let full = destinations.len() >= RULES_MAX;
        let key = (name, record.endpoint_cluster.clone(), record.protocol);
        if let Some(known) = destinations.get(&key) {
            return known.clone();
        }
        let key = if full { ("_other".into(), "".into(), record.protocol) } else { key };
        destinations
            .entry(key.clone())
            .or_insert_with(|| Rc::new(self.new_destination(&key.0, record)))
            .clone()
    }

    fn new_destination(&self, name: &str, record: &ConnectionRecord) -> Destination {
        let namespace = record.service_namespace.as_deref().unwrap_or("unknown");
        let cluster = if record.endpoint_cluster.is_empty() { "unknown" } else { &record.endpoint_cluster };
        let short = if record.service.is_some() { name.split('.').next().unwrap_or(name) } else { name };
        // Of TLS that is passed through nobody here knows who takes part in it.
        let security = match record.protocol {
            ConnectionProtocol::Hbone => "mutual_tls",
            ConnectionProtocol::Sni => "unknown",
        };
        let labels = [
            ("reporter", "gateway"),
            ("source_workload", "unknown"),
            ("source_workload_namespace", "unknown"),
            ("source_principal", "unknown"),
            ("source_cluster", "unknown"),
            ("destination_service", name),
            ("destination_service_name", short),
            ("destination_service_namespace", namespace),
            ("destination_workload", "unknown"),
            ("destination_workload_namespace", namespace),
            ("destination_principal", "unknown"),
            ("destination_cluster", cluster),
            ("request_protocol", "tcp"),
            ("connection_security_policy", security),
        ];
        let counter = |metric| self.telemetry.recorder.counter(metric, &labels);
        Destination {
            opened: counter("istio_tcp_connections_opened_total"),
            closed: counter("istio_tcp_connections_closed_total"),
            sent: counter("istio_tcp_sent_bytes_total"),
            received: counter("istio_tcp_received_bytes_total"),
        }
    }

    fn active(&self, listener: &Arc<str>, change: impl FnOnce(&Gauge)) {
        let mut active = self.active.borrow_mut();
        let gauge = active.entry(listener.clone()).or_insert_with(|| {
            self.telemetry.recorder.gauge("isthmus_connections_active", &[("listener", listener)])
        });
        change(gauge);
    }

    fn count_ended(&self, record: &ConnectionRecord) {
        let Some(reason) = record.reason else {
            return;
        };
        let unknown = || Arc::from("_unknown");
        let service = record.service.as_ref().or(record.route.as_ref()).cloned().unwrap_or_else(unknown);
        let mut ended = self.ended.borrow_mut();
        let key = (record.listener.clone(), service, reason);
        if let Some(counter) = ended.get(&key) {
            counter.increment(1);
            return;
        }
        let service = if ended.len() >= RULES_MAX { "_other" } else { &*key.1 };
        let labels = [("listener", &*record.listener), ("service", service), ("reason", reason.text())];
        let counter = self.telemetry.recorder.counter("isthmus_connections_total", &labels);
        counter.increment(1);
        if ended.len() < RULES_MAX {
            ended.insert(key, counter);
        }
    }
}
