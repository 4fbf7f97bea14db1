//! Metrics of the control side: config, registries, the process.

use metrics::{Counter, Gauge, Recorder as _};

use super::recorder::Recorder;

/// The result of a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadResult {
    /// The new config is in use.
    Applied,
    /// The config before it stays in use.
    Rejected,
}

/// The kind of a certificate whose expiry is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateKind {
    /// The gateway's own certificate.
    Workload,
    /// The root of a trust domain that expires last.
    Roots,
}

impl CertificateKind {
    fn text(self) -> &'static str {
        match self {
            Self::Workload => "workload",
            Self::Roots => "roots",
        }
    }
}

/// Handles of the control side's metrics.
pub struct Control {
    generation: Gauge,
    draining: Gauge,
    applied: Counter,
    rejected: Counter,
}

/// The names and descriptions of all metrics that the recorder counts.
pub const DESCRIPTIONS: &[(&str, &str)] = &[
    (
        "isthmus_connections_total",
        "Connections ended, by listener, by service (or the route that matched), and by reason.",
    ),
    ("isthmus_connections_active", "Connections and CONNECT streams now, from accept to the end."),
    (
        "isthmus_hbone_connections_total",
        "Connections ended that carried CONNECT streams, by listener and reason; the streams are in \
         isthmus_connections_total, with connections that failed.",
    ),
    (
        "isthmus_peer_connections_total",
        "Connections and CONNECT streams of callers of a peer that ended, by peer and reason; isthmus_connections_total has them \
         too.",
    ),
    (
        "isthmus_control_connections_refused_total",
        "Connections to the admin, metrics, health and xDS listeners that were refused (limit_global), made room for another \
         (made_room), or whose client was silent (hello_timeout).",
    ),
    ("isthmus_hello_seconds", "From accept to a whole hello."),
    ("isthmus_connect_seconds", "From the first dial to the endpoint that took the connection."),
    (
        "isthmus_stalled_kernel_bytes",
        "Kernel memory of the sockets of connections whose peers do not read what waits for them.",
    ),
    ("isthmus_relay_bytes_total", "Bytes passed on, by the path they took."),
    ("isthmus_endpoint_ejected", "Endpoints left out now because they failed, by service."),
    (
        "isthmus_endpoint_failures_total",
        "Attempts that an endpoint did not take, by service or route and by reason; also of connections that another \
         endpoint then took.",
    ),
    (
        "isthmus_endpoint_checks_total",
        "Health checks ended, by reason: ok, or the failure (internal: a fault of this host, no verdict).",
    ),
    ("isthmus_config_generation", "Counts up with each world taken into use."),
    ("isthmus_config_reloads_total", "Reloads of the config file, by result."),
    (
        "isthmus_access_log_dropped_total",
        "Lines of the access log that were lost: the queue was full, nobody read them, or they could not be written.",
    ),
    ("isthmus_log_dropped_total", "Lines of the program's own log that were lost in the same ways."),
    ("isthmus_draining", "1 from the order to stop on, 0 before."),
    ("isthmus_spans_sent_total", "Spans that the collector has taken."),
    ("isthmus_spans_dropped_total", "Spans that the queue could not take, or that the collector did not."),
    ("isthmus_xds_clients", "Streams of xDS clients now."),
    ("isthmus_xds_pushes_total", "Responses sent to xDS clients, by resource type."),
    (
        "isthmus_xds_refused_total",
        "Streams of xDS clients that were refused, as no rule of xds.clients allows what they claim.",
    ),
    ("isthmus_xds_rejects_total", "Responses that xDS clients refused, by resource type."),
    ("isthmus_xds_convergence_seconds", "From a change of the world to the acknowledgement of a client."),
    ("isthmus_dns_queries_total", "Queries that the DNS server has answered, by the code of the answer."),
    (
        "isthmus_dns_unanswered_total",
        "Queries without an answer: the bytes were no query, the source had its share of the second, or the socket was full.",
    ),
    (
        "isthmus_dns_forwarded_total",
        "Questions about names of other zones that other servers were asked, by result.",
    ),
    ("isthmus_dns_services", "Services that the DNS server answers for."),
    (
        "isthmus_certificate_expiry_seconds",
        "Seconds until a certificate of ours expires, negative after, by kind (workload, roots) and trust domain.",
    ),
    ("isthmus_build_info", "1, with the version as label."),
    ("istio_tcp_connections_opened_total", "Connections passed on to an endpoint."),
    ("istio_tcp_connections_closed_total", "Ended connections to endpoints."),
    ("istio_tcp_sent_bytes_total", "Bytes from endpoint to client."),
    ("istio_tcp_received_bytes_total", "Bytes from client to endpoint."),
];

impl Control {
    /// Describes all metrics to the recorder and makes the handles.
    pub(crate) fn new(recorder: &Recorder) -> Self {
        for (name, text) in DESCRIPTIONS {
            recorder.describe_gauge((*name).into(), None, (*text).into());
        }
        recorder.gauge("isthmus_build_info", &[("version", env!("CARGO_PKG_VERSION"))]).set(1.0);
        let reloads = |result| recorder.counter("isthmus_config_reloads_total", &[("result", result)]);
        Self {
            generation: recorder.gauge("isthmus_config_generation", &[]),
            draining: recorder.gauge("isthmus_draining", &[]),
            applied: reloads("applied"),
            rejected: reloads("rejected"),
        }
    }

    /// Sets the generation of the snapshot in use.
    pub fn published(&self, generation: u64) {
        self.generation.set(generation as f64);
    }

    /// Notes that the process was ordered to stop.
    pub fn draining(&self) {
        self.draining.set(1.0);
    }

    /// Counts a reload.
    pub fn reloaded(&self, result: ReloadResult) {
        match result {
            ReloadResult::Applied => self.applied.increment(1),
            ReloadResult::Rejected => self.rejected.increment(1),
        }
    }

    /// Sets the seconds until a certificate expires, negative after. Trust domains are those of the config and of the
    /// certificate's source, so the series are few.
    pub fn certificate_expires(
        &self,
        recorder: &Recorder,
        kind: CertificateKind,
        trust_domain: &str,
        seconds: f64,
    ) {
        let labels = [("kind", kind.text()), ("trust_domain", trust_domain)];
        recorder.gauge("isthmus_certificate_expiry_seconds", &labels).set(seconds);
    }
}
