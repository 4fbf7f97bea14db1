//! Watches files for changes: editors' renames, rewrites in place, and Kubernetes' `..data` links alike.
//!
//! The kernel's notice of a change in a file's folder is only a hint to check; whether a file changed is
//! decided by its metadata. Files are also checked without a hint from time to time, for file systems that
//! give none.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use self::notices::{Hint, Subscription};
use super::reading::{ReadError, Readings};

mod notices;

/// Files that are being written are checked after this time without a hint.
const QUIET: Duration = Duration::from_millis(100);
/// The same after a file was closed or put in its place, which is then mostly complete; files that belong to
/// it may follow.
const QUIET_WHEN_WHOLE: Duration = Duration::from_millis(20);
/// Files that change all the time are checked this long after the first hint, if reading them takes little
/// time and no file is open for writing.
const BUSY_WITHIN: Duration = Duration::from_millis(100);
/// Files that change all the time are checked at the latest this long after the first hint.
const QUIET_WITHIN: Duration = Duration::from_secs(2);
/// How often files are checked without a hint.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// A check that takes longer is given up.
const CHECK_WITHIN: Duration = Duration::from_secs(10);
/// Checks of one watch that may hang at the same time.
const CHECKS: usize = 3;

/// Watches files and folders. Every check is a read on a thread of its own.
pub struct FileWatch {
    seen: FileStates,
    notices: SubscriptionState,
    /// The strongest hint since the last check.
    hint: Option<Hint>,
    /// Files that a writer has begun to write and has not closed, as far as known.
    unfinished: BTreeSet<PathBuf>,
    /// How long reading the files takes.
    cost: Duration,
    looks: Readings,
}

enum SubscriptionState {
    /// The watched paths or their links have changed since the subscription was made, or there is none.
    Outdated(Option<Subscription>),
    Current(Subscription),
}

/// The state of a path; of a folder, the states of its entries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PathState {
    file: Option<FileStamp>,
    entries: Vec<(PathBuf, Option<FileStamp>)>,
}

/// Device, inode, size, and time of the last change (seconds, nanoseconds).
type FileStamp = (u64, u64, u64, i64, i64);

/// Files and folders with their states at the last check; `None`: not checked yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileStates(BTreeMap<PathBuf, Option<PathState>>);

impl FileStates {
    /// Adds a path with its present state, unless the path is known. Blocks.
    pub fn note(&mut self, path: &Path) {
        let known = self.0.entry(path.to_owned()).or_default();
        if known.is_none() {
            *known = Some(stamp(path));
        }
    }

    /// Returns the present states of the same paths. Blocks.
    #[must_use]
    pub fn now(&self) -> Self {
        Self(self.0.keys().map(|path| (path.clone(), Some(stamp(path)))).collect())
    }
}

