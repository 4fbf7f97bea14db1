//! The turns of a connection's task, which is three things in one: its life, its frames and its streams. Each has a bell,
//! so that a wake polls the one that it is for; a bell that is rung while the task runs costs no further wake.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// What is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bell {
    Life,
    Frames,
    Streams,
}

impl Bell {
    const ALL: [Self; 3] = [Self::Life, Self::Frames, Self::Streams];
}

/// The bells of a task. They are made when it is first polled.
#[derive(Default)]
pub(super) struct Turns {
    bells: Option<(Arc<Task>, Ringers)>,
}

/// By bell.
type Ringers = [Ringer; Bell::ALL.len()];

/// A task, and whether it runs.
struct Task {
    waker: Waker,
    runs: AtomicBool,
}

struct Ringer {
    inside: Arc<Inside>,
    waker: Waker,
}

struct Inside {
    rung: AtomicBool,
    task: Arc<Task>,
}

impl Wake for Inside {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A task that runs looks at its bells once more after it has said that it does not: one of the two sees the other.
        if !self.rung.swap(true, Ordering::SeqCst) && !self.task.runs.load(Ordering::SeqCst) {
            self.task.waker.wake_by_ref();
        }
    }
}

impl Ringer {
    fn new(task: &Arc<Task>) -> Self {
        let inside = Arc::new(Inside { rung: AtomicBool::new(true), task: task.clone() });
        Self { waker: inside.clone().into(), inside }
    }
}

impl Turns {
    /// Polls what has rung, until nothing has, or for so many rounds. The last argument of `poll` rings for the streams.
    pub(super) fn poll<T>(
        &mut self,
        context: &Context<'_>,
        rounds: usize,
        mut poll: impl FnMut(Bell, &mut Context<'_>, &Waker) -> Poll<T>,
    ) -> Poll<T> {
        let is_same = |(task, _): &(Arc<Task>, _)| task.waker.will_wake(context.waker());
        if !self.bells.as_ref().is_some_and(is_same) {
            let task = Arc::new(Task { waker: context.waker().clone(), runs: AtomicBool::new(false) });
            let ringers = Bell::ALL.map(|_| Ringer::new(&task));
            self.bells = Some((task, ringers));
        }
        let Some((task, ringers)) = &self.bells else { return Poll::Pending };
        let streams = &ringers[Bell::Streams as usize].waker;
        for _ in 0..rounds {
            task.runs.store(true, Ordering::SeqCst);
            for (bell, ringer) in Bell::ALL.into_iter().zip(ringers) {
                if ringer.inside.rung.load(Ordering::Acquire)
                    && ringer.inside.rung.swap(false, Ordering::SeqCst)
                    && let Poll::Ready(end) = poll(bell, &mut Context::from_waker(&ringer.waker), streams)
                {
                    return Poll::Ready(end);
                }
            }
            task.runs.store(false, Ordering::SeqCst);
            if !ringers.iter().any(|ringer| ringer.inside.rung.load(Ordering::SeqCst)) {
                return Poll::Pending;
            }
        }
        // Others have a turn.
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Counter(std::sync::atomic::AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_bell_polls_its_own_part_and_one_that_rings_meanwhile_wakes_nobody() {
        let counter = Arc::new(Counter::default());
        let wakes = || counter.0.load(Ordering::SeqCst);
        let waker: Waker = counter.clone().into();
        let context = Context::from_waker(&waker);
        let mut turns = Turns::default();
        let (mut polled, mut wakers) = (Vec::new(), Vec::new());
        let _ = turns.poll(&context, 4, |bell, context, _| {
            polled.push(bell);
            wakers.push(context.waker().clone());
            Poll::<()>::Pending
        });
        assert_eq!((&polled[..], wakes()), (&Bell::ALL[..], 0));
        // From outside.
        wakers[Bell::Frames as usize].wake_by_ref();
        wakers[Bell::Frames as usize].wake_by_ref();
        assert_eq!(wakes(), 1);
        polled.clear();
        let _ = turns.poll(&context, 4, |bell, _, streams| {
            polled.push(bell);
            match bell {
                Bell::Frames => streams.wake_by_ref(),
                Bell::Streams => wakers[Bell::Life as usize].wake_by_ref(),
                Bell::Life => {}
            }
            Poll::<()>::Pending
        });
        assert_eq!((&polled[..], wakes()), (&[Bell::Frames, Bell::Streams, Bell::Life][..], 1));
        // A part that never rests leaves others a turn.
        wakers[0].wake_by_ref();
        polled.clear();
        let _ = turns.poll(&context, 4, |bell, context, _| {
            polled.push(bell);
            context.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert_eq!((polled.len(), wakes()), (4, 3));
    }
}
