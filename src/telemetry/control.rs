//! Metrics of the control plane: config, certificates, the process, and the descriptions of all metrics.

use metrics::{Counter, Gauge};

use super::recorder::Recorder;

/// The result of a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadResult {
    /// The new config is in use.
    Applied,
    /// The config was rejected, and the previous one stays in use.
    Rejected,
}

/// The result of an upgrade to a new process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeResult {
    /// The new process has taken over.
    Done,
    /// The old process goes on.
    Failed,
}

/// The process in which a live connection of an upgrade goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradedConnection {
    /// The connection goes on in the new process.
    Moved,
    /// The connection ends in the old process.
    Left,
}

/// The result of an enrolment that this gateway served or joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnrolmentResult {
    /// A peer that had no link has one, or its link was printed.
    Enrolled,
    /// The link of a peer replaced another link.
    Replaced,
    /// The other side has sent a secret that belongs to no token of this process.
    TokenUnknown,
    /// The other side has sent the secret of a token that was used.
    TokenUsed,
    /// The other side has sent the secret of a token that has expired.
    TokenExpired,
    /// One of the two gateways has refused the enrolment for a reason that is not listed here.
    Refused,
    /// No address of the token has led to the gateway that made it.
    Unreachable,
    /// The link could not be stored.
    NotStored,
    /// The connection of the other side ended before a request.
    Broken,
}

impl EnrolmentResult {
    /// All results, in the order of the counters.
    const ALL: [Self; 9] = [
        Self::Enrolled,
        Self::Replaced,
        Self::TokenUnknown,
        Self::TokenUsed,
        Self::TokenExpired,
        Self::Refused,
        Self::Unreachable,
        Self::NotStored,
        Self::Broken,
    ];

    fn text(self) -> &'static str {
        match self {
            Self::Enrolled => "enrolled",
            Self::Replaced => "replaced",
            Self::TokenUnknown => "token_unknown",
            Self::TokenUsed => "token_used",
            Self::TokenExpired => "token_expired",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::NotStored => "not_stored",
            Self::Broken => "broken",
        }
    }
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

/// The handles of the control plane's metrics.
pub struct Control {
    generation: Gauge,
    draining: Gauge,
    applied: Counter,
    rejected: Counter,
    upgraded: Counter,
    upgrades_failed: Counter,
    moved: Counter,
    left: Counter,
    /// The counters of enrolments, in the order of [`EnrolmentResult::ALL`].
    enrolments: [Counter; EnrolmentResult::ALL.len()],
}

