//! The metrics of one data-plane thread. It keeps the handles of what most connections count, by listener and by rule, because a
//! lookup in the registry hashes all labels.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::{Equivalent, HashMap};
use metrics::{Counter, Gauge, Histogram};

use super::Telemetry;
use super::recorder::Shard;
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord};
use isthmus_model::trace::{Allowance, Span, TraceId, TraceParent};

/// The number of rules for which one worker keeps handles; further rules are counted together as `_other`.
const RULES_MAX: usize = 20_000;

/// The listener, the service or route, and the reason.
type EndedKey = (Arc<str>, Arc<str>, Reason);
/// The service or route, the cluster of the endpoint, and the protocol of the client.
type DestinationKey = (Arc<str>, Arc<str>, ConnectionProtocol);

/// A key of three parts, borrowed for a lookup.
#[derive(Hash)]
struct Borrowed<'a, T>(&'a str, &'a str, T);

impl<T: PartialEq> Equivalent<(Arc<str>, Arc<str>, T)> for Borrowed<'_, T> {
    fn equivalent(&self, key: &(Arc<str>, Arc<str>, T)) -> bool {
        *self.0 == *key.0 && *self.1 == *key.1 && self.2 == key.2
    }
}

/// A network and a reason, borrowed for a lookup.
#[derive(Hash)]
struct NetworkKey<'a>(&'a str, Reason);

impl Equivalent<(Arc<str>, Reason)> for NetworkKey<'_> {
    fn equivalent(&self, key: &(Arc<str>, Reason)) -> bool {
        *self.0 == *key.0 && self.1 == key.1
    }
}

/// The path of bytes through the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayPath {
    /// In the kernel, through a pipe.
    Splice,
    /// Through a buffer of the worker.
    Copy,
    /// Bytes are carried in frames of a CONNECT stream.
    Hbone,
}

/// The cause for which the gateway itself ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetirementCause {
    /// The connection is older than `maxConnectionAge`.
    Age,
    /// A planned drain.
    Drain,
    /// The gateway stops, or hands over to a new process.
    Stop,
}

/// The way in which the gateway itself ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetirementEnd {
    /// The connection was closed in a pause.
    Pause,
    /// An HBONE connection was asked to leave.
    GoAway,
    /// The connection had no pause, and was reset.
    Reset,
}

/// The metrics of one worker, and its access to the logs.
pub struct Local {
    telemetry: Telemetry,
    /// The shard that holds the counts of this thread.
    recorder: Arc<Shard>,
    hello: Histogram,
    connect: Histogram,
    splice: Counter,
    copy: Counter,
    hbone: Counter,
    stalled: Gauge,
    /// The number of bytes that this worker has added to `stalled`.
    stalled_added: Cell<u64>,
    /// The number of traces that may still be sampled because of their ids, which clients choose.
    allowance: Cell<Allowance>,
    traces_limited: Counter,
    listeners: RefCell<HashMap<Arc<str>, Rc<ListenerCounts>>>,
    ended: RefCell<HashMap<EndedKey, Counter>>,
    /// The ended connections by the client's network and by reason.
    networks: RefCell<HashMap<(Arc<str>, Reason), Counter>>,
    destinations: RefCell<HashMap<DestinationKey, Rc<Destination>>>,
}

/// A listener's connections as one worker counts them.
pub struct ListenerCounts {
    /// The name of the listener.
    pub name: Arc<str>,
    active: Gauge,
    probes: Counter,
}

impl ListenerCounts {
    /// Counts an accepted connection or stream.
    pub fn accepted(&self) {
        self.active.increment(1.0);
    }

    /// Decreases the number of live connections, and counts no reason. Either [`Local::hbone_ended`] counts the reason, or the
    /// connection continues outside the data plane.
    pub fn ended_silently(&self) {
        self.active.decrement(1.0);
    }

    /// Counts the end of a connection from which no byte was read.
    pub fn probed(&self) {
        self.active.decrement(1.0);
        self.probes.increment(1);
    }
}

/// The counters of a destination.
pub struct Destination {
    opened: Counter,
    closed: Counter,
    sent: Counter,
    received: Counter,
}

impl Destination {
    /// Counts a connection that an endpoint accepted.
    pub fn opened(&self) {
        self.opened.increment(1);
    }

