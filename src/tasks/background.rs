//! Runs long computations, such as parsing large files and building snapshots, on threads of low priority.
//!
//! A gateway often has no more processors than workers, so every computation beside the workers delays them. Because these
//! threads have a higher nice value, the kernel gives a worker the processor as soon as a peer has sent something. While a
//! million routes are read again on two processors, p99.9 of round trips through a relay is 0.2 ms with these threads and
//! 0.3 to 4 ms without (`cargo bench --bench routes`). Short computations run on threads of normal priority: while all
//! processors are busy, a thread of low priority waits some milliseconds for one of them.

use std::sync::LazyLock;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinError;

/// The nice value of the threads: at 10, a thread gets about a tenth of a processor that it shares with a worker.
const NICE: i32 = 10;
/// The number of threads: enough for a config, a snapshot and two registries at the same time; further computations wait.
const THREADS: usize = 4;

/// A runtime without tasks, which only provides threads for blocking work. They end when idle, and never delay the exit of
/// the process.
static BACKGROUND: LazyLock<Runtime> = LazyLock::new(|| {
    let threads = Builder::new_current_thread()
        .thread_name("isthmus-lowprio")
        .max_blocking_threads(THREADS)
        .on_thread_start(give_way)
        .build();
    threads.expect("a runtime without drivers asks nothing of the system")
});

/// Runs `work` on a thread of low priority. Tasks that `work` starts run on the caller's runtime. Once begun, `work` runs
/// to its end, even if the future is dropped.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    let caller = Handle::current();
    let work = move || {
        let _here = caller.enter();
        work()
    };
    BACKGROUND.spawn_blocking(work).await
}

/// Runs `work` like [`run`], or, if it is short, on a thread of normal priority. `is_short` must be true only for work that
/// takes about a millisecond at most, whatever a registry or peer has sent.
pub async fn run_by_length<T: Send + 'static>(
    is_short: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if is_short { tokio::task::spawn_blocking(work).await } else { run(work).await }
}

/// Lowers the priority of the current thread; on Linux the nice value belongs to a thread.
pub fn give_way() {
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::debug!(%error, "long work competes with connections");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn long_work_gives_way_and_its_tasks_run_with_the_caller() {
        #[expect(clippy::disallowed_methods, reason = "a task to look at")]
        let (nice, task) =
            run(|| (rustix::process::nice(0), tokio::spawn(async { 7 }))).await.expect("it does not panic");
        let own = rustix::process::nice(0).expect("a priority");
        assert_eq!(nice, Ok((own + NICE).min(19)));
        let short = run_by_length(true, || rustix::process::nice(0)).await.expect("it does not panic");
        assert_eq!(short, Ok(own));
        assert_eq!(task.await.expect("it runs"), 7);
    }
}
