//! Last good copies of registries on disk, from which a restarted process starts while a registry cannot be read.
//!
//! Each registry has a file below `registries/` in the state folder, in one format for all kinds of registry. A copy
//! is written beside the old one and replaces it by a rename, so that a copy is always complete. The newest state is
//! written at most every ten seconds, and once more at the end of the process.

mod codec;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use self::codec::CopyFault;
use super::leases;
use isthmus_files::whole_file::{NEW, remove, write_whole};
use isthmus_registry::change::Item;
use isthmus_registry::shard::Shard;
use isthmus_snapshot::virtual_addresses::Leases;

/// The longest part of a registry's name in a file name, in bytes.
const READABLE_BYTES_MAX: usize = 64;
/// The suffix of a copy's file name.
const SUFFIX: &str = ".copy";
/// The shortest time between two copies of one registry.
const WRITE_EVERY: Duration = Duration::from_secs(10);

/// Reads and writes the copies, if the config gives a state folder; cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct CopyStore {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    orders: Mutex<Orders>,
    ordered: Notify,
    /// Held while files are written, so that two threads never write the same file.
    writing: Mutex<()>,
}

#[derive(Debug, Default)]
struct Orders {
    /// True while another process writes to the state folder. Copies are read, but not written or removed.
    is_held: bool,
    /// The state folder; `None`: nothing is stored.
    state: Option<PathBuf>,
    /// The folder of the copies; `None`: no copies are stored.
    folder: Option<Folder>,
    /// The registries whose copies remain when all other copies are removed, as a new config has ordered; `None`: no removal is
    /// pending.
    only: Option<BTreeSet<Arc<str>>>,
    /// The newest state of registries whose copy is older or absent.
    store: BTreeMap<Arc<str>, Arc<Shard>>,
    /// Registries whose copies are to be read.
    load: BTreeSet<Arc<str>>,
    /// When the last copy of each registry was written.
    written: BTreeMap<Arc<str>, Instant>,
    /// The newest leases of virtual addresses, if those on disk are older.
    leases: Option<Leases>,
    /// The time at which the leases were last written.
    leases_written: Option<Instant>,
}

/// The treatment of copies of registries that the config does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OtherCopies {
    /// They are removed.
    Remove,
    /// They stay, because the registries may be clusters of a source that was not read yet.
    Keep,
}

/// The result of an order to read or write a copy.
#[derive(Debug)]
pub(super) enum CopyEvent {
    Written(Arc<str>, io::Result<()>),
    LeasesWritten(io::Result<()>),
    /// The items of a copy and its time; `None`: there is no copy.
    Read(Arc<str>, Result<Option<(Vec<Item>, SystemTime)>, CopyFault>),
}

impl CopyStore {
    /// Sets the registries whose copies are kept below `dir`, and what happens to the copies of other registries.
    pub(super) fn keep(&self, dir: Option<&Path>, registries: BTreeSet<Arc<str>>, others: OtherCopies) {
        let mut orders = self.orders();
        orders.state = dir.map(Path::to_owned);
        orders.folder = dir.map(|dir| Folder(dir.join("registries")));
        orders.store.retain(|name, _| registries.contains(name));
        orders.written.retain(|name, _| registries.contains(name));
        orders.only = match others {
            OtherCopies::Remove => Some(registries),
            OtherCopies::Keep => None,
        };
        self.shared.ordered.notify_one();
    }

    /// Begins or ends the time in which nothing is written, because another process writes to the state folder.
    pub(super) fn hold(&self, is_held: bool) {
        self.orders().is_held = is_held;
        self.shared.ordered.notify_one();
    }

    /// Returns true if nothing is written at present.
    pub(super) fn is_held(&self) -> bool {
        self.orders().is_held
    }

    /// Requests that a registry's copy be written. A pending request for the same registry is replaced.
    pub(super) fn store(&self, registry: &Arc<str>, shard: Arc<Shard>) {
        let mut orders = self.orders();
        if orders.folder.is_some() {
            orders.store.insert(registry.clone(), shard);
            self.shared.ordered.notify_one();
        }
    }

    /// Orders the write of the leases of virtual addresses. A pending order is replaced.
    pub(super) fn store_leases(&self, leases: &Leases) {
        let mut orders = self.orders();
        if orders.state.is_some() {
            orders.leases = Some(leases.clone());
            self.shared.ordered.notify_one();
        }
    }

