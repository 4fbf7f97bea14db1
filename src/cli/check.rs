//! `isthmus check`: examines every area of a running gateway, or of a config file, and reports whether the area is healthy. For
//! an area that is not healthy, it reports the next step for the operator. `from_zero`: the steps of a first installation.

mod from_zero;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use super::arguments::{Admin, time};
use super::offline::{Names, Offline, offline};
use isthmus_admin::problems::code::{Code, Severity};
use isthmus_api::overview::{Overview, Refusal};
use isthmus_api::requests;
use isthmus_api::status::{Problem, Status};
use isthmus_api::text::{clean, counted};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Colour, Format, paint, structured};
use isthmus_model::reason::Reason;

/// The interval at which the gateway is checked again with `--wait`.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub(super) const EXAMPLES: &str = "Examples:
  isthmus check                      the running gateway
  isthmus check --wait 60s           wait until no check fails, for example after an upgrade
  isthmus check -c isthmus.yaml      a config file, without a gateway
  isthmus check --from-zero          a new installation: the steps in order, and the next one
  isthmus check -o json | jq         for programs

The exit code is 1 if a check failed, and 3 if the gateway cannot be reached. Warnings do not change the exit code.";

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Check this config file instead of the running gateway
    #[arg(short, long, value_name = "FILE", conflicts_with = "wait")]
    config: Option<PathBuf>,
    /// Check the steps of a new installation in order, from the config file to the first call, and show the next one
    #[arg(long, conflicts_with = "wait")]
    from_zero: bool,
    /// Wait until no check fails, at most for this time: 30s, 5m, …
    #[arg(long, value_name = "TIME", value_parser = time)]
    wait: Option<Duration>,
    #[command(flatten)]
    admin: Admin,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// The result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Warning,
    Failed,
}

/// One line of the output of `isthmus check`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    check: &'static str,
    state: State,
    text: String,
    /// The next step; empty if none is needed.
    next: String,
}

impl Check {
    fn new(check: &'static str, state: State, text: impl Into<String>, next: impl Into<String>) -> Self {
        Self { check, state, text: text.into(), next: next.into() }
    }
}

/// A checked area, and the text to show if there are no problems in it.
struct Area {
    name: &'static str,
    well: fn(&Status) -> String,
}

/// The state of a registry that was never read.
const MISSING: &str = "missing";

const AREAS: [Area; 10] = [
    Area {
        name: "config",
        well: |status| format!("{} is in use since {}", status.config.path, status.config.since),
    },
    Area {
        name: "registries",
        well: |status| {
            // A registry of a peer without a link is no problem of this area, because the peer's own problem has the cause.
            let unread = status.registries.iter().filter(|registry| registry.state == MISSING);
            let unread: Vec<&str> = unread.map(|registry| &*registry.name).collect();
            let read = match unread.is_empty() {
                true => "read".to_owned(),
                false => format!("read except {}", unread.join(", ")),
            };
            let registries = match status.registries.len() {
                1 => "1 registry".to_owned(),
                count => format!("{count} registries"),
            };
            format!("{registries}, {read}; {}", counted(status.services, "service"))
        },
    },
    Area {
        name: "limits",
        well: |status| {
            format!(
                "{} of {} connections; no limit has refused one within the last minute",
                status.connections, status.limits.connections
            )
        },
    },
    Area { name: "gateways", well: |_| "no gateway of a network has ceased to answer".to_owned() },
    Area {
        name: "names",
        well: |status| {
            let routes = counted(status.routes, "route");
            format!("{routes}; every host name of an endpoint or gateway resolves")
        },
    },
    Area {
        name: "certificates",
        well: |status| match &status.identity {
            Some(identity) => format!("the certificate comes from {}", identity.source),
            None => "the config needs no certificate".to_owned(),
        },
    },
    Area { name: "endpoints", well: |_| "no endpoint fails".to_owned() },
    Area {
        name: "peers",
        well: |status| match status.peers {
            0 => "the config has no peers".to_owned(),
            count => format!("{}, with a live link each", counted(count, "peer")),
        },
    },
    Area {
        name: "xds",
        well: |status| {
            let clients = counted(status.xds.clients, "client");
            format!("{clients}; none was refused in the last 10 minutes")
        },
    },
    Area {
        name: "logs",
        well: |_| "no line of the access log and no span was lost in the last 10 minutes".to_owned(),
    },
];

/// Runs `isthmus check`.
pub(super) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let (checks, result) = match &arguments.config {
        config if arguments.from_zero => from_zero::run(config.as_deref(), &arguments.admin),
        Some(path) => judged(of_config(path, offline(path, Names::LookUp))),
        None => of_gateway(&arguments.admin, arguments.wait.unwrap_or_default()),
    };
    print(&checks, arguments.output, out)?;
    result
}

