//! The kernel's notices of changes in folders: one inotify instance for the whole process (a user may have 128 of them, and
//! a mesh more files than that), which tells each listener of what it listens to alone.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

use super::super::reading::aside;

/// Hints that wait to be heard; when some are lost, the last one counts as if it were of a file that is being written.
const HINTS: usize = 64;
/// Links followed on the way to a file: as many as the kernel follows (path_resolution(7)).
const LINKS_MAX: usize = 40;

static NOTICES: LazyLock<Notices> = LazyLock::new(Notices::new);

/// What the kernel has noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hint {
    /// More may follow, so that a look could see half of it.
    Begun,
    /// The same, of a file that somebody has written to and is going to close.
    Written,
    /// A file was closed by its writer, or taken from its place; more may follow at once.
    Closed,
    /// A file, or a link, was put in its place, whole.
    Placed,
}

impl Hint {
    /// `None` of what changes nothing.
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

/// A hint, and the path that it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Heard {
    pub(super) hint: Hint,
    /// Empty where it is not known.
    pub(super) path: PathBuf,
}

/// Hears of changes at some paths, until it is dropped.
pub(super) struct Listening {
    heard: mpsc::Receiver<Heard>,
    /// Its own end of the channel, by which it is known; and what wakes it without a notice.
    own: mpsc::Sender<Heard>,
    places: BTreeSet<Place>,
}

/// Where a change may show.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// Without links.
    folder: PathBuf,
    /// The entry of the folder; `None` for any.
    name: Option<OsString>,
}

impl Listening {
    pub(super) fn to<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> Self {
        let (own, heard) = mpsc::channel(HINTS);
        let places = places_of(paths);
        NOTICES.begin(&places, &own);
        Self { heard, own, places }
    }

    /// Listens at other paths, or at where the links of the same ones lead now. Folders that cannot be watched give no
    /// notice.
    pub(super) fn follow<'p>(&mut self, paths: impl IntoIterator<Item = &'p PathBuf>) {
        let places = places_of(paths);
        // The new ones first, so that what is among both is heard all the time. Those among both again, as a folder that
        // was removed and made again is another.
        NOTICES.begin(&places, &self.own);
        NOTICES.end(&self.places, &self.own);
        if !places.is_subset(&self.places) {
            // Where nobody listened until now, something may have happened: it is worth a look.
            let _ = self.own.try_send(Heard { hint: Hint::Begun, path: PathBuf::new() });
        }
        self.places = places;
    }

    /// The next hint.
    pub(super) async fn next(&mut self) -> Heard {
        // Never closed, as this holds an end of its own.
        self.heard.recv().await.unwrap_or(Heard { hint: Hint::Begun, path: PathBuf::new() })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        NOTICES.end(&self.places, &self.own);
    }
}

struct Listener {
    name: Option<OsString>,
    hints: mpsc::Sender<Heard>,
}

/// Who listens, by folder. Not under the watcher's lock: its thread takes this one while others wait for that thread.
type Listeners = Arc<Mutex<BTreeMap<PathBuf, Vec<Listener>>>>;

struct Notices {
    listeners: Listeners,
    /// Without one (no inotify instances left, say) nobody hears anything.
    watcher: Mutex<Option<RecommendedWatcher>>,
}

impl Notices {
    fn new() -> Self {
        let listeners = Listeners::default();
        let told = listeners.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if let Ok(event) = event {
                tell(&locked(&told), &event);
            }
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "files are looked at every 5 s: the kernel gives no notice of changes");
        });
        Self { listeners, watcher: Mutex::new(watcher.ok()) }
    }

    fn begin(&self, places: &BTreeSet<Place>, hints: &mpsc::Sender<Heard>) {
        let mut watcher = locked(&self.watcher);
        for Place { folder, name } in places {
            let listener = Listener { name: name.clone(), hints: hints.clone() };
            locked(&self.listeners).entry(folder.clone()).or_default().push(listener);
            let Some(watcher) = &mut *watcher else { continue };
            if let Err(error) = watcher.watch(folder, RecursiveMode::NonRecursive) {
                tracing::debug!(folder = %folder.display(), %error, "cannot watch a folder");
            }
        }
    }

    fn end(&self, places: &BTreeSet<Place>, hints: &mpsc::Sender<Heard>) {
        let mut idle = Vec::new();
        for Place { folder, name } in places {
            let mut listeners = locked(&self.listeners);
            let Some(all) = listeners.get_mut(folder) else { continue };
            let this = |known: &Listener| known.name == *name && known.hints.same_channel(hints);
            if let Some(at) = all.iter().position(this) {
                all.swap_remove(at);
            }
            if all.is_empty() {
                listeners.remove(folder);
                idle.push(folder.clone());
            }
        }
        if !idle.is_empty() {
            // The watcher may be waiting for a file system that does not answer, and this may be a thread that must not.
            aside(|| NOTICES.unwatch(idle));
        }
    }

    fn unwatch(&self, folders: Vec<PathBuf>) {
        let mut watcher = locked(&self.watcher);
        for folder in folders {
            if !locked(&self.listeners).contains_key(&folder) {
                // Fails where it could not be watched, or is gone.
                let _ = watcher.as_mut().map(|watcher| watcher.unwatch(&folder));
            }
        }
    }
}

