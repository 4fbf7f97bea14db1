//! Limits how many sessions send parts of wide changes at the same time.
//!
//! A wide change, such as another gateway address, changes resources of almost every client. If all sessions sent it at once,
//! a change of one service would wait behind their work, in this process and in those of the clients. A session
//! therefore needs a permit for each bounded response with a part of the change, and gives it back with the client's answer.
//!
//! ```text
//! wide mark ─▶ waiting, in order of arrival ─▶ permit (at most SENDERS) ─▶ response ─▶ ACK or NACK ─▶ more names: waiting
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The number of permits at the same time. While a gateway's new address is sent to 4,900 clients on two processors, which takes
/// 1 s, the 99th percentile of a single service's changes is at most 1.3 times as long as otherwise. With more permits the address
/// would arrive sooner, and other changes later.
pub(crate) const SENDERS: usize = 2;
/// The time after which a permit does not count against [`SENDERS`] any more, so that a client that answers late, because it is
/// far away, or never, does not delay the others.
const COUNTED: Duration = Duration::from_millis(1);
/// The same in tests of sessions, in which no time passes.
const NEVER: Duration = Duration::from_secs(3_600);

/// The sessions that have a permit, and those that wait for one.
pub(super) struct Pace {
    inside: Mutex<Inside>,
    /// Notified when sessions wait.
    waits: Notify,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new(if cfg!(test) { NEVER } else { COUNTED })
    }
}

struct Inside {
    /// The time for which a permit counts against [`SENDERS`].
    counted: Duration,
    /// Sessions in order of arrival, each once. They may have ended.
    waiting: VecDeque<Weak<dyn Waiter>>,
    /// The number and the time of each permit that counts against [`SENDERS`], oldest first.
    permits: VecDeque<(u64, Instant)>,
    /// The number of the last permit.
    last: u64,
}

/// A session that can wait for a permit.
pub(super) trait Waiter: Send + Sync {
    /// Notes that the session waits for a permit; returns false if it does already, or has one.
    fn enqueue(&self) -> bool;

    /// Gives the session a permit, and wakes it.
    fn give_permit(&self, permit: Permit);
}

/// The permission to send one part of a wide change; given back when dropped.
pub struct Permit {
    pace: Arc<Pace>,
    number: u64,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pace.inside().permits.retain(|(number, _)| *number != self.number);
        self.pace.give_permits(Instant::now());
    }
}

impl Inside {
    /// Returns the next waiting session and the number of its permit, if there is one.
    fn begin_next(&mut self, now: Instant) -> Option<(Arc<dyn Waiter>, u64)> {
        while self.has_room(now) {
            if let Some(waiter) = self.waiting.pop_front()?.upgrade() {
                return Some((waiter, self.begin(now)));
            }
        }
        None
    }

    /// Returns true if there is one.
    fn has_room(&mut self, now: Instant) -> bool {
        while self
            .permits
            .front()
            .is_some_and(|(_, since)| now.saturating_duration_since(*since) >= self.counted)
        {
            self.permits.pop_front();
        }
        self.permits.len() < SENDERS
    }

    fn begin(&mut self, now: Instant) -> u64 {
        self.last += 1;
        self.permits.push_back((self.last, now));
        self.last
    }
}

impl Pace {
    fn new(counted: Duration) -> Self {
        let (waiting, permits) = Default::default();
        Self { inside: Mutex::new(Inside { counted, waiting, permits, last: 0 }), waits: Notify::new() }
    }