/// Returns the checks together with the result of the command.
fn judged(checks: Vec<Check>) -> (Vec<Check>, Result<(), Failure>) {
    let has_failed = checks.iter().any(|check| check.state == State::Failed);
    (checks, if has_failed { Err(Failure::Reported) } else { Ok(()) })
}

/// Returns the checks of the running gateway as soon as none of them fails, or when the time is over.
fn of_gateway(admin: &Admin, wait: Duration) -> (Vec<Check>, Result<(), Failure>) {
    let begun = Instant::now();
    loop {
        let (checks, result) = match overview(admin) {
            Ok(overview) => judged(of_overview(&overview)),
            Err(failure) => away(&failure),
        };
        if result.is_ok() || begun.elapsed() >= wait {
            return (checks, result);
        }
        std::thread::sleep(LOOK_EVERY.min(wait));
    }
}

/// Returns the only check of a gateway whose state cannot be read.
fn away(failure: &Failure) -> (Vec<Check>, Result<(), Failure>) {
    let next = match failure.is_unreachable() {
        true => "start the gateway, or give its `admin.bind` with `--admin`",
        false => "give the `admin.bind` of the gateway with `--admin`",
    };
    let check = Check::new("gateway", State::Failed, failure.to_string(), next);
    (
        vec![check],
        Err(if failure.is_unreachable() { Failure::ReportedUnreachable } else { Failure::Reported }),
    )
}

fn overview(admin: &Admin) -> Result<Overview, Failure> {
    Ok(client::read(&admin.url(), &requests::OVERVIEW)?)
}

/// Returns the checks of a gateway in this state.
fn of_overview(overview: &Overview) -> Vec<Check> {
    let mut checks = of_status(&overview.status);
    let lately: Vec<Check> =
        overview.refusals.iter().filter(|refusal| refusal.recent > 0).map(of_refusal).collect();
    if lately.is_empty() {
        checks.push(Check::new(
            CONNECTIONS,
            State::Ok,
            "no connection was refused or failed in the last 5 minutes",
            "",
        ));
    }
    checks.extend(lately);
    checks
}

/// The area of the connections that were refused or failed.
const CONNECTIONS: &str = "connections";

/// Refusing connections is the purpose of a gateway, so only an internal fault counts as a failure.
fn of_refusal(refusal: &Refusal) -> Check {
    let state = if refusal.reason == Reason::Internal.text() { State::Failed } else { State::Warning };
    let last = match (&refusal.last_time, &refusal.last_name) {
        (Some(time), Some(name)) => format!(", the last for {} at {time}", clean(name)),
        (Some(time), None) => format!(", the last at {time}"),
        (None, _) => String::new(),
    };
    let recent = counted(usize::try_from(refusal.recent).unwrap_or(usize::MAX), "connection");
    let text = format!("{}: {recent} in the last 5 minutes{last}", refusal.reason);
    Check::new(CONNECTIONS, state, text, refusal.look_at.as_str())
}

/// Returns the checks of a gateway with this status.
fn of_status(status: &Status) -> Vec<Check> {
    let mut checks = vec![gateway(status)];
    for area in &AREAS {
        let found: Vec<&Problem> = status.problems.iter().filter(|problem| area.has(&problem.code)).collect();
        if found.is_empty() {
            checks.push(Check::new(area.name, State::Ok, (area.well)(status), ""));
        }
        checks.extend(found.into_iter().map(|problem| of_problem(area.name, problem)));
    }
    let is_known = |problem: &&Problem| AREAS.iter().any(|area| area.has(&problem.code));
    let others =
        status.problems.iter().filter(|problem| !is_known(problem) && problem.code != Code::Draining.text());
    checks.extend(others.map(|problem| of_problem("other", problem)));
    checks.extend(status.config.warnings.iter().map(|warning| of_warning(warning)));
    checks
}

impl Area {
    fn has(&self, code: &str) -> bool {
        Code::ALL.iter().any(|known| known.text() == code && known.area() == self.name)
    }
}

fn gateway(status: &Status) -> Check {
    let version = format!("isthmus {}", status.version);
    if status.draining {
        let next = Code::Draining.look_at();
        return Check::new(
            "gateway",
            State::Failed,
            format!("{version} is draining, and exits afterwards"),
            next,
        );
    }
    if !status.ready {
        let why = status.not_ready.join(", ");
        return Check::new(
            "gateway",
            State::Failed,
            format!("{version} is not ready: {why}"),
            "`isthmus status`",
        );
    }
    let addresses: Vec<String> = status
        .listeners
        .iter()
        .filter_map(|listener| Some(format!("{} {}", listener.name, listener.address.as_ref()?)))
        .collect();
    let listens = if addresses.is_empty() { "no listener".to_owned() } else { addresses.join(", ") };
    Check::new(
        "gateway",
        State::Ok,
        format!("{version} is ready, up {} s: {listens}", status.uptime_seconds),
        "",
    )
}

