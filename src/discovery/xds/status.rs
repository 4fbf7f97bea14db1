//! What is known of each client, for operators.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use super::incoming::Caller;
use super::kind::Kind;
use super::node::Introduction;
use super::session::{Answer, Overview, Protocol};

/// All clients that are connected.
#[derive(Default)]
pub struct Clients {
    next: AtomicU64,
    count: AtomicUsize,
    streams: Mutex<BTreeMap<u64, Arc<Mutex<ClientStatus>>>>,
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

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
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
