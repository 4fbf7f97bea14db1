//! The state of all links, for operators.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::refusals::Refusals;

/// The time for which a link that has ended, and a connection that was refused, have a row.
const PAST_FOR: Duration = Duration::from_secs(60);
/// The largest number of such rows; the oldest give way.
const PAST_MAX: usize = 64;

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

impl LinkStatus {
    /// Returns true if this row says what became of a link that has ended: it has the same process or the same address.
    fn follows(&self, past: &Self) -> bool {
        let is_same_process = !past.instance.is_empty() && self.instance == past.instance;
        self.peer == past.peer && (is_same_process || past.dialled && self.address == past.address)
    }

    /// Returns true if this is a connection that was refused before it had a process.
    fn is_refused(&self) -> bool {
        !self.dialled && self.instance.is_empty()
    }
}

/// The last Goodbye of a peer since which no link with it was opened.
#[derive(Debug)]
struct Parted {
    at: SystemTime,
    why: String,
    /// True if the peer opens another link, as its upgrades do.
    goes_on: bool,
}

/// All links, by the name of the peer and a number that is unique in this process.
#[derive(Debug, Default)]
pub struct LinkTable {
    links: Mutex<BTreeMap<(Arc<str>, u64), LinkStatus>>,
    /// Why the times of exports cannot be read or written.
    times_problem: Mutex<Option<String>>,
    /// Why carriers are not open, by the name of the peer and a number that is unique in this process.
    carriers: Mutex<BTreeMap<(Arc<str>, u64), String>>,
    /// The last Goodbye of each peer since which no link with it was opened.
    parted: Mutex<BTreeMap<Arc<str>, Parted>>,
    /// Links that have ended and connections that were refused, each with the time, the oldest first.
    past: Mutex<Vec<(Instant, LinkStatus)>>,
}

impl LinkTable {
    /// Returns all links in order of peer, then those that have ended within the last minute and that no other row follows.
    pub fn all(&self) -> Vec<LinkStatus> {
        let mut all: Vec<LinkStatus> = self.lock().values().cloned().collect();
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.retain(|(at, _)| at.elapsed() < PAST_FOR);
        let rows = past.iter().map(|(_, row)| row);
        let lonely: Vec<LinkStatus> =
            rows.filter(|row| !all.iter().any(|link| link.follows(row))).cloned().collect();
        all.extend(lonely);
        all
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
        let parted = self.parted.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on = parted.get(peer).filter(|parted| parted.goes_on);
        goes_on.is_some_and(|parted| parted.at.elapsed().is_ok_and(|elapsed| elapsed < within))
    }

    /// Notes the Goodbye of the peer; `goes_on` if the peer opens another link.
    pub(super) fn note_parted(&self, peer: &Arc<str>, why: &str, goes_on: bool) {
        let mut parted = self.parted.lock().unwrap_or_else(PoisonError::into_inner);
        // Peers that were removed from the config do not stay.
        let links = self.lock();
        parted.retain(|known, _| links.values().any(|link| link.peer == *known));
        parted.insert(peer.clone(), Parted { at: SystemTime::now(), why: why.to_owned(), goes_on });
    }

    /// Notes that a link with the peer has opened.
    pub(super) fn note_opened(&self, peer: &Arc<str>) {
        self.parted.lock().unwrap_or_else(PoisonError::into_inner).remove(peer);
    }

    /// Notes that a link has ended, and why.
    pub(super) fn end(&self, peer: &Arc<str>, number: u64, why: &str) {
        let Some(link) = self.lock().remove(&(peer.clone(), number)) else { return };
        self.add_past(LinkStatus {
            state: LinkState::Down,
            since: Some(SystemTime::now()),
            round_trip: None,
            problem: Some(format!("the link ended: {why}")),
            ..link
        });
    }

    /// Notes that a connection from this source was refused, whose certificate names the identity of the peer's gateways. The row
    /// replaces that of the peer's last refusal.
    pub(super) fn note_refused(&self, peer: &Arc<str>, source: IpAddr, why: &str) {
        let row = LinkStatus {
            peer: peer.clone(),
            address: source.to_string(),
            since: Some(SystemTime::now()),
            problem: Some(format!(
                "this gateway refused a connection that names the identity of the peer: {why}"
            )),
            ..LinkStatus::default()
        };
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.retain(|(_, row)| !(row.peer == *peer && row.is_refused()));
        drop(past);
        self.add_past(row);
    }

