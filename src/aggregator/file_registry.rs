//! A registry kept in a file, or in a folder of files.

use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use tokio::sync::{Semaphore, mpsc};

use super::copies::Copies;
use crate::document::services::read_registry;
use crate::model::place::{ClusterId, Network};
use crate::net::labour::labour;
use crate::net::watch::FileWatch;
use crate::snapshot::policy::RegistryScope;
use crate::snapshot::shard::{ScopedShard, Shard};

/// Registries that are parsed at the same time: more would only be slower, and leave more memory in pieces.
static READINGS: Semaphore = Semaphore::const_new(2);

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
        let mut texts = Vec::new();
        let mut problems = Vec::new();
        for path in self.files().map_err(|problem| vec![problem])? {
            match std::fs::read_to_string(&path) {
                Ok(text) => texts.push(Text { path, text }),
                Err(error) => problems.push(format!("{}: cannot be read: {error}", path.display())),
            }
        }
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

    fn first_word(&self, copies: &Copies) -> Word {
        let mut word = self.word(copies);
        if let Word::Bad { problems, copy } = &mut word {
            match self.read_copy(copies) {
                Ok(found) => *copy = found,
                Err(found) => problems.extend(found),
            }
        }
        word
    }

    fn word(&self, copies: &Copies) -> Word {
        match self.read() {
            Ok(reading) if copies.are_kept() => Word::Good(reading),
            Ok(reading) => Word::Good(Reading { texts: Vec::new(), ..reading }),
            Err(problems) => Word::Bad { problems, copy: None },
        }
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
    let mut watch = FileWatch::new(vec![registry.path.clone()]);
    let mut read: fn(&FileRegistry, &Copies) -> Word = FileRegistry::first_word;
    loop {
        // Fails only when it is closed, which nobody does.
        let turn = READINGS.acquire().await;
        let (reader, kept) = (registry.clone(), copies.clone());
        let begun = Instant::now();
        let Ok(word) = labour(move || read(&reader, &kept)).await else {
            tracing::error!(registry = &*registry.name, "reading the registry panicked");
            return;
        };
        drop(turn);
        read = FileRegistry::word;
        tracing::debug!(registry = &*registry.name, took = ?begun.elapsed(), "registry parsed");
        if words.send((registry.name.clone(), word)).await.is_err() {
            return;
        }
        watch.changed().await;
    }
}
