//! Tells when files have changed: editors' renames, rewrites in place, and Kubernetes' `..data` links alike.
//!
//! The kernel's notice of a change in a file's folder is only a hint to look; whether something changed is decided by what
//! the files look like. Looking also happens now and then without a hint, for file systems that give none.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

/// Files that are being written are looked at once they have been quiet for this long.
const QUIET: Duration = Duration::from_millis(100);
/// A file that was closed or put in its place is whole: only a few more like it are waited for.
const QUIET_WHEN_WHOLE: Duration = Duration::from_millis(20);
/// But no later than this after the first hint.
const QUIET_WITHIN: Duration = Duration::from_secs(2);
/// How often files are looked at without a hint.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Hints that wait to be heard; when some are lost, the last one counts as if it were of a file that is being written.
const HINTS: usize = 64;

/// What the kernel has noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hint {
    /// More may follow, so that a look could see half of it.
    Begun,
    /// A file was closed by its writer, or renamed.
    Whole,
}

impl Hint {
    /// `None` of what changes nothing.
    fn of(kind: EventKind) -> Option<Self> {
        match kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write))
            | EventKind::Modify(ModifyKind::Name(_)) => Some(Self::Whole),
            EventKind::Access(_) => None,
            _ => Some(Self::Begun),
        }
    }

    fn quiet(self) -> Duration {
        match self {
            Self::Begun => QUIET,
            Self::Whole => QUIET_WHEN_WHOLE,
        }
    }
}

/// Watches some files and folders.
pub struct FileWatch {
    paths: Vec<PathBuf>,
    seen: Vec<Stamp>,
    hints: mpsc::Receiver<Hint>,
    /// Without one (no inotify instances left, say), looking now and then has to do.
    _watcher: Option<RecommendedWatcher>,
}

/// What a path looked like; for a folder, its entries as well.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    file: Option<Look>,
    entries: Vec<(PathBuf, Option<Look>)>,
}

/// Device, inode, size, and when it was last written to (seconds, nanoseconds).
type Look = (u64, u64, u64, i64, i64);

impl FileWatch {
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let (sender, hints) = mpsc::channel(HINTS);
        let watcher = watcher(&paths, sender);
        let seen = paths.iter().map(|path| stamp(path)).collect();
        Self { paths, seen, hints, _watcher: watcher }
    }

    /// Notes how the files are. Who reads them next has read all that was before.
    pub fn look(&mut self) {
        self.seen = self.paths.iter().map(|path| stamp(path)).collect();
    }

    /// Watches these from here on. What has happened since the last look to those that were watched already counts.
    pub fn follow(&mut self, paths: Vec<PathBuf>) {
        let (sender, hints) = mpsc::channel(HINTS);
        // The hints of what has happened meanwhile are lost: have a look without one.
        let _ = sender.try_send(Hint::Begun);
        // Links may lead elsewhere, so that even for the same paths there are other folders to watch.
        self._watcher = watcher(&paths, sender);
        self.hints = hints;
        let known = |path| self.paths.iter().position(|known| known == path).map(|at| self.seen[at].clone());
        self.seen = paths.iter().map(|path| known(path).unwrap_or_else(|| stamp(path))).collect();
        self.paths = paths;
    }

    /// Waits until a file is another than when it was last looked at.
    pub async fn changed(&mut self) {
        loop {
            // Which comes first does not matter: both lead to a look.
            tokio::select! {
                hint = self.hints.recv() => match hint {
                    Some(hint) => self.quiet(hint).await,
                    None => tokio::time::sleep(LOOK_EVERY).await,
                },
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            let now: Vec<Stamp> = self.paths.iter().map(|path| stamp(path)).collect();
            if now != self.seen {
                self.seen = now;
                return;
            }
        }
    }

    /// Waits until hints have stopped for a moment.
    async fn quiet(&mut self, mut last: Hint) {
        let latest = tokio::time::Instant::now() + QUIET_WITHIN;
        while tokio::time::Instant::now() < latest {
            match tokio::time::timeout(last.quiet(), self.hints.recv()).await {
                Ok(Some(hint)) => last = hint,
                Ok(None) | Err(_) => return,
            }
        }
    }
}

