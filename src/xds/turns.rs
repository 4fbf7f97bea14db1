//! The parts of a connection's task: its life (PINGs and the order to end), its frames and its streams. Each part has a waker
//! of its own, so that a wake polls only its part. Waking a part while the task runs does not wake the task.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// A part of a connection's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Life,
    Frames,
    Streams,
}

impl Part {
    const ALL: [Self; 3] = [Self::Life, Self::Frames, Self::Streams];
}

/// The wakers of the parts of a connection's task; `None` until the task is first polled.
#[derive(Default)]
pub(super) struct Turns {
    wakers: Option<(Arc<Task>, PartWakers)>,
}

/// Wakers by part.
type PartWakers = [PartWaker; Part::ALL.len()];

/// The waker of a task, and a flag that is true while the task runs.
struct Task {
    waker: Waker,
    runs: AtomicBool,
}

struct PartWaker {
    flag: Arc<WakeFlag>,
    waker: Waker,
}

struct WakeFlag {
    woken: AtomicBool,
    task: Arc<Task>,
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // The task checks its parts once more after it has cleared `runs`. Therefore either this wake finds `runs` cleared, or
        // that check finds this wake.
        if !self.woken.swap(true, Ordering::SeqCst) && !self.task.runs.load(Ordering::SeqCst) {
            self.task.waker.wake_by_ref();
        }
    }
}

impl PartWaker {
    fn new(task: &Arc<Task>) -> Self {
        let flag = Arc::new(WakeFlag { woken: AtomicBool::new(true), task: task.clone() });
        Self { waker: flag.clone().into(), flag }
    }
}

impl Turns {
    /// Polls the woken parts until no part is woken, or for at most `rounds` rounds. The last argument of `poll` is the waker
    /// of the streams.
    pub(super) fn poll<T>(
        &mut self,
        context: &Context<'_>,
        rounds: usize,
        mut poll: impl FnMut(Part, &mut Context<'_>, &Waker) -> Poll<T>,
    ) -> Poll<T> {
        let is_same = |(task, _): &(Arc<Task>, _)| task.waker.will_wake(context.waker());
        if !self.wakers.as_ref().is_some_and(is_same) {
            let task = Arc::new(Task { waker: context.waker().clone(), runs: AtomicBool::new(false) });
            let wakers = Part::ALL.map(|_| PartWaker::new(&task));
            self.wakers = Some((task, wakers));
        }
        let Some((task, wakers)) = &self.wakers else { return Poll::Pending };
        let streams = &wakers[Part::Streams as usize].waker;
        for _ in 0..rounds {
            task.runs.store(true, Ordering::SeqCst);
            for (part, part_waker) in Part::ALL.into_iter().zip(wakers) {
                if part_waker.flag.woken.load(Ordering::Acquire)
                    && part_waker.flag.woken.swap(false, Ordering::SeqCst)
                    && let Poll::Ready(end) = poll(part, &mut Context::from_waker(&part_waker.waker), streams)
                {
                    return Poll::Ready(end);
                }
            }
            task.runs.store(false, Ordering::SeqCst);
            if !wakers.iter().any(|part_waker| part_waker.flag.woken.load(Ordering::SeqCst)) {
                return Poll::Pending;
            }
        }
        // The task yields, so that other tasks run.
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
        let _ = turns.poll(&context, 4, |part, context, _| {
            polled.push(part);
            wakers.push(context.waker().clone());
            Poll::<()>::Pending
        });
        assert_eq!((&polled[..], wakes()), (&Part::ALL[..], 0));
        // A wake that comes from outside the task.
        wakers[Part::Frames as usize].wake_by_ref();
        wakers[Part::Frames as usize].wake_by_ref();
        assert_eq!(wakes(), 1);
        polled.clear();
        let _ = turns.poll(&context, 4, |part, _, streams| {
            polled.push(part);
            match part {
                Part::Frames => streams.wake_by_ref(),
                Part::Streams => wakers[Part::Life as usize].wake_by_ref(),
                Part::Life => {}
            }
            Poll::<()>::Pending
        });
        assert_eq!((&polled[..], wakes()), (&[Part::Frames, Part::Streams, Part::Life][..], 1));
        // A part that wakes itself without end yields to other tasks.
        wakers[0].wake_by_ref();
        polled.clear();
        let _ = turns.poll(&context, 4, |part, context, _| {
            polled.push(part);
            context.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert_eq!((polled.len(), wakes()), (4, 3));
    }
}
