//! Decides when a connection ends gently: if it is older than `maxConnectionAge`, if a planned drain has emptied what it leads to, or
//! if the gateway stops (`docs/drains.md, "What happens"`). [`super::retire`] carries it out.
//!
//! ```text
//!            due                       in a pause of a second
//! ordinary ───────▶ ends at a pause ─────────────────────────▶ closed with FIN
//!                         │ PATIENCE       in a shorter pause     ▲  ▲
//!                         └───────▶ last tries ───────────────────┘  │ in a pause of a second
//!                                       │ LAST_TRIES                 │
//!                                       └──▶ hard end ───────────────┴──▶ reset
//! ```
//!
//! If the gateway stops, the hard end is that of `drain.timeout`, and the last tries take at most a fifth of that time. The hard end
//! comes between two ticks, so the kernel is asked for how long a pause has lasted then.
//!
//! A connection is in a pause if its endpoint sent last, and nothing is under way in either direction. A gap in a download looks the
//! same, so a shorter pause counts only if the client has sent something in each of the last two seconds: then it is one that asks
//! again and again, and none that has just asked for a download. A connection that carries CONNECT streams gets a GOAWAY when it is
//! due, and ends with its last stream.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use isthmus_model::drain::Drain;
use isthmus_model::reason::Reason;
use isthmus_snapshot::drains::{DrainSource, Drains};
use isthmus_telemetry::local::{RetirementCause, RetirementEnd};

/// The number of ticks, each a second, for which a connection that is due may wait for a pause of a second.
const PATIENCE: u32 = 30;
/// The number of ticks after `PATIENCE` in which the connection closes in a shorter pause.
pub(super) const LAST_TRIES: u32 = 5;
/// The number of ticks after which a connection that is due ends, in a pause or by a reset.
const GRACE: u32 = PATIENCE + LAST_TRIES;
/// The time for which no byte moves in a pause.
const PAUSE: Duration = Duration::from_secs(1);

/// The ticks at which a connection is due; 0: never.
#[derive(Debug, Default)]
pub(crate) struct Retirement {
    /// The tick at which the connection is too old.
    aged: Cell<u32>,
    /// The tick at which a drain ends the connection.
    drained: Cell<u32>,
}

/// The way in which a tick treats a connection that may be due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RetirementStep {
    /// Nothing before this tick.
    Wait(u32),
    /// Nothing at all.
    Stay,
    /// The connection closes if it is in a pause, and is looked at again at this tick.
    Ask(u32),
    /// The connection ends: it is closed if it is in a pause, and reset otherwise.
    End,
}

impl Retirement {
    /// Sets the largest age of a connection of this age. It is varied by a tenth, so that connections that began together do not end
    /// together.
    pub(super) fn limit_age(&self, now: u32, random: u64, age: Duration, most: Duration) {
        let varied = most.as_millis().saturating_mul(u128::from(900 + random % 201)) / 1_000;
        let seconds = varied.div_ceil(1_000).saturating_sub(age.as_secs().into());
        let ticks = u32::try_from(seconds).unwrap_or(u32::MAX).max(1);
        self.aged.set(now.saturating_add(ticks));
    }

    /// Returns the tick at which the connection is due; `None`: never.
    pub(super) fn due(&self) -> Option<u32> {
        [self.aged.get(), self.drained.get()].into_iter().filter(|due| *due > 0).min()
    }

    /// Decides at the tick `now`. `moved` is the tick in which the last byte moved, `asks_again` is true if the client has sent
    /// something in each of the last two ticks, and `last_tries` is the tick from which the gateway, if it stops, closes connections in
    /// shorter pauses.
    pub(super) fn step(
        &self,
        now: u32,
        moved: u32,
        asks_again: bool,
        last_tries: Option<u32>,
    ) -> RetirementStep {
        let Some(due) = self.due() else { return RetirementStep::Stay };
        if now < due {
            return RetirementStep::Wait(due);
        }
        if now >= due.saturating_add(GRACE) {
            return RetirementStep::End;
        }
        // The last tries come before the hard end, whichever it is.
        let patient = due.saturating_add(PATIENCE);
        let last_tries = last_tries.map_or(patient, |tick| tick.min(patient));
        // The tick in which a byte moved may not be over for a whole second.
        if moved.saturating_add(1) < now || (now >= last_tries && asks_again) {
            return RetirementStep::Ask(now + 1);
        }
        RetirementStep::Wait(now + 1)
    }

