//! The keys of the admin API, metrics, health, logs and traces.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::{LogFormat, LogLevel};
use isthmus_document::form;
use isthmus_document::key::keys;
use isthmus_model::address::AdminBind;
use isthmus_model::words;
use isthmus_telemetry::access_log::Format;

/// The address of the admin API.
const ADMIN: AdminBind = AdminBind::Address(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 15_000));

words!(LogFormat, LogLevel);

keys! {
    /// The HTTP API for operators.
    pub(crate) Admin "admin" {
        /// Address of the admin API, or a unix socket, which is created with mode 0600; `off` disables the API.
        BIND "bind": form::OrOff<form::AdminBind> = Some(ADMIN);
    }

    /// Metrics, health checks, logs and traces.
    pub(crate) Telemetry "telemetry" {
        /// A separate listener for Prometheus. The admin listener serves the same metrics.
        METRICS "metrics": form::OrOff<Metrics> => "off";
        /// A separate listener for readiness and liveness probes. The admin listener serves the same probes.
        HEALTH "health": form::OrOff<Health> => "off";
        /// Access log: one line per connection, written when the connection ends.
        ACCESS_LOG "accessLog": form::OrOff<AccessLog> => "defaults";
        /// The program's own log, on stderr.
        LOG "log": Log => "defaults";
        /// Traces: one span per connection and per CONNECT stream, sent to a collector when it ends.
        TRACING "tracing": form::OrOff<Tracing> => "off";
    }

    /// A separate listener for Prometheus.
    pub(crate) Metrics "metrics" {
        /// Address and port of the listener.
        BIND "bind": form::Bind => required;
    }

    /// A separate listener for readiness and liveness probes.
    pub(crate) Health "health" {
        /// Address and port of the listener.
        BIND "bind": form::Bind => required;
    }

    /// One line per connection.
    pub(crate) AccessLog "accessLog" {
        /// `stdout`, `stderr`, or a file. The gateway creates the file with mode 0640 and reopens it on SIGUSR1 and
        /// at a reload. A file that cannot be opened, or that the gateway reads, such as this one, is an error.
        PATH "path": form::OrOff<form::Path> = Some("stdout".into());
        /// Format of a line.
        FORMAT "format": form::Choice<Format> = Format::Json;
    }

    /// Spans over OTLP. A span that the collector does not accept in time is dropped and counted; connections never
    /// wait for the collector.
    pub(crate) Tracing "tracing" {
        /// Address of the collector, which must accept OTLP over gRPC without TLS.
        OTLP "otlp": form::Collector => required;
        /// Fraction of traces that are exported if the caller sent no `traceparent`, or one without the `sampled`
        /// flag. Traces with the flag are always exported.
        SAMPLE "sample": form::Share = 0.01;
    }

    /// The program's own log.
    pub(crate) Log "log" {
        /// Minimum severity of the lines that are written.
        LEVEL "level": form::Choice<LogLevel> = LogLevel::Info;
        /// Format of a line.
        FORMAT "format": form::Choice<LogFormat> = LogFormat::Text;
    }
}
