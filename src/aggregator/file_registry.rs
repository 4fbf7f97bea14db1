//! A registry kept in a file, or in a folder of files.

use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, timeout};

use super::copies::Copies;
use crate::document::services::read_registry;
use crate::model::place::{ClusterId, Network};
use crate::net::file::{self, FileFault};
use crate::net::labour::labour;
use crate::net::reading::{Readings, Unread};
use crate::net::watch::FileWatch;
use crate::snapshot::policy::RegistryScope;
use crate::snapshot::shard::{ScopedShard, Shard};

/// Registries that are read and parsed at the same time: more would only be slower, and leave more memory in pieces.
static TURNS: Semaphore = Semaphore::const_new(2);
/// A registry whose files take longer gives its turn to others until it has them, as its file system may hang.
const TURN: Duration = Duration::from_millis(100);
/// How long the files may take; parsing them is not counted.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// Readings of one registry that may hang at the same time: one that is waited for, and two that were given up.
const READINGS: usize = 3;
/// Files that are being written are read again for so long before it is said that they cannot be understood.
const UNSETTLED: Duration = Duration::from_secs(2);
/// After more readings hang than may, the next attempt.
const AGAIN: Duration = Duration::from_secs(5);
/// All files of one registry together.
const BYTES_MAX: u64 = 256 << 20;

/// Where it is, and what it may speak of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRegistry {
    /// The path as written in the config, unless two are written alike; unique among the registries.
    pub name: Arc<str>,
    pub path: PathBuf,
    pub cluster: ClusterId,
    /// `""`: unknown.
    pub network: Network,
    pub scope: RegistryScope,
}

/// What one file of a registry holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    pub path: PathBuf,
    pub text: String,
}

/// All that a registry says, and the texts that say it.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    pub shard: ScopedShard,
    pub texts: Vec<Text>,
}

/// What became of reading a registry.
pub(super) enum Word {
    /// The texts are there where copies are kept.
    Good(Reading),
    Bad {
        /// Why it cannot be understood, a line each.
        problems: Vec<String>,
        /// The last good copy, looked for when the first reading fails, and when it was written.
        copy: Option<(ScopedShard, SystemTime)>,
    },
}

impl FileRegistry {
    /// Reads all of it, or says what is wrong, a line each. Blocks.
    pub fn read(&self) -> Result<Reading, Vec<String>> {
        let found = self.texts()?;
        self.reading(found)
    }

