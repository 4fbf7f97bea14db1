//! The state of all links, for operators.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::refusals::Refusals;

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

/// The answer of a replica of the peer to the newest roots of this mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnRoots {
    /// They were not sent, or the replica has not answered yet.
    #[default]
    Waiting,
    /// The replica verifies callers of this mesh by them.
    Taken,
    /// The replica refuses them.
    Refused,
}

impl OwnRoots {
    /// Returns the value as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Taken => "taken",
            Self::Refused => "refused",
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
    /// The replica's answer to our newest roots.
    pub own_roots: OwnRoots,
    /// Items that the peer has refused, with the peer's reasons.
    pub refused: Refusals,
    /// Items of the peer that this gateway has refused, with the reasons.
    pub left_out: Refusals,
    /// The reason why there is no link, or the fault of the link.
    pub problem: Option<String>,
}

/// All links, by the name of the peer and a number that is unique in this process.
#[derive(Debug, Default)]
pub struct LinkTable {
    links: Mutex<BTreeMap<(Arc<str>, u64), LinkStatus>>,
    /// Why the times of exports cannot be read or written.
    times_problem: Mutex<Option<String>>,
    /// When each peer last ended a link to open another one, as its upgrades do.
    parted: Mutex<BTreeMap<Arc<str>, SystemTime>>,
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

    /// Returns true if the peer has ended a link less than this time ago, to open another one.
    pub fn has_parted(&self, peer: &str, within: Duration) -> bool {
        let parted = self.parted.lock().unwrap_or_else(PoisonError::into_inner).get(peer).copied();
        parted.is_some_and(|parted| parted.elapsed().is_ok_and(|elapsed| elapsed < within))
    }

    /// Notes that the peer has ended a link to open another one.
    pub(super) fn note_parted(&self, peer: &Arc<str>) {
        let mut parted = self.parted.lock().unwrap_or_else(PoisonError::into_inner);
        // Peers that were removed from the config do not stay.
        let links = self.lock();
        parted.retain(|known, _| links.values().any(|link| link.peer == *known));
        parted.insert(peer.clone(), SystemTime::now());
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
    }

    /// Notes that this gateway begins to connect to a gateway of the peer at an address.
    pub(super) fn note_connecting(&self, peer: &Arc<str>, number: u64, address: &str) {
        self.change(peer, number, |link| {
            (link.address, link.dialled) = (address.to_owned(), true);
            link.problem = Some("this gateway has not connected yet".to_owned());
        });
    }

    /// Notes why there is no link with a gateway of the peer at an address to which this gateway connects, unless there is a link
    /// with another replica at the address. Logs the problem if it differs from the last one.
    pub(super) fn note_down(&self, peer: &Arc<str>, number: u64, address: &str, problem: String) {
        let mut all = self.lock();
        let is_linked = |link: &LinkStatus| link.state != LinkState::Down && link.address == address;
        if all.values().any(|link| link.peer == *peer && is_linked(link)) {
            all.remove(&(peer.clone(), number));
            return;
        }
        let row = LinkStatus {
            peer: peer.clone(),
            address: address.to_owned(),
            dialled: true,
            since: Some(SystemTime::now()),
            ..LinkStatus::default()
        };
        let row = all.entry((peer.clone(), number)).or_insert(row);
        if row.problem.as_ref() != Some(&problem) {
            tracing::warn!(peer = &**peer, address, "there is no link with the peer: {problem}");
        }
        row.problem = Some(problem);
    }

    pub(super) fn remove(&self, peer: &Arc<str>, number: u64) {
        self.lock().remove(&(peer.clone(), number));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<(Arc<str>, u64), LinkStatus>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