    /// Returns true if this order is the hard end of a connection that has been due. It then still closes in a pause.
    pub(super) fn is_hard_end(&self, now: u32, reason: Reason) -> bool {
        matches!(reason, Reason::Drained | Reason::Draining) && self.is_due(now)
    }

    /// Returns true if the connection is closed as soon as it is in a pause.
    pub(super) fn is_due(&self, now: u32) -> bool {
        self.due().is_some_and(|due| due <= now)
    }

    /// Returns why the connection ends. `is_stopping` is true if the gateway stops. `None`: for no cause of this module.
    pub(super) fn cause(&self, is_stopping: bool) -> Option<RetirementCause> {
        let due = self.due();
        match due.is_some() && due == Some(self.aged.get()) {
            true => Some(RetirementCause::Age),
            false if is_stopping => Some(RetirementCause::Stop),
            false => due.map(|_| RetirementCause::Drain),
        }
    }

    /// Sets the tick at which a drain or the stop of the gateway ends the connection, unless it is due earlier. Returns true if it has
    /// been set.
    pub(super) fn end_at(&self, due: u32) -> bool {
        let is_sooner = self.due().is_none_or(|known| known > due);
        if is_sooner {
            self.drained.set(due);
        }
        is_sooner
    }

    /// Returns true if a drain has set an end.
    pub(super) fn is_drained(&self) -> bool {
        self.drained.get() > 0
    }

    /// Returns the number of ticks until a drain ends the connection; `None`: no drain has set an end.
    pub(super) fn drained_in(&self, now: u32) -> Option<u32> {
        self.is_drained().then(|| self.drained.get().saturating_sub(now))
    }

    /// Undoes what a drain has set.
    pub(super) fn stay(&self) {
        self.drained.set(0);
    }
}

/// Returns true if a pause has lasted for a second at the hard end. `moved` is the tick in which the last byte moved, and `silence` is
/// the time since a peer's last byte as the kernel knows it; zero if it does not.
pub(super) fn has_lasted(now: u32, moved: u32, silence: Duration) -> bool {
    silence >= PAUSE || moved.saturating_add(1) < now
}

/// Returns the detail of a connection that has ended; `None` for an HBONE connection, which ends later.
pub(super) fn detail(cause: RetirementCause, end: RetirementEnd) -> Option<String> {
    let cause = match cause {
        RetirementCause::Age => "the connection was older than maxConnectionAge",
        RetirementCause::Stop => "the gateway stops",
        RetirementCause::Drain => "a planned drain ended the connection",
    };
    match end {
        RetirementEnd::Pause => Some(format!("{cause}; it was closed in a pause")),
        RetirementEnd::GoAway => None,
        RetirementEnd::Reset => {
            Some(format!("{cause}; it was reset, as it was in no pause at the end of its time"))
        }
    }
}

/// The drains whose connections have times at which they end.
#[derive(Debug, Default)]
pub(crate) struct Scheduled {
    /// The drains in force at the last look.
    pub(super) drains: Arc<Drains>,
    /// The stages that have begun, each with the ids of its connections.
    pub(super) stages: Vec<(Begun, BTreeSet<u64>)>,
    /// The tick of the next look for connections that have opened since.
    pub(super) next: u32,
    /// True if connections of another process have arrived since the last look, perhaps after the end of a stage.
    pub(super) has_arrivals: bool,
}

impl Scheduled {
    /// Returns true if a drain has set the end of the connection with this id.
    pub(super) fn has(&self, id: u64) -> bool {
        self.stages.iter().any(|(_, ids)| ids.contains(&id))
    }
}

