//! The results of the probes of one address, and what they say: whether the gateway answers, since when it does not, and how long it
//! must answer before it is used again. Time is an argument.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::round_trip::Minimum;
use isthmus_model::place::Network;
use isthmus_model::probe::{Answer, Fault};
use isthmus_upgrade::belief::{FORGET_AFTER, GatewayBelief, Moment, Present};

/// The number of failed probes in a row after which an address is taken out.
const FAILED: u32 = 2;
/// The number of good probes in a row after which an address that was taken out is used again. It doubles with each further outage
/// within [`OUTAGES_WITHIN`], up to [`GOOD_MAX`], so that a gateway that flaps disturbs fewer and fewer calls.
const GOOD: u32 = 3;
const GOOD_MAX: u32 = 300;
const OUTAGES_WITHIN: Duration = Duration::from_secs(3_600);
/// The number of outages that are remembered, from which on [`GOOD_MAX`] is needed.
const OUTAGES_MAX: usize = 8;
/// The time after which a gateway is judged by its probes again that has said that it stops, or whose link has lost its heartbeats,
/// and that answers all the same.
const TOLD_WITHIN: Duration = Duration::from_secs(60);

/// The result of the probes of an address and port of a gateway. The state of a gateway is the largest of its addresses'.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// It has never answered this replica, so it is used as if it did.
    NeverAnswered {
        /// The time of the first probe; `None` if none is over.
        since: Option<SystemTime>,
    },
    /// It answers. `took` is the time of the last connect.
    Answers {
        /// The time of the last connect.
        took: Duration,
    },
    /// Its process has said that it stops, so it is taken out.
    Stopping {
        /// The time at which it has said so.
        since: SystemTime,
    },
    /// It has ceased to answer.
    Unreachable {
        /// The time of the first probe that failed.
        since: SystemTime,
        /// True if it is taken out. It is not if no gateway of any other network answers.
        is_out: bool,
        /// The fault of the last probe that failed.
        fault: Fault,
    },
}

impl State {
    /// Returns the state as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::NeverAnswered { .. } => "never_answered",
            Self::Answers { .. } => "answers",
            Self::Stopping { .. } => "stopping",
            Self::Unreachable { .. } => "unreachable",
        }
    }
}

/// The outcome of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The address accepted the connection after this time. The answer is that to the hello, if one was sent.
    Connected(Duration, Option<Answer>),
    Failed(Fault),
}

/// How an address is probed, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) networks: BTreeSet<Network>,
    /// True if probes may send a hello.
    pub(super) greets: bool,
}

/// The results of the probes of one address.
#[derive(Debug, Default)]
pub(super) struct Probed {
    pub(super) way: Way,
    /// The number of probes by this process.
    probes: u32,
    /// The time of the last probe, also by an earlier process.
    probed: Option<Instant>,
    /// True if the last probe sent no hello.
    greets_next: bool,
    /// The best answer to a hello so far; a later one must be as good.
    best: Answer,
    /// The number of good probes in a row.
    good: u32,
    /// The number of failed probes in a row, the time of the first one, and the fault of the last.
    failed: u32,
    failing_since: Option<SystemTime>,
    fault: Option<Fault>,
    /// The times at which the address was taken out, within [`OUTAGES_WITHIN`].
    outages: VecDeque<Instant>,
    /// The time of the last connect; `None` if none has succeeded.
    took: Option<Duration>,
    pub(super) minimum: Minimum,
    is_out: bool,
    /// The time at which the gateway has said that it stops; `None` again after the first failed probe.
    stopping_since: Option<SystemTime>,
    /// The time at which the link with the gateway has lost its heartbeats; `None` again after an answered hello or a failed probe.
    silent_since: Option<SystemTime>,
}

impl Probed {
    /// Returns the results of an address that was never probed.
    pub(super) fn unknown() -> Self {
        Self { greets_next: true, ..Self::default() }
    }

    /// Returns true if the next probe sends a hello: every other one, and each one while the address is in doubt.
    pub(super) fn greets(&self) -> bool {
        self.way.greets && (self.greets_next || self.failed > 0 || self.is_out)
    }