    /// Counts relayed bytes: `up` from the client and `down` from the endpoint.
    pub fn moved(&self, up: u64, down: u64) {
        self.received.increment(up);
        self.sent.increment(down);
    }

    /// Counts the end of a connection that was counted as opened.
    fn closed(&self) {
        self.closed.increment(1);
    }
}

impl Local {
    /// Creates the handles of one thread, with a shard of its own.
    pub fn new(telemetry: &Telemetry) -> Self {
        let recorder = telemetry.recorder.shard();
        let path = |path| recorder.counter("isthmus_relay_bytes_total", &[("path", path)]);
        Self {
            hello: recorder.histogram("isthmus_hello_seconds"),
            connect: recorder.histogram("isthmus_connect_seconds"),
            splice: path("splice"),
            copy: path("copy"),
            hbone: path("hbone"),
            stalled: recorder.gauge("isthmus_stalled_kernel_bytes", &[]),
            stalled_added: Cell::new(0),
            allowance: Cell::default(),
            traces_limited: recorder.counter("isthmus_traces_limited_total", &[]),
            listeners: RefCell::default(),
            ended: RefCell::default(),
            networks: RefCell::default(),
            destinations: RefCell::default(),
            telemetry: telemetry.clone(),
            recorder,
        }
    }

    /// Returns the counts of a listener.
    pub fn listener(&self, name: &Arc<str>) -> Rc<ListenerCounts> {
        let mut listeners = self.listeners.borrow_mut();
        if let Some(known) = listeners.get(name) {
            return known.clone();
        }
        let labels = [("listener", &**name)];
        let active = self.recorder.gauge("isthmus_connections_active", &labels);
        let probes = self.recorder.counter("isthmus_probes_total", &labels);
        let new = Rc::new(ListenerCounts { name: name.clone(), active, probes });
        listeners.insert(name.clone(), new.clone());
        new
    }

    /// Records the time from the accept to the complete hello.
    pub fn hello(&self, after: Duration) {
        self.hello.record(after.as_secs_f64());
    }

    /// Records the time from the first dial until an endpoint accepted.
    pub fn connected(&self, after: Duration) {
        self.connect.record(after.as_secs_f64());
    }

    /// Sets the number of bytes of kernel memory that connections of this thread hold because their peers do not read.
    pub fn stalled_memory(&self, bytes: u64) {
        let before = self.stalled_added.replace(bytes);
        if before != bytes {
            self.stalled.increment(bytes as f64 - before as f64);
        }
    }

    /// Counts relayed bytes.
    pub fn relayed(&self, path: RelayPath, bytes: u64) {
        match path {
            RelayPath::Splice => self.splice.increment(bytes),
            RelayPath::Copy => self.copy.increment(bytes),
            RelayPath::Hbone => self.hbone.increment(bytes),
        }
    }

    /// Counts the end of a connection or stream; `counts` are those of its destination, if an endpoint has accepted.
    pub fn ended(
        &self,
        listener: &ListenerCounts,
        record: &ConnectionRecord,
        counts: Option<&Destination>,
        reason: Reason,
    ) {
        listener.active.decrement(1.0);
        if let Some(counts) = counts {
            counts.closed();
        }
        self.ended_counter(&listener.name, record, reason).increment(1);
    }

    fn ended_counter(&self, listener: &Arc<str>, record: &ConnectionRecord, reason: Reason) -> Counter {
        let mut ended = self.ended.borrow_mut();
        let name = record.destination().map_or("_unknown", |name| &**name);
        if let Some(counter) = ended.get(&Borrowed(listener, name, reason)) {
            return counter.clone();
        }
        let is_full = ended.len() >= RULES_MAX;
        let service = if is_full { "_other" } else { name };
        let labels = [("listener", &**listener), ("service", service), ("reason", reason.text())];
        let counter = self.recorder.counter("isthmus_connections_total", &labels);
        if !is_full {
            ended.insert((listener.clone(), name.into(), reason), counter.clone());
        }
        counter
    }

