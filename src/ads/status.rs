//! The state of each client, for operators.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::incoming::Caller;
use super::node::{Denied, NodeInfo};
use super::protocol::{Acknowledgement, Overview, Protocol};

/// All connected clients.
#[derive(Default)]
pub struct Clients {
    next: AtomicU64,
    count: AtomicUsize,
    streams: Mutex<BTreeMap<u64, Arc<Mutex<ClientStatus>>>>,
    refusals: Mutex<Refusals>,
}

/// The largest number of refused clients that are remembered.
const REFUSED_MAX: usize = 100;
/// The shortest time between two log lines about refused clients, and between two lines about the same client.
const WARN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

#[derive(Default)]
struct Refusals {
    /// Refused clients in the order of their last refusal.
    clients: VecDeque<RefusedClient>,
    total: u64,
    /// The time of the last log line about a refusal, and the number of refusals after it.
    warned: Option<Instant>,
    untold: u64,
}

/// A client whose claim no rule allows, or that was refused before its first request.
#[derive(Clone, Debug)]
pub struct RefusedClient {
    /// The client's identity, or its address if it has no identity.
    pub who: String,
    /// The id in the client's node; empty for a client that was refused before its first request.
    pub node: String,
    /// The network that the client claims; empty for a client that was refused before its first request.
    pub network: String,
    /// The cluster that the client claims; empty for a client that was refused before its first request.
    pub cluster: String,
    /// The reason of the last refusal.
    pub why: String,
    /// The time of the first refusal.
    pub first: SystemTime,
    /// The time of the last refusal.
    pub last: SystemTime,
    /// The number of refusals.
    pub count: u64,
    warned: Option<Instant>,
}

impl RefusedClient {
    /// Returns a client that was refused once, at this time.
    fn new(who: String, why: String) -> Self {
        let time = SystemTime::now();
        let (node, network, cluster) = Default::default();
        Self { who, node, network, cluster, why, first: time, last: time, count: 1, warned: None }
    }
}

/// The status of one client's stream.
#[derive(Clone, Debug)]
pub struct ClientStatus {
    /// The number of the stream, unique in this process.
    pub id: u64,
    /// The client of the connection.
    pub caller: Caller,
    /// The time at which the stream was opened.
    pub since: SystemTime,
    /// The variant of the protocol.
    pub protocol: Protocol,
    /// The client's node; `None` before its first request.
    pub node_info: Option<NodeInfo>,
    /// The state of each type for which the client has sent a request, by the short name of the type.
    pub types: BTreeMap<&'static str, TypeStatus>,
}

/// The state of one type of a stream.
#[derive(Clone, Debug, Default)]
pub struct TypeStatus {
    /// The state of the client's subscriptions and of the responses to it.
    pub overview: Overview,
    /// The time at which the client last accepted a response.
    pub acked: Option<SystemTime>,
    /// The number of responses that the client refused.
    pub nacks: u64,
    /// The time and text of the client's last NACK.
    pub nacked: Option<(SystemTime, String)>,
}

/// The totals of names that are held back because a registry is unread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBack {
    /// The number of clients from which names are held back.
    pub clients: usize,
    /// The number of names and complete responses that are held back.
    pub names: usize,
}

/// A client's entry in the list of clients. Dropping it removes the client from the list.
pub struct ClientEntry {
    clients: Arc<Clients>,
    id: u64,
    status: Arc<Mutex<ClientStatus>>,
}

impl Clients {
    /// Adds a client; returns `None` if there are `most` clients already.
    pub fn register(
        self: &Arc<Self>,
        caller: &Caller,
        protocol: Protocol,
        most: usize,
    ) -> Option<ClientEntry> {
        let room = |count: usize| (count < most).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (since, types) = (SystemTime::now(), BTreeMap::new());
        let status = Arc::new(Mutex::new(ClientStatus {
            id,
            caller: caller.clone(),
            since,
            protocol,
            node_info: None,
            types,
        }));
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(id, status.clone());
        Some(ClientEntry { clients: self.clone(), id, status })
    }

