//! Work that waits for files, on threads of its own: a mount that hangs keeps its thread, and holds up nobody else.
//!
//! Whoever reads has a [`Readings`] of its own, which bounds how many of its readings can hang at the same time; each is
//! given up after a time, and its thread ends when the file system answers, perhaps never.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;

use super::labour::give_way;

/// All readings at the same time; more wait, and are given up in their time.
const THREADS: usize = 256;

/// Has no tasks, only threads. They end when idle, and never hold up the end of the process.
static FILES: LazyLock<Runtime> = LazyLock::new(|| {
    let threads = Builder::new_current_thread()
        .thread_name("isthmus-files")
        .max_blocking_threads(THREADS)
        .on_thread_start(give_way)
        .build();
    threads.expect("a runtime without drivers asks nothing of the system")
});

/// The readings of one reader; clones share the bound.
#[derive(Clone, Debug)]
pub struct Readings {
    /// Begun and not ended, given up or not.
    running: Arc<watch::Sender<usize>>,
    most: usize,
}

/// Why there is no result; fits after "failed to read: ".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    #[error("the file system has not answered within {0:?}")]
    Late(Duration),
    #[error("the file system does not answer: {0} earlier attempts still wait for it")]
    Hanging(usize),
    #[error("reading panicked")]
    Panicked,
}

struct Running(Arc<watch::Sender<usize>>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

impl Readings {
    /// At most so many at the same time.
    pub fn new(most: usize) -> Self {
        Self { running: Arc::default(), most }
    }

    /// Has the work done, and gives it up after a time; it then goes on aside. Tasks that it starts run where this was
    /// called. Once begun it is finished, even if the future is dropped.
    pub async fn read<T: Send + 'static>(
        &self,
        within: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unread> {
        let mut before = 0;
        let begun = self.running.send_if_modified(|running| {
            before = *running;
            *running += usize::from(before < self.most);
            before < self.most
        });
        if !begun {
            return Err(Unread::Hanging(before));
        }
        let (running, caller) = (Running(self.running.clone()), Handle::current());
        let work = FILES.spawn_blocking(move || {
            let _running = running;
            let _here = caller.enter();
            work()
        });
        match tokio::time::timeout(within, work).await {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(_)) => Err(Unread::Panicked),
            Err(_) => Err(Unread::Late(within)),
        }
    }

    /// Waits until none is running.
    pub async fn ended(&self) {
        // The sender lives in `self`, so the wait cannot fail.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }
}

/// Has work done that may wait for files, and does not wait for it.
pub(super) fn aside(work: impl FnOnce() + Send + 'static) {
    drop(FILES.spawn_blocking(work));
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn what_hangs_is_given_up_and_others_go_on() {
        let readings = Readings::new(2);
        let soon = Duration::from_millis(10);
        let (stop, hang) = channel::<()>();
        let late = readings.read(soon, move || hang.recv()).await;
        assert_eq!(late.expect_err("it hangs"), Unread::Late(soon));
        // One place is left, and given back.
        for round in 0..3 {
            assert_eq!(readings.read(Duration::from_secs(10), move || round).await, Ok(round));
        }
        let (also_stop, hang) = channel::<()>();
        let late = readings.read(soon, move || hang.recv()).await;
        assert_eq!(late.expect_err("it hangs"), Unread::Late(soon));
        assert_eq!(readings.read(soon, || ()).await, Err(Unread::Hanging(2)));
        assert_eq!(Readings::new(1).read(Duration::from_secs(10), || 7).await, Ok(7));
        drop((stop, also_stop));
        readings.ended().await;
        assert_eq!(readings.read(Duration::from_secs(10), || 8).await, Ok(8));
        let panics = || panic!("a test's");
        assert_eq!(readings.read::<()>(Duration::from_secs(10), panics).await, Err(Unread::Panicked));
    }
}