    /// Returns the span of a connection that has ended, if its trace is sampled. `caller` is the trace context that the caller
    /// sent, `hello` is the id of the trace that begins with the client's hello, and `random` supplies the ids. If a trace is
    /// sampled because of an id that the client chose, the [`Allowance`] of the worker must permit it too.
    pub fn span(
        &self,
        caller: Option<TraceParent>,
        hello: Option<TraceId>,
        random: impl FnMut() -> u64,
    ) -> Option<Span> {
        let sampling = self.telemetry.spans.sampling()?;
        let span = sampling.span(caller, hello, random);
        let is_id_of_client = caller.map_or_else(|| hello.is_some(), |caller| !caller.sampled);
        if !is_id_of_client {
            return span;
        }
        let mut allowance = self.allowance.get();
        allowance.counted(sampling);
        let span = span.filter(|_| {
            let may = allowance.take();
            self.traces_limited.increment(u64::from(!may));
            may
        });
        self.allowance.set(allowance);
        span
    }

    /// Returns true if the end of a connection must be passed to [`log`](Self::log).
    pub fn is_logged(&self, reason: Reason, cancelled: bool) -> bool {
        (reason != Reason::Ok && !cancelled) || self.telemetry.writer.logs_connections()
    }

    /// Passes a connection that has ended to the logs, and to the exporter if it has a span.
    pub fn log(&self, record: ConnectionRecord) {
        let record = Arc::new(record);
        if record.span.is_some() {
            self.telemetry.spans.offer(&record);
        }
        self.telemetry.writer.connection(record);
    }

    /// Counts the end of an HBONE connection; its streams are counted separately.
    pub fn hbone_ended(&self, listener: &Arc<str>, reason: Reason) {
        let labels = [("listener", &**listener), ("reason", reason.text())];
        self.recorder.counter("isthmus_hbone_connections_total", &labels).increment(1);
    }

    /// Counts a connection that the gateway itself ends.
    pub fn retired(&self, cause: RetirementCause, end: RetirementEnd) {
        let cause = match cause {
            RetirementCause::Age => "age",
            RetirementCause::Drain => "drain",
            RetirementCause::Stop => "stop",
        };
        let end = match end {
            RetirementEnd::Pause => "pause",
            RetirementEnd::GoAway => "goaway",
            RetirementEnd::Reset => "reset",
        };
        self.recorder
            .counter("isthmus_connections_retired_total", &[("cause", cause), ("end", end)])
            .increment(1);
    }

    /// Counts the end of a connection or stream of a peer's caller; [`Self::ended`] counts it too.
    pub fn peer_ended(&self, peer: &Arc<str>, reason: Reason) {
        let labels = [("peer", &**peer), ("reason", reason.text())];
        self.recorder.counter("isthmus_peer_connections_total", &labels).increment(1);
    }

    /// Counts the end of a connection or stream whose client is on this network; [`Self::ended`] counts it too.
    pub fn network_ended(&self, network: &Arc<str>, reason: Reason) {
        let mut networks = self.networks.borrow_mut();
        if let Some(counter) = networks.get(&NetworkKey(network, reason)) {
            return counter.increment(1);
        }
        let labels = [("network", &**network), ("reason", reason.text())];
        let counter = self.recorder.counter("isthmus_network_connections_total", &labels);
        counter.increment(1);
        if networks.len() < RULES_MAX {
            networks.insert((network.clone(), reason), counter);
        }
    }

    /// Returns the counters of a connection's destination.
    pub fn destination(&self, record: &ConnectionRecord) -> Rc<Destination> {
        let name = record.destination().map_or("unknown", |name| &**name);
        let cluster = record.endpoint_cluster.as_deref().unwrap_or_default();
        let mut destinations = self.destinations.borrow_mut();
        if let Some(known) = destinations.get(&Borrowed(name, cluster, record.protocol)) {
            return known.clone();
        }
        let is_full = destinations.len() >= RULES_MAX;
        let (name, cluster) = if is_full { ("_other", "") } else { (name, cluster) };
        let key = (name.into(), cluster.into(), record.protocol);
        let new = || Rc::new(self.new_destination(name, record));
        destinations.entry(key).or_insert_with(new).clone()
    }

