//! `admin` and `telemetry`: the admin API, metrics, health checks, logs and traces.

use std::path::{Path, PathBuf};

use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_document::form::{self, Form, TextForm};
use isthmus_document::key::Key;
use isthmus_document::problem::{Path as KeyPath, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::scalar::UNIX_PATH_MAX;
use isthmus_document::table::Kind;
use isthmus_document::tree::{Node, Value};
use isthmus_model::address::{AdminBind, Bind};
use isthmus_model::trace::Sampling;
use isthmus_telemetry::access_log::{AccessLog, Sink};
use isthmus_telemetry::spans::TracingOptions;

use super::Log;
use super::addresses::Opened;
use super::file::{Names, absolute, relative_to};
use super::table::Root;
use super::table::telemetry as keys;

/// Returns the address of the admin API.
pub(super) fn admin(
    root: &Fields<'_>,
    opened: &mut Vec<Opened>,
    problems: &mut Problems,
) -> Option<AdminBind> {
    if root.is_off(&Root::ADMIN) {
        return None;
    }
    let fields = root.map(&Root::ADMIN);
    let bind = fields.get(&keys::Admin::BIND)?;
    let path = KeyPath::Root.key(Root::ADMIN.name());
    let path = path.key(keys::Admin::BIND.name()).to_string();
    let position = fields.at(&keys::Admin::BIND).map(|node| node.position);
    match (bind, position) {
        (AdminBind::Address(address), position) => {
            if let Some(position) = position.filter(|_| !address.ip().is_loopback()) {
                let fault = format!(
                    "found {address}, which is not a loopback address: the admin API has no authentication, so everyone who can \
                     reach this address can read the state of the gateway and drain it; use a loopback address or a unix socket"
                );
                problems.warn(position, &path, fault);
            }
            opened.push(Opened { path, bind: Bind::Address(address), position });
            Some(AdminBind::Address(address))
        }
        (AdminBind::Unix(socket), Some(position)) => {
            let socket = relative_to(problems.file(position.file), &socket);
            let bytes = socket.as_os_str().len();
            if bytes > UNIX_PATH_MAX {
                let fault = format!(
                    "found a path of {bytes} bytes ({}); the path of a unix socket has at most {UNIX_PATH_MAX} bytes",
                    socket.display()
                );
                problems.error(position, &path, fault);
            }
            Some(AdminBind::Unix(socket))
        }
        // This case does not occur, because the default is not a unix socket.
        (AdminBind::Unix(_), None) => None,
    }
}

pub(super) fn metrics(telemetry: &Fields<'_>, opened: &mut Vec<Opened>) -> Option<Bind> {
    let key = keys::Telemetry::METRICS;
    opening(&telemetry.map(&key), key.name(), &keys::Metrics::BIND, opened)
}

pub(super) fn health(telemetry: &Fields<'_>, opened: &mut Vec<Opened>) -> Option<Bind> {
    let key = keys::Telemetry::HEALTH;
    opening(&telemetry.map(&key), key.name(), &keys::Health::BIND, opened)
}

/// Reads the address of a telemetry listener; `name` is the key of the listener under `telemetry`.
fn opening(fields: &Fields<'_>, name: &str, key: &Key<form::Bind>, opened: &mut Vec<Opened>) -> Option<Bind> {
    let (bind, node) = fields.found(key)?;
    let path = KeyPath::Root.key(Root::TELEMETRY.name());
    let path = path.key(name).key(key.name()).to_string();
    opened.push(Opened { path, bind, position: Some(node.position) });
    Some(bind)
}

pub(super) fn access_log(telemetry: &Fields<'_>, problems: &Problems) -> AccessLog {
    if telemetry.is_off(&keys::Telemetry::ACCESS_LOG) {
        return AccessLog::Off;
    }
    let fields = telemetry.map(&keys::Telemetry::ACCESS_LOG);
    let Some(path) = fields.get(&keys::AccessLog::PATH) else { return AccessLog::Off };
    let sink = match (path.to_str(), fields.at(&keys::AccessLog::PATH)) {
        (Some("stdout"), _) => Sink::Stdout,
        (Some("stderr"), _) => Sink::Stderr,
        (_, Some(node)) => Sink::File(relative_to(problems.file(node.position.file), &path)),
        (_, None) => Sink::File(path),
    };
    AccessLog::To { sink, format: fields.get(&keys::AccessLog::FORMAT) }
}

/// Refuses an access log in a file that the gateway reads: the lines would be appended to a config, a registry or a private key.
pub(super) fn access_log_is_not_read(
    root: &Node,
    log: &AccessLog,
    names: &Names,
    registries: &[RegistrySpec],
    problems: &mut Problems,
) {
    let AccessLog::To { sink: Sink::File(path), .. } = log else { return };
    let section =
        root.get(Root::TELEMETRY.name()).and_then(|node| node.get(keys::Telemetry::ACCESS_LOG.name()));
    let Some(node) = section.and_then(|node| node.get(keys::AccessLog::PATH.name())) else { return };
    // The canonical path is that of the link's target. Only links of the log are followed: another file may be on a file system
    // that does not answer, which must not hold up the config.
    let logs = [Some(absolute(path)), path.canonicalize().ok()];
    let mut read = Vec::new();
    read_paths(root, &Root::KIND, &mut read);
    let is_read = |log: &PathBuf| {
        let of_key = read.iter().filter(|other| other.position != node.position).any(|other| {
            let text = other.text().unwrap_or_default();
            absolute(&relative_to(problems.file(other.position.file), Path::new(text))) == *log
        });
        let of_registry = registries.iter().any(|registry| match &registry.kind {
            RegistryKind::File { path } => {
                log.parent() == Some(&absolute(path)) && RegistryKind::is_file_in_folder(log)
            }
            RegistryKind::Etcd(_)
            | RegistryKind::Istiod(_)
            | RegistryKind::Kubernetes(_)
            | RegistryKind::KubernetesClusters(_)
            | RegistryKind::Peer(_) => false,
        });
        of_key || of_registry || names.contain(log)
    };
    if logs.iter().flatten().any(is_read) {
        let path = KeyPath::Root.key(Root::TELEMETRY.name());
        let path = path.key(keys::Telemetry::ACCESS_LOG.name());
        let fault =
            format!("found {node}, which is a file that the gateway reads; expected a file of its own");
        problems.error(node.position, &path.key(keys::AccessLog::PATH.name()), fault);
    }
}

/// Adds the values that are paths to `paths`.
fn read_paths<'n>(node: &'n Node, kind: &Kind, paths: &mut Vec<&'n Node>) {
    match (&node.value, kind) {
        (Value::Scalar(_), Kind::Text(text)) if text.name == form::Path::TEXT.name => paths.push(node),
        (_, Kind::OrOff(kind)) => read_paths(node, kind, paths),
        (_, Kind::Union(union)) => union.kinds.iter().for_each(|kind| read_paths(node, kind, paths)),
        (Value::Sequence(items), Kind::List { of, .. }) => {
            items.iter().for_each(|item| read_paths(item, of, paths));
        }
        (Value::Mapping(entries), Kind::Map { of, .. }) => {
            entries.iter().for_each(|(_, value)| read_paths(value, of, paths));
        }
        (Value::Mapping(entries), Kind::Object(object)) => {
            for (key, value) in entries {
                if let Some(key) = object.key(&key.text) {
                    read_paths(value, key.kind(), paths);
                }
            }
        }
        _ => {}
    }
}

pub(super) fn log(telemetry: &Fields<'_>) -> Log {
    let fields = telemetry.map(&keys::Telemetry::LOG);
    Log { level: fields.get(&keys::Log::LEVEL), format: fields.get(&keys::Log::FORMAT) }
}

/// Returns the settings of tracing; `None`: off.
pub(super) fn tracing(telemetry: &Fields<'_>) -> Option<TracingOptions> {
    let fields = telemetry.map(&keys::Telemetry::TRACING);
    let sample = Sampling::of(fields.get(&keys::Tracing::SAMPLE));
    Some(TracingOptions { otlp: fields.get(&keys::Tracing::OTLP)?, sample })
}