fn watcher(paths: &[PathBuf], hints: mpsc::Sender<Hint>) -> Option<RecommendedWatcher> {
    let notice = move |event: notify::Result<notify::Event>| {
        if let Some(hint) = event.ok().and_then(|event| Hint::of(event.kind)) {
            // A full queue holds hints enough.
            let _ = hints.try_send(hint);
        }
    };
    let mut watcher = match notify::recommended_watcher(notice) {
        Ok(watcher) => watcher,
        Err(error) => {
            tracing::warn!(%error, "files are looked at every 5 s: the kernel gives no notice of changes");
            return None;
        }
    };
    for folder in folders(paths) {
        if let Err(error) = watcher.watch(&folder, RecursiveMode::NonRecursive) {
            tracing::debug!(folder = %folder.display(), %error, "cannot watch a folder");
        }
    }
    Some(watcher)
}

/// The folders in which a change of the paths shows: their own, and those that links lead to.
fn folders(paths: &[PathBuf]) -> BTreeSet<PathBuf> {
    let mut folders = BTreeSet::new();
    for path in paths {
        let ends = [Some(path.clone()), std::fs::canonicalize(path).ok()];
        for end in ends.into_iter().flatten() {
            if end.is_dir() {
                folders.insert(end);
            } else if let Some(parent) = end.parent() {
                let here = parent.as_os_str().is_empty();
                folders.insert(if here { PathBuf::from(".") } else { parent.to_owned() });
            }
        }
    }
    folders
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
    async fn what_changes_while_files_are_read_is_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, more) = (folder.path().join("a.yaml"), folder.path().join("b.yaml"));
        std::fs::write(&file, "1").expect("written");
        let mut watch = FileWatch::new(vec![file.clone()]);
        std::fs::write(&file, "22").expect("written");
        watch.look();
        // Here a reader is at work, who has read 22.
        std::fs::write(&file, "333").expect("written");
        watch.follow(vec![file, more]);
        tokio::time::timeout(Duration::from_secs(10), watch.changed()).await.expect("seen");
        let again = tokio::time::timeout(QUIET * 3, watch.changed());
        assert!(again.await.is_err(), "seen twice");
    }

    #[test]
    fn a_file_is_whole_when_it_is_closed_or_put_in_its_place() {
        use notify::event::{CreateKind, DataChange, RenameMode};
        for (kind, hint) in [
            (EventKind::Modify(ModifyKind::Name(RenameMode::To)), Some(Hint::Whole)),
            (EventKind::Access(AccessKind::Close(AccessMode::Write)), Some(Hint::Whole)),
            (EventKind::Create(CreateKind::File), Some(Hint::Begun)),
            (EventKind::Modify(ModifyKind::Data(DataChange::Any)), Some(Hint::Begun)),
            (EventKind::Access(AccessKind::Open(AccessMode::Any)), None),
            (EventKind::Access(AccessKind::Close(AccessMode::Read)), None),
        ] {
            assert_eq!(Hint::of(kind), hint, "{kind:?}");
        }
    }

    #[tokio::test]
    async fn a_file_put_in_its_place_is_looked_at_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, next) = (folder.path().join("a.yaml"), folder.path().join("next"));
        std::fs::write(&file, "1").expect("written");
        std::fs::write(&next, "2").expect("written");
        let mut watch = FileWatch::new(vec![file.clone()]);
        let mut fastest = Duration::MAX;
        // More than once, as the machine may be busy; the wait for writers would be too long every time.
        for size in 3..8 {
            let began = std::time::Instant::now();
            std::fs::rename(&next, &file).expect("renamed");
            tokio::time::timeout(Duration::from_secs(10), watch.changed()).await.expect("seen");
            fastest = fastest.min(began.elapsed());
            std::fs::write(&next, "x".repeat(size)).expect("written");
        }
        assert!(fastest < QUIET, "{fastest:?}");
    }
}
