//! A registry in a file, or in a folder of files. `parts`: the services of each file.

mod parts;

use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use self::parts::{Found, Parts};
use super::registry::{Changes, Closed, Registry};
use super::spec::RegistrySpec;
use isthmus_files::reading::{ReadError, Readings};
use isthmus_files::watch::{FileStates, FileWatch};
use isthmus_model::service::Service;
use isthmus_registry::change::{Change, Item, Key};
use isthmus_registry::listing::Listing;
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
/// The time for which mistakes in files are not reported if the files keep changing or one is empty; the files are read again
/// when they change.
const UNSETTLED: Duration = Duration::from_secs(2);
/// The time until the next attempt if too many reads hang.
const AGAIN: Duration = Duration::from_secs(5);

/// Reads the changed files of a registry after each change, and sends the differences.
#[derive(Clone, Debug)]
pub struct FileRegistry {
    spec: RegistrySpec,
    path: PathBuf,
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
        let found = Found::below(&self.path, &FileStates::default(), &Parts::default())?;
        let services = found.parse(&self.spec.cluster, &self.spec.network, &[]).joined()?;
        let services = services.iter().map(|service| (service.key.clone(), service.clone())).collect();
        Ok(Listing { cluster: self.spec.cluster.clone(), network: self.spec.network.clone(), services })
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
            parts: Arc::default(),
            last: None,
        };
        // Ends when the receiver of changes is gone.
        Box::pin(async move {
            let Err(Closed) = follower.follow(changes).await;
        })
    }
}

/// Returns the changes from one list to another, in one batch. Both lists are in order of key, and share equal services.
fn changes_between(last: Option<&[Arc<Service>]>, next: &[Arc<Service>]) -> Vec<Change> {
    let put = |service: &Arc<Service>| Change::Put(Item::Service(service.clone()));
    let Some(last) = last else {
        return std::iter::once(Change::Begin)
            .chain(next.iter().map(put))
            .chain([Change::Complete])
            .collect();
    };
    let (mut puts, mut removals) = (Vec::new(), Vec::new());
    let mut old = last.iter().peekable();
    let mut gone = |service: &Arc<Service>| removals.push(Change::Remove(Key::Service(service.key.clone())));
    for service in next {
        while let Some(before) = old.next_if(|old| old.key < service.key) {
            gone(before);
        }
        let known = old.next_if(|old| old.key == service.key);
        if !known.is_some_and(|known| Arc::ptr_eq(known, service)) {
            puts.push(put(service));
        }
    }
    old.for_each(gone);
    puts.extend(removals);
    puts
}

/// Returns the rest of the time for which mistakes are not reported. `bad_since` is the time at which they were first found.
fn unsettled(bad_since: &mut Option<Instant>) -> Duration {
    UNSETTLED.saturating_sub(bad_since.get_or_insert_with(Instant::now).elapsed())
}

/// The result of an attempt to read a registry.
enum Outcome {
    /// The services, and the changes since they were read last.
    Good(Services, Vec<Change>),
    /// The mistakes of the files, a line each.
    Bad(Vec<String>, Files),
    /// The file system does not answer.
    ReadError(ReadError),
}

/// The state of files after they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Files {
    /// They have changed since they were read.
    Changed,
    /// One is empty.
    Empty,
    Settled,
}

/// Follows one registry.
struct Follower {
    registry: FileRegistry,
    watch: FileWatch,
    readings: Readings,
    /// The files as they were read last.
    parts: Arc<Parts>,
    /// The services that were sent to the aggregator last; `None` before the first listing.
    last: Option<Services>,
}

impl Follower {
    /// Reads the registry whenever it changes, and sends the differences.
    async fn follow(mut self, changes: Changes) -> Result<Infallible, Closed> {
        let (mut bad_since, mut has_failed) = (None, false);
        // True if the watch has just checked the files.
        let mut is_checked = false;
        loop {
            let (problems, files, unread) = match self.read(std::mem::take(&mut is_checked)).await {
                Outcome::Good(services, mut batch) => {
                    bad_since = None;
                    self.last = Some(services);
                    batch.extend(std::mem::take(&mut has_failed).then_some(Change::Readable));
                    changes.send(batch).await?;
                    self.watch.changed().await;
                    is_checked = true;
                    continue;
                }
                Outcome::Bad(problems, files) => (problems, files, None),
                Outcome::ReadError(unread) => {
                    let path = self.registry.path.display();
                    (vec![format!("{path}: cannot be read: {unread}")], Files::Settled, Some(unread))
                }
            };
            let unsettled = unsettled(&mut bad_since);
            if unread.is_none()
                && !unsettled.is_zero()
                && (files != Files::Settled || self.watch.is_busy().await)
            {
                // The files may have been read in the middle of a change.
                if files != Files::Changed {
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

    /// Reads the files that have changed since the last read. `is_checked` is true if the watch has just checked the files.
    async fn read(&mut self, is_checked: bool) -> Outcome {
        // Fails only if the semaphore is closed, which never happens.
        let turn = TURNS.acquire().await;
        let begun = Instant::now();
        let (path, before, known) =
            (self.registry.path.clone(), self.watch.seen().clone(), self.parts.clone());
        // The state of the files is taken before the read, so that changes during the read are seen.
        let files = self.readings.read(READ_WITHIN, move || {
            let seen = if is_checked { before } else { before.now() };
            let found = Found::below(&path, &seen, &known);
            (seen, found)
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
        let (seen, found) = match read {
            Ok(read) => read,
            Err(unread) => return Outcome::ReadError(unread),
        };
        let (spec, last) = (self.registry.spec.clone(), self.last.clone());
        let has_empty_file = found.as_ref().is_ok_and(Found::has_empty_file);
        let parse = move || {
            let parts = found
                .map(|found| found.parse(&spec.cluster, &spec.network, last.as_deref().unwrap_or_default()));
            let services = parts.as_ref().map_err(Clone::clone).and_then(Parts::joined);
            let changes = services.map(|next| {
                let changes = changes_between(last.as_deref(), &next);
                (next, changes)
            });
            (parts.unwrap_or_default(), changes)
        };
        let parsed = background::run(parse).await;
        drop(turn);
        tracing::debug!(registry = &*self.registry.spec.name, took = ?begun.elapsed(), "registry parsed");
        let outcome = match parsed {
            Ok((parts, changes)) => {
                self.parts = Arc::new(parts);
                match changes {
                    Ok((services, changes)) => Outcome::Good(services, changes),
                    Err(problems) if self.differs_from(&seen).await => Outcome::Bad(problems, Files::Changed),
                    Err(problems) if has_empty_file => Outcome::Bad(problems, Files::Empty),
                    Err(problems) => Outcome::Bad(problems, Files::Settled),
                }
            }
            Err(_) => Outcome::ReadError(ReadError::Panicked),
        };
        self.watch.was_read(seen, begun.elapsed());
        outcome
    }

    /// Returns true if the files have changed since these states.
    async fn differs_from(&self, seen: &FileStates) -> bool {
        let before = seen.clone();
        self.readings.read(READ_WITHIN, move || before.now() != before).await.unwrap_or(false)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn mistakes_in_files_that_keep_changing_are_reported_after_two_seconds() {
        let mut bad_since = None;
        assert_eq!(unsettled(&mut bad_since), Duration::from_secs(2));
        tokio::time::advance(Duration::from_millis(1_999)).await;
        assert_eq!(unsettled(&mut bad_since), Duration::from_millis(1));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(unsettled(&mut bad_since), Duration::ZERO);
    }
}
