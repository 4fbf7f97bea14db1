//! The program log: its start, its filter, and changes of its level at run time.

use std::io::Write;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry, reload};

use isthmus_config::{Log, LogFormat, LogLevel};
use isthmus_document::nearest::nearest;
use isthmus_telemetry::writer::Writer;

/// The environment variable that overrides the level of the config file.
const VARIABLE: &str = "RUST_LOG";
/// The filter of libraries, unless the level is debug or trace, or the filter names them: a stranger can make the HTTP/2 library
/// warn once per connection. The gateway counts such frames itself.
const QUIET: &str = "h2=error";

/// The handle that changes the log level at run time.
pub(super) struct LogControl {
    filter: reload::Handle<EnvFilter, registry::Registry>,
}

impl LogControl {
    /// Applies a level, or a filter in the form of `RUST_LOG`; targets that the filter does not name get
    /// `level`.
    pub(super) fn set(&self, text: &str, level: LogLevel) -> Result<(), String> {
        self.filter.reload(filter(text, level)?).map_err(|error| error.to_string())
    }
}

/// Starts the log. `RUST_LOG`, if set, overrides the config file.
pub(super) fn start(log: &Log, writer: &Writer) -> LogControl {
    let wanted = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty());
    let of_level = || filter(log.level.text(), log.level).unwrap_or_default();
    let (chosen, problem) = match wanted.map(|text| filter(&text, log.level)) {
        Some(Ok(chosen)) => (chosen, None),
        Some(Err(problem)) => (of_level(), Some(problem)),
        None => (of_level(), None),
    };
    let (filter, handle) = reload::Layer::new(chosen);
    let lines = writer.lines();
    let writer = move || lines.clone();
    let subscriber = registry::Registry::default().with(filter);
    // This fails only if the process already has a log, which then stays in use.
    let _ = match log.format {
        LogFormat::Text => {
            subscriber.with(fmt::layer().with_writer(writer).with_ansi(false).with_target(false)).try_init()
        }
        LogFormat::Json => {
            subscriber.with(fmt::layer().json().flatten_event(true).with_writer(writer)).try_init()
        }
    };
    if let Some(problem) = problem {
        tracing::warn!(level = log.level.text(), "{VARIABLE} is ignored: {problem}");
    }
    LogControl { filter: handle }
}

/// Checks a level or filter as `LogControl::set` takes it.
pub fn checked(text: &str) -> Result<String, String> {
    filter(text, LogLevel::Info).map(|_| text.to_owned())
}

/// Parses a filter in which every part is a level or `target=level`. `EnvFilter` alone would take a misspelt
/// level for a target, and turn all other targets off.
fn filter(text: &str, level: LogLevel) -> Result<EnvFilter, String> {
    let levels = || LogLevel::ALL.map(LogLevel::text).into_iter();
    let parts = || text.split(',').map(str::trim);
    let is_level = |part: &str| levels().any(|level| level.eq_ignore_ascii_case(part));
    if let Some(part) = parts().find(|part| !is_level(part) && !part.contains('=')) {
        let hint = nearest(part, levels()).map(|level| format!(" (did you mean {level:?}?)"));
        return Err(format!(
            "{part:?} is not a log level; expected one of {}, or target=level{}",
            levels().collect::<Vec<_>>().join(", "),
            hint.unwrap_or_default()
        ));
    }
    let base = parts().find(|part| is_level(part)).unwrap_or_else(|| level.text());
    let is_chatty =
        [LogLevel::Debug, LogLevel::Trace].iter().any(|all| all.text().eq_ignore_ascii_case(base));
    let quiet = if is_chatty { base } else { QUIET };
    let whole = format!("{base},{quiet},{text}");
    whole.parse().map_err(|error| format!("{text:?} is not a log level or filter: {error}"))
}

/// Writes a problem to stderr before the log is started.
pub(super) fn print_problem(problem: &str) {
    // If stderr is closed, the problem cannot be reported.
    let _ = writeln!(std::io::stderr(), "{problem}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_with_a_typing_error_is_refused_and_targets_leave_the_rest_as_it_was() {
        let shown = |text: &str| filter(text, LogLevel::Info).map(|filter| filter.to_string());
        for bad in ["debugg", "", "isthmus", "info,h2", "h2=debugg", "debug,,"] {
            assert!(shown(bad).is_err(), "{bad}: {:?}", shown(bad));
        }
        assert!(shown("debugg").is_err_and(|text| text.contains("did you mean \"debug\"?")));
        for (text, all) in [
            ("warn", "h2=error,warn"),
            ("DEBUG", "debug"),
            ("h2=debug", "h2=debug,info"),
            ("isthmus_peer=trace", "isthmus_peer=trace,h2=error,info"),
        ] {
            assert_eq!(shown(text).as_deref(), Ok(all), "{text}");
        }
    }
}
