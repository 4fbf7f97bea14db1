//! Watches files for changes: renames by editors, rewrites in place, and Kubernetes' `..data` links.
//!
//! A notice from the kernel about a file's folder only triggers a check; the metadata decides whether the file changed. Files
//! are also checked from time to time without a notice, because some file systems send none.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use self::notices::{Hint, Subscription};
use super::reading::{ReadError, Readings};

mod notices;

/// The pause between the last notice that a file may have changed and the check of the files, if related changes are likely to
/// follow.
const QUIET: Duration = Duration::from_millis(100);
/// The pause between the last notice and the check, if that notice says that a file was closed, or that a complete file was
/// moved to its path. That file is complete, but related files may follow.
const QUIET_WHEN_WHOLE: Duration = Duration::from_millis(20);
/// The time from the first notice to the check, if notices never pause. It is longer if a read of the files takes long or a
/// file is open for writing.
const BUSY_WITHIN: Duration = Duration::from_millis(100);
/// The upper bound of the time from the first notice to the check, if notices never pause or a file stays open for writing.
const QUIET_WITHIN: Duration = Duration::from_secs(2);
/// The same bound for a file that is open for writing, if the watch [waits for writers](FileWatch::waiting_for_writers).
const UNCLOSED_WITHIN: Duration = Duration::from_secs(60);
/// The time for which a file must be missing before that is a change. Some editors save a file by renaming it to the name of a
/// backup and writing a new one.
const MISSING_FOR: Duration = Duration::from_millis(500);
/// The interval of checks without a notice.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// The timeout of a check.
const CHECK_WITHIN: Duration = Duration::from_secs(10);
/// The number of checks of one watch that may hang at the same time.
const CHECKS: usize = 3;

/// Watches files and folders. Each check is a read on a separate thread.
pub struct FileWatch {
    seen: FileStates,
    notices: SubscriptionState,
    /// The latest notice since the last check that a file may have changed; `None` if there was none.
    hint: Option<Hint>,
    /// The files that a writer has begun to write and has not closed, as far as is known.
    unfinished: BTreeSet<PathBuf>,
    waits_for_writers: bool,
    /// True once it was reported that a writer has not closed a file.
    is_unclosed: bool,
    /// The duration of the last read of the files by the owner of the watch.
    cost: Duration,
    looks: Readings,
}

enum SubscriptionState {
    /// There is no subscription, or the watched paths or their links have changed since the subscription was made.
    Outdated(Option<Subscription>),
    Current(Subscription),
}

/// The state of a path; for a folder, the states of its entries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PathState {
    file: Option<FileStamp>,
    entries: Vec<(PathBuf, Option<FileStamp>)>,
}

/// The device, inode, size, and time of the last change (seconds, nanoseconds).
pub type FileStamp = (u64, u64, u64, i64, i64);

/// Files and folders with their states at the last check; `None` if a path has not been checked yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileStates(BTreeMap<PathBuf, Option<PathState>>);

impl FileStates {
    /// Returns the current states of these paths. Blocks.
    fn of(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        let checked = |path: PathBuf| {
            let state = stamp(&path);
            (path, Some(state))
        };
        Self(paths.into_iter().map(checked).collect())
    }

    /// Adds a path with its current state, unless the path is already known. Blocks.
    pub fn note(&mut self, path: &Path) {
        let known = self.0.entry(path.to_owned()).or_default();
        if known.is_none() {
            *known = Some(stamp(path));
        }
    }

    /// Returns the current states of the same paths. Blocks.
    #[must_use]
    pub fn now(&self) -> Self {
        Self::of(self.0.keys().cloned())
    }

    /// Returns the state of a watched file; `None` if it is not a file, or was not checked.
    pub fn stamp_of(&self, path: &Path) -> Option<FileStamp> {
        self.0.get(path)?.as_ref()?.file
    }

    /// Returns the entries of a watched folder in order of name, with their states; none if the folder was not checked.
    pub fn entries_of(&self, folder: &Path) -> &[(PathBuf, Option<FileStamp>)] {
        let state = self.0.get(folder).and_then(Option::as_ref);
        state.map(|state| &*state.entries).unwrap_or_default()
    }

    /// Returns true if a path that was a file in `before` is not a file here.
    fn lacks_file_of(&self, before: &Self) -> bool {
        let is_file = |state: &Option<PathState>| state.as_ref().is_some_and(|state| state.file.is_some());
        self.0.iter().any(|(path, state)| !is_file(state) && before.0.get(path).is_some_and(is_file))
    }
}

