//! `admin` and `telemetry`: the state that the gateway shows, and where.

use std::net::SocketAddr;

use crate::document::reader::Fields;
use crate::document::scalar;
use crate::document::table::Object;
use crate::model::address::Bind;

use super::addresses::Opened;
use super::file::relative_to;
use super::table::telemetry::{ACCESS_LOG, ADMIN, HEALTH, LOG, METRICS, TRACING};
use super::{Log, LogFormat, LogLevel};
use crate::document::problem::Problems;
use crate::model::trace::Sampling;
use crate::telemetry::access_log::{AccessLog, Format, Sink};
use crate::telemetry::spans::TracingOptions;

/// The default address of the admin API.
const ADMIN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 15_000);

/// The default share of sampled traces.
const SAMPLE: f64 = 0.01;

/// Returns the address of the admin API.
pub(super) fn admin(root: &Fields<'_>, opened: &mut Vec<Opened>) -> Option<SocketAddr> {
    let fields = root.fields("admin", &ADMIN);
    if root.is_off("admin") || fields.is_off("bind") {
        return None;
    }
    let bind = fields.read("bind", scalar::bind_address).unwrap_or(ADMIN_DEFAULT);
    let position = fields.node("bind").map(|node| node.position);
    opened.push(Opened { path: "admin.bind".to_owned(), bind: Bind::Address(bind), position });
    Some(bind)
}

pub(super) fn metrics(telemetry: &Fields<'_>, opened: &mut Vec<Opened>) -> Option<Bind> {
    opening(telemetry, "metrics", &METRICS, opened)
}

pub(super) fn health(telemetry: &Fields<'_>, opened: &mut Vec<Opened>) -> Option<Bind> {
    opening(telemetry, "health", &HEALTH, opened)
}

fn opening(
    telemetry: &Fields<'_>,
    key: &str,
    object: &'static Object,
    opened: &mut Vec<Opened>,
) -> Option<Bind> {
    let fields = telemetry.fields(key, object);
    let bind = fields.read("bind", scalar::bind)?;
    let position = fields.node("bind").map(|node| node.position);
    opened.push(Opened { path: format!("telemetry.{key}.bind"), bind, position });
    Some(bind)
}

pub(super) fn access_log(telemetry: &Fields<'_>, problems: &Problems) -> AccessLog {
    let fields = telemetry.fields("accessLog", &ACCESS_LOG);
    if telemetry.is_off("accessLog") || fields.is_off("path") {
        return AccessLog::Off;
    }
    let path = fields.node("path").and_then(|node| Some((node.text()?, node.position.file)));
    let sink = match path {
        None | Some(("stdout", _)) => Sink::Stdout,
        Some(("stderr", _)) => Sink::Stderr,
        Some((path, file)) => Sink::File(relative_to(problems.file(file), path.as_ref())),
    };
    let formats = [Format::Json, Format::Text];
    let text = |format| match format {
        Format::Json => "json",
        Format::Text => "text",
    };
    let format = fields.choice("format", &formats, text).unwrap_or(Format::Json);
    AccessLog::To { sink, format }
}

pub(super) fn log(telemetry: &Fields<'_>) -> Log {
    let fields = telemetry.fields("log", &LOG);
    let text = |format| match format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    Log {
        level: fields.choice("level", &LogLevel::ALL, LogLevel::text).unwrap_or(LogLevel::Info),
        format: fields.choice("format", &[LogFormat::Text, LogFormat::Json], text).unwrap_or(LogFormat::Text),
    }
}

/// Returns the settings of tracing; `None`: off.
pub(super) fn tracing(telemetry: &Fields<'_>) -> Option<TracingOptions> {
    if telemetry.is_off("tracing") {
        return None;
    }
    telemetry.node("tracing")?;
    let fields = telemetry.fields("tracing", &TRACING);
    let sample = fields.read("sample", scalar::share).unwrap_or(SAMPLE);
    Some(TracingOptions {
        otlp: fields.read("otlp", scalar::collector)?.to_owned(),
        sample: Sampling::of(sample),
    })
}
