//! Runs computations, such as parsing files and building snapshots, on threads whose priority is lowered if they take long.
//!
//! A gateway often has no more processors than workers, so every computation beside the workers delays them. Because the
//! threads of long computations have a higher nice value, the kernel gives a worker the processor as soon as a peer has sent
//! something. While a million routes are read again on two processors, p99.9 of round trips through a relay is 0.2 ms with
//! these threads and 0.3 to 4 ms without (`cargo bench --bench routes`). A short computation ends at normal priority: while
//! all processors are busy, a thread of low priority waits some milliseconds for one of them.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{getpriority_process, setpriority_process};
use rustix::thread::{Pid, gettid};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinError;
use tokio::time::timeout;

/// The amount by which the nice value of a long computation is higher.
const NICE: i32 = 10;
/// How long a computation runs at normal priority.
const NORMAL_FOR: Duration = Duration::from_millis(5);
/// The number of threads: enough for a config, a snapshot and two registries at the same time; further computations wait.
const THREADS: usize = 4;

/// A runtime without tasks, which only provides threads for blocking work. They never delay the exit of the process. A thread
/// ends as soon as it is idle, because a process without privileges cannot raise the priority of a thread again.
static BACKGROUND: LazyLock<Runtime> = LazyLock::new(|| {
    let threads = Builder::new_current_thread()
        .thread_name("isthmus-lowprio")
        .max_blocking_threads(THREADS)
        .thread_keep_alive(Duration::ZERO)
        .build();
    threads.expect("a runtime without drivers asks nothing of the system")
});

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
/// `work` starts run on the caller's runtime. `work` runs to its end, even if the future is dropped.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    let caller = Handle::current();
    let waiting = Waiting(Arc::default());
    let computing = Computing(waiting.0.clone());
    let mut work = BACKGROUND.spawn_blocking(move || {
        let _here = caller.enter();
        locked(&computing.0).begin();
        work()
    });
    match timeout(NORMAL_FOR, &mut work).await {
        Ok(done) => done,
        Err(_) => {
            drop(waiting);
            work.await
        }
    }
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
