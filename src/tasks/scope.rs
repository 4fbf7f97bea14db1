//! Scopes of tasks: shutdown waits for all tasks that were started in a scope.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A scope for tasks of a multi-threaded runtime.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    running: Arc<watch::Sender<usize>>,
}

struct Running(Arc<watch::Sender<usize>>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

impl Scope {
    /// Starts a task. [`Scope::finished`] waits for its end.
    #[expect(clippy::disallowed_methods, reason = "this is the scope")]
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.running.send_modify(|running| *running += 1);
        let running = Running(self.running.clone());
        tokio::spawn(async move {
            let _running = running;
            task.await
        })
    }

    /// Returns the number of running tasks.
    pub fn running(&self) -> usize {
        *self.running.borrow()
    }

    /// Waits until no task runs.
    pub async fn finished(&self) {
        // The sender is owned by `self`, so the wait cannot fail.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }
}

/// A scope for tasks of one single-threaded runtime, which end with the runtime.
#[derive(Clone, Debug, Default)]
pub struct LocalScope(());

impl LocalScope {
    /// Starts a task. The given future itself is the task: a wrapper that awaited it would reserve room for it twice, which
    /// is a kilobyte per connection.
    #[expect(clippy::disallowed_methods, reason = "this is the scope")]
    pub fn spawn<F: Future<Output = ()> + 'static>(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}
