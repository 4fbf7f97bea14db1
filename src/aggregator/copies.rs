//! Last good copies of registries on disk, from which a restart goes on while a registry cannot be read.
//!
//! Each registry has a folder of its own below `registries/` in the state folder, with a file for each of its files.
//! A new copy is written beside the old one and takes its place by a rename, so that a copy is always one whole
//! reading. Writing is a task's business: of a registry that changes faster than the disk takes it, the newest
//! reading is written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::{Notify, mpsc};

use super::file_registry::Text;

/// The part of a name that is kept for people to read.
const READABLE_BYTES_MAX: usize = 64;
/// What the folder of a copy is called while it is written, and while another takes its place.
const NEW: &str = ".new";
const OLD: &str = ".old";

/// Keeps copies where the config says so; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Copies {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    orders: Mutex<Orders>,
    ordered: Notify,
}

#[derive(Debug, Default)]
struct Orders {
    /// `None`: no copies are kept.
    folder: Option<Folder>,
    /// Registries that there are, if that has changed.
    only: Option<BTreeSet<Arc<str>>>,
    store: BTreeMap<Arc<str>, Vec<Text>>,
}

/// A registry whose copy was written, or what is wrong.
pub(super) type Written = (Arc<str>, io::Result<()>);

impl Copies {
    /// Keeps copies of these registries, and of no others, below `dir`.
    pub(super) fn keep(&self, dir: Option<&Path>, registries: BTreeSet<Arc<str>>) {
        let mut orders = self.orders();
        orders.folder = dir.map(|dir| Folder(dir.join("registries")));
        orders.store.retain(|name, _| registries.contains(name));
        orders.only = Some(registries);
        self.shared.ordered.notify_one();
    }

    pub(super) fn are_kept(&self) -> bool {
        self.orders().folder.is_some()
    }

    /// Has a copy written, in the place of the one before.
    pub(super) fn store(&self, registry: &Arc<str>, texts: Vec<Text>) {
        self.orders().store.insert(registry.clone(), texts);
        self.shared.ordered.notify_one();
    }

    /// The copy of a registry and when it was written, if there is one. Blocks.
    pub(super) fn load(&self, registry: &str) -> io::Result<Option<(Vec<Text>, SystemTime)>> {
        let folder = self.orders().folder.clone();
        folder.map_or(Ok(None), |folder| folder.load(registry))
    }

    /// Carries out the orders, and tells how it went.
    pub(super) async fn run(self, written: mpsc::Sender<Written>) {
        loop {
            self.shared.ordered.notified().await;
            let (folder, only, store) = {
                let mut orders = self.orders();
                (orders.folder.clone(), orders.only.take(), std::mem::take(&mut orders.store))
            };
            let Some(folder) = folder else { continue };
            let work = move || {
                if let Some(only) = only {
                    folder.retain(&only);
                }
                let store = store.into_iter();
                store.map(|(name, texts)| (folder.store(&name, &texts), name)).collect::<Vec<_>>()
            };
            let Ok(results) = tokio::task::spawn_blocking(work).await else {
                tracing::error!("writing copies of registries panicked");
                return;
            };
            for (result, name) in results {
                if written.send((name, result)).await.is_err() {
                    return;
                }
            }
        }
    }

    fn orders(&self) -> MutexGuard<'_, Orders> {
        // Each change of the orders is whole by itself.
        self.shared.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the copies are.
#[derive(Clone, Debug)]
struct Folder(PathBuf);

impl Folder {
    fn store(&self, registry: &str, texts: &[Text]) -> io::Result<()> {
        let place = self.0.join(folder_name(registry));
        let (new, old) = (with_suffix(&place, NEW), with_suffix(&place, OLD));
        remove(&new)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&new)?;
        for (index, Text { path, text }) in texts.iter().enumerate() {
            let name = path.file_name().map(|name| readable(&name.to_string_lossy())).unwrap_or_default();
            let path = new.join(format!("{index:05}-{name}"));
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
        }
        File::open(&new)?.sync_all()?;
        if place.exists() {
            remove(&old)?;
            fs::rename(&place, &old)?;
        }
        fs::rename(&new, &place)?;
        remove(&old)
    }

