//! The state of an endpoint for operators, in one word. `explain`, `get endpoints`, `status`, `check`, the dashboard and the
//! metrics all show this word.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::withdrawals::Withdrawal;
use isthmus_balance::Availability;
use isthmus_model::endpoint::Health;
use isthmus_model::reason::Reason;

/// The number of failures in a row from which an endpoint is failing. Fewer failures may come from a restart.
pub const FAILURES_MIN: u32 = 3;
/// The time without an answer to a hello, or an acknowledgement of bytes, from which an endpoint is silent.
pub const SILENT_AFTER: Duration = Duration::from_secs(5);

/// The state of an endpoint: the first that holds, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// An operator has taken the endpoint out.
    Disabled,
    /// The registry or an operator lets the endpoint's connections end, and it gets no new ones.
    Draining,
    /// The endpoint's host name has no address.
    Unresolved,
    /// The registry or health checks have found the endpoint unhealthy.
    Unhealthy,
    /// The endpoint gets no connections for a while, after failures in a row.
    Ejected,
    /// The endpoint answered the last hello with bytes that are not TLS.
    NotTls,
    /// The endpoint has been sent a hello, and has not answered it for [`SILENT_AFTER`], or does not acknowledge bytes.
    Silent,
    /// The last connections or checks failed, at least [`FAILURES_MIN`] in a row.
    Failing,
    /// The endpoint answers much later than the others of its service.
    Slow,
    /// None of the others.
    Healthy,
}

impl State {
    /// Returns the state of an endpoint with this health in its registry. `run_time` is `None` if the endpoint was not dialled for
    /// a while.
    pub fn of(health: Health, resolution: Resolution, run_time: Option<&EndpointState>) -> Self {
        let availability = run_time.map_or(Availability::Available, EndpointState::availability);
        let holds = |condition: fn(&EndpointState) -> bool| run_time.is_some_and(condition);
        match (availability, health) {
            (Availability::Disabled, _) => Self::Disabled,
            (Availability::Draining, _) | (_, Health::Draining) => Self::Draining,
            _ if resolution == Resolution::Unresolved => Self::Unresolved,
            (Availability::Unhealthy, _) | (_, Health::Unhealthy) => Self::Unhealthy,
            (Availability::Ejected, _) => Self::Ejected,
            _ if holds(|state| state.not_tls.is_some()) => Self::NotTls,
            _ if holds(|state| state.silent_for.is_some() || state.unacknowledged > 0) => Self::Silent,
            _ if holds(|state| state.in_a_row >= FAILURES_MIN) => Self::Failing,
            _ if holds(|state| state.is_slow) => Self::Slow,
            (Availability::Available, Health::Healthy) => Self::Healthy,
        }
    }

    /// Returns the value as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Draining => "draining",
            Self::Unresolved => "unresolved",
            Self::Unhealthy => "unhealthy",
            Self::Ejected => "ejected",
            Self::NotTls => "not_tls",
            Self::Silent => "silent",
            Self::Failing => "failing",
            Self::Slow => "slow",
            Self::Healthy => "healthy",
        }
    }
}

/// The result of looking up the host name of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The endpoint has an address.
    Resolved,
    /// The host name has no address.
    Unresolved,
}

/// The last failure of a connection to an endpoint, made for a client or by a health check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastFailure {
    /// The reason of the failure.
    pub reason: Reason,
    /// The endpoint's answer to the ClientHello of a check, where the reason alone does not say it.
    pub detail: Option<Arc<str>>,
    /// True if the connection was that of a health check.
    pub by_check: bool,
    /// The time of the failure.
    pub time: SystemTime,
}

impl LastFailure {
    /// Returns the reason with the detail.
    pub fn text(&self) -> String {
        match &self.detail {
            Some(detail) => format!("{}: {detail}", self.reason),
            None => self.reason.to_string(),
        }
    }
}

/// The median and the 99th percentile of recent times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percentiles {
    /// The median.
    pub p50: Duration,
    /// The 99th percentile.
    pub p99: Duration,
}

/// A number of connections per second, in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate(pub u32);

impl Rate {
    /// Returns the rate of this number of connections within this time.
    pub fn of(count: u64, time: Duration) -> Self {
        let milliseconds = time.as_millis().max(1);
        Self(u32::try_from(u128::from(count) * 1_000_000 / milliseconds).unwrap_or(u32::MAX))
    }