    /// Orders the read of a registry's copy.
    pub(super) fn load(&self, registry: &Arc<str>) {
        self.orders().load.insert(registry.clone());
        self.shared.ordered.notify_one();
    }

    /// Carries out orders and sends their results, until the receiver is gone.
    pub(super) async fn run(self, news: mpsc::Sender<CopyEvent>) {
        loop {
            let now = Instant::now();
            if !self.orders().is_due(now) {
                let next = self.orders().next_due();
                // The order does not matter: both arms lead to another check.
                tokio::select! {
                    () = self.shared.ordered.notified() => {}
                    () = tokio::time::sleep_until(next.unwrap_or_else(|| Instant::now() + WRITE_EVERY)) => {}
                }
                continue;
            }
            let (copies, asked) = (self.clone(), self.orders().load.clone());
            let all = tokio::task::spawn_blocking(move || copies.carry_out(now)).await.unwrap_or_else(|_| {
                tracing::error!("internal error: writing or reading the copies of registries panicked");
                // A registry waits for its copy before it judges its first listing.
                asked.into_iter().map(|name| CopyEvent::Read(name, Ok(None))).collect()
            });
            for one in all {
                if news.send(one).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Writes all pending copies. Reads that were ordered are left to [`Self::run`]. Blocks.
    pub(super) fn write_all(&self) {
        let mut orders = self.orders();
        orders.written.clear();
        orders.leases_written = None;
        let load = std::mem::take(&mut orders.load);
        drop(orders);
        let all = self.carry_out(Instant::now());
        self.orders().load.extend(load);
        self.shared.ordered.notify_one();
        for one in all {
            match one {
                CopyEvent::Written(name, Err(error)) => {
                    tracing::error!(registry = &*name, %error, "cannot write the registry's last good copy");
                }
                CopyEvent::LeasesWritten(Err(error)) => {
                    tracing::error!(%error, "cannot write the virtual addresses in use");
                }
                CopyEvent::Written(..) | CopyEvent::LeasesWritten(_) | CopyEvent::Read(..) => {}
            }
        }
    }

    /// Takes the orders that are due and carries them out. Blocks.
    fn carry_out(&self, now: Instant) -> Vec<CopyEvent> {
        // Locked before orders are taken: otherwise the end of the process would find neither an order nor a write to wait for. If the
        // lock is poisoned, a thread that panicked may have left an incomplete file. Such a file is written again.
        let _writing = self.shared.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let Due { state, leases, folder, only, store, load } = self.orders().due(now);
        let Some(folder) = folder else {
            return load.into_iter().map(|name| CopyEvent::Read(name, Ok(None))).collect();
        };
        if let Some(only) = only {
            folder.retain(&only);
        }
        let read = load.into_iter().map(|name| {
            let result = folder.load(&name);
            CopyEvent::Read(name, result)
        });
        let mut all: Vec<CopyEvent> = read.collect();
        all.extend(store.into_iter().map(|(name, shard)| {
            let result = folder.store(&name, shard.items());
            CopyEvent::Written(name, result)
        }));
        let leases = state.zip(leases).map(|(state, leases)| leases::store(&state, &leases));
        all.extend(leases.map(CopyEvent::LeasesWritten));
        all
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        // A poisoned lock is usable: each change is a single step.
        self.shared.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reads and writes of copies that are due.
#[derive(Debug, Default)]
struct Due {
    state: Option<PathBuf>,
    leases: Option<Leases>,
    folder: Option<Folder>,
    only: Option<BTreeSet<Arc<str>>>,
    store: BTreeMap<Arc<str>, Arc<Shard>>,
    load: BTreeSet<Arc<str>>,
}

impl Orders {
    /// Returns true if there are orders to carry out.
    fn is_due(&self, now: Instant) -> bool {
        let waits = |at: &Instant| now < *at + WRITE_EVERY;
        if self.is_held {
            return !self.load.is_empty();
        }
        self.only.is_some()
            || !self.load.is_empty()
            || self.store.keys().any(|name| !self.written.get(name).is_some_and(waits))
            || (self.leases.is_some() && !self.leases_written.as_ref().is_some_and(waits))
    }

    /// Removes and returns the orders that are due.
    fn due(&mut self, now: Instant) -> Due {
        if self.folder.is_none() {
            self.store.clear();
        }
        if self.is_held {
            return Due {
                folder: self.folder.clone(),
                load: std::mem::take(&mut self.load),
                ..Due::default()
            };
        }
        let written = &self.written;
        let waits = |name: &Arc<str>| written.get(name).is_some_and(|at| now < *at + WRITE_EVERY);
        let (later, store) = std::mem::take(&mut self.store).into_iter().partition(|(name, _)| waits(name));
        self.store = later;
        let store: BTreeMap<Arc<str>, Arc<Shard>> = store;
        self.written.extend(store.keys().map(|name| (name.clone(), now)));
        let load = std::mem::take(&mut self.load);
        let waits = self.leases_written.is_some_and(|at| now < at + WRITE_EVERY);
        let leases = self.leases.take_if(|_| !waits);
        if leases.is_some() {
            self.leases_written = Some(now);
        }
        let (state, folder) = (self.state.clone(), self.folder.clone());
        Due { state, leases, folder, only: self.only.take(), store, load }
    }

    /// Returns the time at which the next copy is due.
    fn next_due(&self) -> Option<Instant> {
        if self.is_held {
            return None;
        }
        let at = |name: &Arc<str>| self.written.get(name).map(|at| *at + WRITE_EVERY);
        let leases =
            self.leases.is_some().then_some(self.leases_written).flatten().map(|at| at + WRITE_EVERY);
        self.store.keys().filter_map(at).chain(leases).min()
    }
}

/// Returns items in the form of a copy on disk; `None` if they cannot be written.
pub(super) fn text(items: impl Iterator<Item = Item>) -> Option<String> {
    let mut text = Vec::new();
    codec::write(items, &mut text).ok()?;
    String::from_utf8(text).ok()
}

/// Returns the items of a text that [`text`] has written.
pub(super) fn items(text: &str) -> Result<Vec<Item>, CopyFault> {
    codec::read(text.as_bytes())
}

/// The folder of the copies.
#[derive(Clone, Debug)]
struct Folder(PathBuf);

impl Folder {
    fn path(&self, registry: &str) -> PathBuf {
        self.0.join(file_name(registry))
    }

    fn store(&self, registry: &str, items: impl Iterator<Item = Item>) -> io::Result<()> {
        write_whole(&self.path(registry), |file| {
            let mut buffered = BufWriter::new(file);
            codec::write(items, &mut buffered)?;
            buffered.into_inner().map_err(io::IntoInnerError::into_error)
        })
    }

    fn load(&self, registry: &str) -> Result<Option<(Vec<Item>, SystemTime)>, CopyFault> {
        let file = match File::open(self.path(registry)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let written = file.metadata()?.modified()?;
        Ok(Some((codec::read(BufReader::new(file))?, written)))
    }

    /// Removes copies of other registries, and files of an older format. Other files stay.
    fn retain(&self, registries: &BTreeSet<Arc<str>>) {
        let names: BTreeSet<String> = registries.iter().map(|name| file_name(name)).collect();
        let Ok(entries) = fs::read_dir(&self.0) else { return };
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !names.contains(&name) && is_copy_name(&name) {
                match remove(&entry.path()) {
                    Ok(()) => tracing::info!(
                        copy = name,
                        "removed the copy of a registry that the config does not have"
                    ),
                    Err(error) => tracing::warn!(copy = name, %error, "cannot remove the copy of a registry"),
                }
            }
        }
    }
}

/// Returns the registries that have a copy in the state folder and whose names begin with `prefix`, without the prefix and in
/// order. Only the hash of a name with special characters, or of a long one, is known, so such a registry is not named. Blocks.
pub fn registries_with_copies(state: &Path, prefix: &str) -> BTreeSet<Arc<str>> {
    let Ok(entries) = fs::read_dir(state.join("registries")) else { return BTreeSet::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names
        .filter_map(|file| {
            let (base, _) = file.strip_suffix(SUFFIX)?.rsplit_once('-')?;
            let rest = base.strip_prefix(&*readable(prefix))?;
            (file_name(&format!("{prefix}{rest}")) == file).then(|| rest.into())
        })
        .collect()
}

/// Returns the file name of a registry: a readable part of its name, and a hash that distinguishes names with
/// equal readable parts. A name can be any text of the operator, so only plain characters are used.
pub fn file_name(registry: &str) -> String {
    format!("{}-{:016x}{SUFFIX}", readable(registry), fnv(registry.as_bytes()))
}

/// Returns true if this is the name of a copy, complete or not, or of a folder in which earlier versions kept copies.
fn is_copy_name(name: &str) -> bool {
    let base = [NEW, ".old"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
    let base = base.strip_suffix(SUFFIX).unwrap_or(base);
    let hash = base.rsplit_once('-').map_or("", |(_, hash)| hash);
    hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the end of a name, which differs more often than its beginning, without special characters.
fn readable(name: &str) -> String {
    let plain = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' => char::from(byte),
        _ => '_',
    };
    let bytes = &name.as_bytes()[name.len().saturating_sub(READABLE_BYTES_MAX)..];
    let text: String = bytes.iter().copied().map(plain).collect();
    // A leading dot would make the file hidden, or its name `..`.
    text.strip_prefix('.').map(|rest| format!("_{rest}")).unwrap_or(text)
}

/// Hashes by FNV-1a, whose result is the same in every release.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use isthmus_document::services::read_registry;
    use isthmus_files::whole_file::with_suffix;
    use isthmus_model::place::{ClusterId, Network};
    use isthmus_settings::scope::RegistryScope;

    fn shard(service: &str) -> Arc<Shard> {
        let text =
            format!("services: [{{hostname: {service}.mesh, namespace: n, ports: [{{name: p, port: 80}}]}}]");
        let listing = read_registry("x".as_ref(), &text, &ClusterId::default(), &Network::default());
        Arc::new(Shard::of(listing.expect("good"), &RegistryScope::default()))
    }

    fn loaded(folder: &Folder, registry: &str) -> Option<Vec<String>> {
        let copy = folder.load(registry).expect("readable");
        copy.map(|(items, _)| items.iter().map(|item| item.key().to_string()).collect())
    }

    #[test]
    fn a_copy_takes_the_place_of_the_one_before() {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = Folder(temporary.path().join("state/registries"));
        assert_eq!(loaded(&folder, "a.yaml"), None);
        folder.store("a.yaml", shard("one").items()).expect("stored");
        assert_eq!(loaded(&folder, "a.yaml"), Some(vec!["service n/one.mesh".to_owned()]));
        // The process was killed while writing.
        let place = folder.path("a.yaml");
        fs::write(with_suffix(&place, NEW), "half").expect("written");
        assert_eq!(loaded(&folder, "a.yaml"), Some(vec!["service n/one.mesh".to_owned()]));
        folder.store("a.yaml", shard("two").items()).expect("stored");
        assert_eq!(loaded(&folder, "a.yaml"), Some(vec!["service n/two.mesh".to_owned()]));
        assert_eq!(fs::read_dir(&folder.0).expect("listed").count(), 1);
        assert_eq!(place.metadata().expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn no_name_leads_out_of_the_folder() {
        let long = "x".repeat(5000);
        for name in ["../../etc/passwd", "/abs/file.yaml", "..", ".", "", "a\0b\n", "ü/ß", &long] {
            let file = file_name(name);
            assert!(!file.contains(['/', '\0', '\n']) && !file.starts_with('.'), "{file}");
            assert!(file.len() <= 100 && is_copy_name(&file), "{file}");
        }
        assert_ne!(file_name("a/b"), file_name("a_b"));
        assert_eq!(file_name("west.yaml"), "west.yaml-833daf8468084c2f.copy");
    }

    #[test]
    fn copies_of_others_are_removed_and_nothing_else() {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = Folder(temporary.path().to_owned());
        for name in ["a", "b"] {
            folder.store(name, shard(name).items()).expect("stored");
        }
        fs::create_dir(temporary.path().join("a-0123456789abcdef")).expect("made");
        fs::write(temporary.path().join("notes.txt"), "mine").expect("written");
        folder.retain(&["a".into()].into());
        assert_eq!((loaded(&folder, "a").is_some(), loaded(&folder, "b")), (true, None));
        let left = fs::read_dir(temporary.path()).expect("listed").count();
        assert_eq!(left, 2, "the copy of a and the notes");
        assert!(temporary.path().join("notes.txt").exists());
    }

    #[test]
    fn copies_of_clusters_stay_and_are_named_while_their_source_is_unread() {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = Folder(temporary.path().join("registries"));
        for name in ["kubernetes/east-1", "kubernetes/ü", "etcd/east"] {
            folder.store(name, shard("one").items()).expect("stored");
        }
        let copies = CopyStore::default();
        let keep = |others| {
            copies.keep(Some(temporary.path()), BTreeSet::new(), others);
            copies.carry_out(Instant::now());
            registries_with_copies(temporary.path(), "kubernetes/")
        };
        assert_eq!(keep(OtherCopies::Keep), ["east-1".into()].into());
        assert!(loaded(&folder, "kubernetes/ü").is_some());
        assert_eq!(keep(OtherCopies::Remove), BTreeSet::new());
        assert!(loaded(&folder, "kubernetes/ü").is_none());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let temporary = tempfile::tempdir().expect("a folder");
        let file = temporary.path().join("file");
        fs::write(&file, "").expect("written");
        assert!(Folder(file).store("a", shard("a").items()).is_err());
    }

    #[test]
    fn a_registry_that_changes_all_the_time_is_written_every_ten_seconds_and_at_the_end() {
        let temporary = tempfile::tempdir().expect("a folder");
        let copies = CopyStore::default();
        let name: Arc<str> = "a".into();
        copies.keep(Some(temporary.path()), [name.clone()].into(), OtherCopies::Remove);
        let folder = Folder(temporary.path().join("registries"));
        let now = Instant::now();
        let write = |service: &str, after: Duration| {
            copies.store(&name, shard(service));
            copies.carry_out(now + after);
        };
        write("one", Duration::ZERO);
        write("two", WRITE_EVERY / 2);
        assert_eq!(loaded(&folder, "a"), Some(vec!["service n/one.mesh".to_owned()]));
        assert_eq!(copies.orders().next_due(), Some(now + WRITE_EVERY));
        write("three", WRITE_EVERY);
        assert_eq!(loaded(&folder, "a"), Some(vec!["service n/three.mesh".to_owned()]));
        write("four", WRITE_EVERY + WRITE_EVERY / 2);
        copies.load(&name);
        copies.write_all();
        assert!(copies.orders().load.contains(&name), "who has ordered the read still waits for it");
        assert_eq!(loaded(&folder, "a"), Some(vec!["service n/four.mesh".to_owned()]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_copy_of_a_registry_is_written_ten_seconds_after_the_first() {
        let temporary = tempfile::tempdir().expect("a folder");
        let copies = CopyStore::default();
        let name: Arc<str> = "a".into();
        copies.keep(Some(temporary.path()), [name.clone()].into(), OtherCopies::Remove);
        copies.store(&name, shard("one"));
        let (news, mut carried_out) = mpsc::channel(8);
        let story = async {
            assert!(matches!(carried_out.recv().await, Some(CopyEvent::Written(_, Ok(())))));
            let first = Instant::now();
            copies.store(&name, shard("two"));
            assert!(matches!(carried_out.recv().await, Some(CopyEvent::Written(_, Ok(())))));
            first.elapsed()
        };
        let waited = tokio::select! {
            () = copies.clone().run(news) => panic!("it ended"),
            waited = story => waited,
        };
        assert_eq!(waited, Duration::from_secs(10));
        let folder = Folder(temporary.path().join("registries"));
        assert_eq!(loaded(&folder, "a"), Some(vec!["service n/two.mesh".to_owned()]));
    }

    #[test]
    fn an_order_is_pending_until_it_is_carried_out() {
        let temporary = tempfile::tempdir().expect("a folder");
        let copies = CopyStore::default();
        let name: Arc<str> = "a".into();
        copies.keep(Some(temporary.path()), [name.clone()].into(), OtherCopies::Remove);
        copies.store(&name, shard("one"));
        let (news, mut carried_out) = mpsc::channel(8);
        let mut run = Box::pin(copies.clone().run(news));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let mut step = |time: Duration| {
            runtime.block_on(async {
                tokio::select! {
                    () = &mut run => panic!("it ended"),
                    event = carried_out.recv() => event,
                    () = tokio::time::sleep(time) => None,
                }
            })
        };
        let writing = copies.shared.writing.lock().expect("not poisoned");
        assert!(step(Duration::from_millis(100)).is_none());
        assert!(copies.orders().store.contains_key(&name), "the end of the process would not write it");
        drop(writing);
        assert!(matches!(step(Duration::from_secs(20)), Some(CopyEvent::Written(..))));
        assert!(loaded(&Folder(temporary.path().join("registries")), "a").is_some());
    }
}