    /// Returns the number of good probes in a row that end the present outage.
    fn good_needed(&self) -> u32 {
        let earlier = self.outages.len().saturating_sub(1);
        (GOOD << earlier).min(GOOD_MAX)
    }

    pub(super) fn take_out(&mut self, at: Instant) {
        if !std::mem::replace(&mut self.is_out, true) {
            self.outages.retain(|outage| at.saturating_duration_since(*outage) < OUTAGES_WITHIN);
            if self.outages.len() >= OUTAGES_MAX {
                self.outages.pop_front();
            }
            self.outages.push_back(at);
        }
    }

    pub(super) fn is_out(&self) -> bool {
        self.is_out
    }

    /// Returns true if the last probe has succeeded, and the gateway's link has not lost its heartbeats.
    pub(super) fn answers(&self) -> bool {
        self.took.is_some() && self.failed == 0 && self.silent_since.is_none()
    }

    /// Returns true if the address has failed often enough to be taken out, if others answer. One that has never answered must refuse
    /// connections: a firewall drops them. `sibling_answers` is true if another gateway of its network answers.
    pub(super) fn is_dead(&self, sibling_answers: impl FnOnce() -> bool) -> bool {
        let is_judged = || self.took.is_some() || self.is_unknown_and_refuses() && sibling_answers();
        self.failed >= FAILED && !self.is_out && is_judged()
    }

    /// Returns true if the address has never answered, and refuses connections.
    pub(super) fn is_unknown_and_refuses(&self) -> bool {
        self.took.is_none() && self.failed > 0 && self.fault == Some(Fault::Refused)
    }

    /// Returns true if this process has judged the address: its first probe has succeeded or cannot change the verdict, or its
    /// second probe has ended.
    pub(super) fn is_judged(&self) -> bool {
        let may_be_dead = self.took.is_some() || self.is_unknown_and_refuses();
        let is_certain = self.is_out || self.failed == 0 || !may_be_dead;
        self.probes > 1 || self.probes == 1 && is_certain
    }

    pub(super) fn state(&self) -> State {
        if let Some(since) = self.stopping_since {
            return State::Stopping { since };
        }
        let fault = self.fault.unwrap_or(Fault::Unconnected);
        match (self.took, self.failing_since) {
            (_, Some(since)) if self.is_out || self.took.is_some() && self.failed >= FAILED => {
                State::Unreachable { since, is_out: self.is_out, fault }
            }
            (None, since) => State::NeverAnswered { since },
            (Some(took), _) => State::Answers { took },
        }
    }

    /// Records the outcome of a probe.
    pub(super) fn note(&mut self, outcome: Outcome, (now, at): (SystemTime, Instant)) {
        (self.probes, self.probed) = (self.probes.saturating_add(1), Some(at));
        self.greets_next = !self.greets_next;
        let result = match outcome {
            Outcome::Connected(_, Some(answer)) if answer < self.best => Err(Fault::Mute),
            Outcome::Connected(took, answer) => {
                self.best = self.best.max(answer.unwrap_or_default());
                Ok(took)
            }
            Outcome::Failed(fault) => Err(fault),
        };
        let is_answered = matches!(outcome, Outcome::Connected(_, Some(Answer::Closed | Answer::Bytes)));
        if let Outcome::Connected(took, _) = outcome {
            self.took = Some(took);
        }
        let holds = |since: Option<SystemTime>| {
            since.is_some_and(|since| now.duration_since(since).is_ok_and(|elapsed| elapsed < TOLD_WITHIN))
        };
        match result {
            Ok(_) if holds(self.stopping_since) => (self.failed, self.failing_since) = (0, None),
            Ok(_) if holds(self.silent_since) && !is_answered => {}
            Ok(took) => self.succeeded(took, at),
            Err(fault) => {
                (self.stopping_since, self.silent_since) = (None, None);
                (self.fault, self.good) = (Some(fault), 0);
                self.failed = self.failed.saturating_add(1);
                self.failing_since = self.failing_since.or(Some(now));
            }
        }
    }

