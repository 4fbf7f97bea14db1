//! The keys of the admin API, metrics, health, logs and traces.

use crate::document::scalar;
use crate::document::table::{Kind, Object, default, optional, required};

use super::BIND;

pub(in crate::config) static ADMIN: Object = Object {
    name: "admin",
    doc: "The HTTP API for operators.",
    one_of: &[],
    fields: &[default(
        "bind",
        Kind::OrOff(&Kind::Text(&scalar::BIND_ADDRESS)),
        "127.0.0.1:15000",
        "Address of the admin API; `off` disables it.",
    )],
};

pub(in crate::config) static TELEMETRY: Object = Object {
    name: "telemetry",
    doc: "Metrics, health checks, logs and traces.",
    one_of: &[],
    fields: &[
        optional(
            "metrics",
            Kind::OrOff(&Kind::Object(&METRICS)),
            "not opened",
            "A separate listener for Prometheus. The admin listener serves the same metrics.",
        ),
        optional(
            "health",
            Kind::OrOff(&Kind::Object(&HEALTH)),
            "not opened",
            "A separate listener for readiness and liveness probes. The admin listener serves the same probes.",
        ),
        optional(
            "accessLog",
            Kind::OrOff(&Kind::Object(&ACCESS_LOG)),
            "defaults",
            "Access log: one line per connection, written when the connection ends.",
        ),
        optional("log", Kind::Object(&LOG), "defaults", "The program's own log, on stderr."),
        optional(
            "tracing",
            Kind::OrOff(&Kind::Object(&TRACING)),
            "off",
            "Traces: one span per connection and per CONNECT stream, sent to a collector when it ends.",
        ),
    ],
};

pub(in crate::config) static METRICS: Object = Object {
    name: "metrics",
    doc: "A separate listener for Prometheus.",
    one_of: &[],
    fields: &[required("bind", BIND, "Address and port of the listener.")],
};

pub(in crate::config) static HEALTH: Object = Object {
    name: "health",
    doc: "A separate listener for readiness and liveness probes.",
    one_of: &[],
    fields: &[required("bind", BIND, "Address and port of the listener.")],
};

pub(in crate::config) static ACCESS_LOG: Object = Object {
    name: "accessLog",
    doc: "One line per connection.",
    one_of: &[],
    fields: &[
        default(
            "path",
            Kind::OrOff(&Kind::Text(&scalar::PATH)),
            "stdout",
            "`stdout`, `stderr`, or a file. The gateway creates the file with mode 0640 and reopens it on SIGUSR1 \
             and at a reload. A file that cannot be opened is an error.",
        ),
        default("format", Kind::Choice(&["json", "text"]), "json", "Format of a line."),
    ],
};

pub(in crate::config) static TRACING: Object = Object {
    name: "tracing",
    doc: "Spans over OTLP. A span that the collector does not accept in time is dropped and counted; connections \
          never wait for the collector.",
    one_of: &[],
    fields: &[
        required(
            "otlp",
            Kind::Text(&scalar::COLLECTOR),
            "Address of the collector, which must accept OTLP over gRPC without TLS.",
        ),
        default(
            "sample",
            Kind::Share,
            "0.01",
            "Fraction of traces that are exported if the caller sent no `traceparent`, or one without the \
             `sampled` flag. Traces with the flag are always exported.",
        ),
    ],
};

pub(in crate::config) static LOG: Object = Object {
    name: "log",
    doc: "The program's own log.",
    one_of: &[],
    fields: &[
        default(
            "level",
            Kind::Choice(&["error", "warn", "info", "debug", "trace"]),
            "info",
            "Minimum severity of the lines that are written.",
        ),
        default("format", Kind::Choice(&["text", "json"]), "text", "Format of a line."),
    ],
};