    /// Records a client whose claims no rule allows, and logs the refusal within a rate limit.
    pub fn refuse(&self, caller: &Caller, node_info: &NodeInfo, denied: &Denied) {
        let viewer = &node_info.viewer;
        let refused = RefusedClient {
            node: node_info.id.clone(),
            network: viewer.network.to_string(),
            cluster: viewer.cluster.to_string(),
            ..RefusedClient::new(denied.who.clone(), denied.to_string())
        };
        self.record(caller.peer, refused);
    }

    /// Records a client that was refused without its claims: in the TLS handshake, because of its token, or because of a request
    /// with too many items. Logs the refusal within a rate limit. `who` is the client's identity, or its address.
    pub fn refuse_early(&self, peer: SocketAddr, who: String, why: String) {
        self.record(peer, RefusedClient::new(who, why));
    }

    fn record(&self, peer: SocketAddr, mut client: RefusedClient) {
        let now = Instant::now();
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.total += 1;
        let is_same = |other: &RefusedClient| {
            other.who == client.who && other.network == client.network && other.cluster == client.cluster
        };
        let at = refusals.clients.iter().position(is_same);
        if let Some(known) = at.and_then(|at| refusals.clients.remove(at)) {
            (client.first, client.warned) = (known.first, known.warned);
            client.count += known.count;
        }
        let is_over =
            |since: Option<Instant>, rest| since.is_none_or(|since| now.duration_since(since) >= rest);
        if is_over(refusals.warned, WARN.0) && is_over(client.warned, WARN.1) {
            (refusals.warned, client.warned) = (Some(now), Some(now));
            let untold = std::mem::take(&mut refusals.untold);
            tracing::warn!(%peer, node = client.node, untold, "xDS client refused: {}", client.why);
        } else {
            refusals.untold += 1;
        }
        if refusals.clients.len() == REFUSED_MAX {
            refusals.clients.pop_front();
        }
        refusals.clients.push_back(client);
    }

    /// Returns the number of refusals, and the most recently refused clients, newest first.
    pub fn refused(&self) -> (u64, Vec<RefusedClient>) {
        let refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        (refusals.total, refusals.clients.iter().rev().cloned().collect())
    }

    /// Returns the number of streams.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the totals of names that are held back.
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

    /// Returns all clients, oldest first.
    pub fn list(&self) -> Vec<ClientStatus> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.values().map(|status| status.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect()
    }
}

impl ClientEntry {
    fn change(&self, change: impl FnOnce(&mut ClientStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Records the client's node.
    pub fn set_node(&self, node_info: NodeInfo) {
        self.change(|status| status.node_info = Some(node_info));
    }

    /// Records the state of the client's subscription to a resource type, and the client's answer to the last response of the
    /// type.
    pub fn note(&self, kind: &'static str, overview: Overview, answer: &Acknowledgement) {
        if !overview.asked {
            return;
        }
        self.change(|status| {
            let of = status.types.entry(kind).or_default();
            of.overview = overview;
            match answer {
                Acknowledgement::None => {}
                Acknowledgement::Ack(_) => of.acked = Some(SystemTime::now()),
                Acknowledgement::Nack(text) => {
                    of.nacks += 1;
                    of.nacked = Some((SystemTime::now(), text.clone()));
                }
            }
        });
    }
}

impl Drop for ClientEntry {
    fn drop(&mut self) {
        self.clients.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.clients.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_are_refused_early_are_counted_and_remembered() {
        let clients = Clients::default();
        let refuse = |who: &str, why: &str| {
            clients.refuse_early(([127, 0, 0, 1], 9).into(), who.to_owned(), why.to_owned());
        };
        refuse("127.0.0.1", "no certificate");
        refuse("127.0.0.2", "no certificate");
        refuse("127.0.0.1", "an unknown issuer");
        let (total, recent) = clients.refused();
        let recent: Vec<_> = recent
            .iter()
            .map(|client| (&*client.who, &*client.why, client.count, client.warned.is_some()))
            .collect();
        assert_eq!(total, 3);
        // The log gets at most one line per second.
        let expected =
            [("127.0.0.1", "an unknown issuer", 2, true), ("127.0.0.2", "no certificate", 1, false)];
        assert_eq!(recent, expected);
    }
}