    fn succeeded(&mut self, took: Duration, at: Instant) {
        (self.stopping_since, self.silent_since) = (None, None);
        self.minimum.add(took, at);
        self.minimum.expire(at);
        self.good = self.good.saturating_add(1);
        self.failed = 0;
        self.is_out &= self.good < self.good_needed();
        if !self.is_out {
            self.failing_since = None;
        }
    }

    /// Records whether the process of the gateway has said that it stops. Returns true if anything has changed.
    pub(super) fn note_stop(&mut self, since: Option<SystemTime>) -> bool {
        if self.stopping_since.is_some() == since.is_some() {
            return false;
        }
        (self.stopping_since, self.good) = (since, 0);
        self.is_out = since.is_some();
        true
    }

    /// Records that the link with the gateway has lost its heartbeats, unless the gateway answers hellos.
    pub(super) fn note_silence(&mut self, since: SystemTime) -> bool {
        let is_heard = self.way.greets && self.best > Answer::None && self.failed == 0;
        if is_heard || self.silent_since.is_some() || self.stopping_since.is_some() {
            return false;
        }
        (self.silent_since, self.fault, self.good) = (Some(since), Some(Fault::Heartbeats), 0);
        self.failing_since = self.failing_since.or(Some(since));
        true
    }

    /// Records that the link with the gateway has heartbeats. Returns true if that ends an outage, or a doubt.
    pub(super) fn note_heartbeat(&mut self) -> bool {
        let was_silent = self.silent_since.take().is_some();
        if was_silent {
            (self.is_out, self.failing_since) = (false, None);
        }
        was_silent
    }

    /// Returns what another process of this gateway needs to know of the address; `None` if it was never probed.
    pub(super) fn belief(&self, address: SocketAddr, present: Present) -> Option<GatewayBelief> {
        // `way` is of the config, and `greets_next` and `probes` begin anew.
        let Self {
            way: _,
            probes: _,
            greets_next: _,
            probed,
            best,
            good,
            failed,
            failing_since,
            fault,
            outages,
            took,
            minimum,
            is_out,
            stopping_since,
            silent_since,
        } = self;
        let moment = |time: Option<SystemTime>| time.map(Moment::from);
        let minimum = minimum.smallest(present.instant);
        Some(GatewayBelief {
            address,
            probed: present.moment_of((*probed)?),
            took: *took,
            best: *best,
            is_out: *is_out,
            good: *good,
            failed: *failed,
            failing_since: moment(*failing_since),
            fault: *fault,
            outages: outages.iter().map(|outage| present.moment_of(*outage)).collect(),
            minimum: minimum.map(|(at, took)| (present.moment_of(at), took)),
            stopping_since: moment(*stopping_since),
            silent_since: moment(*silent_since),
        })
    }

    /// Returns what an earlier process of this gateway knew of an address; `None` if that is too long ago.
    pub(super) fn recalled(belief: GatewayBelief, present: Present) -> Option<Self> {
        let GatewayBelief {
            address: _,
            probed,
            took,
            best,
            is_out,
            good,
            failed,
            failing_since,
            fault,
            outages,
            minimum,
            stopping_since,
            silent_since,
        } = belief;
        if present.age(probed) >= FORGET_AFTER {
            return None;
        }
        let time = |moment: Option<Moment>| moment.map(SystemTime::from);
        let mut shortest = Minimum::default();
        if let Some((at, took)) = minimum
            && let Some(at) = present.instant_of(at)
        {
            shortest.add(took, at);
        }
        let outages = outages.into_iter().filter(|outage| present.age(*outage) < OUTAGES_WITHIN);
        let mut outages: VecDeque<Instant> =
            outages.filter_map(|outage| present.instant_of(outage)).collect();
        outages.drain(..outages.len().saturating_sub(OUTAGES_MAX));
        Some(Self {
            way: Way::default(),
            probes: 0,
            probed: Some(present.instant_of(probed).unwrap_or(present.instant)),
            greets_next: true,
            best,
            good,
            failed,
            failing_since: time(failing_since),
            fault,
            outages,
            took,
            minimum: shortest,
            is_out,
            stopping_since: time(stopping_since),
            silent_since: time(silent_since),
        })
    }
}
