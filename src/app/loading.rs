//! Readings of the config file: on threads of their own, given up after a time, a few at most.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

use super::orders::Reload;
use crate::config::{self, Config};
use crate::net::reading::Readings;
use crate::net::watch::FileStates;

/// A reading of the config that takes longer is given up.
const READ_WITHIN: Duration = Duration::from_secs(30);
/// Readings that may hang at the same time.
const READINGS: usize = 4;
/// A reading that has taken so long may hang, unless the one before took long too: another may begin beside it.
const SLOW: Duration = Duration::from_secs(1);
/// How many times as long as the one before a reading may take before another begins beside it.
const SLOWER: u32 = 4;

/// What a reading found.
pub(super) struct Loaded {
    /// Or what is wrong, a line each.
    pub(super) config: Result<Config, Vec<String>>,
    /// The files of this config, as they were before they were read; `None`: nobody knows.
    pub(super) files: Option<FileStates>,
    /// The files known before, as they were before they were read.
    pub(super) known: FileStates,
    pub(super) cost: Duration,
}

/// What a reading that came to its end found.
struct Contents {
    /// Or what is wrong, a line each.
    config: Result<Config, Vec<String>>,
    /// The files of this config, and those known before, as they were before they were read.
    files: FileStates,
    known: FileStates,
}

/// Reads one config, again and again.
pub(super) struct Loader {
    path: PathBuf,
    readings: Readings,
    /// How long a reading may take.
    within: Duration,
    current: Option<Current>,
    /// How long the last reading took that came to its end.
    cost: Duration,
}

/// A reading under way.
struct Current {
    reload: Reload,
    begun: Instant,
    loaded: Pin<Box<dyn Future<Output = Loaded> + Send>>,
}

impl Loader {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            readings: Readings::new(READINGS),
            within: READ_WITHIN,
            current: None,
            cost: Duration::ZERO,
        }
    }

    /// Reads it for the first time.
    pub(super) fn first(&self) -> impl Future<Output = Loaded> + Send + 'static {
        self.load(FileStates::default())
    }

    pub(super) fn is_reading(&self) -> bool {
        self.current.is_some()
    }

    /// When another reading may begin.
    pub(super) fn may_begin(&self) -> Instant {
        let slow = SLOW.max(SLOWER * self.cost);
        self.current.as_ref().map_or_else(Instant::now, |current| current.begun + slow)
    }

    /// Begins a reading. Whoever waits for one under way waits for this.
    pub(super) fn begin(&mut self, mut reload: Reload, known: FileStates) {
        let loaded = Box::pin(self.load(known));
        if let Some(before) = self.current.take() {
            reload.waiters.extend(before.reload.waiters);
        }
        self.current = Some(Current { reload, begun: Instant::now(), loaded });
    }

    /// Waits for the reading under way; for ever, where there is none. Nothing is lost where this is dropped.
    pub(super) async fn loaded(&mut self) -> (Reload, Loaded) {
        if let Some(current) = &mut self.current {
            let loaded = current.loaded.as_mut().await;
            if loaded.files.is_some() {
                self.cost = loaded.cost;
            }
            if let Some(Current { reload, .. }) = self.current.take() {
                return (reload, loaded);
            }
        }
        std::future::pending().await
    }

    fn load(&self, known: FileStates) -> impl Future<Output = Loaded> + Send + 'static {
        let (file, before) = (self.path.clone(), known.clone());
        // Looked at first: what changes while it is read is to be read again.
        self.read(known, move || {
            let known = before.now();
            let mut files = FileStates::default();
            let environment = |name: &str| std::env::var(name).ok();
            let read = config::load(&file, &environment, &mut |path| files.note(path));
            let problems = |problems: Vec<_>| problems.iter().map(ToString::to_string).collect();
            Contents { config: read.map_err(problems), files, known }
        })
    }

    /// Has the config read, and gives that up after a time.
    fn read(
        &self,
        known: FileStates,
        read: impl FnOnce() -> Contents + Send + 'static,
    ) -> impl Future<Output = Loaded> + Send + 'static {
        let (path, readings, within) = (self.path.clone(), self.readings.clone(), self.within);
        async move {
            let begun = Instant::now();
            match readings.read(within, read).await {
                Ok(Contents { config, files, known }) => {
                    Loaded { config, files: Some(files), known, cost: begun.elapsed() }
                }
                Err(unread) => Loaded {
                    config: Err(vec![format!("{}: cannot be read: {unread}", path.display())]),
                    files: None,
                    known,
                    cost: begun.elapsed(),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A reading that ends when the sender of the channel is dropped.
    fn hanging(hang: Receiver<()>) -> impl FnOnce() -> Contents + Send + 'static {
        move || {
            let _ = hang.recv();
            Contents { config: Err(Vec::new()), files: FileStates::default(), known: FileStates::default() }
        }
    }

    #[tokio::test]
    async fn a_reading_that_hangs_is_given_up_and_the_next_one_succeeds() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("isthmus.yaml");
        std::fs::write(&path, "listen: \"127.0.0.1:0\"\n").expect("written");
        let mut loader = Loader::new(&path);
        loader.within = Duration::from_millis(10);
        let mut stops = Vec::new();
        for hung in 0..=READINGS {
            let (stop, hang) = channel();
            stops.push(stop);
            let late = loader.read(FileStates::default(), hanging(hang)).await;
            let problems = late.config.expect_err("it was not read");
            let why = match hung {
                READINGS => {
                    format!("the file system does not answer: {READINGS} earlier attempts still wait for it")
                }
                _ => "the file system has not answered within 10ms".to_owned(),
            };
            assert_eq!(problems, [format!("{}: cannot be read: {why}", path.display())]);
            assert!(late.files.is_none(), "what the file was like is not known");
        }
        drop(stops);
        loader.readings.ended().await;
        loader.within = READ_WITHIN;
        assert!(loader.first().await.config.is_ok(), "the file system answers again");
    }

    #[test]
    fn a_reading_of_the_config_has_half_a_minute() {
        assert_eq!(Loader::new(Path::new("isthmus.yaml")).within, Duration::from_secs(30));
    }
}
