//! The result of writing to the API server, for the report on a registry, and the objects whose writes it refused.

use std::collections::BTreeMap;
use std::time::Duration;

use http::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

use super::client::Fault;
use super::lease::RENEW_EVERY;
use isthmus_registry::change::Report;

/// The pause after the API server has refused the Lease or an object, so that a right that is not granted costs little. A right that
/// is granted later is used after at most this time.
const PAUSE: Duration = Duration::from_secs(60);

/// The largest number of writes at the same time.
pub(super) const TOGETHER: usize = 8;

/// The time for which an object is not written again, if it does not stay as it was written: another program may write it, too.
const AGAIN_AFTER: Duration = Duration::from_secs(30);

/// The last write of an object, and whether the object has stayed as it was written.
pub(super) struct LastWrite {
    at: Instant,
    /// True once the object was read as it was written.
    is_seen: bool,
    /// True if the object had lost the same content shortly before.
    is_repair: bool,
}

impl LastWrite {
    /// Returns a write at this time. `before` is the last write of the same content.
    pub(super) fn now(before: Option<&Self>) -> Self {
        Self { at: Instant::now(), is_seen: false, is_repair: before.is_some_and(Self::is_recent) }
    }

    /// Returns true until the interval of turns is over, in which an object is written once at most.
    pub(super) fn is_fresh(&self) -> bool {
        self.at.elapsed() < RENEW_EVERY
    }

    /// Returns true for [`AGAIN_AFTER`] after the write.
    pub(super) fn is_recent(&self) -> bool {
        self.at.elapsed() < AGAIN_AFTER
    }

    /// Records whether the object was read as it was written.
    pub(super) fn note(&mut self, is_as_written: bool) {
        self.is_seen |= is_as_written;
    }

    /// Returns true if the same content may be written again. Content that was seen and is lost is written again at once, but not a
    /// second time.
    pub(super) fn may_be_repeated(&self) -> bool {
        (self.is_seen && !self.is_repair) || !self.is_recent()
    }
}

/// Puts the objects after those that are done first, so that objects that are due in every turn do not hold up the others. The objects
/// are sorted, and `is_done` is true up to the one that was written last.
pub(super) fn rotate<T>(due: &mut [T], is_done: impl FnMut(&T) -> bool) {
    let at = due.partition_point(is_done);
    due.rotate_left(at);
}

/// The writes of a task, and the right that they need.
#[derive(Debug)]
pub(super) struct Duty {
    /// The subject, such as `conditions of ServiceExports`.
    pub(super) subject: &'static str,
    /// The value of the chart that grants the right.
    pub(super) grant: &'static str,
    /// How a missing right is judged.
    pub(super) lack: Lack,
}

/// The judgement on a missing right to write.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lack {
    /// A choice of the operator: nothing in the config asks for these writes.
    Fact,
    /// A problem, because the config asks for these writes.
    Problem,
}

/// The result of the last attempt to write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Writing {
    /// Everything was written, or nothing had to be.
    #[default]
    Works,
    /// The API server forbids the writes of this subject.
    Forbidden(&'static str, String),
    /// The attempt failed for another reason, which is a problem of the registry.
    Fails(String),
}

impl Writing {
    pub(super) fn of(fault: &Fault, duty: &Duty) -> Self {
        let Duty { subject, grant, .. } = duty;
        match fault.status() {
            Some(StatusCode::FORBIDDEN) => {
                let why = format!("not written: {fault}; the chart grants the right with {grant}");
                Self::Forbidden(subject, why)
            }
            _ => Self::Fails(format!("cannot write the {subject}: {fault}")),
        }
    }

    /// Returns the result of a turn that failed, and the time until the next one.
    pub(super) fn of_turn(fault: &Fault, duty: &Duty) -> (Self, Duration) {
        let writing = Self::of(fault, duty);
        let pause = match (&writing, fault) {
            (Self::Forbidden(..), _) => PAUSE,
            // The Lease has to be renewed at once.
            (_, Fault::Overdue) => Duration::ZERO,
            _ => RENEW_EVERY,
        };
        (writing, pause)
    }

    /// Returns this result, or the other one if nothing failed here.
    pub(super) fn or(self, other: Self) -> Self {
        if self == Self::Works { other } else { self }
    }

    /// Publishes the result if it is new; calls `log` for a right that is missing since now.
    pub(super) fn publish(self, to: &watch::Sender<Self>, log: impl FnOnce(&str, &str)) {
        to.send_if_modified(|known| {
            let is_new = *known != self;
            if let Self::Forbidden(subject, why) = &self
                && is_new
            {
                log(subject, why);
            }
            *known = self;
            is_new
        });
    }

