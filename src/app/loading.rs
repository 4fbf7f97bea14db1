//! Reads of the config file, in threads of their own, with a timeout and a limit on their number.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

use super::orders::Reload;
use isthmus_config::{self as config, Config};
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileStates;

/// The time after which a read of the config is abandoned.
const READ_WITHIN: Duration = Duration::from_secs(30);
/// The largest number of reads that may hang at the same time.
const READINGS: usize = 4;
/// The shortest time after which another read may begin in parallel, because the current read may be hanging.
const SLOW: Duration = Duration::from_secs(1);
/// Another read may begin in parallel only after the current read has taken this many times as long as the last complete read.
const SLOWER: u32 = 4;

/// The result of a read of the config file, completed or abandoned.
pub(super) struct Loaded {
    /// The config, or the problems, one per line.
    pub(super) config: Result<Config, Vec<String>>,
    /// The files of the config with their states before the read; `None` if the read was abandoned.
    pub(super) files: Option<FileStates>,
    /// The files that were watched before, with their states before the read.
    pub(super) known: FileStates,
    pub(super) cost: Duration,
}

/// The result of a read that was completed.
struct Contents {
    /// The config, or the problems, one per line.
    config: Result<Config, Vec<String>>,
    /// The files of the config, and in `known` the files that were watched before, each with its state before the read.
    files: FileStates,
    known: FileStates,
}

/// Reads one config file repeatedly.
pub(super) struct Loader {
    path: PathBuf,
    readings: Readings,
    /// The time that a read may take.
    within: Duration,
    current: Option<Current>,
    /// The time that the last complete read took.
    cost: Duration,
}

/// A read in progress.
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

    /// Starts the first read of the config file.
    pub(super) fn first(&self) -> impl Future<Output = Loaded> + Send + 'static {
        self.load(FileStates::default())
    }

    pub(super) fn is_reading(&self) -> bool {
        self.current.is_some()
    }

    /// Returns the earliest time at which another read may begin.
    pub(super) fn may_begin(&self) -> Instant {
        let slow = SLOW.max(SLOWER * self.cost);
        self.current.as_ref().map_or_else(Instant::now, |current| current.begun + slow)
    }

    /// Starts a read. Waiters of a read in progress then wait for the new read.
    pub(super) fn begin(&mut self, mut reload: Reload, known: FileStates) {
        let loaded = Box::pin(self.load(known));
        if let Some(before) = self.current.take() {
            reload.waiters.extend(before.reload.waiters);
        }
        self.current = Some(Current { reload, begun: Instant::now(), loaded });
    }

    /// Waits for the read in progress; forever if there is none. Cancel safe.
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
        // The states of the files are recorded before the files are read, so that changes during the read are noticed.
        self.read(known, move || {
            let known = before.now();
            let mut files = FileStates::default();
            let environment = |name: &str| std::env::var_os(name);
            let read = config::load(&file, &environment, &mut |path| files.note(path));
            let problems = |problems: Vec<_>| problems.iter().map(ToString::to_string).collect();
            Contents { config: read.map_err(problems), files, known }
        })
    }

    /// Runs `read` in a thread of its own, and abandons it after the timeout.
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

    /// Returns a read that ends when the sender of the channel is dropped.
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
                    format!("the file system does not answer; {READINGS} earlier reads still wait for it")
                }
                _ => "no result within 10ms; the file system hangs, or the machine is too busy".to_owned(),
            };
            assert_eq!(problems, [format!("{}: cannot be read: {why}", path.display())]);
            assert!(late.files.is_none(), "what the file was like is not known");
        }
        drop(stops);
        loader.readings.ended().await;
        loader.within = READ_WITHIN;
        assert!(loader.first().await.config.is_ok(), "the file system answers again");
    }

    #[tokio::test(start_paused = true)]
    async fn another_read_waits_for_four_times_as_long_as_the_last_one_took_and_at_least_a_second() {
        for (cost, wait) in [(0, 1_000), (250, 1_000), (2_000, 8_000)] {
            let mut loader = Loader::new(Path::new("isthmus.yaml"));
            loader.cost = Duration::from_millis(cost);
            loader.begin(Reload { why: Vec::new(), waiters: Vec::new() }, FileStates::default());
            assert_eq!(loader.may_begin() - Instant::now(), Duration::from_millis(wait));
        }
    }

    #[test]
    fn a_reading_of_the_config_has_half_a_minute() {
        assert_eq!(Loader::new(Path::new("isthmus.yaml")).within, Duration::from_secs(30));
    }
}