impl FileWatch {
    /// Watches paths that have never been checked.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self::since(FileStates(paths.into_iter().map(|path| (path, None)).collect()))
    }

    /// Watches paths; reports changes since the given states.
    pub fn since(seen: FileStates) -> Self {
        Self {
            seen,
            notices: SubscriptionState::Outdated(None),
            hint: None,
            unfinished: BTreeSet::new(),
            waits_for_writers: false,
            is_unclosed: false,
            cost: Duration::ZERO,
            looks: Readings::new(CHECKS),
        }
    }

    /// Has the watch report no change of the files while one of them is open for writing: its content may be half of a change that is
    /// legal. After a minute, [`changed`](Self::changed) returns once to say so by [`unclosed`](Self::unclosed).
    #[must_use]
    pub fn waiting_for_writers(mut self) -> Self {
        self.waits_for_writers = true;
        self
    }

    /// Returns a file that its writer has not closed for a minute, so that its change waits.
    pub fn unclosed(&self) -> Option<&Path> {
        self.unfinished.first().filter(|_| self.is_unclosed).map(PathBuf::as_path)
    }

    /// Returns the states of the files at the last check.
    pub fn seen(&self) -> &FileStates {
        &self.seen
    }

    /// Notifies the watch of a read of the files. `seen` has the states of the files just before the read. They become the
    /// recorded states, because the read covers all earlier changes. `cost` is the time that the read took.
    pub fn was_read(&mut self, seen: FileStates, cost: Duration) {
        for (path, stamp) in seen.0 {
            self.seen.0.entry(path).and_modify(|known| *known = stamp);
        }
        self.cost = cost;
    }

    /// Checks the files and records their states. Must be called before the files are read, so that the read covers all earlier
    /// changes.
    pub async fn refresh(&mut self) {
        match self.now().await {
            Ok(now) => self.seen = now,
            Err(unread) => tracing::debug!(%unread, "cannot check files for changes"),
        }
    }

    /// Returns true if the files may be changing at present, so that a read may have seen half of a change. They may be if a
    /// notice has come since the last check; if none has, waits up to 100 ms for one.
    pub async fn is_busy(&mut self) -> bool {
        // After a change, the subscription must be renewed. The first subscription is not made here, because a new subscription
        // begins with a notice.
        if matches!(self.notices, SubscriptionState::Outdated(Some(_))) {
            self.listen().await;
        }
        self.hint.is_some() || tokio::time::timeout(QUIET, self.next_hint()).await.is_ok()
    }

    /// Watches more paths. If a path later differs from the state given here, that is reported as a change. For a path that is
    /// already watched, the recorded state stays, and the given one is ignored.
    pub fn add(&mut self, more: &FileStates) {
        for (path, stamp) in &more.0 {
            self.seen.0.entry(path.clone()).or_insert_with(|| stamp.clone());
        }
        self.outdate();
    }

    /// Stops watching all paths except these.
    pub fn retain(&mut self, these: &FileStates) {
        self.seen.0.retain(|path, _| these.0.contains_key(path));
        self.outdate();
    }

    /// Waits until a file differs from its state at the last check, or one is [unclosed](Self::unclosed). Cancel safe.
    pub async fn changed(&mut self) {
        let mut missing_since = None;
        loop {
            self.listen().await;
            if self.hint.is_none() {
                // The order does not matter, because both arms lead to a check.
                tokio::select! {
                    () = self.next_hint() => {}
                    () = tokio::time::sleep(CHECK_EVERY) => {}
                }
            }
            self.quiet().await;
            if !self.unfinished.is_empty() {
                self.hint = None;
                if !std::mem::replace(&mut self.is_unclosed, true) {
                    return;
                }
                continue;
            }
            self.is_unclosed = false;
            let now = self.now().await;
            if now.as_ref().is_ok_and(|now| now.lacks_file_of(&self.seen)) {
                let since = *missing_since.get_or_insert_with(Instant::now);
                if since.elapsed() < MISSING_FOR {
                    let _ = tokio::time::timeout_at(since + MISSING_FOR, self.next_hint()).await;
                    continue;
                }
            }
            (self.hint, missing_since) = (None, None);
            match now {
                Ok(now) if now != self.seen => {
                    self.seen = now;
                    // A link may have a new target after a change.
                    self.outdate();
                    return;
                }
                Ok(_) | Err(ReadError::Late(_)) => {}
                // A notice would only repeat the failing check, so the task waits.
                Err(_) => tokio::time::sleep(CHECK_EVERY).await,
            }
        }
    }

    async fn now(&self) -> Result<FileStates, ReadError> {
        let paths: Vec<PathBuf> = self.seen.0.keys().cloned().collect();
        self.looks.read(CHECK_WITHIN, || FileStates::of(paths)).await
    }

    fn outdate(&mut self) {
        self.notices = match std::mem::replace(&mut self.notices, SubscriptionState::Outdated(None)) {
            SubscriptionState::Current(listening) => SubscriptionState::Outdated(Some(listening)),
            outdated => outdated,
        };
    }

    /// Subscribes to changes of the paths and of the current targets of their links. If the targets cannot be determined,
    /// there are no notices until the next call.
    async fn listen(&mut self) {
        let SubscriptionState::Outdated(before) = &mut self.notices else { return };
        let (before, paths) = (before.take(), self.seen.0.keys().cloned().collect::<Vec<_>>());
        // Changes before the first subscription caused no notice. Therefore the first subscription begins with a notice, which
        // leads to a check.
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

    /// Waits for the next notice; waits forever if there is no subscription.
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

    /// Waits until notices have paused for a moment, or until files that change all the time must be checked.
    async fn quiet(&mut self) {
        let first = Instant::now();
        // With this pause, reads take at most a third of the time.
        let busy = first + BUSY_WITHIN.max(2 * self.cost).min(QUIET_WITHIN);
        let alone = self.seen.0.len() == 1
            && self.seen.0.values().all(|stamp| stamp.as_ref().is_some_and(|stamp| stamp.file.is_some()));
        let unclosed = if self.waits_for_writers { UNCLOSED_WITHIN } else { QUIET_WITHIN };
        while let (Some(last), SubscriptionState::Current(_)) = (self.hint, &self.notices) {
            // The content of a file that its writer has not closed may be half of a change.
            let is_whole = self.unfinished.is_empty();
            let latest = if is_whole { busy } else { first + unclosed };
            if Instant::now() >= latest {
                break;
            }
            let rest = match last {
                // The only watched file was replaced by a complete one, so no further change is expected.
                Hint::Placed if alone => break,
                _ if !is_whole => unclosed,
                Hint::Begun | Hint::Written => QUIET,
                Hint::Placed | Hint::Closed => QUIET_WHEN_WHOLE,
            };
            let rest = (Instant::now() + rest).min(latest);
            if tokio::time::timeout_at(rest, self.next_hint()).await.is_err() && rest < latest {
                break;
            }
        }
        // If the kernel dropped the event for the end of a write, nothing else would remove the file from the set. A file that
        // is still being written is added again by its next event.
        if !self.waits_for_writers {
            self.unfinished.clear();
        }
    }
}

