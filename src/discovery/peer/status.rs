//! The state of all links, for operators.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::proto::isthmus::peer::v1 as proto;

/// The largest number of refused items that are kept by name for each link and direction.
const REFUSED_MAX: usize = 100;

/// The state of one link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkState {
    /// There is no connection; the gateway that dials tries again.
    #[default]
    Down,
    /// Both gateways have sent Hello, and heartbeats are answered.
    Live,
    /// Two heartbeats were not answered.
    Suspect,
}

impl LinkState {
    /// Returns the value as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Live => "live",
            Self::Suspect => "suspect",
        }
    }
}

/// One link, or the attempts to open one.
#[derive(Clone, Debug, Default)]
pub struct LinkStatus {
    /// Our name for the peer.
    pub peer: Arc<str>,
    /// The ID of the peer's process; empty while there is no link.
    pub instance: Arc<str>,
    /// The state of the link: down, live or suspect.
    pub state: LinkState,
    /// The address of the peer's gateway.
    pub address: String,
    /// True if we dialled.
    pub dialled: bool,
    /// The name and version of the peer's program.
    pub software: String,
    /// The time at which the link entered its state.
    pub since: Option<SystemTime>,
    /// The time between the last heartbeat and its answer.
    pub round_trip: Option<Duration>,
    /// The peer's clock minus ours at Hello, in milliseconds.
    pub clock_skew_ms: Option<i64>,
    /// The time at which the peer last sent a change or the end of a listing.
    pub changed: Option<SystemTime>,
    /// The number of services that we sent to the peer, and the number that the peer sent to us.
    pub services: (usize, usize),
    /// Items that the peer has refused, with the peer's reasons: the first 100 by name.
    pub refused: BTreeMap<String, String>,
    /// Items of the peer that this gateway has refused, with the reasons: the first 100 by name.
    pub left_out: BTreeMap<String, String>,
    /// The reason why there is no link, or the fault of the link.
    pub problem: Option<String>,
}

impl LinkStatus {
    /// Removes the refusals of the items that a message sends again.
    pub(super) fn renew(refused: &mut BTreeMap<String, String>, delta: &proto::Delta) {
        if delta.begins {
            return refused.clear();
        }
        let services = delta.services.iter().map(|one| &one.name).chain(&delta.removed_services);
        let gateways = delta.gateways.iter().map(|one| &one.key).chain(&delta.removed_gateways);
        if !refused.is_empty() {
            services.chain(gateways).for_each(|item| drop(refused.remove(item)));
        }
    }
}

/// All links, by the name of the peer and a number that is unique in this process.
#[derive(Debug, Default)]
pub struct LinkTable {
    links: Mutex<BTreeMap<(Arc<str>, u64), LinkStatus>>,
    /// Why the times of exports cannot be read or written.
    times_problem: Mutex<Option<String>>,
}

impl LinkTable {
    /// Returns all links, in order of peer.
    pub fn all(&self) -> Vec<LinkStatus> {
        self.lock().values().cloned().collect()
    }

    /// Returns the reason why the times of exports cannot be kept over a restart.
    pub fn times_problem(&self) -> Option<String> {
        self.times_problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_times_problem(&self, problem: Option<String>) {
        *self.times_problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }

    /// Adds or changes a link.
    pub(super) fn change(&self, peer: &Arc<str>, number: u64, change: impl FnOnce(&mut LinkStatus)) {
        let mut all = self.lock();
        let link = all
            .entry((peer.clone(), number))
            .or_insert_with(|| LinkStatus { peer: peer.clone(), ..LinkStatus::default() });
        let before = link.state;
        change(link);
        if link.since.is_none() || link.state != before {
            link.since = Some(SystemTime::now());
        }
        for items in [&mut link.refused, &mut link.left_out] {
            while items.len() > REFUSED_MAX {
                items.pop_last();
            }
        }
    }

    pub(super) fn remove(&self, peer: &Arc<str>, number: u64) {
        self.lock().remove(&(peer.clone(), number));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<(Arc<str>, u64), LinkStatus>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