/// A stage of a drain that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) drain: Arc<Drain>,
    pub(super) source: DrainSource,
    pub(super) stage: Stage,
}

/// A part of what a drain does with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The connections that carry streams get a GOAWAY.
    GoAway,
    /// Other connections are closed.
    Close,
}

impl Stage {
    /// Returns the time at which the stage of a drain begins, in seconds since 1970; `None` if the drain has no such stage. A drain
    /// that leaves a part of the weight leaves the connections, too.
    pub(super) fn begins(self, drain: &Drain) -> Option<u64> {
        let begins = match self {
            Self::GoAway => Some(drain.since),
            Self::Close => drain.close_after.map(|after| drain.since.saturating_add(after.as_secs())),
        };
        begins.filter(|_| drain.to_percent == 0)
    }

    /// Returns the time until which connections open that the stage ends: those that open later come because there is nothing else.
    pub(super) fn ends(self, drain: &Drain) -> u64 {
        drain.ramp_ends().max(self.begins(drain).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_closes_in_a_pause_at_its_hard_end_too() {
        let retirement = Retirement::default();
        assert!(!retirement.is_hard_end(50, Reason::Draining), "its listener was removed");
        retirement.end_at(50);
        assert!(!retirement.is_hard_end(49, Reason::Draining), "a second signal ends it before it is due");
        assert!(!retirement.is_hard_end(50, Reason::Killed), "an operator closes it");
        assert!([Reason::Drained, Reason::Draining].iter().all(|reason| retirement.is_hard_end(50, *reason)));

        // The last byte moved early in tick 49, and the hard end comes late in tick 50: only the kernel knows that it was a second.
        let [just, second] = [999, 1_000].map(Duration::from_millis);
        assert!(has_lasted(50, 49, second) && !has_lasted(50, 49, just));
        assert!(has_lasted(50, 48, Duration::ZERO), "the whole of tick 49 was quiet");
    }

    #[test]
    fn a_connection_that_is_due_waits_for_a_pause_and_is_reset_at_last() {
        let retirement = Retirement::default();
        assert_eq!(retirement.step(100, 0, false, None), RetirementStep::Stay);
        retirement.aged.set(50);
        retirement.drained.set(40);
        assert_eq!(retirement.step(39, 39, false, None), RetirementStep::Wait(40));
        assert_eq!(
            retirement.step(40, 40, false, None),
            RetirementStep::Wait(41),
            "a byte moved in this tick"
        );
        assert_eq!(retirement.step(41, 40, false, None), RetirementStep::Wait(42), "less than a second ago");
        assert_eq!(retirement.step(42, 40, false, None), RetirementStep::Ask(43));
        assert!(!retirement.is_due(39) && retirement.is_due(40));
        assert_eq!(retirement.step(69, 69, false, None), RetirementStep::Wait(70));
        assert_eq!(
            retirement.step(70, 70, false, None),
            RetirementStep::Wait(71),
            "its client is silent, so a gap is no end of an answer"
        );
        assert_eq!(retirement.step(71, 71, true, None), RetirementStep::Ask(72), "a shorter pause");
        assert_eq!(retirement.step(74, 74, true, None), RetirementStep::Ask(75));
        assert_eq!(retirement.step(75, 0, true, None), RetirementStep::End);
        assert_eq!(retirement.cause(true), Some(RetirementCause::Stop), "the earlier of the two");
        assert_eq!(retirement.cause(false), Some(RetirementCause::Drain));
        // The gateway stops before the connection would be reset.
        assert_eq!(retirement.step(54, 54, true, Some(55)), RetirementStep::Wait(55));
        assert_eq!(retirement.step(55, 55, true, Some(55)), RetirementStep::Ask(56), "a shorter pause");
        retirement.drained.set(0);
        assert_eq!(retirement.due(), Some(50));
        assert_eq!(retirement.cause(true), Some(RetirementCause::Age));
        assert_eq!(Retirement::default().cause(false), None, "another cause");
    }
}