fn stamp(path: &Path) -> PathState {
    if !path.is_dir() {
        return PathState { file: file_stamp(path), entries: Vec::new() };
    }
    // The times of a folder also change when a file in it changes that is not watched, so a folder is compared by its entries
    // only.
    let list = std::fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
    let stamped = |path: PathBuf| (file_stamp(&path), path);
    let mut entries: Vec<_> =
        list.map(|entry| stamped(entry.path())).map(|(stamp, path)| (path, stamp)).collect();
    // Paths would be compared component by component.
    entries.sort_by(|(one, _), (other, _)| one.as_os_str().cmp(other.as_os_str()));
    PathState { file: None, entries }
}

fn file_stamp(path: &Path) -> Option<FileStamp> {
    let data = std::fs::metadata(path).ok()?;
    Some((data.dev(), data.ino(), data.size(), data.mtime(), data.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use self::notices::Notice;
    use super::*;

    /// Returns the wait before the check of one file after a notice of this kind, which is repeated every ten milliseconds if
    /// `is_endless`. The last read of the file has taken `cost`.
    async fn wait_after(hint: Hint, is_endless: bool, cost: Duration) -> Duration {
        let file = PathState { file: Some((0, 0, 0, 0, 0)), entries: Vec::new() };
        let mut watch = FileWatch::since(FileStates([("/a".into(), Some(file))].into()));
        let (notices, subscription) = Subscription::scripted();
        watch.notices = SubscriptionState::Current(subscription);
        watch.cost = cost;
        let notice = || Notice { hint, path: "/a".into() };
        notices.try_send(notice()).expect("room");
        watch.next_hint().await;
        let begun = Instant::now();
        let repeating = async {
            if !is_endless {
                return std::future::pending::<()>().await;
            }
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                notices.try_send(notice()).expect("room");
            }
        };
        tokio::select! {
            () = watch.quiet() => {}
            () = repeating => {}
        }
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_is_checked_after_a_pause_that_depends_on_what_may_follow() {
        let millis = async |hint, is_endless, cost| {
            wait_after(hint, is_endless, Duration::from_millis(cost)).await.as_millis()
        };
        assert_eq!(millis(Hint::Placed, false, 0).await, 0, "it is complete");
        assert_eq!(millis(Hint::Closed, false, 0).await, 20, "others may follow at once");
        assert_eq!(millis(Hint::Begun, false, 300).await, 100, "others usually follow");
        assert_eq!(millis(Hint::Written, false, 0).await, 2_000, "its writer has not closed it");
        for (cost, longest) in [(0, 100), (300, 600), (5_000, 2_000)] {
            assert_eq!(millis(Hint::Begun, true, cost).await, longest, "notices without a pause");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_waits_for_writers_reports_no_change_of_a_file_that_is_not_closed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.yaml");
        std::fs::write(&path, "whole").expect("written");
        let mut watch = FileWatch::new(vec![path.clone()]).waiting_for_writers();
        watch.refresh().await;
        let (notices, subscription) = Subscription::scripted();
        watch.notices = SubscriptionState::Current(subscription);
        std::fs::write(&path, "half").expect("written");
        let notice = |hint| notices.try_send(Notice { hint, path: path.clone() }).expect("room");
        notice(Hint::Written);
        let begun = Instant::now();
        watch.changed().await;
        assert_eq!((begun.elapsed(), watch.unclosed()), (UNCLOSED_WITHIN, Some(&*path)));
        // The checks without a notice find the change as well, and more is written.
        let more = async {
            tokio::time::sleep(Duration::from_secs(600)).await;
            notice(Hint::Written);
            tokio::time::sleep(Duration::from_secs(600)).await;
        };
        tokio::select! {
            () = watch.changed() => panic!("it was said once"),
            () = more => {}
        }
        notice(Hint::Closed);
        watch.changed().await;
        assert_eq!(watch.unclosed(), None);
    }

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
        // The change is noticed earlier than by the next periodic check.
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
        // The notice may come late, but the wait for a pause after it is longer than each of these waits.
        while watch.hint.is_none() {
            let given_up = tokio::time::timeout(QUIET_WHEN_WHOLE / 2, watch.changed()).await;
            assert!(given_up.is_err(), "no wait is long enough for a pause");
        }
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
        // A reader that has read "22" starts its watch here.
        std::fs::write(&file, "333").expect("written");
        let mut seen = FileStates::default();
        [file, more].iter().for_each(|path| seen.note(path));
        watch.add(&seen);
        tokio::time::timeout(Duration::from_secs(10), watch.changed()).await.expect("seen");
        let again = tokio::time::timeout(QUIET * 3, watch.changed());
        assert!(again.await.is_err(), "seen twice");
    }

    #[tokio::test]
    async fn a_file_is_checked_when_its_writer_has_closed_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.yaml");
        std::fs::write(&file, "1").expect("written");
        let mut watch = FileWatch::new(vec![file.clone()]);
        watch.refresh().await;
        // The first subscription leads to a check of its own.
        assert!(tokio::time::timeout(QUIET * 3, watch.changed()).await.is_err());
        let mut writer = std::fs::File::create(&file).expect("opened");
        writer.write_all(b"half of ").expect("written");
        let early = tokio::time::timeout(QUIET * 5, watch.changed()).await;
        assert!(early.is_err(), "the file was checked while it was being written");
        writer.write_all(b"a change").expect("written");
        drop(writer);
        tokio::time::timeout(CHECK_EVERY / 2, watch.changed()).await.expect("seen");
    }

    #[tokio::test]
    async fn a_file_that_an_editor_moves_away_and_writes_again_is_not_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, backup) = (folder.path().join("a.yaml"), folder.path().join("a.yaml~"));
        std::fs::write(&file, "1").expect("written");
        let mut watch = FileWatch::new(vec![file.clone(), folder.path().to_owned()]);
        watch.refresh().await;
        std::fs::rename(&file, &backup).expect("renamed");
        let early = tokio::time::timeout(MISSING_FOR / 2, watch.changed()).await;
        assert!(early.is_err(), "the file was missing only for a moment");
        std::fs::write(&file, "22").expect("written");
        tokio::time::timeout(CHECK_EVERY / 2, watch.changed()).await.expect("seen");
        assert!(watch.seen().0[&file].as_ref().is_some_and(|state| state.file.is_some()));
        std::fs::remove_file(&file).expect("removed");
        tokio::time::timeout(CHECK_EVERY / 2, watch.changed()).await.expect("a removal is seen");
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
        // The fastest of several rounds is compared, because the host may be under load. If each change waited for [`QUIET`],
        // every round would be too slow.
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