    /// Adds this to the report on how a registry is read.
    pub(super) fn describe(&self, lack: Lack, report: &mut Report) {
        match self {
            Self::Works => {}
            Self::Forbidden(subject, why) => match lack {
                Lack::Fact => report.facts.push((subject, why.clone())),
                Lack::Problem => report.problems.push(format!("{subject}: {why}")),
            },
            Self::Fails(why) => report.problems.push(why.clone()),
        }
    }
}

/// The objects that the API server refused to be written, each with the time and the result. They are tried again after [`PAUSE`], so
/// that they do not hold up the others.
pub(super) struct Refused<K>(BTreeMap<K, (Instant, Writing)>);

impl<K: Ord> Refused<K> {
    pub(super) fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(super) fn insert(&mut self, object: K, fault: &Fault, duty: &Duty) {
        self.0.insert(object, (Instant::now(), Writing::of(fault, duty)));
    }

    pub(super) fn contains(&self, object: &K) -> bool {
        self.0.contains_key(object)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Forgets the objects that are due again, and those that are not there any more.
    pub(super) fn forget(&mut self, is_there: impl Fn(&K) -> bool) {
        self.0.retain(|object, (at, _)| is_there(object) && at.elapsed() < PAUSE);
    }

    /// Returns the result to report: a failure rather than a right that is not granted.
    pub(super) fn result(&self) -> Writing {
        let mut all = self.0.values().map(|(_, writing)| writing);
        let failed = all.clone().find(|writing| matches!(writing, Writing::Fails(_)));
        failed.or_else(|| all.next()).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_to_write_that_is_missing_is_a_problem_if_the_config_asks_for_the_writes() {
        let reported = |status, lack| {
            let duty = Duty { subject: "status", grant: "a.value", lack };
            let mut report = Report::default();
            let fault = Fault::Refused { status, message: "no".into(), retry_after: None };
            Writing::of(&fault, &duty).describe(lack, &mut report);
            (report.facts.len(), report.problems.len())
        };
        let duty = Duty { subject: "slices", grant: "a.value", lack: Lack::Problem };
        let fault = Fault::Refused { status: StatusCode::FORBIDDEN, message: "no".into(), retry_after: None };
        let mut report = Report::default();
        Writing::Works.or(Writing::of(&fault, &duty)).describe(Lack::Problem, &mut report);
        assert!(report.problems[0].starts_with("slices: not written: "), "whoever reports it");
        assert_eq!(reported(StatusCode::FORBIDDEN, Lack::Fact), (1, 0));
        assert_eq!(reported(StatusCode::FORBIDDEN, Lack::Problem), (0, 1));
        assert_eq!(reported(StatusCode::INTERNAL_SERVER_ERROR, Lack::Fact), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_right_that_is_missing_is_tried_again_after_a_minute_and_a_server_that_fails_after_two_seconds()
    {
        let duty = Duty { subject: "status", grant: "a.value", lack: Lack::Fact };
        let mut refused = Refused::new();
        let fault = |status| Fault::Refused { status, message: "no".into(), retry_after: None };
        let (forbidden, failing) = (fault(StatusCode::FORBIDDEN), fault(StatusCode::INTERNAL_SERVER_ERROR));
        let pause = |fault| Writing::of_turn(fault, &duty).1.as_secs();
        assert_eq!((pause(&forbidden), pause(&failing), pause(&Fault::Overdue)), (60, 2, 0));
        refused.insert(1, &forbidden, &duty);
        tokio::time::advance(Duration::from_millis(59_999)).await;
        refused.forget(|_| true);
        assert!(refused.contains(&1));
        tokio::time::advance(Duration::from_millis(1)).await;
        refused.forget(|_| true);
        assert_eq!(refused.len(), 0);
    }

    #[test]
    fn a_turn_begins_after_the_object_that_was_written_last() {
        let after = |last: u8| {
            let mut due = [1, 3, 5];
            rotate(&mut due, |at| *at <= last);
            due
        };
        assert_eq!([0, 1, 4, 5, 9].map(after), [[1, 3, 5], [3, 5, 1], [5, 1, 3], [1, 3, 5], [1, 3, 5]]);
    }

    #[test]
    fn a_failure_is_reported_rather_than_a_missing_right() {
        let duty = Duty { subject: "status", grant: "a.value", lack: Lack::Fact };
        let mut refused = Refused::new();
        assert_eq!(refused.result(), Writing::Works);
        for (object, status) in [(1, StatusCode::FORBIDDEN), (2, StatusCode::INTERNAL_SERVER_ERROR)] {
            let fault = Fault::Refused { status, message: "no".into(), retry_after: None };
            refused.insert(object, &fault, &duty);
        }
        assert!(matches!(refused.result(), Writing::Fails(_)));
        refused.forget(|object| *object == 1);
        assert!(matches!(refused.result(), Writing::Forbidden(..)) && refused.len() == 1);
    }
}
