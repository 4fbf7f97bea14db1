//! Finds out whether the new process of an upgrade still answers: its kernel accepts connections for it also while it hangs. The old
//! process asks at the upgrade socket, which the new one has taken over.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use isthmus_tasks::scope::Scope;
use isthmus_upgrade::channel::Channel;
use isthmus_upgrade::message::{Message, PROTOCOL};

/// The time between two questions.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// The time within which a question must be answered.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// The time without any answer after which the process hangs.
const HANGS_AFTER: Duration = Duration::from_secs(10);

/// The state of the new process, as far as this process knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Health {
    /// It was not asked yet, or has not answered.
    #[default]
    Unknown,
    /// It has answered.
    Answers,
    /// It has not answered for [`HANGS_AFTER`].
    Hangs,
}

/// A new process that is watched. The watch ends when this is dropped.
#[derive(Debug)]
pub(super) struct Watched {
    health: watch::Receiver<Health>,
    task: JoinHandle<()>,
}

impl Watched {
    /// Watches the process that serves the upgrade socket at this path.
    pub(super) fn start(door: PathBuf, scope: &Scope) -> Self {
        let (say, health) = watch::channel(Health::default());
        let task = scope.spawn(follow(say, async move || answers(&door).await));
        Self { health, task }
    }

    /// Returns what is known of the process.
    pub(super) fn health(&self) -> Health {
        *self.health.borrow()
    }

    /// Waits until the process has answered or hangs.
    pub(super) async fn is_known(&mut self) -> Health {
        let known = self.health.wait_for(|health| *health != Health::Unknown).await;
        known.map_or(Health::Unknown, |known| *known)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Asks again and again, until the process hangs.
async fn follow(say: watch::Sender<Health>, ask: impl AsyncFn() -> bool) {
    let mut answered = Instant::now();
    loop {
        if ask().await {
            answered = Instant::now();
            say.send_replace(Health::Answers);
        } else if answered.elapsed() >= HANGS_AFTER {
            say.send_replace(Health::Hangs);
            return;
        }
        sleep(ASK_EVERY).await;
    }
}

/// Returns true if the process answers at its upgrade socket, whatever it says: its main loop has come to this question.
async fn answers(door: &Path) -> bool {
    let question = Message::Hello { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned() };
    let asked = async {
        let mut channel = Channel::connect(door).await?;
        // The process may have answered and closed the socket before.
        let _ = channel.send(&question).await;
        channel.receive().await.map(drop)
    };
    let answered: Result<io::Result<()>, _> = timeout(ANSWERED_WITHIN, asked).await;
    matches!(answered, Ok(Ok(())))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_process_hangs_if_it_has_not_answered_for_ten_seconds() {
        let begun = Instant::now();
        let (say, health) = watch::channel(Health::default());
        let questions = Cell::new(0);
        let heard = health.clone();
        let seen = Cell::new(Vec::new());
        follow(say, async || {
            let count = questions.get();
            questions.set(count + 1);
            let mut all = seen.take();
            all.push(*heard.borrow());
            seen.set(all);
            // It answers twice, and then each question takes as long as it may.
            if count >= 2 {
                sleep(ANSWERED_WITHIN).await;
            }
            count < 2
        })
        .await;
        assert_eq!(*health.borrow(), Health::Hangs);
        assert_eq!(seen.take()[..3], [Health::Unknown, Health::Answers, Health::Answers]);
        assert_eq!(begun.elapsed().as_secs(), 1 + 1 + 5 + 1 + 5, "{} questions", questions.get());
    }
}
