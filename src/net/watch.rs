//! Tells when files have changed: editors' renames, rewrites in place, and Kubernetes' `..data` links alike.
//!
//! The kernel's notice of a change in a file's folder is only a hint to look; whether something changed is decided by what
//! the files look like. Looking also happens now and then without a hint, for file systems that give none.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

/// After a hint, files are looked at once they have been quiet for this long.
const QUIET: Duration = Duration::from_millis(100);
/// But no later than this after the first hint.
const QUIET_WITHIN: Duration = Duration::from_secs(2);
/// How often files are looked at without a hint.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Watches some files and folders.
pub struct FileWatch {
    paths: Vec<PathBuf>,
    seen: Vec<Stamp>,
    hints: mpsc::Receiver<()>,
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
        let (hint, hints) = mpsc::channel(1);
        let watcher = watcher(&paths, hint);
        let seen = paths.iter().map(|path| stamp(path)).collect();
        Self { paths, seen, hints, _watcher: watcher }
    }

    /// Waits until a file is another than when it was last looked at.
    pub async fn changed(&mut self) {
        loop {
            // Which comes first does not matter: both lead to a look.
            tokio::select! {
                hint = self.hints.recv() => match hint {
                    Some(()) => self.quiet().await,
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
    async fn quiet(&mut self) {
        let latest = tokio::time::Instant::now() + QUIET_WITHIN;
        while tokio::time::Instant::now() < latest {
            match tokio::time::timeout(QUIET, self.hints.recv()).await {
                Ok(Some(())) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }
}

fn watcher(paths: &[PathBuf], hint: mpsc::Sender<()>) -> Option<RecommendedWatcher> {
    let notice = move |event: notify::Result<notify::Event>| {
        // Being read is no change; a full queue holds a hint already.
        if event.is_ok_and(|event| !event.kind.is_access()) {
            let _ = hint.try_send(());
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
}
