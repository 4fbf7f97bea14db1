//! The history of the problems: the time since which a registry's report has problems, the time of the last loss, and the problems
//! that the log has reported.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::Problem;
use super::code::Code;
use super::narrowed::narrowed;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::Conflict;
use isthmus_telemetry::clock::rfc3339;
use isthmus_telemetry::recorder::Recorder;

/// The time for which a loss remains a problem after its last occurrence.
pub(super) const LOSS_REMEMBERED: Duration = Duration::from_secs(600);
/// The time that the report of a registry must have problems before they are a problem of the gateway. A connection to an API
/// server that is opened again takes about a second.
const IMPAIRED_AFTER: Duration = Duration::from_secs(5);
/// Counters of losses: an increase is a problem. Each has the code of that problem, and the noun for its text.
const LOSSES: [(Code, &str, &str); 3] = [
    (Code::AccessLogLost, "isthmus_access_log_dropped_total", "lines of the access log"),
    (Code::SpansLost, "isthmus_spans_dropped_total", "spans"),
    (Code::XdsClientRefused, "isthmus_xds_refused_total", "xDS clients"),
];

/// The data that is kept between two evaluations of the problems.
#[derive(Default)]
pub struct History {
    state: Mutex<HistoryState>,
}

#[derive(Default)]
struct HistoryState {
    /// The registries whose reports have problems, each with the time at which they were first seen.
    impaired: BTreeMap<String, Instant>,
    losses: BTreeMap<Code, Loss>,
    /// The generation of a snapshot, and what a search through all of its services found.
    found: Option<(u64, Arc<OfServices>)>,
    /// The problems that the log has reported.
    logged: Vec<Problem>,
}

/// The last value of one of the counters in [`LOSSES`], and the time of its last increase.
struct Loss {
    count: u64,
    /// The time at which the counter last increased; `None` if it never did.
    last: Option<(Instant, SystemTime)>,
}

impl History {
    /// Logs the problems that have begun, and those that have ended, since the last call.
    pub(super) fn log(&self, now: Vec<Problem>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        log_changes(&state.logged, &now);
        state.logged = now;
    }

    /// Returns a problem for each counter that increased within the last ten minutes.
    pub(super) fn losses(&self, recorder: &Recorder, now: Instant) -> Vec<Problem> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut problems = Vec::new();
        for (code, counter, what) in LOSSES {
            let count = recorder.counted(counter);
            let loss = state.losses.entry(code).or_insert(Loss { count: 0, last: None });
            if count > loss.count {
                *loss = Loss { count, last: Some((now, SystemTime::now())) };
            }
            if let Some((_, when)) = loss.last.filter(|(at, _)| now.duration_since(*at) < LOSS_REMEMBERED) {
                let verb = if code == Code::XdsClientRefused { "refused" } else { "lost" };
                let text = format!("{count} {what} {verb} since the start, the last at {}", rfc3339(when));
                problems.push(Problem::new(code, "", text));
            }
        }
        problems
    }

    /// Removes the problems of registries' reports that have lasted for less than [`IMPAIRED_AFTER`].
    pub(super) fn settled(&self, problems: &mut Vec<Problem>, now: Instant) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut state.impaired);
        problems.retain(|problem| {
            if problem.code != Code::RegistryImpaired {
                return true;
            }
            let since = before.get(&problem.about).copied().unwrap_or(now);
            state.impaired.insert(problem.about.clone(), since);
            now.saturating_duration_since(since) >= IMPAIRED_AFTER
        });
    }

    /// Returns what a search through all services finds. The search is made once per snapshot.
    pub(super) fn of_services(&self, snapshot: &Snapshot) -> Arc<OfServices> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = state.found.as_ref().filter(|(of, _)| *of == snapshot.generation) {
            return known.clone();
        }
        let conflicts = snapshot.services().into_iter().flat_map(|service| service.conflicts.clone());
        let found = Arc::new(OfServices { conflicts: conflicts.collect(), narrowed: narrowed(snapshot) });
        state.found = Some((snapshot.generation, found.clone()));
        found
    }
}

/// The result of a search through all services.
pub(super) struct OfServices {
    /// The conflicts between registries.
    pub(super) conflicts: Vec<Conflict>,
    /// The rules that lead to less than they name.
    pub(super) narrowed: Vec<Problem>,
}

fn log_changes(before: &[Problem], now: &[Problem]) {
    let same = |one: &Problem, other: &Problem| one.code == other.code && one.about == other.about;
    for problem in now.iter().filter(|problem| !before.iter().any(|known| same(known, problem))) {
        let (code, look_at) = (problem.code.text(), problem.code.look_at());
        match problem.code {
            // These problems are errors, since without a valid certificate no caller can connect.
            Code::CertificateExpired | Code::CertificateNotYetValid => {
                tracing::error!(code, look_at, "problem: {}", problem.text);
            }
            // These states are not logged as problems, since an operator requested them.
            Code::Draining | Code::EndpointWithdrawn => {}
            _ => tracing::warn!(code, look_at, "problem: {}", problem.text),
        }
    }
    for problem in before.iter().filter(|problem| !now.iter().any(|known| same(known, problem))) {
        tracing::info!(code = problem.code.text(), about = problem.about, "problem solved");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_loss_of_a_registry_is_no_problem() {
        let (history, start) = (History::default(), Instant::now());
        let stale = || Problem::new(Code::RegistryStale, "south", "stale");
        let shown = |impaired: &[&str], seconds: u64| {
            let of = |name: &&str| Problem::new(Code::RegistryImpaired, *name, "the watch ended");
            let mut all: Vec<Problem> = impaired.iter().map(of).chain([stale()]).collect();
            history.settled(&mut all, start + Duration::from_secs(seconds));
            assert_eq!(all.pop(), Some(stale()));
            all.into_iter().map(|problem| problem.about).collect::<Vec<_>>()
        };
        assert_eq!(shown(&["west"], 0), [""; 0]);
        assert_eq!(shown(&["east", "west"], 4), [""; 0]);
        assert_eq!(shown(&["east", "west"], 5), ["west"]);
        assert_eq!(shown(&["east"], 8), [""; 0], "the time of east began later");
        assert_eq!(shown(&["east", "west"], 9), ["east"], "the time of west begins anew");
    }

    #[test]
    fn what_is_lost_is_a_problem_for_ten_minutes() {
        let (history, recorder, start) = (History::default(), Recorder::default(), Instant::now());
        let after = |seconds| history.losses(&recorder, start + Duration::from_secs(seconds));
        assert_eq!(after(0), []);
        recorder.counter("isthmus_spans_dropped_total", &[]).increment(3);
        for seconds in [1, 600] {
            let [problem] = &after(seconds)[..] else { panic!("one after {seconds} s") };
            assert_eq!(problem.code, Code::SpansLost);
            assert!(problem.text.starts_with("3 spans lost since the start"), "{}", problem.text);
        }
        assert_eq!(after(601), []);
    }
}
