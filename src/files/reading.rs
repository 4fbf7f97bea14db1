//! Runs work that waits for files on its own threads: a hanging mount blocks its thread and nothing else.
//!
//! Each reader has a [`Readings`] that bounds how many of its reads can hang at the same time. A caller stops waiting for a
//! read after a timeout; the thread ends when the file system answers, perhaps never.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;

use isthmus_tasks::background::give_way;

/// The number of simultaneous reads of the process; further ones wait, and may time out.
const THREADS: usize = 256;

/// A runtime without tasks, which only provides threads for blocking work. They end when idle, and never delay the exit of
/// the process.
static FILES: LazyLock<Runtime> = LazyLock::new(|| {
    let threads = Builder::new_current_thread()
        .thread_name("isthmus-files")
        .max_blocking_threads(THREADS)
        .on_thread_start(give_way)
        .build();
    threads.expect("a runtime without drivers asks nothing of the system")
});

/// The reads of one reader; clones share the bound.
#[derive(Clone, Debug)]
pub struct Readings {
    /// The number of reads that have begun and not ended, including those that nobody waits for any more.
    running: Arc<watch::Sender<usize>>,
    most: usize,
}

/// The reason why a read has no result; the text fits after "failed to read: ".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The read took longer than this.
    #[error("no result within {0:?}; the file system hangs, or the machine is too busy")]
    Late(Duration),
    /// This many earlier reads hang, so no further read is started.
    #[error("the file system does not answer; {0} earlier reads still wait for it")]
    Hanging(usize),
    /// The work panicked.
    #[error("internal error: reading panicked")]
    Panicked,
}

struct Running(Arc<watch::Sender<usize>>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

impl Readings {
    /// Creates a reader with at most `most` simultaneous reads.
    pub fn new(most: usize) -> Self {
        Self { running: Arc::default(), most }
    }

    /// Runs `work` and waits up to `within` for its result. Once begun, `work` runs to its end, even after the timeout or
    /// if the future is dropped. Tasks that `work` starts run on the caller's runtime.
    pub async fn read<T: Send + 'static>(
        &self,
        within: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ReadError> {
        let mut before = 0;
        let begun = self.running.send_if_modified(|running| {
            before = *running;
            *running += usize::from(before < self.most);
            before < self.most
        });
        if !begun {
            return Err(ReadError::Hanging(before));
        }
        let (running, caller) = (Running(self.running.clone()), Handle::current());
        let work = FILES.spawn_blocking(move || {
            let _running = running;
            let _here = caller.enter();
            work()
        });
        match tokio::time::timeout(within, work).await {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(_)) => Err(ReadError::Panicked),
            Err(_) => Err(ReadError::Late(within)),
        }
    }

    /// Waits until no read is running.
    pub async fn ended(&self) {
        // The sender is owned by `self`, so the wait cannot fail.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }
}

/// Runs work that may wait for files, without waiting for its end.
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
        assert_eq!(late.expect_err("it hangs"), ReadError::Late(soon));
        // The hanging read takes one of the two slots; each round takes and releases the other.
        for round in 0..3 {
            assert_eq!(readings.read(Duration::from_secs(10), move || round).await, Ok(round));
        }
        let (also_stop, hang) = channel::<()>();
        let late = readings.read(soon, move || hang.recv()).await;
        assert_eq!(late.expect_err("it hangs"), ReadError::Late(soon));
        assert_eq!(readings.read(soon, || ()).await, Err(ReadError::Hanging(2)));
        assert_eq!(Readings::new(1).read(Duration::from_secs(10), || 7).await, Ok(7));
        drop((stop, also_stop));
        readings.ended().await;
        assert_eq!(readings.read(Duration::from_secs(10), || 8).await, Ok(8));
        let panics = || panic!("a test's");
        assert_eq!(readings.read::<()>(Duration::from_secs(10), panics).await, Err(ReadError::Panicked));
    }
}