    /// Reads the files, at least those that can be read. Blocks, for as long as the file system does.
    fn texts(&self) -> Result<Found, Vec<String>> {
        let mut found = Found::default();
        let mut left = BYTES_MAX;
        for path in self.files().map_err(|problem| vec![problem])? {
            let text = match file::read(&path, left) {
                Ok(bytes) => {
                    String::from_utf8(bytes).map_err(|_| "cannot be read: it is not UTF-8".to_owned())
                }
                Err(FileFault::TooLarge(_)) if left < BYTES_MAX => {
                    Err(format!("the files of this folder are larger than {} MiB together", BYTES_MAX >> 20))
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

    fn reading(&self, Found { texts, problems }: Found) -> Result<Reading, Vec<String>> {
        match self.understand(&texts, problems) {
            Ok(shard) => Ok(Reading { shard, texts }),
            Err(problems) => Err(problems),
        }
    }

    /// The file, or the `*.yaml`, `*.yml` and `*.json` of the folder in the order of their names.
    fn files(&self) -> Result<Vec<PathBuf>, String> {
        if !self.path.is_dir() {
            return Ok(vec![self.path.clone()]);
        }
        let cannot = |error: std::io::Error| format!("{}: cannot be listed: {error}", self.path.display());
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(cannot)? {
            let path = entry.map_err(cannot)?.path();
            let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            let kind = path.extension().and_then(|extension| extension.to_str());
            if !hidden && matches!(kind, Some("yaml" | "yml" | "json")) {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// The services of all texts together, unless there are problems.
    fn understand(&self, texts: &[Text], mut problems: Vec<String>) -> Result<ScopedShard, Vec<String>> {
        let mut shard =
            Shard { cluster: self.cluster.clone(), network: self.network.clone(), ..Shard::default() };
        for Text { path, text } in texts {
            match read_registry(path, text, &self.cluster, &self.network) {
                Ok(part) => join(&mut shard, part, path, &mut problems),
                Err(found) => problems.extend(found.iter().map(ToString::to_string)),
            }
        }
        if problems.is_empty() { Ok(ScopedShard::new(shard, &self.scope)) } else { Err(problems) }
    }

    fn read_copy(&self, copies: &Copies) -> Result<Option<(ScopedShard, SystemTime)>, Vec<String>> {
        let copy = copies
            .load(&self.name)
            .map_err(|error| vec![format!("its last good copy cannot be read: {error}")])?;
        let Some((texts, written)) = copy else { return Ok(None) };
        Ok(Some((self.understand(&texts, Vec::new())?, written)))
    }
}

/// Adds the services of one more file; a service in two files is an error.
fn join(shard: &mut Shard, part: Shard, file: &Path, problems: &mut Vec<String>) {
    for (key, service) in part.services {
        match shard.services.entry(key) {
            Entry::Vacant(free) => drop(free.insert(service)),
            Entry::Occupied(taken) => {
                let key = taken.key();
                problems
                    .push(format!("{}: service {key} is in another file of this folder too", file.display()));
            }
        }
    }
}

/// Reads the registry whenever it changes, and says what it found.
pub(super) async fn follow(registry: FileRegistry, copies: Copies, words: mpsc::Sender<(Arc<str>, Word)>) {
    let mut follower = Follower {
        watch: FileWatch::new(vec![registry.path.clone()]),
        readings: Readings::new(READINGS),
        registry,
        copies,
    };
    let mut copy_wanted = true;
    let mut bad_since: Option<Instant> = None;
    loop {
        let outcome = follower.read().await;
        let (problems, changing, unread) = match outcome {
            Outcome::Good(reading) => {
                bad_since = None;
                copy_wanted = false;
                if words.send((follower.registry.name.clone(), Word::Good(reading))).await.is_err() {
                    return;
                }
                follower.watch.changed().await;
                continue;
            }
            Outcome::Bad(problems, changing) => (problems, changing, None),
            Outcome::Unread(unread) => {
                let path = follower.registry.path.display();
                (vec![format!("{path}: cannot be read: {unread}")], false, Some(unread))
            }
        };
        let unsettled = UNSETTLED.saturating_sub(bad_since.get_or_insert_with(Instant::now).elapsed());
        if unread.is_none() && !unsettled.is_zero() && (changing || follower.watch.is_busy().await) {
            // Half of a change, perhaps.
            if !changing {
                let _ = timeout(unsettled, follower.watch.changed()).await;
            }
            continue;
        }
        bad_since = None;
        let word = follower.bad(problems, std::mem::take(&mut copy_wanted)).await;
        if words.send((follower.registry.name.clone(), word)).await.is_err() {
            return;
        }
        match unread {
            None => follower.watch.changed().await,
            Some(unread) => follower.answered(&unread).await,
        }
    }
}

/// What the files of a registry hold, and what is wrong with those that cannot be read.
#[derive(Debug, Default)]
struct Found {
    texts: Vec<Text>,
    problems: Vec<String>,
}

/// How an attempt to read a registry ended.
enum Outcome {
    Good(Reading),
    /// What is wrong, a line each, and whether the files changed while they were read.
    Bad(Vec<String>, bool),
    /// The file system does not answer.
    Unread(Unread),
}

/// Reads one registry, again and again.
struct Follower {
    registry: FileRegistry,
    copies: Copies,
    watch: FileWatch,
    readings: Readings,
}

impl Follower {
    async fn read(&mut self) -> Outcome {
        // Fails only when it is closed, which nobody does.
        let turn = TURNS.acquire().await;
        let begun = Instant::now();
        let (registry, before) = (self.registry.clone(), self.watch.seen().clone());
        // What changes after it was looked at is to be read again.
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
            Err(unread) => return Outcome::Unread(unread),
        };
        let (registry, are_kept) = (self.registry.clone(), self.copies.are_kept());
        let parse = move || match found.and_then(|found| registry.reading(found)) {
            Ok(reading) if are_kept => Outcome::Good(reading),
            Ok(reading) => Outcome::Good(Reading { texts: Vec::new(), ..reading }),
            Err(problems) => Outcome::Bad(problems, changing),
        };
        let outcome = labour(parse).await;
        drop(turn);
        tracing::debug!(registry = &*self.registry.name, took = ?begun.elapsed(), "registry parsed");
        self.watch.was_read(seen, begun.elapsed());
        outcome.unwrap_or(Outcome::Unread(Unread::Panicked))
    }

    /// The word that it cannot be read or understood, with the last good copy if it is wanted.
    async fn bad(&self, mut problems: Vec<String>, copy_wanted: bool) -> Word {
        if !copy_wanted {
            return Word::Bad { problems, copy: None };
        }
        let (registry, copies) = (self.registry.clone(), self.copies.clone());
        let read = Readings::new(1).read(READ_WITHIN, move || registry.read_copy(&copies)).await;
        let unread = |unread: Unread| Err(vec![format!("its last good copy cannot be read: {unread}")]);
        let copy = read.unwrap_or_else(unread).unwrap_or_else(|found| {
            problems.extend(found);
            None
        });
        Word::Bad { problems, copy }
    }

    /// Waits until it is worth another attempt: a reading that hung has ended, or there are other files.
    async fn answered(&mut self, unread: &Unread) {
        if matches!(unread, Unread::Hanging(_) | Unread::Panicked) {
            tokio::time::sleep(AGAIN).await;
        }
        self.watch.look().await;
        // Which comes first does not matter: both lead to another reading.
        tokio::select! {
            () = self.readings.ended() => {}
            () = self.watch.changed() => {}
        }
    }
}
