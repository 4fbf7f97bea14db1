//! A session's mailbox: the set of resources that changed since the session last read it.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use crate::discovery::xds::kind::Kind;

/// Changes that a session has not read yet.
#[derive(Default)]
pub struct Mailbox {
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    marks: [Marks; Kind::ALL.len()],
    /// True if the session has something to check.
    news: bool,
    /// True if the session is in the hub's queue of sessions to be woken.
    queued: bool,
    /// The session's task, while it waits.
    waiting: Option<Waker>,
}

impl Inside {
    fn mark(&mut self, kind: Kind, name: Option<&Arc<str>>, since: Instant) {
        let marks = &mut self.marks[kind as usize];
        match name {
            Some(name) => drop(marks.names.insert(name.clone())),
            None => marks.all = true,
        }
        marks.since = Some(marks.since.map_or(since, |first| first.min(since)));
        self.news = true;
    }
}

/// Changes of one type.
#[derive(Debug, Default)]
pub struct Marks {
    /// Names of changed resources.
    pub names: BTreeSet<Arc<str>>,
    /// True if the list of all resources of the type changed.
    pub all: bool,
    /// When the first of the changes was made.
    pub since: Option<Instant>,
}

impl Mailbox {
    /// Marks a resource, or the list of all (`None`), as changed, without waking the session.
    pub(super) fn mark(&self, kind: Kind, name: Option<&Arc<str>>, since: Instant) {
        self.inside().mark(kind, name, since);
    }

    /// Marks a resource, or the list of all (`None`), as changed, and wakes the session.
    pub(super) fn deliver(&self, kind: Kind, name: Option<&Arc<str>>, since: Instant) {
        let mut inside = self.inside();
        inside.mark(kind, name, since);
        let waiting = inside.waiting.take();
        drop(inside);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Wakes the session, so that it checks its state.
    pub(super) fn wake(&self) {
        let mut inside = self.inside();
        inside.news = true;
        let waiting = inside.waiting.take();
        drop(inside);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Notes that the session is queued; returns true if it was not queued before.
    pub(super) fn enqueue(&self) -> bool {
        !std::mem::replace(&mut self.inside().queued, true)
    }

    /// Wakes a queued session, unless it has read its marks meanwhile.
    pub(super) fn dequeue(&self) {
        let mut inside = self.inside();
        inside.queued = false;
        let waiting = if inside.news { inside.waiting.take() } else { None };
        drop(inside);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Takes the changes of all types in one step, so that their order is kept.
    pub fn take(&self) -> [Marks; Kind::ALL.len()] {
        let mut inside = self.inside();
        match std::mem::take(&mut inside.news) {
            true => std::mem::take(&mut inside.marks),
            false => Default::default(),
        }
    }

    /// Waits until there is something to take. Only one task may wait at a time.
    pub async fn changed(&self) {
        poll_fn(|context| {
            let mut inside = self.inside();
            if inside.news {
                return Poll::Ready(());
            }
            if !inside.waiting.as_ref().is_some_and(|waiting| waiting.will_wake(context.waker())) {
                inside.waiting = Some(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // A poisoned lock is usable: each change is a single step.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
