//! Tells when files have changed: editors' renames, rewrites in place, and Kubernetes' `..data` links alike.
//!
//! The kernel's notice of a change in a file's folder is only a hint to look; whether something changed is decided by what
//! the files look like. Looking also happens now and then without a hint, for file systems that give none.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::notices::{Hint, Listening};

mod notices;

/// Files that are being written are looked at once they have been quiet for this long.
const QUIET: Duration = Duration::from_millis(100);
/// A file that was closed is mostly whole, and one that was put in its place is; but others may follow that belong to it.
const QUIET_WHEN_WHOLE: Duration = Duration::from_millis(20);
/// But no later than this after the first hint.
const QUIET_WITHIN: Duration = Duration::from_secs(2);
/// How often files are looked at without a hint.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Watches some files and folders.
pub struct FileWatch {
    seen: Sightings,
    /// From the first wait on.
    notices: Option<Listening>,
    /// Heard, and not looked at yet.
    hint: Option<Hint>,
}

/// What a path looked like; for a folder, its entries as well.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    file: Option<Look>,
    entries: Vec<(PathBuf, Option<Look>)>,
}

/// Device, inode, size, and when it was last written to (seconds, nanoseconds).
type Look = (u64, u64, u64, i64, i64);

/// Files and folders, each as it was when it was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sightings(BTreeMap<PathBuf, Stamp>);

impl Sightings {
    /// Notes how this is now, unless it was noted before.
    pub fn note(&mut self, path: &Path) {
        self.0.entry(path.to_owned()).or_insert_with(|| stamp(path));
    }

    /// How the same are now.
    fn now(&self) -> Self {
        Self(self.0.keys().map(|path| (path.clone(), stamp(path))).collect())
    }
}

impl FileWatch {
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let mut seen = Sightings::default();
        paths.iter().for_each(|path| seen.note(path));
        Self::since(seen)
    }

    /// Watches these. What has happened since they were noted counts.
    pub fn since(seen: Sightings) -> Self {
        Self { seen, notices: None, hint: None }
    }

    /// Notes how the files are. Who reads them next has read all that was before.
    pub fn look(&mut self) {
        self.seen = self.seen.now();
    }

    /// Watches these as well. What has happened since they were noted counts, and since the last look to those that are
    /// watched already.
    pub fn add(&mut self, more: &Sightings) {
        for (path, stamp) in &more.0 {
            self.seen.0.entry(path.clone()).or_insert_with(|| stamp.clone());
        }
        self.listen();
    }

    /// Watches none but these any more.
    pub fn retain(&mut self, these: &Sightings) {
        self.seen.0.retain(|path, _| these.0.contains_key(path));
        self.listen();
    }

    /// Listens to where the paths lead now.
    fn listen(&mut self) {
        if let Some(notices) = &mut self.notices {
            notices.follow(self.seen.0.keys());
        }
    }

    /// Waits until a file is another than when it was last looked at. Nothing is lost where the wait is given up.
    pub async fn changed(&mut self) {
        loop {
            if self.notices.is_none() {
                // Of what was before this nobody gives notice.
                self.hint = Some(Hint::Begun);
            }
            let notices = self.notices.get_or_insert_with(|| Listening::to(self.seen.0.keys()));
            if self.hint.is_none() {
                // Which comes first does not matter: both lead to a look.
                tokio::select! {
                    hint = notices.next() => self.hint = Some(hint),
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
            }
            self.quiet().await;
            self.hint = None;
            let now = self.seen.now();
            if now != self.seen {
                self.seen = now;
                // Links may lead elsewhere now.
                self.listen();
                return;
            }
        }
    }

    /// Waits until hints have stopped for a moment.
    async fn quiet(&mut self) {
        let latest = tokio::time::Instant::now() + QUIET_WITHIN;
        let alone = self.seen.0.len() == 1 && self.seen.0.values().all(|stamp| stamp.file.is_some());
        while let (Some(last), Some(notices)) = (self.hint, &mut self.notices)
            && tokio::time::Instant::now() < latest
        {
            let rest = match last {
                Hint::Begun => QUIET,
                // Nothing else belongs to it.
                Hint::Placed if alone => return,
                Hint::Placed | Hint::Closed => QUIET_WHEN_WHOLE,
            };
            match tokio::time::timeout(rest, notices.next()).await {
                Ok(hint) => self.hint = Some(hint),
                Err(_) => return,
            }
        }
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
        std::fs::write(&file, "22").expect("written");
        watch.look();
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