    fn new_destination(&self, name: &str, record: &ConnectionRecord) -> Destination {
        let namespace = record.service_namespace.as_deref().unwrap_or("unknown");
        let cluster = record.endpoint_cluster.as_deref().filter(|cluster| !cluster.is_empty());
        let cluster = cluster.unwrap_or("unknown");
        let short = if record.service.is_some() { name.split('.').next().unwrap_or(name) } else { name };
        // The gateway cannot see the identities in TLS that it does not terminate.
        let security = match record.protocol {
            ConnectionProtocol::Hbone => "mutual_tls",
            ConnectionProtocol::Sni | ConnectionProtocol::Tcp => "unknown",
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
        let counter = |metric| self.recorder.counter(metric, &labels);
        Destination {
            opened: counter("istio_tcp_connections_opened_total"),
            closed: counter("istio_tcp_connections_closed_total"),
            sent: counter("istio_tcp_sent_bytes_total"),
            received: counter("istio_tcp_received_bytes_total"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_log::AccessLog;
    use isthmus_model::testing::record;

    /// The telemetry, and the metrics of one thread.
    fn local() -> (Telemetry, Local) {
        let telemetry = Telemetry::start(AccessLog::Off.open().expect("no file")).expect("threads");
        let local = Local::new(&telemetry);
        (telemetry, local)
    }

    fn to(service: &Arc<str>, cluster: &Arc<str>) -> ConnectionRecord {
        let (service, endpoint_cluster) = (Some(service.clone()), Some(cluster.clone()));
        ConnectionRecord { service, endpoint_cluster, ..record(Reason::Ok, b"a.test") }
    }

    #[test]
    fn ends_are_counted_by_listener_service_and_reason() {
        let (telemetry, local) = local();
        let [east, west] = ["east", "west"].map(|name| local.listener(&name.into()));
        let services: [Arc<str>; 2] = ["a.test".into(), "b.test".into()];
        let clusters: [Arc<str>; 2] = ["one".into(), "two".into()];
        for (service, cluster, listener, reason) in [
            (0, 0, &east, Reason::Ok),
            (0, 0, &east, Reason::Ok),
            (0, 0, &west, Reason::Ok),
            (0, 1, &west, Reason::Ok),
            (1, 1, &west, Reason::Ok),
            (0, 0, &east, Reason::Ok),
            (0, 0, &east, Reason::EndpointReset),
        ] {
            let to = to(&services[service], &clusters[cluster]);
            listener.accepted();
            let counts = local.destination(&to);
            counts.opened();
            local.ended(listener, &to, Some(&counts), reason);
        }
        // A reload makes the same names again, in other memory.
        let again = local.listener(&"east".into());
        let (service, cluster): (Arc<str>, Arc<str>) = ("a.test".into(), "one".into());
        let to = to(&service, &cluster);
        again.accepted();
        local.ended(&again, &to, Some(&local.destination(&to)), Reason::Ok);
        let text = telemetry.recorder.render();
        for (listener, service, reason, count) in [
            ("east", "a.test", "ok", 4),
            ("west", "a.test", "ok", 2),
            ("west", "b.test", "ok", 1),
            ("east", "a.test", "endpoint_reset", 1),
        ] {
            let line = format!(
                "isthmus_connections_total{{listener=\"{listener}\",service=\"{service}\",reason=\"{reason}\"}} {count}\n"
            );
            assert!(text.contains(&line), "{line}{text}");
        }
        for (service, cluster, count) in [("a.test", "one", 6), ("a.test", "two", 1), ("b.test", "two", 1)] {
            let closed = text.lines().find(|line| {
                line.starts_with("istio_tcp_connections_closed_total")
                    && line.contains(&format!("destination_service=\"{service}\""))
                    && line.contains(&format!("destination_cluster=\"{cluster}\""))
            });
            assert!(closed.is_some_and(|line| line.ends_with(&format!("}} {count}"))), "{closed:?}");
        }
        assert!(text.contains("isthmus_connections_active{listener=\"east\"} 0\n"), "{text}");
    }

    #[test]
    fn services_beyond_the_limit_share_counters_but_not_those_of_another_service() {
        let (telemetry, local) = local();
        let (listener, cluster): (_, Arc<str>) = (local.listener(&"east".into()), "one".into());
        for number in 0..RULES_MAX {
            local.destination(&to(&format!("{number}.test").into(), &cluster));
        }
        for service in ["a.test", "b.test", "b.test"] {
            let service = service.into();
            let to = to(&service, &cluster);
            let counts = local.destination(&to);
            local.ended(&listener, &to, Some(&counts), Reason::Ok);
        }
        let text = telemetry.recorder.render();
        for (service, count) in [("a.test", 1), ("b.test", 2)] {
            let line = format!("{{listener=\"east\",service=\"{service}\",reason=\"ok\"}} {count}\n");
            assert!(text.contains(&line), "{line}");
        }
    }
}
