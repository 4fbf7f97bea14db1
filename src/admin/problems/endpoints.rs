//! The problems of endpoints.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use super::Problem;
use super::code::Code;
use isthmus_api::text::counted;
use isthmus_dataplane::endpoint_state::{EndpointState, FAILURES_MIN, SILENT_AFTER};
use isthmus_dataplane::upstreams::Upstreams;
use isthmus_snapshot::candidates::EndpointKey;
use isthmus_telemetry::clock::rfc3339;

/// Returns at most `most` problems of each code, in order of code, group and address, and for each code a line that gives the
/// number of further ones. Thousands of endpoints may fail together, so the further ones are only counted.
pub(super) fn of_endpoints(upstreams: &Upstreams, most: usize) -> Vec<Problem> {
    let mut of_codes: BTreeMap<Code, OfCode> = BTreeMap::new();
    upstreams.visit_troubled(|key, state| {
        for what in What::all(&state) {
            of_codes.entry(what.code()).or_default().add(key, what, &state, most);
        }
    });
    let problems = |(code, OfCode { first, count })| {
        let further = Problem::further(code, count, most);
        first.into_iter().map(|(key, (what, state))| what.problem(&key, &state)).chain(further)
    };
    of_codes.into_iter().flat_map(problems).collect()
}

/// The problems with one code.
#[derive(Default)]
struct OfCode {
    /// The first ones in order of group and address.
    first: BTreeMap<EndpointKey, (What, EndpointState)>,
    /// The number of all.
    count: usize,
}

impl OfCode {
    fn add(&mut self, key: &EndpointKey, what: What, state: &EndpointState, most: usize) {
        self.count += 1;
        if self.first.len() >= most {
            if self.first.last_key_value().is_none_or(|(last, _)| last < key) {
                return;
            }
            self.first.pop_last();
        }
        self.first.insert(key.clone(), (what, state.clone()));
    }
}

/// The kind of a problem of an endpoint.
#[derive(Clone, Copy)]
enum What {
    Unhealthy,
    /// Ejected for so long from now.
    Ejected(Duration),
    Failing,
    /// It last answered without TLS at this time.
    NotTls(SystemTime),
    /// It has not answered a hello for so long.
    Silent(Duration),
    /// It does not acknowledge bytes of so many connections.
    Unacknowledged(u32),
    Slow,
}

impl What {
    /// Returns the problems of an endpoint in this state.
    fn all(state: &EndpointState) -> impl Iterator<Item = Self> + use<> {
        let health = state.unhealthy.then_some(Self::Unhealthy);
        let connections = match state.ejected_for {
            Some(rest) => Some(Self::Ejected(rest)),
            None => (state.in_a_row >= FAILURES_MIN && !state.unhealthy).then_some(Self::Failing),
        };
        let answers = state.not_tls.map(Self::NotTls);
        let late = state.unacknowledged;
        let silent = state.silent_for.map(Self::Silent);
        let silent = silent.or_else(|| (late > 0).then_some(Self::Unacknowledged(late)));
        let slow = state.is_slow.then_some(Self::Slow);
        [health, connections, answers, silent, slow].into_iter().flatten()
    }

    fn code(self) -> Code {
        match self {
            Self::Unhealthy => Code::EndpointUnhealthy,
            Self::Ejected(_) => Code::EndpointEjected,
            Self::Failing => Code::EndpointFailing,
            Self::NotTls(_) => Code::EndpointNotTls,
            Self::Silent(_) | Self::Unacknowledged(_) => Code::EndpointSilent,
            Self::Slow => Code::EndpointSlow,
        }
    }

    fn problem(self, key: &EndpointKey, state: &EndpointState) -> Problem {
        let about = format!("{} of {}", key.address, key.group);
        let last = state.last_failure.as_ref().map_or(String::new(), |last| {
            format!("{}, {} in a row, last at {}", last.text(), state.in_a_row, rfc3339(last.time))
        });
        let text = match self {
            Self::Unhealthy => format!("{about} is unhealthy: {last}"),
            Self::Ejected(rest) => format!("{about} is ejected for another {} s: {last}", rest.as_secs()),
            Self::Failing => format!("{about} fails: {last}"),
            Self::NotTls(time) => format!(
                "{about} answered a ClientHello with bytes that are not TLS, last at {}",
                rfc3339(time)
            ),
            Self::Silent(time) => format!(
                "{about} has been sent a ClientHello, and has not answered it for {} s",
                time.as_secs()
            ),
            Self::Unacknowledged(count) => {
                let connections = counted(count.try_into().unwrap_or(usize::MAX), "connection");
                format!(
                    "{about} has acknowledged nothing on {connections} for more than {} s",
                    SILENT_AFTER.as_secs()
                )
            }
            Self::Slow => {
                let median = state.answer.map_or(Duration::ZERO, |times| times.p50);
                format!(
                    "{about} answers after {:.1} s (median), more than five times as late as the others",
                    median.as_secs_f64()
                )
            }
        };
        Problem::new(self.code(), about, text)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use isthmus_dataplane::upstreams::CheckResult;
    use isthmus_model::reason::Reason;
    use isthmus_telemetry::recorder::Recorder;

    #[test]
    fn of_many_failing_endpoints_the_first_are_listed_and_the_others_counted() {
        let upstreams = Upstreams::new(&Arc::new(Recorder::default()));
        let key = |port| EndpointKey { group: "a.mesh:443".into(), address: ([10, 0, 0, 1], port).into() };
        let failed = |failed, unhealthy| CheckResult {
            failed,
            unhealthy,
            failure: Some(Reason::EndpointRefused.into()),
        };
        for port in (1..=60).rev() {
            upstreams.checked(&key(port), failed(9, true));
        }
        upstreams.checked(&key(61), failed(FAILURES_MIN, false));
        upstreams.checked(&key(62), failed(FAILURES_MIN - 1, false));
        assert_eq!(of_endpoints(&upstreams, usize::MAX).len(), 61);
        let listed = of_endpoints(&upstreams, 5);
        let unhealthy = |port| {
            format!("10.0.0.1:{port} of a.mesh:443 is unhealthy: endpoint_refused, 9 in a row, last at ")
        };
        for (problem, port) in listed[..5].iter().zip(1..) {
            assert_eq!(problem.code, Code::EndpointUnhealthy);
            assert_eq!(problem.about, format!("10.0.0.1:{port} of a.mesh:443"));
            assert!(problem.text.starts_with(&unhealthy(port)), "{}", problem.text);
        }
        let [.., further, failing] = &listed[..] else { panic!("{listed:?}") };
        assert_eq!((listed.len(), further.code, &*further.text), (7, Code::EndpointUnhealthy, "and 55 more"));
        let text = &failing.text;
        assert!(text.starts_with("10.0.0.1:61 of a.mesh:443 fails: endpoint_refused, 3 in a row"), "{text}");
    }
}
