//! Runs computations, such as parsing files and building snapshots, on threads whose priority is lowered if they take long.
//!
//! A gateway often has no more processors than workers, so every computation beside the workers delays them. Because the
//! threads of long computations have a higher nice value, the kernel gives a worker the processor as soon as a peer has sent
//! something. While a million routes are read again on two processors, p99.9 of round trips through a relay is 0.2 ms with
//! these threads and 0.3 to 4 ms without (`cargo bench --bench routes`). A short computation ends at normal priority: while
//! all processors are busy, a thread of low priority waits some milliseconds for one of them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{getpriority_process, setpriority_process};
use rustix::thread::{Pid, gettid};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

/// The amount by which the nice value of a long computation is higher.
const NICE: i32 = 10;
/// How long a computation runs at normal priority.
const NORMAL_FOR: Duration = Duration::from_millis(5);
/// The number of threads: enough for a config, a snapshot and two registries at the same time; further computations wait.
const THREADS: usize = 4;

/// The places of the threads. Each computation has a thread of its own, because a process without privileges cannot raise the
/// priority of a thread again. The threads never delay the exit of the process.
static PLACES: Semaphore = Semaphore::const_new(THREADS);

/// A computation has panicked, or there was no thread for it.
#[derive(Clone, Copy, Debug)]
pub struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a computation has panicked, or there was no thread for it")
    }
}

impl std::error::Error for Failed {}

/// The priority of one computation: its caller may ask for a lower one before the thread has begun, and after it has ended.
#[derive(Default)]
struct Priority {
    /// The thread, while it computes.
    thread: Option<Pid>,
    is_low: bool,
}

impl Priority {
    fn begin(&mut self) {
        self.thread = Some(gettid());
        if self.is_low {
            lower(None);
        }
    }

    fn lower(&mut self) {
        if !self.is_low && self.thread.is_some() {
            lower(self.thread);
        }
        self.is_low = true;
    }
}

/// A computation as its thread sees it; it ends when this value is dropped.
struct Computing(Arc<Mutex<Priority>>);

impl Drop for Computing {
    fn drop(&mut self) {
        locked(&self.0).thread = None;
    }
}

/// A computation as its caller sees it; its priority is lowered when this value is dropped.
struct Waiting(Arc<Mutex<Priority>>);

impl Drop for Waiting {
    fn drop(&mut self) {
        locked(&self.0).lower();
    }
}

fn locked(priority: &Mutex<Priority>) -> MutexGuard<'_, Priority> {
    priority.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on a thread whose priority is lowered after a few milliseconds, or at once if the future is dropped. Tasks that
/// `work` starts run on the caller's runtime. `work` that has begun runs to its end, even if the future is dropped.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failed> {
    let place = PLACES.acquire().await.map_err(|_| Failed)?;
    let caller = Handle::current();
    let waiting = Waiting(Arc::default());
    let computing = Computing(waiting.0.clone());
    let (result, mut done) = oneshot::channel();
    let thread = std::thread::Builder::new().name("isthmus-lowprio".to_owned()).spawn(move || {
        let (_place, _here) = (place, caller.enter());
        locked(&computing.0).begin();
        let made = work();
        drop(computing);
        // Fails only if nobody waits for the result.
        let _ = result.send(made);
    });
    thread.map_err(|_| Failed)?;
    match timeout(NORMAL_FOR, &mut done).await {
        Ok(made) => made.map_err(|_| Failed),
        Err(_) => {
            drop(waiting);
            done.await.map_err(|_| Failed)
        }
    }
}

/// Runs `work` on a value as [`run`] does, with `stand_in` in its place meanwhile. If the work panics or has no thread, or the
/// future is dropped, the stand-in stays.
pub async fn run_on<V: Send + 'static, T: Send + 'static>(
    value: &mut V,
    stand_in: V,
    work: impl FnOnce(&mut V) -> T + Send + 'static,
) -> Result<T, Failed> {
    let mut lent = std::mem::replace(value, stand_in);
    let (back, made) = run(move || {
        let made = work(&mut lent);
        (lent, made)
    })
    .await?;
    *value = back;
    Ok(made)
}

/// Lowers the priority of the current thread.
pub fn give_way() {
    lower(None);
}

/// Lowers the priority of a thread, or of the current one; on Linux the nice value belongs to a thread.
fn lower(thread: Option<Pid>) {
    let lowered = getpriority_process(thread).and_then(|nice| setpriority_process(thread, nice + NICE));
    if let Err(error) = lowered {
        tracing::debug!(%error, "long work competes with connections");
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn nice() -> i32 {
        getpriority_process(None).expect("a priority")
    }

    #[tokio::test]
    async fn long_work_gives_way_and_its_tasks_run_with_the_caller() {
        let lowered = (nice() + NICE).min(19);
        let long = move || {
            while nice() != lowered {
                std::thread::yield_now();
            }
            #[expect(clippy::disallowed_methods, reason = "a task to look at")]
            tokio::spawn(async { 7 })
        };
        let task = run(long).await.expect("it does not panic");
        assert_eq!(task.await.expect("it runs"), 7);
    }

    #[tokio::test]
    async fn short_work_has_normal_priority_after_long_work_too() {
        let own = nice();
        // On a busy machine even short work may take long.
        for _ in 0..1_000 {
            run(|| std::thread::sleep(2 * NORMAL_FOR)).await.expect("it does not panic");
            if run(nice).await.expect("it does not panic") == own {
                return;
            }
        }
        panic!("all work has a low priority");
    }

    #[tokio::test]
    async fn work_gives_way_at_once_if_nobody_waits_for_it() {
        let (before, (begun, running), (lowered, result)) = (nice(), oneshot::channel(), oneshot::channel());
        let work = move || {
            let _ = begun.send(());
            while nice() == before {
                std::thread::yield_now();
            }
            lowered.send(())
        };
        // The order does not matter: the work cannot end before the other arm.
        tokio::select! {
            _ = run(work) => {}
            _ = running => {}
        }
        result.await.expect("the work has seen the lower priority");
    }
}
