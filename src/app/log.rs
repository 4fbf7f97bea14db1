//! The program's own log.

use std::io::Write;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry, reload};

use crate::config::{Log, LogFormat};
use crate::telemetry::writer::Writer;

/// Changes what is logged while the program runs.
pub(super) struct LogControl {
    filter: reload::Handle<EnvFilter, registry::Registry>,
}

impl LogControl {
    /// Takes a level, or a filter as `RUST_LOG` has it, into use.
    pub(super) fn set(&self, level: &str) -> Result<(), String> {
        let filter: EnvFilter =
            level.parse().map_err(|error| format!("{level:?} is no level or filter: {error}"))?;
        self.filter.reload(filter).map_err(|error| error.to_string())
    }
}

/// Starts the log. `RUST_LOG`, where it is set, overrules the file.
pub(super) fn start(log: &Log, writer: &Writer) -> LogControl {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(log.level.text()));
    let (filter, handle) = reload::Layer::new(filter);
    let lines = writer.lines();
    let writer = move || lines.clone();
    let subscriber = registry::Registry::default().with(filter);
    // Fails only where a log was started before in this process, which then goes on.
    let _ = match log.format {
        LogFormat::Text => {
            subscriber.with(fmt::layer().with_writer(writer).with_ansi(false).with_target(false)).try_init()
        }
        LogFormat::Json => {
            subscriber.with(fmt::layer().json().flatten_event(true).with_writer(writer)).try_init()
        }
    };
    LogControl { filter: handle }
}

/// Tells of a problem while there is no log yet.
pub(super) fn complain(problem: &str) {
    // Nothing can be done about a stderr that is gone.
    let _ = writeln!(std::io::stderr(), "{problem}");
}
