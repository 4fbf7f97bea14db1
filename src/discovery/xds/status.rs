//! What is known of each client, for operators.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::incoming::Caller;
use super::kind::Kind;
use super::node::{Denied, Introduction};
use super::session::{Answer, Overview, Protocol};

/// All clients that are connected.
#[derive(Default)]
pub struct Clients {
    next: AtomicU64,
    count: AtomicUsize,
    streams: Mutex<BTreeMap<u64, Arc<Mutex<ClientStatus>>>>,
    refusals: Mutex<Refusals>,
}

/// Refused clients that are remembered, the latest of them.
const REFUSED_MAX: usize = 100;
/// How often the log tells of refused clients at most, and of the same one.
const WARN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

#[derive(Default)]
struct Refusals {
    /// In the order of their last time.
    clients: VecDeque<RefusedClient>,
    total: u64,
    /// When the log told of one, and how many there were since that it has not told of.
    warned: Option<Instant>,
    untold: u64,
}

/// A client that claimed what no rule lets it.
#[derive(Clone, Debug)]
pub struct RefusedClient {
    /// Its identity, or its address.
    pub who: String,
    pub node: String,
    pub network: String,
    pub cluster: String,
    /// What it was told.
    pub why: String,
    pub first: SystemTime,
    pub last: SystemTime,
    pub count: u64,
    warned: Option<Instant>,
}

/// One client's stream.
#[derive(Clone, Debug)]
pub struct ClientStatus {
    /// Counts up with each stream of this process.
    pub id: u64,
    pub caller: Caller,
    pub since: SystemTime,
    pub protocol: Protocol,
    /// `None` before its first request.
    pub introduction: Option<Introduction>,
    /// What it has asked for.
    pub types: BTreeMap<Kind, TypeStatus>,
}

#[derive(Clone, Debug, Default)]
pub struct TypeStatus {
    pub overview: Overview,
    pub acked: Option<SystemTime>,
    pub nacks: u64,
    /// The last refusal, with its text.
    pub nacked: Option<(SystemTime, String)>,
}

/// What clients keep that a registry may have which was not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBack {
    pub clients: usize,
    /// Names, and responses that would have to hold all.
    pub names: usize,
}

/// A client's place in the list; dropping it takes it out.
pub struct Place {
    clients: Arc<Clients>,
    id: u64,
    status: Arc<Mutex<ClientStatus>>,
}

impl Clients {
    /// A place for one more, of at most `most`.
    pub fn enter(self: &Arc<Self>, caller: &Caller, protocol: Protocol, most: usize) -> Option<Place> {
        let room = |count: usize| (count < most).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (since, types) = (SystemTime::now(), BTreeMap::new());
        let status = Arc::new(Mutex::new(ClientStatus {
            id,
            caller: caller.clone(),
            since,
            protocol,
            introduction: None,
            types,
        }));
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(id, status.clone());
        Some(Place { clients: self.clone(), id, status })
    }

    /// Notes a client whose claims no rule allows, and tells of it in the log, but not too often.
    pub fn refuse(&self, caller: &Caller, introduction: &Introduction, denied: &Denied) {
        let (now, time) = (Instant::now(), SystemTime::now());
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.total += 1;
        let viewer = &introduction.viewer;
        let is_same = |other: &RefusedClient| {
            other.who == denied.who
                && other.network == viewer.network.as_str()
                && other.cluster == viewer.cluster.as_str()
        };
        let known = refusals.clients.iter().position(is_same).and_then(|at| refusals.clients.remove(at));
        let mut client = known.unwrap_or_else(|| RefusedClient {
            who: denied.who.clone(),
            node: String::new(),
            network: viewer.network.to_string(),
            cluster: viewer.cluster.to_string(),
            why: String::new(),
            first: time,
            last: time,
            count: 0,
            warned: None,
        });
        client.node.clone_from(&introduction.id);
        client.why = denied.to_string();
        client.last = time;
        client.count += 1;
        let is_over =
            |since: Option<Instant>, rest| since.is_none_or(|since| now.duration_since(since) >= rest);
        if is_over(refusals.warned, WARN.0) && is_over(client.warned, WARN.1) {
            (refusals.warned, client.warned) = (Some(now), Some(now));
            let untold = std::mem::take(&mut refusals.untold);
            tracing::warn!(peer = %caller.peer, node = client.node, untold, "xDS client refused: {denied}");
        } else {
            refusals.untold += 1;
        }
        if refusals.clients.len() == REFUSED_MAX {
            refusals.clients.pop_front();
        }
        refusals.clients.push_back(client);
    }

    /// How many were refused, and the latest of them, newest first.
    pub fn refused(&self) -> (u64, Vec<RefusedClient>) {
        let refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        (refusals.total, refusals.clients.iter().rev().cloned().collect())
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// How much is held back from all clients, and from how many, while registries have not been read.
    pub fn held_back(&self) -> HeldBack {
        let held_back =
            |status: &ClientStatus| -> usize { status.types.values().map(|of| of.overview.held_back).sum() };
        let all = self.list();
        let some = all.iter().map(held_back).filter(|count| *count > 0);
        some.fold(HeldBack::default(), |sum, count| HeldBack {
            clients: sum.clients + 1,
            names: sum.names + count,
        })
    }

    /// All, oldest first.
    pub fn list(&self) -> Vec<ClientStatus> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.values().map(|status| status.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect()
    }
}

impl Place {
    fn change(&self, change: impl FnOnce(&mut ClientStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn introduced(&self, introduction: Introduction) {
        self.change(|status| status.introduction = Some(introduction));
    }

    /// Notes how a type stands, and what the client said of the response before.
    pub fn note(&self, kind: Kind, overview: Overview, answer: &Answer) {
        if !overview.asked {
            return;
        }
        self.change(|status| {
            let of = status.types.entry(kind).or_default();
            of.overview = overview;
            match answer {
                Answer::None => {}
                Answer::Ack(_) => of.acked = Some(SystemTime::now()),
                Answer::Nack(text) => {
                    of.nacks += 1;
                    of.nacked = Some((SystemTime::now(), text.clone()));
                }
            }
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.clients.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.clients.count.fetch_sub(1, Ordering::Relaxed);
    }
}