    /// Returns the number per second.
    pub fn per_second(self) -> f64 {
        f64::from(self.0) / 1e3
    }
}

/// The connections of a service or route to an endpoint since this process knows the endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// The number of connections that were dialled.
    pub dialled: u64,
    /// The number of connections that failed at the endpoint.
    pub failed: u64,
    /// The largest number of connections at once.
    pub active_max: u32,
    /// The number of connections dialled per second in the last five seconds.
    pub rate: Rate,
    /// The highest of these rates.
    pub rate_max: Rate,
}

/// The run-time state of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointState {
    /// The number of connections, counted from before the dial until their end.
    pub in_flight: u32,
    /// The connections so far; `None` if this service or route has made none.
    pub calls: Option<Calls>,
    /// The remaining time of the ejection; `None` if the endpoint is not ejected.
    pub ejected_for: Option<Duration>,
    /// The number of failures since the endpoint last took a connection. If the last failure was that of a health check: the
    /// number of consecutive failed checks.
    pub in_a_row: u32,
    /// True if health checks have found the endpoint unhealthy.
    pub unhealthy: bool,
    /// The withdrawal by an operator.
    pub withdrawal: Option<Withdrawal>,
    /// The last failure, even if the endpoint has taken connections since.
    pub last_failure: Option<LastFailure>,
    /// The time at which the endpoint last answered a ClientHello with bytes that are not TLS; `None` if it never did or has
    /// answered with TLS since.
    pub not_tls: Option<SystemTime>,
    /// The time for which connections have waited for the endpoint's answer to a hello without any being answered; `None` if it is
    /// shorter than [`SILENT_AFTER`].
    pub silent_for: Option<Duration>,
    /// The number of connections of which the endpoint has not acknowledged bytes for [`SILENT_AFTER`].
    pub unacknowledged: u32,
    /// True if the endpoint answers much later than the others of its service.
    pub is_slow: bool,
    /// The times until the endpoint accepted recent connections.
    pub connect: Option<Percentiles>,
    /// The longest waits of connections for the endpoint's bytes.
    pub answer: Option<Percentiles>,
}

impl EndpointState {
    /// Returns true if an operator should look at the endpoint.
    pub fn is_troubled(&self) -> bool {
        self.in_a_row > 0 || self.state() != State::Healthy
    }

    /// Returns the state of an endpoint that has an address and is healthy in its registry.
    pub fn state(&self) -> State {
        State::of(Health::Healthy, Resolution::Resolved, Some(self))
    }

    /// Returns whether the endpoint may be chosen.
    pub fn availability(&self) -> Availability {
        match self.withdrawal {
            Some(withdrawal) => withdrawal.availability(),
            None if self.unhealthy => Availability::Unhealthy,
            None if self.ejected_for.is_some() => Availability::Ejected,
            None => Availability::Available,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_state_that_holds_is_shown() {
        let mut state =
            EndpointState { in_a_row: FAILURES_MIN - 1, is_slow: true, ..EndpointState::default() };
        let word = |state: &EndpointState| State::of(Health::Healthy, Resolution::Resolved, Some(state));
        assert_eq!(word(&state), State::Slow);
        state.in_a_row = FAILURES_MIN;
        assert_eq!(word(&state), State::Failing);
        state.unacknowledged = 1;
        assert_eq!(word(&state), State::Silent);
        (state.silent_for, state.unacknowledged) = (Some(SILENT_AFTER), 0);
        assert_eq!(word(&state), State::Silent);
        state.not_tls = Some(SystemTime::now());
        assert_eq!(word(&state), State::NotTls);
        state.ejected_for = Some(Duration::from_secs(1));
        assert_eq!(word(&state), State::Ejected);
        state.unhealthy = true;
        assert_eq!(word(&state), State::Unhealthy);
        let of = |health, resolution| State::of(health, resolution, Some(&state));
        assert_eq!(of(Health::Healthy, Resolution::Unresolved), State::Unresolved);
        assert_eq!(of(Health::Draining, Resolution::Unresolved), State::Draining);
        state.withdrawal = Some(Withdrawal::Disabled);
        assert_eq!(State::of(Health::Draining, Resolution::Resolved, Some(&state)), State::Disabled);
        let unknown = |health| State::of(health, Resolution::Resolved, None);
        assert_eq!([Health::Healthy, Health::Unhealthy].map(unknown), [State::Healthy, State::Unhealthy]);
    }
}
