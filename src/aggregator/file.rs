//! A registry in a file, or in a folder of files.

use std::collections::btree_map::Entry;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::registry::{Changes, Closed, Registry};
use super::spec::{RegistryKind, RegistrySpec};
use isthmus_document::services::read_registry;
use isthmus_files::file::{self, FileFault};
use isthmus_files::reading::{ReadError, Readings};
use isthmus_files::watch::FileWatch;
use isthmus_model::service::{Service, ServiceKey};
use isthmus_snapshot::change::{Change, Item, Key};
use isthmus_snapshot::listing::Listing;
use isthmus_tasks::background;

/// The permits to read and parse a registry. More than two reads at the same time would be slower, and would fragment memory.
static TURNS: Semaphore = Semaphore::const_new(2);
/// How long a registry holds its permit of [`TURNS`] while it reads its files. If reading takes longer, the file system may
/// hang, so the registry releases the permit until the files are read.
const TURN: Duration = Duration::from_millis(100);
/// How long reading the files may take, without parsing them.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// The largest number of reads of one registry that may hang: one that the registry waits for, and two that have timed out.
const READINGS: usize = 3;
/// The time for which mistakes in files are not reported if the files keep changing; the files are read again meanwhile.
const UNSETTLED: Duration = Duration::from_secs(2);
/// The time until the next attempt if too many reads hang.
const AGAIN: Duration = Duration::from_secs(5);
/// The largest total size of a registry's files, in bytes.
const BYTES_MAX: u64 = 256 << 20;
/// Reads all files of a registry after each change, and sends the differences.
#[derive(Clone, Debug)]
pub struct FileRegistry {
    spec: RegistrySpec,
    path: PathBuf,
}

/// The content of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Text {
    path: PathBuf,
    text: String,
}

/// Services in order of key. A map would repeat the keys.
type Services = Arc<[Arc<Service>]>;

impl FileRegistry {
    /// Makes the registry of a file or folder.
    pub fn new(spec: RegistrySpec, path: PathBuf) -> Self {
        Self { spec, path }
    }

    /// Reads and parses all files; the errors are lines of text. Blocks.
    pub fn read(&self) -> Result<Listing, Vec<String>> {
        let Found { texts, problems } = self.texts()?;
        self.understand(&texts, problems)
    }

    /// Reads the files that can be read. Blocks as long as the file system does.
    fn texts(&self) -> Result<Found, Vec<String>> {
        let mut found = Found::default();
        let mut left = BYTES_MAX;
        for path in self.files().map_err(|problem| vec![problem])? {
            let text = match file::read(&path, left) {
                Ok(bytes) => {
                    String::from_utf8(bytes).map_err(|_| "cannot be read: it is not UTF-8".to_owned())
                }
                Err(FileFault::TooLarge(_)) if left < BYTES_MAX => {
                    Err(format!("the files of this directory exceed {} MiB together", BYTES_MAX >> 20))
                }
                Err(fault) => Err(fault.to_string()),
            };
            match text {
                Ok(text) => {
                    left = left.saturating_sub(text.len() as u64);
                    found.texts.push(Text { path, text });
                }
                Err(problem) => found.problems.push(format!("{}: {problem}", path.display())),
            }
        }
        Ok(found)
    }

