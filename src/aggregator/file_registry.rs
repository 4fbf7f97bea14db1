//! A registry kept in a file, or in a folder of files.

use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::document::services::read_registry;
use crate::model::place::{ClusterId, Network};
use crate::net::watch::FileWatch;
use crate::snapshot::policy::RegistryScope;
use crate::snapshot::shard::{ScopedShard, Shard};

/// Where it is, and what it may speak of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRegistry {
    /// Unique among the registries.
    pub name: Arc<str>,
    pub path: PathBuf,
    pub cluster: ClusterId,
    pub network: Network,
    pub scope: RegistryScope,
}

/// What a registry says: all it has, or why it cannot be understood (a line each).
pub type Word = Result<ScopedShard, Vec<String>>;

impl FileRegistry {
    /// Reads all of it. Blocks.
    pub fn read(&self) -> Word {
        let mut shard =
            Shard { cluster: self.cluster.clone(), network: self.network.clone(), ..Shard::default() };
        let mut problems = Vec::new();
        for file in self.files().map_err(|problem| vec![problem])? {
            match self.read_file(&file) {
                Ok(part) => self.join(&mut shard, part, &file, &mut problems),
                Err(found) => problems.extend(found),
            }
        }
        if problems.is_empty() { Ok(ScopedShard::new(shard, &self.scope)) } else { Err(problems) }
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

    fn read_file(&self, file: &Path) -> Result<Shard, Vec<String>> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| vec![format!("{}: cannot be read: {error}", file.display())])?;
        read_registry(file, &text, &self.cluster, &self.network)
            .map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    /// Adds the services of one more file; a service in two files is an error.
    fn join(&self, shard: &mut Shard, part: Shard, file: &Path, problems: &mut Vec<String>) {
        for (key, service) in part.services {
            match shard.services.entry(key) {
                Entry::Vacant(free) => drop(free.insert(service)),
                Entry::Occupied(taken) => {
                    let key = taken.key();
                    problems.push(format!(
                        "{}: service {key} is in another file of this folder too",
                        file.display()
                    ));
                }
            }
        }
    }
}

/// Reads the registry whenever it changes, and says what it found.
pub(super) async fn follow(registry: FileRegistry, words: mpsc::Sender<(Arc<str>, Word)>) {
    let mut watch = FileWatch::new(vec![registry.path.clone()]);
    loop {
        let reader = registry.clone();
        let Ok(word) = tokio::task::spawn_blocking(move || reader.read()).await else {
            tracing::error!(registry = &*registry.name, "reading the registry panicked");
            return;
        };
        if words.send((registry.name.clone(), word)).await.is_err() {
            return;
        }
        watch.changed().await;
    }
}