/// Tells those whom an event concerns.
fn tell(listeners: &BTreeMap<PathBuf, Vec<Listener>>, event: &Event) {
    let Some(hint) = Hint::of(event.kind) else { return };
    // A full queue holds hints enough.
    let tell = |listener: &Listener, path: &Path| {
        let _ = listener.hints.try_send(Heard { hint, path: path.to_owned() });
    };
    if event.need_rescan() {
        // Some were lost, and nobody knows whose.
        listeners.values().flatten().for_each(|listener| tell(listener, Path::new("")));
    }
    for path in &event.paths {
        let tell = |listener: &Listener| tell(listener, path);
        let inside = path.parent().and_then(|folder| listeners.get(folder)).into_iter().flatten();
        let concerned =
            |listener: &&Listener| listener.name.is_none() || listener.name.as_deref() == path.file_name();
        inside.filter(concerned).for_each(tell);
        // The folder itself.
        listeners.get(path).into_iter().flatten().for_each(tell);
    }
}

fn places_of<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> BTreeSet<Place> {
    paths.into_iter().flat_map(|path| places(path)).collect()
}

/// Where a change may show of what is at a path: there, in the folder if it is one, and at each link on the way.
fn places(path: &Path) -> Vec<Place> {
    let mut places = Vec::new();
    let Ok(whole) = std::path::absolute(path) else { return places };
    let mut at = PathBuf::new();
    // What is left of the way, last part first.
    let mut way: Vec<OsString> = parts(&whole);
    while let Some(part) = way.pop() {
        if part == OsStr::new("..") {
            at.pop();
            continue;
        }
        let next = at.join(&part);
        let link = std::fs::read_link(&next).ok().filter(|_| places.len() < LINKS_MAX);
        if link.is_some() || way.is_empty() {
            places.push(Place { folder: at.clone(), name: Some(part) });
        }
        match link {
            Some(target) => way.extend(parts(&target)),
            None => at = next,
        }
    }
    if at.is_dir() {
        places.push(Place { folder: at, name: None });
    }
    places
}

/// The parts of a path, last first. The root is one, which leads there from anywhere.
fn parts(path: &Path) -> Vec<OsString> {
    let parts = path.components().rev().filter(|part| *part != Component::CurDir);
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left behind is whole: each change is one step.
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
            let relative = |place: Place| {
                let folder = place.folder.strip_prefix(&root).expect("inside").display().to_string();
                format!("{folder}:{}", place.name.unwrap_or_default().display())
            };
            places(&root.join(path)).into_iter().map(relative).collect::<Vec<_>>()
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
            (Listener { name: name.map(Into::into), hints }, heard)
        };
        let (one, mut one_heard) = listen(Some("a.yaml"));
        let (other, mut other_heard) = listen(None);
        let listeners = [("/a".into(), vec![one]), ("/b".into(), vec![other])].into();
        tell(&listeners, &Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan));
        let lost = || Ok(Heard { hint: Hint::Begun, path: PathBuf::new() });
        assert_eq!((one_heard.try_recv(), other_heard.try_recv()), (lost(), lost()));
        tell(&listeners, &Event::new(EventKind::Other).add_path("/a/b.yaml".into()));
        assert!(one_heard.try_recv().is_err() && other_heard.try_recv().is_err());
    }

    #[tokio::test]
    async fn one_instance_tells_each_listener_of_its_own() {
        let folder = tempfile::tempdir().expect("a folder");
        let files: Vec<PathBuf> = (0..200).map(|file| folder.path().join(format!("{file}.yaml"))).collect();
        let mut all: Vec<Listening> =
            files.iter().map(|file| Listening::to(std::slice::from_ref(file))).collect();
        let mut whole = Listening::to(&[folder.path().to_owned()]);
        std::fs::write(&files[7], "").expect("written");
        let _ = (all[7].next().await, whole.next().await);
        let others = all.iter().enumerate().filter(|(at, _)| *at != 7);
        assert!(others.map(|(_, other)| other.heard.len()).all(|heard| heard == 0));
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("a list").filter_map(Result::ok);
        let links = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        assert_eq!(links.filter(|link| link.to_string_lossy() == "anon_inode:inotify").count(), 1);
        let gone = folder.path().canonicalize().expect("it is there");
        drop((all, whole));
        assert!(!locked(&NOTICES.listeners).contains_key(&gone));
    }
}
