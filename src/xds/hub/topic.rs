//! Topics, to which sessions subscribe: a resource, the list of all resources of a type, or the unread registries. The owner of
//! a topic changes its value, raises its generation, and notifies the mailboxes of the subscribed sessions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;
use super::mailbox::Mailbox;
use super::subscribers::{Slot, Subscribers};

/// A value that changes, and the sessions that subscribe to it.
#[derive(Default)]
pub(crate) struct Topic<T> {
    pub(super) value: T,
    /// Grows with each change of the value; 0: there is no value yet.
    generation: AtomicU64,
    subscribers: Mutex<Subscribers>,
}

/// The value of a topic.
pub(crate) trait Value: Sized {
    /// Called when the last session has unsubscribed. A session may have subscribed meanwhile.
    fn unused(_topic: &Arc<Topic<Self>>) {}
}

/// A session's subscription to a topic. The subscription ends when it is dropped.
pub(crate) struct Subscription<T: Value> {
    pub(super) topic: Arc<Topic<T>>,
    slot: Slot,
}

impl<T: Value> Topic<T> {
    pub(super) fn new(value: T) -> Arc<Self> {
        Arc::new(Self { value, generation: AtomicU64::new(0), subscribers: Mutex::default() })
    }

    /// Subscribes a mailbox. The session must read the value, or the generation, afterwards, so that it misses no change.
    pub(super) fn subscribe(self: &Arc<Self>, mailbox: &Arc<Mailbox>) -> Subscription<T> {
        let slot = lock(&self.subscribers).insert(mailbox.clone());
        Subscription { topic: self.clone(), slot }
    }

    /// Returns the mailboxes to notify after a change. They are a copy, so that no lock is held while sessions wake.
    pub(super) fn subscribers(&self) -> Vec<Arc<Mailbox>> {
        lock(&self.subscribers).iter().cloned().collect()
    }

    pub(super) fn is_unused(&self) -> bool {
        lock(&self.subscribers).is_empty()
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(super) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Ordering::Release);
    }

    /// Notes that the value has changed.
    pub(super) fn advance(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }
}

impl<T: Clone> Subscription<Mutex<T>>
where
    Mutex<T>: Value,
{
    /// Returns the value if it has changed since the generation `seen`, and updates `seen`.
    pub(crate) fn newer(&self, seen: &mut u64) -> Option<T> {
        if self.topic.generation() == *seen {
            return None;
        }
        let value = lock(&self.topic.value);
        *seen = self.topic.generation();
        Some(value.clone())
    }
}

impl<T: Value> Drop for Subscription<T> {
    fn drop(&mut self) {
        let is_unused = lock(&self.topic.subscribers).remove(&self.slot);
        if is_unused {
            T::unused(&self.topic);
        }
    }
}
