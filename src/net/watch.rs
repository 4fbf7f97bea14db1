//! Tells when files have changed: editors' renames, rewrites in place, and Kubernetes' `..data` links alike.
//!
//! The kernel's notice of a change in a file's folder is only a hint to look; whether something changed is decided by what
//! the files look like. Looking also happens now and then without a hint, for file systems that give none.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use self::notices::{Hint, Listening};
use super::reading::{Readings, Unread};

mod notices;

/// Files that are being written are looked at once they have been quiet for this long.
const QUIET: Duration = Duration::from_millis(100);
/// A file that was closed is mostly whole, and one that was put in its place is; but others may follow that belong to it.
const QUIET_WHEN_WHOLE: Duration = Duration::from_millis(20);
/// Files that are never quiet are looked at this long after the first hint, where a reading of them takes little time and
/// no file is open for writing.
const BUSY_WITHIN: Duration = Duration::from_millis(100);
/// But no later than this after the first hint.
const QUIET_WITHIN: Duration = Duration::from_secs(2);
/// How often files are looked at without a hint.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// A look that takes longer is given up.
const LOOK_WITHIN: Duration = Duration::from_secs(10);
/// Looks of one watch that may hang at the same time.
const LOOKS: usize = 3;

/// Watches some files and folders. Every look at them is a reading on a thread of its own.
pub struct FileWatch {
    seen: Sightings,
    notices: Notices,
    /// Heard, and not looked at yet.
    hint: Option<Hint>,
    /// Files that somebody has begun to write and not closed, as far as is known.
    unfinished: BTreeSet<PathBuf>,
    /// How long a reading of the files takes.
    cost: Duration,
    looks: Readings,
}

enum Notices {
    /// Nobody listens, or at paths that have changed since.
    Outdated(Option<Listening>),
    Current(Listening),
}

/// What a path looked like; for a folder, its entries as well.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    file: Option<Look>,
    entries: Vec<(PathBuf, Option<Look>)>,
}

/// Device, inode, size, and when it was last written to (seconds, nanoseconds).
type Look = (u64, u64, u64, i64, i64);

/// Files and folders, each as it was when it was looked at; `None`: nobody has looked at it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sightings(BTreeMap<PathBuf, Option<Stamp>>);

impl Sightings {
    /// Notes how this is now, unless it was noted before. Blocks.
    pub fn note(&mut self, path: &Path) {
        let known = self.0.entry(path.to_owned()).or_default();
        if known.is_none() {
            *known = Some(stamp(path));
        }
    }

    /// How the same are now. Blocks.
    #[must_use]
    pub fn now(&self) -> Self {
        Self(self.0.keys().map(|path| (path.clone(), Some(stamp(path)))).collect())
    }
}

