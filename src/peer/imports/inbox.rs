//! The queues by which links deliver the items of peers to the tasks of the peers' registries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{mpsc, oneshot, watch};

use isthmus_model::link::{Extent, LinkKey};
use isthmus_proto::isthmus::peer::v1 as proto;

/// The largest number of events that may wait for a registry; further senders wait.
const WAITING_MAX: usize = 64;

/// An event of a link.
#[derive(Debug)]
pub(super) enum Event {
    /// A link was established.
    Up { link: LinkKey },
    /// Items; `answer` receives what is refused, and what is taken although it was refused before.
    Delta { link: LinkKey, delta: Box<proto::Delta>, answer: oneshot::Sender<proto::Ack> },
    /// The end of a listing; `answer` as above.
    Listed { link: LinkKey, extent: Extent, answer: oneshot::Sender<proto::Ack> },
    /// The link has ended. If `forget` is true, the peer has ordered that its services be removed.
    Down { link: LinkKey, why: String, forget: bool },
}

/// The path from links to registries: one queue per peer, which leads to the newest task of the peer's registry.
#[derive(Clone, Debug, Default)]
pub struct Inbox(Arc<Mutex<HashMap<Arc<str>, Entry>>>);

#[derive(Debug)]
struct Entry {
    queue: Option<mpsc::Sender<Event>>,
    renewals: watch::Sender<u64>,
}

impl Default for Entry {
    fn default() -> Self {
        Self { queue: None, renewals: watch::Sender::new(0) }
    }
}

impl Inbox {
    /// Makes the queue for a new task of a peer's registry, and asks the peer's links for a full listing.
    pub(super) fn attach(&self, peer: &Arc<str>) -> mpsc::Receiver<Event> {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.entry(peer.clone()).or_default();
        entry.queue = Some(sender);
        entry.renewals.send_modify(|count| *count += 1);
        receiver
    }

    /// Returns a counter that changes when the task of a peer's registry starts.
    pub fn renewals(&self, peer: &Arc<str>) -> watch::Receiver<u64> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.entry(peer.clone()).or_default().renewals.subscribe()
    }

    fn queue(&self, peer: &Arc<str>) -> Option<mpsc::Sender<Event>> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.get(peer)?.queue.clone()
    }

    async fn send(&self, peer: &Arc<str>, event: Event) {
        if let Some(queue) = self.queue(peer) {
            // Fails only if the registry's task has just ended; the next task asks for a full listing.
            let _ = queue.send(event).await;
        }
    }

    /// Sends an event that is answered; returns the answer, which is empty if the registry's task has just ended.
    async fn ask(
        &self,
        peer: &Arc<str>,
        event: impl FnOnce(oneshot::Sender<proto::Ack>) -> Event,
    ) -> proto::Ack {
        let (answer, answered) = oneshot::channel();
        self.send(peer, event(answer)).await;
        answered.await.unwrap_or_default()
    }

    /// Reports that a link was established.
    pub async fn up(&self, peer: &Arc<str>, link: &LinkKey) {
        self.send(peer, Event::Up { link: link.clone() }).await;
    }

    /// Delivers items; returns which of them are refused, and which earlier refusals no longer hold. The result has no sequence
    /// number.
    pub async fn delta(&self, peer: &Arc<str>, link: &LinkKey, delta: Box<proto::Delta>) -> proto::Ack {
        self.ask(peer, |answer| Event::Delta { link: link.clone(), delta, answer }).await
    }

    /// Reports that a full listing has ended; returns the same as [`Self::delta`].
    pub async fn listed(&self, peer: &Arc<str>, link: &LinkKey, extent: Extent) -> proto::Ack {
        self.ask(peer, |answer| Event::Listed { link: link.clone(), extent, answer }).await
    }

    /// Reports that a link has ended. If `forget` is true, the peer has ordered that its services be removed.
    pub async fn down(&self, peer: &Arc<str>, link: &LinkKey, why: &str, forget: bool) {
        let event = Event::Down { link: link.clone(), why: why.to_owned(), forget };
        self.send(peer, event).await;
    }
}
