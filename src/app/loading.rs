//! Readings of the config file: on threads of their own, given up after a time, a few at most.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

use super::orders::Reload;
use crate::config::{self, Config};
use crate::net::reading::Readings;
use crate::net::watch::Sightings;

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
    pub(super) files: Option<Sightings>,
    /// The files known before, as they were before they were read.
    pub(super) known: Sightings,
    pub(super) cost: Duration,
}

/// Reads one config, again and again.
pub(super) struct Loader {
    path: PathBuf,
    readings: Readings,
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
        Self { path: path.to_owned(), readings: Readings::new(READINGS), current: None, cost: Duration::ZERO }
    }

    /// Reads it for the first time.
    pub(super) fn first(&self) -> impl Future<Output = Loaded> + Send + 'static {
        self.load(Sightings::default())
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
    pub(super) fn begin(&mut self, mut reload: Reload, known: Sightings) {
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

    fn load(&self, known: Sightings) -> impl Future<Output = Loaded> + Send + 'static {
        let (path, readings) = (self.path.clone(), self.readings.clone());
        async move {
            let begun = Instant::now();
            let (file, before) = (path.clone(), known.clone());
            // Looked at first: what changes while it is read is to be read again.
            let read = move || {
                let known = before.now();
                let mut files = Sightings::default();
                let environment = |name: &str| std::env::var(name).ok();
                let read = config::load(&file, &environment, &mut |path| files.note(path));
                let problems = |problems: Vec<_>| problems.iter().map(ToString::to_string).collect();
                (read.map_err(problems), files, known)
            };
            match readings.read(READ_WITHIN, read).await {
                Ok((config, files, known)) => {
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
