//! A session's mailbox: the set of resources that changed since the session last read it.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use super::pace::{Permit, Waiter};
use crate::kind::Kind;
use isthmus_ads::kind::ResourceKind;

/// Changes that a session has not read yet.
#[derive(Default)]
pub struct Mailbox {
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    marks: [Marks; Kind::ALL.len()],
    wide: Wide,
    permit: Option<Permit>,
    /// True if the session has a change to check.
    news: bool,
    /// True if the session waits for a permit.
    queued: bool,
    /// The waker of the session's task while the task waits.
    waiting: Option<Waker>,
}

impl Inside {
    /// Notes that the session waits for a permit; returns false if it does already, or has one.
    fn enqueue(&mut self) -> bool {
        self.permit.is_none() && !std::mem::replace(&mut self.queued, true)
    }

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

/// Everything that a session finds in its mailbox.
#[derive(Default)]
pub struct News {
    /// Changes by type.
    pub marks: [Marks; Kind::ALL.len()],
    /// Assignments that may have changed with those of many other services.
    pub wide: Wide,
    /// The permission to send a part of them.
    pub permit: Option<Permit>,
}

/// Assignments of a wide change, in the order in which they are sent.
#[derive(Debug, Default)]
pub struct Wide {
    names: BTreeSet<Arc<str>>,
    /// The name that was taken last. The next one follows it, so that names that are added again and again do not hold up
    /// the others.
    last: Option<Arc<str>>,
    /// When the first of the changes was made.
    pub since: Option<Instant>,
}

impl Wide {
    fn add(&mut self, name: Arc<str>, since: Instant) {
        self.names.insert(name);
        self.since = Some(self.since.map_or(since, |first| first.min(since)));
    }

    /// Adds the names of a later mailbox that are in `keep`.
    pub fn append(&mut self, later: Self, keep: impl Fn(&str) -> bool) {
        self.names.extend(later.names.into_iter().filter(|name| keep(name)));
        if !self.names.is_empty() {
            self.since = self.since.or(later.since);
        }
    }

    /// Returns true if there are no names.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Takes the next name.
    pub fn pop(&mut self) -> Option<Arc<str>> {
        let after = self.last.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let next = self
            .names
            .range::<str, _>((after, Bound::Unbounded))
            .next()
            .or_else(|| self.names.first())
            .cloned();
        if let Some(name) = &next {
            self.names.remove(name);
        }
        self.last.clone_from(&next);
        next
    }

    /// Removes a name.
    pub fn remove(&mut self, name: &str) {
        self.names.remove(name);
    }

    /// Keeps the names in `keep`.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.names.retain(|name| keep(name));
    }
}

/// Changes of one type.
#[derive(Debug, Default)]
pub struct Marks {
    /// The names of the changed resources.
    pub names: BTreeSet<Arc<str>>,
    /// True if the list of all resources of the type changed.
    pub all: bool,
    /// The time of the earliest of the changes.
    pub since: Option<Instant>,
}

impl Mailbox {
    /// Marks a resource, or the list of all (`None`), as changed with many others, without waking the session. Returns true if
    /// the session must get a permit, which wakes it.
    pub(super) fn mark_wide(&self, kind: Kind, name: Option<&Arc<str>>, since: Instant) -> bool {
        let mut inside = self.inside();
        match name {
            Some(name) if kind == Kind::Assignment => {
                inside.wide.add(name.clone(), since);
                inside.news = true;
            }
            // Other types are not delayed, because a session that sends an urgent assignment must find the change of its
            // cluster too.
            _ => inside.mark(kind, name, since),
        }
        inside.enqueue()
    }

    /// Marks a resource as changed, or the list of all resources if `name` is `None`. Then wakes the session.
    pub(super) fn deliver(&self, kind: Kind, name: Option<&Arc<str>>, since: Instant) {
        self.notify(|inside| inside.mark(kind, name, since));
    }

    /// Wakes the session, so that it checks its state.
    pub(super) fn wake(&self) {
        self.notify(|_| ());
    }

    /// Makes a change, and wakes the session so that it reads the change.
    fn notify<T>(&self, change: impl FnOnce(&mut Inside) -> T) -> T {
        let mut inside = self.inside();
        inside.news = true;
        let result = change(&mut inside);
        let waiting = inside.waiting.take();
        drop(inside);
        waiting.into_iter().for_each(Waker::wake);
        result
    }

    /// Takes the changes of all types in one step, which keeps their order.
    pub fn take(&self) -> News {
        let mut inside = self.inside();
        match std::mem::take(&mut inside.news) {
            true => News {
                marks: std::mem::take(&mut inside.marks),
                wide: std::mem::take(&mut inside.wide),
                permit: inside.permit.take(),
            },
            false => News::default(),
        }
    }

    /// Waits until there is a change to take. Only one task may wait at a time.
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
        // A poisoned lock is usable, because every change is a single step.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter for Mailbox {
    fn enqueue(&self) -> bool {
        self.inside().enqueue()
    }

    fn give_permit(&self, permit: Permit) {
        // Dropping a permit gives the next one, perhaps to this session, so no lock is held then.
        drop(self.notify(|inside| {
            inside.queued = false;
            inside.permit.replace(permit)
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_added_again_and_again_do_not_hold_up_the_others() {
        let (mut wide, now) = (Wide::default(), Instant::now());
        let names = ["a", "b", "c"].map(Arc::<str>::from);
        let mut popped = Vec::new();
        for _ in 0..6 {
            names.iter().for_each(|name| wide.add(name.clone(), now));
            popped.extend(wide.pop());
        }
        assert_eq!(popped, [names.clone(), names].concat());
    }
}