impl FileWatch {
    /// Watches these, which nobody has looked at.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self::since(Sightings(paths.into_iter().map(|path| (path, None)).collect()))
    }

    /// Watches these. What has happened since they were noted counts.
    pub fn since(seen: Sightings) -> Self {
        Self {
            seen,
            notices: Notices::Outdated(None),
            hint: None,
            unfinished: BTreeSet::new(),
            cost: Duration::ZERO,
            looks: Readings::new(LOOKS),
        }
    }

    /// How the files were when they were last looked at.
    pub fn seen(&self) -> &Sightings {
        &self.seen
    }

    /// Takes over how the files were just before somebody read them, and how long the reading took: who reads them next has
    /// read all that was before.
    pub fn was_read(&mut self, seen: Sightings, cost: Duration) {
        for (path, stamp) in seen.0 {
            self.seen.0.entry(path).and_modify(|known| *known = stamp);
        }
        self.cost = cost;
    }

    /// Looks at the files, before they are read: who reads them next has read all that was before.
    pub async fn look(&mut self) {
        match self.now().await {
            Ok(now) => self.seen = now,
            Err(unread) => tracing::debug!(%unread, "cannot look at files"),
        }
    }

    /// Returns true if somebody is writing to the files now, so that a reading may have seen half of a change. Waits a
    /// moment for a hint.
    pub async fn is_busy(&mut self) -> bool {
        // After a change it has to listen anew. Before the first one nothing was listened to, which is no hint.
        if matches!(self.notices, Notices::Outdated(Some(_))) {
            self.listen().await;
        }
        self.hint.is_some() || tokio::time::timeout(QUIET, self.hear()).await.is_ok()
    }

    /// Watches these as well. What has happened since they were noted counts, and since the last look to those that are
    /// watched already.
    pub fn add(&mut self, more: &Sightings) {
        for (path, stamp) in &more.0 {
            self.seen.0.entry(path.clone()).or_insert_with(|| stamp.clone());
        }
        self.outdate();
    }

    /// Watches none but these any more.
    pub fn retain(&mut self, these: &Sightings) {
        self.seen.0.retain(|path, _| these.0.contains_key(path));
        self.outdate();
    }

    /// Waits until a file is another than when it was last looked at. Nothing is lost where the wait is given up.
    pub async fn changed(&mut self) {
        loop {
            self.listen().await;
            if self.hint.is_none() {
                // Which comes first does not matter: both lead to a look.
                tokio::select! {
                    () = self.hear() => {}
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
            }
            self.quiet().await;
            let now = self.now().await;
            self.hint = None;
            match now {
                Ok(now) if now != self.seen => {
                    self.seen = now;
                    // Links may lead elsewhere now.
                    self.outdate();
                    return;
                }
                Ok(_) | Err(Unread::Late(_)) => {}
                // Hints would only have it tried in vain.
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    async fn now(&self) -> Result<Sightings, Unread> {
        let seen = self.seen.clone();
        self.looks.read(LOOK_WITHIN, move || seen.now()).await
    }

    fn outdate(&mut self) {
        self.notices = match std::mem::replace(&mut self.notices, Notices::Outdated(None)) {
            Notices::Current(listening) => Notices::Outdated(Some(listening)),
            outdated => outdated,
        };
    }

    /// Listens to where the paths lead now. Where that cannot be found out, nobody gives notice until the next time.
    async fn listen(&mut self) {
        let Notices::Outdated(before) = &mut self.notices else { return };
        let (before, paths) = (before.take(), self.seen.0.keys().cloned().collect::<Vec<_>>());
        // Of what was before this nobody gives notice.
        let missed = before.is_none().then_some(Hint::Begun);
        let follow = move || match before {
            Some(mut listening) => {
                listening.follow(&paths);
                listening
            }
            None => Listening::to(&paths),
        };
        match self.looks.read(LOOK_WITHIN, follow).await {
            Ok(listening) => {
                self.notices = Notices::Current(listening);
                self.hint = self.hint.or(missed);
            }
            Err(unread) => tracing::debug!(%unread, "cannot listen to changes of files"),
        }
    }

    /// Waits for the next hint; for ever, where nobody listens.
    async fn hear(&mut self) {
        let Notices::Current(listening) = &mut self.notices else { return std::future::pending().await };
        let heard = listening.next().await;
        match heard.hint {
            Hint::Begun => {}
            Hint::Written => drop(self.unfinished.insert(heard.path)),
            Hint::Closed | Hint::Placed => drop(self.unfinished.remove(&heard.path)),
        }
        self.hint = Some(heard.hint);
    }

    /// Waits until hints have stopped for a moment, or for so long that the files are looked at all the same.
    async fn quiet(&mut self) {
        let first = Instant::now();
        // A reading takes at most a third of the time.
        let busy = first + BUSY_WITHIN.max(2 * self.cost).min(QUIET_WITHIN);
        let alone = self.seen.0.len() == 1
            && self.seen.0.values().all(|stamp| stamp.as_ref().is_some_and(|stamp| stamp.file.is_some()));
        while let (Some(last), Notices::Current(_)) = (self.hint, &self.notices) {
            let latest = if self.unfinished.is_empty() { busy } else { first + QUIET_WITHIN };
            if Instant::now() >= latest {
                break;
            }
            let rest = match last {
                // Nothing else belongs to it.
                Hint::Placed if alone => break,
                Hint::Begun | Hint::Written => QUIET,
                Hint::Placed | Hint::Closed if !self.unfinished.is_empty() => QUIET,
                Hint::Placed | Hint::Closed => QUIET_WHEN_WHOLE,
            };
            let rest = (Instant::now() + rest).min(latest);
            if tokio::time::timeout_at(rest, self.hear()).await.is_err() && rest < latest {
                break;
            }
        }
        // Of a file whose end was not heard of nobody knows; the next hint of it begins anew.
        self.unfinished.clear();
    }
}

fn stamp(path: &Path) -> Stamp {
    let mut entries = Vec::new();
    if path.is_dir()
        && let Ok(list) = std::fs::read_dir(path)
    {
        entries = list.filter_map(Result::ok).map(|entry| (entry.path(), look(&entry.path()))).collect();
        entries.sort();
    }
    // A folder's own times change with files that do not matter, so that only its entries count.
    let file = if path.is_dir() { None } else { look(path) };
    Stamp { file, entries }
}

fn look(path: &Path) -> Option<Look> {
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
        watch.look().await;
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
        watch.look().await;
        // Sooner than without a notice.
        let mut seen = async || tokio::time::timeout(LOOK_EVERY / 2, watch.changed()).await.expect("seen");
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
        watch.look().await;
        std::fs::write(&file, "1").expect("written");
        let given_up = tokio::time::timeout(QUIET_WHEN_WHOLE / 2, watch.changed()).await;
        assert!(given_up.is_err() && watch.hint.is_some());
        tokio::time::timeout(LOOK_EVERY / 2, watch.changed()).await.expect("seen");
    }

    #[tokio::test]
    async fn what_changes_while_files_are_read_is_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, more) = (folder.path().join("a.yaml"), folder.path().join("b.yaml"));
        std::fs::write(&file, "1").expect("written");
        let mut watch = FileWatch::new(vec![file.clone()]);
        watch.look().await;
        std::fs::write(&file, "22").expect("written");
        watch.look().await;
        // Here a reader is at work, who has read 22.
        std::fs::write(&file, "333").expect("written");
        let mut seen = Sightings::default();
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
        watch.look().await;
        let mut fastest = Duration::MAX;
        // More than once, as the machine may be busy; the wait for writers would be too long every time.
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
