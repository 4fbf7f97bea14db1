//! The keys of what operators see: the admin API, metrics, health, logs and traces.

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
        "Where it listens; `off` closes it.",
    )],
};

pub(in crate::config) static TELEMETRY: Object = Object {
    name: "telemetry",
    doc: "Metrics, health, logs and traces.",
    one_of: &[],
    fields: &[
        optional(
            "metrics",
            Kind::OrOff(&Kind::Object(&METRICS)),
            "not opened",
            "A listener for Prometheus; metrics are on the admin listener as well.",
        ),
        optional(
            "health",
            Kind::OrOff(&Kind::Object(&HEALTH)),
            "not opened",
            "A listener for readiness and liveness probes; they are on the admin listener as well.",
        ),
        optional(
            "accessLog",
            Kind::OrOff(&Kind::Object(&ACCESS_LOG)),
            "defaults",
            "One line per connection, at its end.",
        ),
        optional("log", Kind::Object(&LOG), "defaults", "The program's own log, on stderr."),
        optional(
            "tracing",
            Kind::OrOff(&Kind::Object(&TRACING)),
            "off",
            "A span per connection and per CONNECT stream, at its end, sent to a collector.",
        ),
    ],
};

pub(in crate::config) static METRICS: Object = Object {
    name: "metrics",
    doc: "A listener for Prometheus.",
    one_of: &[],
    fields: &[required("bind", BIND, "Where it listens.")],
};

pub(in crate::config) static HEALTH: Object = Object {
    name: "health",
    doc: "A listener for probes.",
    one_of: &[],
    fields: &[required("bind", BIND, "Where it listens.")],
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
            "`stdout`, `stderr`, or a file, made with mode 0640 and opened again on SIGUSR1 and by a reload; one that cannot be opened is an error.",
        ),
        default("format", Kind::Choice(&["json", "text"]), "json", "How a line is written."),
    ],
};

pub(in crate::config) static TRACING: Object = Object {
    name: "tracing",
    doc: "Spans over OTLP. One that the collector does not take in time is lost and counted; connections never wait.",
    one_of: &[],
    fields: &[
        required(
            "otlp",
            Kind::Text(&scalar::COLLECTOR),
            "The collector, which takes OTLP over gRPC without TLS.",
        ),
        default(
            "sample",
            Kind::Share,
            "0.01",
            "The share of traces, by their ids, that are told of where the caller has not chosen: those that it sends \
             no `traceparent` of, or one without the flag `sampled`. With the flag all are.",
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
            "The least grave lines that are written.",
        ),
        default("format", Kind::Choice(&["text", "json"]), "text", "How a line is written."),
    ],
};