impl FileWatch {
    /// Watches paths that were never checked.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self::since(FileStates(paths.into_iter().map(|path| (path, None)).collect()))
    }

    /// Watches paths; changes since the given states count.
    pub fn since(seen: FileStates) -> Self {
        Self {
            seen,
            notices: SubscriptionState::Outdated(None),
            hint: None,
            unfinished: BTreeSet::new(),
            cost: Duration::ZERO,
            looks: Readings::new(CHECKS),
        }
    }

    /// Returns the states of the last check.
    pub fn seen(&self) -> &FileStates {
        &self.seen
    }

    /// Replaces the states by those from just before a read, with the time that the read took: the read
    /// covers all changes before.
    pub fn was_read(&mut self, seen: FileStates, cost: Duration) {
        for (path, stamp) in seen.0 {
            self.seen.0.entry(path).and_modify(|known| *known = stamp);
        }
        self.cost = cost;
    }

    /// Updates the states; to be called before the files are read, so that the read covers all changes
    /// before.
    pub async fn refresh(&mut self) {
        match self.now().await {
            Ok(now) => self.seen = now,
            Err(unread) => tracing::debug!(%unread, "cannot check files for changes"),
        }
    }

    /// Returns true if a writer is active, so that a read may have seen half of a change. Waits a moment for
    /// a hint.
    pub async fn is_busy(&mut self) -> bool {
        // After a change the subscription must be renewed. Before the first check there was none, which is
        // not a hint.
        if matches!(self.notices, SubscriptionState::Outdated(Some(_))) {
            self.listen().await;
        }
        self.hint.is_some() || tokio::time::timeout(QUIET, self.next_hint()).await.is_ok()
    }

    /// Watches more paths. A difference from the given state is reported as a change. For a path that is already watched, the
    /// known state is kept.
    pub fn add(&mut self, more: &FileStates) {
        for (path, stamp) in &more.0 {
            self.seen.0.entry(path.clone()).or_insert_with(|| stamp.clone());
        }
        self.outdate();
    }

    /// Stops watching all other paths.
    pub fn retain(&mut self, these: &FileStates) {
        self.seen.0.retain(|path, _| these.0.contains_key(path));
        self.outdate();
    }

    /// Waits until a file differs from its state at the last check. Cancel safe.
    pub async fn changed(&mut self) {
        loop {
            self.listen().await;
            if self.hint.is_none() {
                // The order does not matter: both arms lead to a check.
                tokio::select! {
                    () = self.next_hint() => {}
                    () = tokio::time::sleep(CHECK_EVERY) => {}
                }
            }
            self.quiet().await;
            let now = self.now().await;
            self.hint = None;
            match now {
                Ok(now) if now != self.seen => {
                    self.seen = now;
                    // Links may point elsewhere after a change.
                    self.outdate();
                    return;
                }
                Ok(_) | Err(ReadError::Late(_)) => {}
                // A hint would only repeat the failing check.
                Err(_) => tokio::time::sleep(CHECK_EVERY).await,
            }
        }
    }

    async fn now(&self) -> Result<FileStates, ReadError> {
        let seen = self.seen.clone();
        self.looks.read(CHECK_WITHIN, move || seen.now()).await
    }

    fn outdate(&mut self) {
        self.notices = match std::mem::replace(&mut self.notices, SubscriptionState::Outdated(None)) {
            SubscriptionState::Current(listening) => SubscriptionState::Outdated(Some(listening)),
            outdated => outdated,
        };
    }

    /// Subscribes to the places that the paths and their links point to now. If they cannot be found, there
    /// are no notices until the next call.
    async fn listen(&mut self) {
        let SubscriptionState::Outdated(before) = &mut self.notices else { return };
        let (before, paths) = (before.take(), self.seen.0.keys().cloned().collect::<Vec<_>>());
        // Changes before this moment gave no notice.
        let missed = before.is_none().then_some(Hint::Begun);
        let follow = move || match before {
            Some(mut listening) => {
                listening.follow(&paths);
                listening
            }
            None => Subscription::to(&paths),
        };
        match self.looks.read(CHECK_WITHIN, follow).await {
            Ok(listening) => {
                self.notices = SubscriptionState::Current(listening);
                self.hint = self.hint.or(missed);
            }
            Err(unread) => tracing::debug!(%unread, "cannot receive notices of file changes"),
        }
    }

    /// Waits for the next hint; forever without a subscription.
    async fn next_hint(&mut self) {
        let SubscriptionState::Current(listening) = &mut self.notices else {
            return std::future::pending().await;
        };
        let heard = listening.next().await;
        match heard.hint {
            Hint::Begun => {}
            Hint::Written => drop(self.unfinished.insert(heard.path)),
            Hint::Closed | Hint::Placed => drop(self.unfinished.remove(&heard.path)),
        }
        self.hint = Some(heard.hint);
    }

    /// Waits until hints have stopped for a moment, or until files that change all the time must be checked.
    async fn quiet(&mut self) {
        let first = Instant::now();
        // Reading takes at most a third of the time.
        let busy = first + BUSY_WITHIN.max(2 * self.cost).min(QUIET_WITHIN);
        let alone = self.seen.0.len() == 1
            && self.seen.0.values().all(|stamp| stamp.as_ref().is_some_and(|stamp| stamp.file.is_some()));
        while let (Some(last), SubscriptionState::Current(_)) = (self.hint, &self.notices) {
            let latest = if self.unfinished.is_empty() { busy } else { first + QUIET_WITHIN };
            if Instant::now() >= latest {
                break;
            }
            let rest = match last {
                // A single file was put in its place, and no other file belongs to it.
                Hint::Placed if alone => break,
                Hint::Begun | Hint::Written => QUIET,
                Hint::Placed | Hint::Closed if !self.unfinished.is_empty() => QUIET,
                Hint::Placed | Hint::Closed => QUIET_WHEN_WHOLE,
            };
            let rest = (Instant::now() + rest).min(latest);
            if tokio::time::timeout_at(rest, self.next_hint()).await.is_err() && rest < latest {
                break;
            }
        }
        // The end of a write may have been missed; the next hint of the file adds it again.
        self.unfinished.clear();
    }
}

fn stamp(path: &Path) -> PathState {
    let mut entries = Vec::new();
    if path.is_dir()
        && let Ok(list) = std::fs::read_dir(path)
    {
        entries =
            list.filter_map(Result::ok).map(|entry| (entry.path(), file_stamp(&entry.path()))).collect();
        entries.sort();
    }
    // The times of a folder change with files that are not watched, so only its entries count.
    let file = if path.is_dir() { None } else { file_stamp(path) };
    PathState { file, entries }
}