    fn add_past(&self, row: LinkStatus) {
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.push((Instant::now(), row));
        let surplus = past.len().saturating_sub(PAST_MAX);
        past.drain(..surplus);
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
        // The reason that the peer gave is nearer than how it refuses later connections.
        let parted = self.parted.lock().unwrap_or_else(PoisonError::into_inner);
        let problem = match parted.get(peer) {
            Some(Parted { why, .. }) => format!("the peer ended the last link: {why}; now: {problem}"),
            None => problem,
        };
        drop(parted);
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

    /// Notes why a carrier to a gateway of the peer is not open; `None`: it is open, or not wanted any more. Logs the first problem after
    /// the carrier was open.
    pub(super) fn note_carrier(&self, peer: &Arc<str>, number: u64, problem: Option<(SocketAddr, String)>) {
        let mut all = self.carriers.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (peer.clone(), number);
        let Some((address, problem)) = problem else {
            all.remove(&key);
            return;
        };
        let problem = format!("{address}: {problem}");
        if all.insert(key, problem.clone()).is_none() {
            tracing::warn!(peer = &**peer, "a carrier is not open: {problem}");
        }
    }

    /// Returns why carriers that this gateway opens to the peer are not open, one text for each cause.
    pub fn carrier_problems(&self, peer: &str) -> BTreeSet<String> {
        let all = self.carriers.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|((name, _), _)| **name == *peer).map(|(_, problem)| problem.clone()).collect()
    }

    pub(super) fn remove(&self, peer: &Arc<str>, number: u64) {
        self.lock().remove(&(peer.clone(), number));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<(Arc<str>, u64), LinkStatus>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(table: &LinkTable) -> Vec<String> {
        table.all().into_iter().filter_map(|link| link.problem).collect()
    }

    fn open(table: &LinkTable, number: u64, instance: &str) {
        table.change(&"west".into(), number, |link| {
            (link.instance, link.state) = (instance.into(), LinkState::Live);
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_that_has_ended_keeps_a_row_for_a_minute_or_until_its_process_has_another_link() {
        let (table, west) = (LinkTable::default(), Arc::from("west"));
        open(&table, 1, "w1");
        open(&table, 2, "w2");
        table.end(&west, 1, "it broke");
        table.end(&west, 2, "it broke");
        assert_eq!(problems(&table), ["the link ended: it broke"; 2]);
        open(&table, 3, "w1");
        let all = table.all();
        let states: Vec<_> = all.iter().map(|link| (&*link.instance, link.state)).collect();
        assert_eq!(states, [("w1", LinkState::Live), ("w2", LinkState::Down)]);
        tokio::time::advance(PAST_FOR).await;
        assert_eq!(table.all().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_has_one_row_of_refused_connections_and_all_rows_of_the_past_are_bounded() {
        let (table, west) = (LinkTable::default(), Arc::from("west"));
        for last in [1, 2] {
            table.note_refused(&west, IpAddr::from([192, 0, 2, last]), "the certificate is not trusted");
        }
        let all = table.all();
        assert_eq!(all.iter().map(|link| &*link.address).collect::<Vec<_>>(), ["192.0.2.2"]);
        assert_eq!(
            problems(&table),
            [
                "this gateway refused a connection that names the identity of the peer: the certificate is not trusted"
            ]
        );
        for number in 0..2 * PAST_MAX as u64 {
            open(&table, number, &format!("w{number}"));
            table.end(&west, number, "it broke");
        }
        assert_eq!(table.all().len(), PAST_MAX);
    }

    #[test]
    fn the_goodbye_of_a_peer_stays_until_there_is_a_link() {
        let (table, west) = (LinkTable::default(), Arc::from("west"));
        let within = Duration::from_secs(5);
        open(&table, 1, "w1");
        table.note_parted(&west, "the peer was removed from the config", false);
        assert!(!table.has_parted("west", within));
        table.end(&west, 1, "the peer was removed from the config");
        table.note_down(&west, 9, "192.0.2.1:15443", "connection refused".to_owned());
        assert_eq!(
            problems(&table)[0],
            "the peer ended the last link: the peer was removed from the config; now: connection refused"
        );
        table.note_opened(&west);
        table.note_down(&west, 9, "192.0.2.1:15443", "connection refused".to_owned());
        assert_eq!(problems(&table)[0], "connection refused");
        table.note_parted(&west, "the gateway goes on in a new process", true);
        assert!(table.has_parted("west", within));
    }
}