    /// Returns the file, or the `*.yaml`, `*.yml` and `*.json` of the folder in order of name.
    fn files(&self) -> Result<Vec<PathBuf>, String> {
        if !self.path.is_dir() {
            return Ok(vec![self.path.clone()]);
        }
        let cannot = |error: std::io::Error| format!("{}: cannot be listed: {error}", self.path.display());
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(cannot)? {
            let path = entry.map_err(cannot)?.path();
            if RegistryKind::is_file_in_folder(&path) {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// Parses all texts; returns the services unless there are problems.
    fn understand(&self, texts: &[Text], mut problems: Vec<String>) -> Result<Listing, Vec<String>> {
        let (cluster, network) = (&self.spec.cluster, &self.spec.network);
        let mut listing =
            Listing { cluster: cluster.clone(), network: network.clone(), ..Listing::default() };
        for Text { path, text } in texts {
            match read_registry(path, text, cluster, network) {
                Ok(part) => join(&mut listing, part, path, &mut problems),
                Err(found) => problems.extend(found.iter().map(ToString::to_string)),
            }
        }
        if problems.is_empty() { Ok(listing) } else { Err(problems) }
    }
}

impl Registry for FileRegistry {
    fn spec(&self) -> &RegistrySpec {
        &self.spec
    }

    fn run(self: Box<Self>, changes: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let follower = Follower {
            watch: FileWatch::new(vec![self.path.clone()]),
            readings: Readings::new(READINGS),
            registry: *self,
            last: None,
        };
        // Ends when the receiver of changes is gone.
        Box::pin(async move {
            let Err(Closed) = follower.follow(changes).await;
        })
    }
}

/// Adds the services of another file; a service in two files is an error.
fn join(listing: &mut Listing, part: Listing, file: &Path, problems: &mut Vec<String>) {
    for (key, service) in part.services {
        match listing.services.entry(key) {
            Entry::Vacant(free) => drop(free.insert(service)),
            Entry::Occupied(taken) => {
                let key = taken.key();
                problems.push(format!(
                    "{}: the service {key} is already in another file of this directory",
                    file.display()
                ));
            }
        }
    }
}

/// Returns the changes from one listing to another, in one batch. Both lists are in order of key.
fn changes_between(last: Option<&[Arc<Service>]>, next: &mut [Arc<Service>]) -> Vec<Change> {
    let Some(last) = last else {
        let items = next.iter().map(|service| Change::Put(Item::Service(service.clone())));
        return std::iter::once(Change::Begin).chain(items).chain([Change::Complete]).collect();
    };
    let place = |services: &[Arc<Service>], key: &ServiceKey| {
        services.binary_search_by(|service| service.key.cmp(key)).ok()
    };
    let mut changes = Vec::new();
    for service in next.iter_mut() {
        match place(last, &service.key).filter(|at| last[*at] == *service) {
            // An equal service is shared, so that it is in memory only once.
            Some(at) => *service = last[at].clone(),
            None => changes.push(Change::Put(Item::Service(service.clone()))),
        }
    }
    let gone = last.iter().filter(|service| place(next, &service.key).is_none());
    changes.extend(gone.map(|service| Change::Remove(Key::Service(service.key.clone()))));
    changes
}

/// The contents of a registry's files, and the problems of the files that cannot be read.
#[derive(Debug, Default)]
struct Found {
    texts: Vec<Text>,
    problems: Vec<String>,
}

/// The result of an attempt to read a registry.
enum Outcome {
    /// The services, and the changes since they were read last.
    Good(Services, Vec<Change>),
    /// The mistakes of the files, a line each. The second value is true if the files changed during the read.
    Bad(Vec<String>, bool),
    /// The file system does not answer.
    ReadError(ReadError),
}

/// Follows one registry.
struct Follower {
    registry: FileRegistry,
    watch: FileWatch,
    readings: Readings,
    /// The services that were sent to the aggregator last; `None` before the first listing.
    last: Option<Services>,
}

impl Follower {
    /// Reads the registry whenever it changes, and sends the differences.
    async fn follow(mut self, changes: Changes) -> Result<Infallible, Closed> {
        let (mut bad_since, mut has_failed) = (None, false);
        loop {
            let (problems, changing, unread) = match self.read().await {
                Outcome::Good(services, mut batch) => {
                    bad_since = None;
                    self.last = Some(services);
                    batch.extend(std::mem::take(&mut has_failed).then_some(Change::Readable));
                    changes.send(batch).await?;
                    self.watch.changed().await;
                    continue;
                }
                Outcome::Bad(problems, changing) => (problems, changing, None),
                Outcome::ReadError(unread) => {
                    let path = self.registry.path.display();
                    (vec![format!("{path}: cannot be read: {unread}")], false, Some(unread))
                }
            };
            let unsettled = UNSETTLED.saturating_sub(bad_since.get_or_insert_with(Instant::now).elapsed());
            if unread.is_none() && !unsettled.is_zero() && (changing || self.watch.is_busy().await) {
                // The files may have been read in the middle of a change.
                if !changing {
                    let _ = timeout(unsettled, self.watch.changed()).await;
                }
                continue;
            }
            (bad_since, has_failed) = (None, true);
            changes.send(vec![Change::Failed(problems)]).await?;
            match unread {
                None => self.watch.changed().await,
                Some(unread) => self.answered(&unread).await,
            }
        }
    }

    async fn read(&mut self) -> Outcome {
        // Fails only if the semaphore is closed, which never happens.
        let turn = TURNS.acquire().await;
        let begun = Instant::now();
        let (registry, before) = (self.registry.clone(), self.watch.seen().clone());
        // The state of the files is taken before the read, so that changes during the read are seen.
        let files = self.readings.read(READ_WITHIN, move || {
            let (seen, found) = (before.now(), registry.texts());
            let changing = seen.now() != seen;
            (seen, found, changing)
        });
        let mut files = pin!(files);
        let (turn, read) = match timeout(TURN, &mut files).await {
            Ok(read) => (turn, read),
            Err(_) => {
                drop(turn);
                let read = files.await;
                (TURNS.acquire().await, read)
            }
        };
        let (seen, found, changing) = match read {
            Ok(read) => read,
            Err(unread) => return Outcome::ReadError(unread),
        };
        let (registry, last) = (self.registry.clone(), self.last.clone());
        let parse = move || {
            let listing = found.and_then(|Found { texts, problems }| registry.understand(&texts, problems));
            match listing {
                Ok(listing) => {
                    let mut services: Vec<_> = listing.services.into_values().collect();
                    let changes = changes_between(last.as_deref(), &mut services);
                    Outcome::Good(services.into(), changes)
                }
                Err(problems) => Outcome::Bad(problems, changing),
            }
        };
        let outcome = background::run(parse).await;
        drop(turn);
        tracing::debug!(registry = &*self.registry.spec.name, took = ?begun.elapsed(), "registry parsed");
        self.watch.was_read(seen, begun.elapsed());
        outcome.unwrap_or(Outcome::ReadError(ReadError::Panicked))
    }

    /// Waits until another attempt may succeed: a read that hung has ended, or the files have changed.
    async fn answered(&mut self, unread: &ReadError) {
        if matches!(unread, ReadError::Hanging(_) | ReadError::Panicked) {
            tokio::time::sleep(AGAIN).await;
        }
        self.watch.refresh().await;
        // The order does not matter: both arms lead to another read.
        tokio::select! {
            () = self.readings.ended() => {}
            () = self.watch.changed() => {}
        }
    }
}