fn file_stamp(path: &Path) -> Option<FileStamp> {
    let data = std::fs::metadata(path).ok()?;
    Some((data.dev(), data.ino(), data.size(), data.mtime(), data.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn rewrites_renames_and_links_are_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.yaml");
        std::fs::create_dir(folder.path().join("one")).expect("a folder");
        std::fs::create_dir(folder.path().join("two")).expect("a folder");
        for (at, text) in [("a.yaml", "1"), ("one/b.yaml", "1"), ("two/b.yaml", "2")] {
            std::fs::write(folder.path().join(at), text).expect("written");
        }
        std::os::unix::fs::symlink("one", folder.path().join("..data")).expect("linked");
        let linked = folder.path().join("..data/b.yaml");
        let mut watch = FileWatch::new(vec![file.clone(), linked, folder.path().join("absent")]);
        watch.refresh().await;
        let mut seen = async || tokio::time::timeout(Duration::from_secs(10), watch.changed()).await;
        std::fs::write(&file, "22").expect("written");
        seen().await.expect("a rewrite is seen");
        std::fs::write(folder.path().join("new"), "333").expect("written");
        std::fs::rename(folder.path().join("new"), &file).expect("renamed");
        seen().await.expect("a rename is seen");
        std::os::unix::fs::symlink("two", folder.path().join("next")).expect("linked");
        std::fs::rename(folder.path().join("next"), folder.path().join("..data")).expect("renamed");
        seen().await.expect("a link is seen");
    }

    #[tokio::test]
    async fn links_on_the_way_are_watched_wherever_they_lead() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        for name in ["one", "two"] {
            std::fs::create_dir_all(at(name).join("inner")).expect("a folder");
            std::fs::write(at(name).join("inner/a.yaml"), name).expect("written");
        }
        let link = |to: &str| {
            std::os::unix::fs::symlink(to, at("next")).expect("linked");
            std::fs::rename(at("next"), at("current")).expect("renamed");
        };
        link("one");
        let mut watch = FileWatch::new(vec![at("current/inner/a.yaml")]);
        watch.refresh().await;
        // The change is seen sooner than by a check without a hint.
        let mut seen = async || tokio::time::timeout(CHECK_EVERY / 2, watch.changed()).await.expect("seen");
        link("two");
        seen().await;
        std::fs::write(at("two/inner/a.yaml"), "where it leads now").expect("written");
        seen().await;
    }

    #[tokio::test]
    async fn a_wait_that_is_given_up_loses_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.yaml");
        let mut watch = FileWatch::new(vec![file.clone()]);
        watch.refresh().await;
        std::fs::write(&file, "1").expect("written");
        let given_up = tokio::time::timeout(QUIET_WHEN_WHOLE / 2, watch.changed()).await;
        assert!(given_up.is_err() && watch.hint.is_some());
        tokio::time::timeout(CHECK_EVERY / 2, watch.changed()).await.expect("seen");
    }

    #[tokio::test]
    async fn what_changes_while_files_are_read_is_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, more) = (folder.path().join("a.yaml"), folder.path().join("b.yaml"));
        std::fs::write(&file, "1").expect("written");
        let mut watch = FileWatch::new(vec![file.clone()]);
        watch.refresh().await;
        std::fs::write(&file, "22").expect("written");
        watch.refresh().await;
        // A reader that has read "22" begins here.
        std::fs::write(&file, "333").expect("written");
        let mut seen = FileStates::default();
        [file, more].iter().for_each(|path| seen.note(path));
        watch.add(&seen);
        tokio::time::timeout(Duration::from_secs(10), watch.changed()).await.expect("seen");
        let again = tokio::time::timeout(QUIET * 3, watch.changed());
        assert!(again.await.is_err(), "seen twice");
    }

    #[tokio::test]
    async fn a_file_put_in_its_place_is_looked_at_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, next) = (folder.path().join("a.yaml"), folder.path().join("next"));
        std::fs::write(&file, "1").expect("written");
        std::fs::write(&next, "2").expect("written");
        let mut watch = FileWatch::new(vec![file.clone()]);
        watch.refresh().await;
        let mut fastest = Duration::MAX;
        // Several rounds, as the machine may be busy; the wait for writers would be too long in every round.
        for size in 3..8 {
            let began = std::time::Instant::now();
            std::fs::rename(&next, &file).expect("renamed");
            tokio::time::timeout(Duration::from_secs(10), watch.changed()).await.expect("seen");
            fastest = fastest.min(began.elapsed());
            std::fs::write(&next, "x".repeat(size)).expect("written");
        }
        assert!(fastest < QUIET_WHEN_WHOLE, "{fastest:?}");
    }
}
