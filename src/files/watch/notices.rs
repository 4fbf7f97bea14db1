//! The kernel's notices of changes in folders. One inotify instance serves the whole process, because a user may have only
//! 128 of them and a mesh has more files. Each subscription gets only the notices of its own paths.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

use super::super::reading::aside;

/// The number of notices that may wait in a subscription. Further notices are lost. If the notice that a file was closed is
/// lost, the file counts as being written until the next check.
const HINTS: usize = 64;
/// The number of links followed to reach a file; the kernel follows as many (path_resolution(7)).
const LINKS_MAX: usize = 40;

static NOTICES: LazyLock<Notifier> = LazyLock::new(Notifier::new);

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hint {
    /// A change after which others usually follow, so that a read could see half of the change.
    Begun,
    /// A writer has written to a file and not closed it yet; other changes may follow.
    Written,
    /// A file was closed by its writer, or removed; other changes may follow immediately.
    Closed,
    /// A complete file or link was moved to its path.
    Placed,
}

impl Hint {
    /// Returns the kind of change that an event reports; `None` if the event changes nothing.
    fn of(kind: EventKind) -> Option<Self> {
        match kind {
            EventKind::Modify(ModifyKind::Name(RenameMode::To | RenameMode::Both)) => Some(Self::Placed),
            EventKind::Access(AccessKind::Close(AccessMode::Write))
            | EventKind::Modify(ModifyKind::Name(_))
            | EventKind::Remove(_) => Some(Self::Closed),
            EventKind::Modify(ModifyKind::Data(_)) => Some(Self::Written),
            EventKind::Access(_) => None,
            _ => Some(Self::Begun),
        }
    }
}

/// The kind of a change, and the path that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Notice {
    pub(super) hint: Hint,
    /// The path; empty if it is not known.
    pub(super) path: PathBuf,
}

/// A subscription to changes of some paths, which ends when it is dropped.
pub(super) struct Subscription {
    heard: mpsc::Receiver<Notice>,
    /// The sender of the `heard` channel. The watcher identifies the subscription by its sender, and the subscription uses the
    /// sender to wake itself.
    own: mpsc::Sender<Notice>,
    watch_points: BTreeSet<WatchPoint>,
}

/// An entry of a folder that is watched, or all of its entries.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WatchPoint {
    /// The path of the folder, with all links resolved.
    folder: PathBuf,
    /// The name of the watched entry in the folder; `None`: all entries are watched.
    name: Option<OsString>,
}

impl Subscription {
    pub(super) fn to<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> Self {
        let (own, heard) = mpsc::channel(HINTS);
        let watch_points = watch_points_of(paths);
        NOTICES.begin(&watch_points, &own);
        Self { heard, own, watch_points }
    }

    /// Returns a subscription to nothing, and the sender of its notices.
    #[cfg(test)]
    pub(super) fn scripted() -> (mpsc::Sender<Notice>, Self) {
        let (own, heard) = mpsc::channel(HINTS);
        (own.clone(), Self { heard, own, watch_points: BTreeSet::new() })
    }

    /// Subscribes to other paths, or to the current targets of the same links. Folders that cannot be watched give no
    /// notices.
    pub(super) fn follow<'p>(&mut self, paths: impl IntoIterator<Item = &'p PathBuf>) {
        let watch_points = watch_points_of(paths);
        // New watches are added before old ones are dropped, so that no event is lost. Watch points in both sets are added
        // again, because a folder that was removed and created again has another inode.
        NOTICES.begin(&watch_points, &self.own);
        NOTICES.end(&self.watch_points, &self.own);
        if !watch_points.is_subset(&self.watch_points) {
            // A new watch point may have changed before its watch began, so a check is due.
            let _ = self.own.try_send(Notice { hint: Hint::Begun, path: PathBuf::new() });
        }
        self.watch_points = watch_points;
    }

    /// Waits for the next notice.
    pub(super) async fn next(&mut self) -> Notice {
        // The channel never closes, because the subscription itself holds a sender.
        self.heard.recv().await.unwrap_or(Notice { hint: Hint::Begun, path: PathBuf::new() })
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        NOTICES.end(&self.watch_points, &self.own);
    }
}

struct Subscriber {
    name: Option<OsString>,
    hints: mpsc::Sender<Notice>,
}

/// The subscriptions by folder. They have a lock of their own. With one lock for the subscriptions and the watcher there would
/// be a deadlock: a thread that has locked the watcher may wait for the watcher's thread, and the watcher's thread locks the
/// subscriptions.
type Subscribers = Arc<Mutex<BTreeMap<PathBuf, Vec<Subscriber>>>>;