    /// Returns a permit if one is free; else the session gets one later.
    pub(super) fn permit_or_wait<W: Waiter + 'static>(self: &Arc<Self>, waiter: &Arc<W>) -> Option<Permit> {
        let now = Instant::now();
        let mut inside = self.inside();
        if inside.waiting.is_empty() && inside.has_room(now) {
            return Some(Permit { pace: self.clone(), number: inside.begin(now) });
        }
        drop(inside);
        if waiter.enqueue() {
            self.wait(waiter);
        }
        None
    }

    /// Gives the session a permit as soon as one is free. The session has noted that it waits.
    pub(super) fn wait<W: Waiter + 'static>(self: &Arc<Self>, waiter: &Arc<W>) {
        let waiter: Weak<W> = Arc::downgrade(waiter);
        self.inside().waiting.push_back(waiter);
        self.give_permits(Instant::now());
    }

    /// Gives permits to waiting sessions; returns true if some still wait.
    fn give_permits(self: &Arc<Self>, now: Instant) -> bool {
        loop {
            let mut inside = self.inside();
            let Some((waiter, number)) = inside.begin_next(now) else {
                let some_wait = !inside.waiting.is_empty();
                drop(inside);
                if some_wait {
                    self.waits.notify_one();
                }
                return some_wait;
            };
            // The session's task, and a permit that is dropped, lock again.
            drop(inside);
            waiter.give_permit(Permit { pace: self.clone(), number });
        }
    }

    /// Gives the permits that become free because older ones are not counted any more.
    pub(super) async fn run(self: &Arc<Self>) {
        loop {
            self.waits.notified().await;
            while self.give_permits(Instant::now()) {
                let counted = self.inside().counted;
                tokio::time::sleep(counted).await;
            }
        }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        // A poisoned lock is usable: each change is a single step.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A session that keeps its permit until it is asked for it.
    #[derive(Default)]
    struct Mailbox {
        is_queued: AtomicBool,
        permit: Mutex<Option<Permit>>,
        given: Notify,
    }

    impl Waiter for Mailbox {
        fn enqueue(&self) -> bool {
            !self.is_queued.swap(true, Ordering::Relaxed)
        }

        fn give_permit(&self, permit: Permit) {
            self.is_queued.store(false, Ordering::Relaxed);
            *self.permit.lock().expect("whole") = Some(permit);
            self.given.notify_one();
        }
    }

    fn is_given(mailbox: &Mailbox) -> Option<Permit> {
        mailbox.permit.lock().expect("whole").take()
    }

    #[test]
    fn permits_are_bounded_and_in_order_of_arrival() {
        let pace = Arc::<Pace>::default();
        let permit = |mailbox| pace.permit_or_wait(mailbox);
        let mailboxes: Vec<Arc<Mailbox>> = (0..SENDERS + 3).map(|_| Arc::default()).collect();
        let (first, later) = mailboxes.split_at(SENDERS);
        let mut permits: Vec<Permit> = first.iter().filter_map(permit).collect();
        assert_eq!(permits.len(), SENDERS);
        assert!(
            later.iter().all(|mailbox| permit(mailbox).is_none() && !mailbox.enqueue()),
            "each waits once"
        );
        drop(permits.pop());
        let second = is_given(&later[0]).expect("the first of them");
        assert!(later.iter().all(|mailbox| is_given(mailbox).is_none()));
        // A session that waits again is behind the others.
        assert!(permit(&later[0]).is_none());
        drop((second, permits));
        assert!(later[1..].iter().chain(&later[..1]).all(|mailbox| is_given(mailbox).is_some()));
        assert!(pace.inside().permits.is_empty() && pace.inside().waiting.is_empty());
    }

    #[test]
    fn a_client_that_does_not_answer_holds_up_nobody_for_long() {
        let (pace, now) = (Arc::<Pace>::default(), Instant::now());
        let [waits, gone] = [(); 2].map(|()| Arc::<Mailbox>::default());
        let silent: Vec<_> = (0..SENDERS).map(|_| pace.permit_or_wait(&Arc::<Mailbox>::default())).collect();
        assert!(silent.iter().all(Option::is_some));
        assert!(pace.permit_or_wait(&gone).is_none() && pace.permit_or_wait(&waits).is_none());
        drop(gone);
        assert!(pace.give_permits(now) && is_given(&waits).is_none());
        assert!(!pace.give_permits(Instant::now() + NEVER));
        let permit = is_given(&waits);
        assert!(permit.is_some());
        // Giving back a permit that does not count any more ends no other permit.
        drop(silent);
        assert_eq!(pace.inside().permits.len(), 1);
        drop(permit);
        assert!(pace.inside().permits.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_sessions_go_on_without_an_answer_after_a_millisecond() {
        let (pace, begun) = (Arc::new(Pace::new(COUNTED)), Instant::now());
        let silent: Vec<_> = (0..SENDERS).map(|_| pace.permit_or_wait(&Arc::<Mailbox>::default())).collect();
        let mailbox = Arc::<Mailbox>::default();
        assert!(pace.permit_or_wait(&mailbox).is_none());
        let watch = async {
            mailbox.given.notified().await;
            is_given(&mailbox)
        };
        tokio::select! {
            permit = watch => assert!(permit.is_some()),
            () = pace.run() => {}
        }
        assert_eq!(begun.elapsed().as_millis(), 1);
        drop(silent);
    }
}
