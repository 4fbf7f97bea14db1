//! Long work of the processor, on threads that give way to those that serve: reading large files, building worlds.
//!
//! A gateway often has no more processors than workers, so what is built beside them is built at their cost. With these
//! threads nicer than the rest, the kernel hands a worker the processor as soon as a peer has something to say.
//! While a million routes are read again on two processors, p99.9 of round trips through a relay is 0.2 ms with it, 0.3 to
//! 4 ms without (`cargo bench --bench routes`).

use std::sync::LazyLock;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinError;

/// How much they give way: at 10, a thread gets about a tenth of the processor that it shares with one of ours.
const NICE: i32 = 10;
/// A config, a world, and two registries, at the same time; more wait.
const THREADS: usize = 4;

/// Has no tasks, only threads for blocking work. They end when idle, and never hold up the end of the process.
static LABOUR: LazyLock<Runtime> = LazyLock::new(|| {
    let threads = Builder::new_current_thread()
        .thread_name("isthmus-labour")
        .max_blocking_threads(THREADS)
        .on_thread_start(give_way)
        .build();
    threads.expect("a runtime without drivers asks nothing of the system")
});

/// Has the work done; tasks that it starts run where this was called. Once begun it is finished, even if the future is
/// dropped.
pub async fn labour<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    let caller = Handle::current();
    let work = move || {
        let _here = caller.enter();
        work()
    };
    LABOUR.spawn_blocking(work).await
}

/// On Linux it is threads that have a priority.
pub(super) fn give_way() {
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
        let (nice, task) = labour(|| (rustix::process::nice(0), tokio::spawn(async { 7 })))
            .await
            .expect("it does not panic");
        let own = rustix::process::nice(0).expect("a priority");
        assert_eq!(nice, Ok((own + NICE).min(19)));
        assert_eq!(task.await.expect("it runs"), 7);
    }
}