struct Notifier {
    subscribers: Subscribers,
    /// The watcher; `None` if it could not be created, for example for lack of inotify instances. Then there are no
    /// notices.
    watcher: Mutex<Option<RecommendedWatcher>>,
}

impl Notifier {
    fn new() -> Self {
        let subscribers = Subscribers::default();
        let shared = subscribers.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if let Ok(event) = event {
                deliver(&locked(&shared), &event);
            }
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "cannot use inotify, so files are checked for changes every 5 s");
        });
        Self { subscribers, watcher: Mutex::new(watcher.ok()) }
    }

    fn begin(&self, watch_points: &BTreeSet<WatchPoint>, hints: &mpsc::Sender<Notice>) {
        let mut watcher = locked(&self.watcher);
        for WatchPoint { folder, name } in watch_points {
            let subscriber = Subscriber { name: name.clone(), hints: hints.clone() };
            locked(&self.subscribers).entry(folder.clone()).or_default().push(subscriber);
            let Some(watcher) = &mut *watcher else { continue };
            if let Err(error) = watcher.watch(folder, RecursiveMode::NonRecursive) {
                tracing::debug!(folder = %folder.display(), %error, "cannot watch a directory");
            }
        }
    }

    fn end(&self, watch_points: &BTreeSet<WatchPoint>, hints: &mpsc::Sender<Notice>) {
        let mut idle = Vec::new();
        for WatchPoint { folder, name } in watch_points {
            let mut subscribers = locked(&self.subscribers);
            let Some(all) = subscribers.get_mut(folder) else { continue };
            let this = |known: &Subscriber| known.name == *name && known.hints.same_channel(hints);
            if let Some(at) = all.iter().position(this) {
                all.swap_remove(at);
            }
            if all.is_empty() {
                subscribers.remove(folder);
                idle.push(folder.clone());
            }
        }
        if !idle.is_empty() {
            // A separate thread makes this call, because the watcher may wait for a file system that does not answer.
            aside(|| NOTICES.unwatch(idle));
        }
    }

    fn unwatch(&self, folders: Vec<PathBuf>) {
        let mut watcher = locked(&self.watcher);
        for folder in folders {
            if !locked(&self.subscribers).contains_key(&folder) {
                // The call fails if the folder could not be watched, or has been removed.
                let _ = watcher.as_mut().map(|watcher| watcher.unwatch(&folder));
            }
        }
    }
}

/// Delivers an event to the subscriptions of its paths.
fn deliver(subscribers: &BTreeMap<PathBuf, Vec<Subscriber>>, event: &Event) {
    let Some(hint) = Hint::of(event.kind) else { return };
    // A notice for a full queue is dropped, because the queue already contains enough notices.
    let deliver = |subscriber: &Subscriber, path: &Path| {
        let _ = subscriber.hints.try_send(Notice { hint, path: path.to_owned() });
    };
    if event.need_rescan() {
        // The kernel has dropped events with unknown paths, so every subscription is notified.
        subscribers.values().flatten().for_each(|subscriber| deliver(subscriber, Path::new("")));
    }
    for path in &event.paths {
        let deliver = |subscriber: &Subscriber| deliver(subscriber, path);
        let inside = path.parent().and_then(|folder| subscribers.get(folder)).into_iter().flatten();
        let concerned = |subscriber: &&Subscriber| {
            subscriber.name.is_none() || subscriber.name.as_deref() == path.file_name()
        };
        inside.filter(concerned).for_each(deliver);
        // A subscription may also be to the folder itself.
        subscribers.get(path).into_iter().flatten().for_each(deliver);
    }
}

fn watch_points_of<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> BTreeSet<WatchPoint> {
    paths.into_iter().flat_map(|path| watch_points(path)).collect()
}

/// Returns the watch points of a path: the path itself, the entries of a folder, and each link on the path.
fn watch_points(path: &Path) -> Vec<WatchPoint> {
    let mut watch_points = Vec::new();
    let Ok(whole) = std::path::absolute(path) else { return watch_points };
    let mut at = PathBuf::new();
    // The rest of the path, last component first.
    let mut way: Vec<OsString> = parts(&whole);
    while let Some(part) = way.pop() {
        if part == OsStr::new("..") {
            at.pop();
            continue;
        }
        let next = at.join(&part);
        let link = std::fs::read_link(&next).ok().filter(|_| watch_points.len() < LINKS_MAX);
        if link.is_some() || way.is_empty() {
            watch_points.push(WatchPoint { folder: at.clone(), name: Some(part) });
        }
        match link {
            Some(target) => way.extend(parts(&target)),
            None => at = next,
        }
    }
    if at.is_dir() {
        watch_points.push(WatchPoint { folder: at, name: None });
    }
    watch_points
}