/// The names and descriptions of all metrics that the recorder counts.
pub const DESCRIPTIONS: &[(&str, &str)] = &[
    (
        "isthmus_connections_total",
        "Ended connections, by listener, by service (or the route that matched), and by reason.",
    ),
    (
        "isthmus_connections_retired_total",
        "Connections that the gateway itself ended, by cause: age (maxConnectionAge), drain (a planned drain), or stop (of the gateway, or \
         its upgrade); and by end: pause (closed in a pause), goaway (an HBONE connection that ends with its last stream), or reset (no \
         pause until the end of the time).",
    ),
    ("isthmus_connections_active", "Open connections and CONNECT streams, from accept to their end."),
    (
        "isthmus_probes_total",
        "Connections that the client closed before the gateway read a byte, or whose hello is that of a gateway's probe, by listener. \
         isthmus_connections_total does not count them.",
    ),
    (
        "isthmus_hbone_connections_total",
        "Ended HBONE connections that carried CONNECT streams, by listener and reason. isthmus_connections_total counts the \
         streams, and HBONE connections that failed before the first stream.",
    ),
    (
        "isthmus_peer_connections_total",
        "Ended connections and CONNECT streams of a peer's callers, by peer and reason; isthmus_connections_total counts them \
         too.",
    ),
    (
        "isthmus_network_connections_total",
        "Ended connections and CONNECT streams, by the client's network (networks.*.cidrs) and by reason; isthmus_connections_total counts \
         them too. Clients of an unknown network are not counted here.",
    ),
    (
        "isthmus_peer_enrolments_total",
        "Enrolments that this gateway served or joined, by result: enrolled, replaced (the peer had a link), token_unknown, token_used, \
         token_expired, refused (by one of the sides), unreachable (at all addresses of the token), not_stored, or broken (the other side's \
         connection ended before a request).",
    ),
    (
        "isthmus_control_connections_refused_total",
        "Connections to the admin, metrics, health, xDS and DNS listeners, and of peers that are not verified yet (peers), that the \
         gateway refused (limit_global), closed to make room for another connection (made_room), or closed because the client \
         sent nothing (hello_timeout) or a request that cannot be read (bad_request; admin, metrics and health only).",
    ),
    ("isthmus_hello_seconds", "Seconds from accept until the whole hello has arrived."),
    ("isthmus_connect_seconds", "Seconds from the first connection attempt until an endpoint accepted."),
    (
        "isthmus_stalled_kernel_bytes",
        "Bytes of kernel memory of the sockets of connections whose client or endpoint does not read the bytes that wait for \
         it. Connections that `bytesPerSecond` slows do not count.",
    ),
    ("isthmus_relay_bytes_total", "Relayed bytes, by path through the gateway (splice, copy or hbone)."),
    ("isthmus_endpoint_ejected", "Endpoints that are ejected at the moment because they failed, by service."),
    (
        "isthmus_endpoint_failures_total",
        "Failed attempts to connect to an endpoint, by service or route and by reason, even if the connection then succeeded \
         with another endpoint.",
    ),
    (
        "isthmus_endpoint_checks_total",
        "Completed health checks, by reason: ok or the failure; internal is a fault of this host, which says nothing about the \
         endpoint.",
    ),
    (
        "isthmus_config_generation",
        "Number of the state of config and services in use: it increases each time a new state is \
         published.",
    ),
    ("isthmus_config_reloads_total", "Reloads of the config file, by result."),
    (
        "isthmus_upgrades_total",
        "Upgrades to a new process of the gateway, by result: done, or failed (the old process went on).",
    ),
    (
        "isthmus_upgrade_connections_total",
        "Live connections and CONNECT streams of upgrades, by outcome: moved (to the new process) or left (to end in the old one).",
    ),
    (
        "isthmus_access_log_dropped_total",
        "Lines of the access log that were lost because the queue was full, the reader of the log did not read, or writing \
         failed.",
    ),
    (
        "isthmus_log_dropped_total",
        "Lines of the program's own log that were lost because the queue was full, the reader of the \
         log did not read, or writing failed.",
    ),
    ("isthmus_draining", "1 after the gateway was told to stop, 0 before."),
    ("isthmus_spans_sent_total", "Spans that the collector accepted."),
    (
        "isthmus_spans_dropped_total",
        "Spans that were lost because the queue was full or the collector did not accept them.",
    ),
    (
        "isthmus_traces_limited_total",
        "Traces that were not sampled, because clients chose ids that are sampled more than twice as often as \
         `telemetry.tracing.sample` allows.",
    ),
    ("isthmus_xds_clients", "Open streams of xDS clients."),
    ("isthmus_xds_pushes_total", "Responses sent to xDS clients, by resource type."),
    (
        "isthmus_xds_refused_total",
        "Streams of xDS clients that were refused because no rule of xds.clients allows the network or cluster that the client \
         claims, or because a request has too many items, and connections that were refused in the TLS handshake.",
    ),
    ("isthmus_xds_rejects_total", "Responses that xDS clients refused, by resource type."),
    ("isthmus_xds_unserved_total", "Requests of xDS clients for types of resources that are not served."),
    (
        "isthmus_xds_convergence_seconds",
        "Seconds from a change of config or services until a client acknowledged the response.",
    ),
    ("isthmus_dns_queries_total", "Queries that the DNS server has answered, by the code of the answer."),
    (
        "isthmus_dns_unanswered_total",
        "Queries that the DNS server did not answer because the bytes were not a query, the source exceeded its rate, or the \
         socket buffer was full.",
    ),
    (
        "isthmus_dns_forwarded_total",
        "Queries for names of other zones that were forwarded to upstream servers, by result.",
    ),
    ("isthmus_dns_services", "Services that the DNS server answers for."),
    (
        "isthmus_certificate_expiry_seconds",
        "Seconds until a certificate of this gateway expires, by kind (workload, roots) and trust domain; negative if it has \
         expired.",
    ),
    ("isthmus_build_info", "Always 1; the label version is the version of the program."),
    ("istio_tcp_connections_opened_total", "Connections that the gateway opened to endpoints."),
    ("istio_tcp_connections_closed_total", "Ended connections to endpoints."),
    ("istio_tcp_sent_bytes_total", "Bytes from endpoint to client."),
    ("istio_tcp_received_bytes_total", "Bytes from client to endpoint."),
];

impl Control {
    /// Describes all metrics to the recorder and creates the handles.
    pub fn new(recorder: &Recorder) -> Self {
        for (name, text) in DESCRIPTIONS {
            recorder.describe(name, text);
        }
        recorder.gauge("isthmus_build_info", &[("version", env!("CARGO_PKG_VERSION"))]).set(1.0);
        let reloads = |result| recorder.counter("isthmus_config_reloads_total", &[("result", result)]);
        let upgrades = |result| recorder.counter("isthmus_upgrades_total", &[("result", result)]);
        let connections =
            |outcome| recorder.counter("isthmus_upgrade_connections_total", &[("outcome", outcome)]);
        Self {
            generation: recorder.gauge("isthmus_config_generation", &[]),
            draining: recorder.gauge("isthmus_draining", &[]),
            applied: reloads("applied"),
            rejected: reloads("rejected"),
            upgraded: upgrades("done"),
            upgrades_failed: upgrades("failed"),
            moved: connections("moved"),
            left: connections("left"),
            enrolments: EnrolmentResult::ALL.map(|result| {
                recorder.counter("isthmus_peer_enrolments_total", &[("result", result.text())])
            }),
        }
    }

    /// Sets the generation of the snapshot in use.
    pub fn published(&self, generation: u64) {
        self.generation.set(generation as f64);
    }

    /// Records that the process was ordered to stop.
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

    /// Counts an upgrade.
    pub fn upgraded(&self, result: UpgradeResult) {
        match result {
            UpgradeResult::Done => self.upgraded.increment(1),
            UpgradeResult::Failed => self.upgrades_failed.increment(1),
        }
    }

    /// Counts live connections of an upgrade.
    pub fn upgraded_connections(&self, outcome: UpgradedConnection, count: u64) {
        match outcome {
            UpgradedConnection::Moved => self.moved.increment(count),
            UpgradedConnection::Left => self.left.increment(count),
        }
    }

    /// Counts an enrolment.
    pub fn enrolled(&self, result: EnrolmentResult) {
        self.enrolments[result as usize].increment(1);
    }

    /// Sets the number of seconds until a certificate expires; the number is negative after its expiry. Each trust domain has a
    /// series of its own. There are few, because trust domains come only from the config and from the certificate's source.
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