fn of_problem(name: &'static str, problem: &Problem) -> Check {
    // A code that this version does not know comes from a newer gateway, and is treated as a failure.
    let code = Code::ALL.iter().find(|code| code.text() == problem.code);
    let state = code.map_or(State::Failed, |code| match code.severity() {
        Severity::Failed => State::Failed,
        Severity::Warning => State::Warning,
    });
    Check::new(name, state, format!("{}: {}", problem.code, problem.text), problem.look_at.as_str())
}

fn of_warning(warning: &str) -> Check {
    Check::new("config", State::Warning, warning, "`isthmus validate FILE`")
}

/// Returns the checks of a config file, by what was read of it without a running gateway.
fn of_config(path: &Path, read: Result<Offline, Vec<String>>) -> Vec<Check> {
    let offline = match read {
        Ok(offline) => offline,
        Err(problems) => {
            let next = "correct the file; `isthmus schema --reference` describes all keys";
            return problems
                .into_iter()
                .map(|problem| Check::new("config", State::Failed, problem, next))
                .collect();
        }
    };
    let next = "correct the files that the config names, or run the check on the host of the gateway";
    let mut checks: Vec<Check> =
        offline.faults.into_iter().map(|fault| Check::new("files", State::Failed, fault, next)).collect();
    if checks.is_empty() {
        checks.push(Check::new("config", State::Ok, format!("{} has no mistakes", path.display()), ""));
    }
    let next = "run the gateway, then `isthmus check`";
    checks.extend(offline.notes.into_iter().map(|note| Check::new("registries", State::Warning, note, next)));
    checks.extend(offline.warnings.iter().map(|warning| of_warning(warning)));
    checks
}

fn print(checks: &[Check], format: Format, out: &mut impl Write) -> Result<(), Failure> {
    if format != Format::Table {
        return Ok(structured(out, &json!(checks), format)?);
    }
    let width = checks.iter().map(|check| check.check.len()).max().unwrap_or_default();
    for check in checks {
        let (word, colour) = match check.state {
            State::Ok => ("ok     ", Colour::Green),
            State::Warning => ("warning", Colour::Yellow),
            State::Failed => ("failed ", Colour::Red),
        };
        writeln!(out, "{}  {:width$}  {}", paint(word, colour), check.check, clean(&check.text))?;
        if check.state != State::Ok && !check.next.is_empty() {
            writeln!(out, "{:9}{:width$}  next: {}", "", "", clean(&check.next))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_aggregator::status::RegistryState;
    use isthmus_api::registry::Registry;

    #[test]
    fn every_problem_belongs_to_one_area() {
        for code in Code::ALL.iter().filter(|code| **code != Code::Draining) {
            let areas: Vec<&str> =
                AREAS.iter().filter(|area| area.has(code.text())).map(|area| area.name).collect();
            assert_eq!(areas.len(), 1, "{}: {areas:?}", code.text());
        }
    }

    #[test]
    fn problems_of_a_newer_gateway_are_failures() {
        let problem =
            Problem { code: "moon_lost".to_owned(), text: "it is gone".to_owned(), ..Problem::default() };
        let status = Status { ready: true, problems: vec![problem], ..Status::default() };
        let checks = of_status(&status);
        let last = checks.last().expect("checks");
        assert_eq!((last.check, last.state, &*last.text), ("other", State::Failed, "moon_lost: it is gone"));
        assert!(checks[..checks.len() - 1].iter().all(|check| check.state == State::Ok), "{checks:?}");
    }

    #[test]
    fn a_registry_of_a_peer_without_a_link_is_not_said_to_be_read() {
        let registry = |name: &str, state: RegistryState| Registry {
            name: name.to_owned(),
            state: state.text().to_owned(),
            ..Registry::default()
        };
        let registries =
            vec![registry("west.yaml", RegistryState::Live), registry("peer/west", RegistryState::Missing)];
        let status = Status { ready: true, registries, ..Status::default() };
        let checks = of_status(&status);
        let found = checks.iter().find(|check| check.check == "registries").expect("an area");
        assert_eq!(found.text, "2 registries, read except peer/west; 0 services");
    }

    #[test]
    fn a_failure_has_its_next_step_below_it() {
        let checks = [
            Check::new("gateway", State::Ok, "isthmus 1 is ready", ""),
            Check::new("endpoints", State::Failed, "endpoint_failing: 10.0.0.1:1", "look at it"),
            Check::new("names", State::Ok, "a\u{202e}b", ""),
        ];
        let mut out = Vec::new();
        print(&checks, Format::Table, &mut out).expect("memory takes it");
        assert_eq!(
            String::from_utf8(out).expect("text"),
            "ok       gateway    isthmus 1 is ready\n\
             failed   endpoints  endpoint_failing: 10.0.0.1:1\n                    next: look at it\n\
             ok       names      a\\u{202e}b\n"
        );
    }
}