/// Returns the components of a path, last first. The root of an absolute path is one of them.
fn parts(path: &Path) -> Vec<OsString> {
    let parts = path.components().rev().filter(|part| *part != Component::CurDir);
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is usable: each change is a single step.
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_when_it_is_closed_or_put_in_its_place() {
        use notify::event::{CreateKind, DataChange, RemoveKind};
        for (kind, hint) in [
            (EventKind::Modify(ModifyKind::Name(RenameMode::To)), Some(Hint::Placed)),
            (EventKind::Modify(ModifyKind::Name(RenameMode::From)), Some(Hint::Closed)),
            (EventKind::Access(AccessKind::Close(AccessMode::Write)), Some(Hint::Closed)),
            (EventKind::Create(CreateKind::File), Some(Hint::Begun)),
            (EventKind::Modify(ModifyKind::Data(DataChange::Any)), Some(Hint::Written)),
            (EventKind::Remove(RemoveKind::File), Some(Hint::Closed)),
            (EventKind::Access(AccessKind::Open(AccessMode::Any)), None),
            (EventKind::Access(AccessKind::Close(AccessMode::Read)), None),
        ] {
            assert_eq!(Hint::of(kind), hint, "{kind:?}");
        }
    }

    #[test]
    fn a_change_shows_at_each_link_on_the_way() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().canonicalize().expect("it is there");
        std::fs::create_dir_all(root.join("one/inner")).expect("made");
        std::fs::write(root.join("one/inner/a"), "").expect("written");
        symlink("one", root.join("..data")).expect("linked");
        symlink("..data/inner", root.join("folder")).expect("linked");
        symlink(root.join("./folder/../inner/a"), root.join("a")).expect("linked");
        symlink("loop", root.join("loop")).expect("linked");
        let shown = |path: &str| {
            let relative = |place: WatchPoint| {
                let folder = place.folder.strip_prefix(&root).expect("inside").display().to_string();
                format!("{folder}:{}", place.name.unwrap_or_default().display())
            };
            watch_points(&root.join(path)).into_iter().map(relative).collect::<Vec<_>>()
        };
        assert_eq!(shown("one/inner/a"), ["one/inner:a"]);
        assert_eq!(shown("one/absent"), ["one:absent"]);
        assert_eq!(shown("a"), [":a", ":folder", ":..data", "one/inner:a"]);
        assert_eq!(shown("folder"), [":folder", ":..data", "one:inner", "one/inner:"]);
        assert_eq!(shown("loop").len(), LINKS_MAX + 1);
    }

    #[test]
    fn where_the_kernel_has_lost_notices_everybody_looks() {
        let listen = |name: Option<&str>| {
            let (hints, heard) = mpsc::channel(HINTS);
            (Subscriber { name: name.map(Into::into), hints }, heard)
        };
        let (one, mut one_heard) = listen(Some("a.yaml"));
        let (other, mut other_heard) = listen(None);
        let subscribers = [("/a".into(), vec![one]), ("/b".into(), vec![other])].into();
        deliver(&subscribers, &Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan));
        let lost = || Ok(Notice { hint: Hint::Begun, path: PathBuf::new() });
        assert_eq!((one_heard.try_recv(), other_heard.try_recv()), (lost(), lost()));
        deliver(&subscribers, &Event::new(EventKind::Other).add_path("/a/b.yaml".into()));
        assert!(one_heard.try_recv().is_err() && other_heard.try_recv().is_err());
    }

    #[tokio::test]
    async fn one_instance_tells_each_listener_of_its_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let files: Vec<PathBuf> = (0..200).map(|file| folder.path().join(format!("{file}.yaml"))).collect();
        let mut all: Vec<Subscription> =
            files.iter().map(|file| Subscription::to(std::slice::from_ref(file))).collect();
        let mut whole = Subscription::to(&[folder.path().to_owned()]);
        std::fs::write(&files[7], "").expect("written");
        let _ = (all[7].next().await, whole.next().await);
        let others = all.iter().enumerate().filter(|(at, _)| *at != 7);
        assert!(others.map(|(_, other)| other.heard.len()).all(|heard| heard == 0));
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("a list").filter_map(Result::ok);
        let links = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        assert_eq!(links.filter(|link| link.to_string_lossy() == "anon_inode:inotify").count(), 1);
        let gone = folder.path().canonicalize().expect("it is there");
        drop((all, whole));
        assert!(!locked(&NOTICES.subscribers).contains_key(&gone));
    }
}