    fn load(&self, registry: &str) -> io::Result<Option<(Vec<Text>, SystemTime)>> {
        let place = self.0.join(folder_name(registry));
        // Without the first, the process ended while a copy took the place of another.
        for place in [place.clone(), with_suffix(&place, OLD)] {
            match fs::metadata(&place) {
                Ok(metadata) => return Ok(Some((texts_of(&place)?, metadata.modified()?))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Removes copies of other registries. What does not look like a copy is left alone.
    fn retain(&self, registries: &BTreeSet<Arc<str>>) {
        let names: BTreeSet<String> = registries.iter().map(|name| folder_name(name)).collect();
        let Ok(entries) = fs::read_dir(&self.0) else { return };
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let base = [NEW, OLD].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(&name);
            if !names.contains(base) && is_folder_name(base) {
                match remove(&entry.path()) {
                    Ok(()) => tracing::info!(copy = name, "removed the copy of a registry that is gone"),
                    Err(error) => tracing::warn!(copy = name, %error, "cannot remove an old copy"),
                }
            }
        }
    }
}

fn texts_of(folder: &Path) -> io::Result<Vec<Text>> {
    let paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<BTreeSet<_>>>()?;
    paths.into_iter().map(|path| Ok(Text { text: fs::read_to_string(&path)?, path })).collect()
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The folder of a registry: a readable part of its name, and a hash that tells apart names whose readable parts are
/// the same. A name is an operator's path, so nothing of it but plain characters is taken over.
fn folder_name(registry: &str) -> String {
    format!("{}-{:016x}", readable(registry), fnv(registry.as_bytes()))
}

fn is_folder_name(name: &str) -> bool {
    let hash = name.rsplit_once('-').map_or("", |(_, hash)| hash);
    hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The end of a name, which tells files apart better than its beginning, without characters that mean something.
fn readable(name: &str) -> String {
    let plain = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' => char::from(byte),
        _ => '_',
    };
    let bytes = &name.as_bytes()[name.len().saturating_sub(READABLE_BYTES_MAX)..];
    let text: String = bytes.iter().copied().map(plain).collect();
    // Neither hidden nor `..`.
    text.strip_prefix('.').map(|rest| format!("_{rest}")).unwrap_or(text)
}

/// FNV-1a, which is the same in every release.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn text(path: &str, text: &str) -> Text {
        Text { path: path.into(), text: text.to_owned() }
    }

    fn loaded(folder: &Folder, registry: &str) -> Option<Vec<String>> {
        let copy = folder.load(registry).expect("readable");
        copy.map(|(texts, _)| texts.into_iter().map(|text| text.text).collect())
    }

    #[test]
    fn a_copy_takes_the_place_of_the_one_before() {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = Folder(temporary.path().join("state/registries"));
        assert_eq!(loaded(&folder, "a.yaml"), None);
        folder.store("a.yaml", &[text("x/b.yaml", "1"), text("x/a.yaml", "2")]).expect("stored");
        assert_eq!(loaded(&folder, "a.yaml"), Some(vec!["1".to_owned(), "2".to_owned()]));
        folder.store("a.yaml", &[text("a.yaml", "3")]).expect("stored");
        assert_eq!(loaded(&folder, "a.yaml"), Some(vec!["3".to_owned()]));
        // Cut off between the two renames, and while writing.
        let place = folder.0.join(folder_name("a.yaml"));
        fs::rename(&place, with_suffix(&place, OLD)).expect("renamed");
        fs::create_dir(with_suffix(&place, NEW)).expect("made");
        assert_eq!(loaded(&folder, "a.yaml"), Some(vec!["3".to_owned()]));
        folder.store("a.yaml", &[text("a.yaml", "4")]).expect("stored");
        assert_eq!(loaded(&folder, "a.yaml"), Some(vec!["4".to_owned()]));
        assert_eq!(fs::read_dir(&folder.0).expect("listed").count(), 1);
        let file = fs::read_dir(&place).expect("listed").next().expect("one").expect("listed");
        assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn no_name_leads_out_of_the_folder() {
        let long = "x".repeat(5000);
        for name in ["../../etc/passwd", "/abs/file.yaml", "..", ".", "", "a\0b\n", "ü/ß", &long] {
            let folder = folder_name(name);
            assert!(!folder.contains(['/', '\0', '\n']) && !folder.starts_with('.'), "{folder}");
            assert!(folder.len() <= 100 && is_folder_name(&folder), "{folder}");
        }
        assert_ne!(folder_name("a/b"), folder_name("a_b"));
        assert_eq!(folder_name("west.yaml"), "west.yaml-833daf8468084c2f");
    }

    #[test]
    fn copies_of_others_are_removed_and_nothing_else() {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = Folder(temporary.path().to_owned());
        for name in ["a", "b"] {
            folder.store(name, &[text(name, name)]).expect("stored");
        }
        fs::write(temporary.path().join("notes.txt"), "mine").expect("written");
        folder.retain(&["a".into()].into());
        assert_eq!((loaded(&folder, "a").is_some(), loaded(&folder, "b")), (true, None));
        assert!(temporary.path().join("notes.txt").exists());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let temporary = tempfile::tempdir().expect("a folder");
        let file = temporary.path().join("file");
        fs::write(&file, "").expect("written");
        assert!(Folder(file).store("a", &[text("a", "a")]).is_err());
    }
}
