//! The files of a registry, each with the services that were read from it. A file that has not changed since its last read is
//! neither read nor parsed again, so that a change in a large folder costs the changed files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::spec::RegistryKind;
use super::Services;
use isthmus_document::services::read_registry;
use isthmus_files::file::{self, FileFault};
use isthmus_files::watch::{FileStamp, FileStates};
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::Service;
use isthmus_net::budget::registry_bytes;

/// The largest total size of a registry's files, in bytes.
const BYTES_MAX: usize = 256 << 20;

/// The files of a registry without mistakes, as they were read last, and the mistakes of the others.
#[derive(Debug, Default)]
pub(super) struct Parts {
    /// In order of name.
    files: Vec<(PathBuf, Part)>,
    problems: Vec<String>,
}

/// One file.
#[derive(Clone, Debug)]
struct Part {
    /// The state of the file before it was read; `None` if it is not known.
    stamp: Option<FileStamp>,
    bytes: u64,
    services: Services,
}

/// The files of a registry after a change.
#[derive(Debug, Default)]
pub(super) struct Found {
    files: Vec<(PathBuf, Content)>,
    /// The problems of the files that cannot be read.
    problems: Vec<String>,
}

#[derive(Debug)]
enum Content {
    /// The file has not changed since it was read.
    Known(Part),
    Text {
        stamp: Option<FileStamp>,
        text: String,
    },
}

impl Found {
    /// Reads the file, or the files of the folder, that are not in `known` with their state in `seen`. Blocks as long as the file
    /// system does.
    pub(super) fn below(path: &Path, seen: &FileStates, known: &Parts) -> Result<Self, Vec<String>> {
        let mut found = Self::default();
        let most = registry_bytes(BYTES_MAX) as u64;
        let mut left = most;
        for (path, stamp) in files(path, seen).map_err(|problem| vec![problem])? {
            match content(&path, stamp, (left, most), known) {
                Ok(content) => {
                    left = left.saturating_sub(content.bytes());
                    found.files.push((path, content));
                }
                Err(problem) => found.problems.push(format!("{}: {problem}", path.display())),
            }
        }
        Ok(found)
    }

    /// Returns true if a file that was read is empty. Its writer may be about to fill it: a disk that stalls truncates a file long
    /// before the kernel notifies anyone of it.
    pub(super) fn has_empty_file(&self) -> bool {
        self.files.iter().any(|(_, content)| matches!(content, Content::Text { text, .. } if text.is_empty()))
    }

    /// Parses the files that were read. A service that equals one of `last`, which is in order of key, is shared with it, so that
    /// it is in memory only once.
    pub(super) fn parse(self, cluster: &ClusterId, network: &Network, last: &[Arc<Service>]) -> Parts {
        let mut parts = Parts { problems: self.problems, ..Parts::default() };
        for (path, content) in self.files {
            let part = match content {
                Content::Known(part) => Ok(part),
                Content::Text { stamp, text } => {
                    read_registry(&path, &text, cluster, network).map(|listing| {
                        let services = listing.services.into_values().map(|service| shared(service, last));
                        Part { stamp, bytes: text.len() as u64, services: services.collect() }
                    })
                }
            };
            match part {
                Ok(part) => parts.files.push((path, part)),
                Err(found) => parts.problems.extend(found.iter().map(ToString::to_string)),
            }
        }
        parts
    }
}

impl Parts {
    /// Returns the services of all files in order of key, unless there are problems. A service in two files is one.
    pub(super) fn joined(&self) -> Result<Services, Vec<String>> {
        let mut problems = self.problems.clone();
        let services = self.files.iter();
        let mut services: Vec<(&Arc<Service>, &Path)> = services
            .flat_map(|(path, part)| part.services.iter().map(move |service| (service, path.as_path())))
            .collect();
        // The sort is stable: of equal keys, that of the first file comes first.
        services.sort_by(|(one, _), (other, _)| one.key.cmp(&other.key));
        for pair in services.windows(2).filter(|pair| pair[0].0.key == pair[1].0.key) {
            let (service, file) = pair[1];
            problems.push(format!(
                "{}: the service {} is already in another file of this directory",
                file.display(),
                service.key
            ));
        }
        if problems.is_empty() {
            Ok(services.into_iter().map(|(service, _)| service.clone()).collect())
        } else {
            Err(problems)
        }
    }

    fn get(&self, path: &Path) -> Option<&Part> {
        let at = self.files.binary_search_by(|(known, _)| known.as_os_str().cmp(path.as_os_str()));
        at.ok().map(|at| &self.files[at].1)
    }
}

impl Content {
    fn bytes(&self) -> u64 {
        match self {
            Self::Known(part) => part.bytes,
            Self::Text { text, .. } => text.len() as u64,
        }
    }
}

/// Returns the file, or the `*.yaml`, `*.yml` and `*.json` of the folder in order of name, with their states.
fn files(path: &Path, seen: &FileStates) -> Result<Vec<(PathBuf, Option<FileStamp>)>, String> {
    if !path.is_dir() {
        return Ok(vec![(path.to_owned(), seen.stamp_of(path))]);
    }
    let is_read = |path: &Path| RegistryKind::is_file_in_folder(path);
    let entries = seen.entries_of(path);
    if !entries.is_empty() {
        return Ok(entries.iter().filter(|(path, _)| is_read(path)).cloned().collect());
    }
    // The folder was not checked, or cannot be listed.
    let cannot = |error: std::io::Error| format!("{}: cannot be listed: {error}", path.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        if is_read(&path) {
            files.push((path, None));
        }
    }
    files.sort_by(|(one, _), (other, _): &(PathBuf, _)| one.as_os_str().cmp(other.as_os_str()));
    Ok(files)
}

/// Returns the content of a file of at most `left` bytes, of which all files have at most `most`.
fn content(
    path: &Path,
    stamp: Option<FileStamp>,
    (left, most): (u64, u64),
    known: &Parts,
) -> Result<Content, String> {
    let exceeded = || format!("the files of this directory exceed {} MiB together", most >> 20);
    let part = known.get(path).filter(|part| stamp.is_some() && part.stamp == stamp);
    if let Some(part) = part {
        return if part.bytes > left { Err(exceeded()) } else { Ok(Content::Known(part.clone())) };
    }
    let bytes = file::read(path, left).map_err(|fault| match fault {
        FileFault::TooLarge(_) if left < most => exceeded(),
        fault => fault.to_string(),
    })?;
    let text = String::from_utf8(bytes).map_err(|_| "cannot be read: it is not UTF-8".to_owned())?;
    Ok(Content::Text { stamp, text })
}

/// Returns the equal service of `last`, or this one.
fn shared(service: Arc<Service>, last: &[Arc<Service>]) -> Arc<Service> {
    let known = last.binary_search_by(|known| known.key.cmp(&service.key));
    known.ok().map(|at| &last[at]).filter(|known| **known == service).cloned().unwrap_or(service)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the names of the files that `found` would parse.
    fn read_anew(found: &Found) -> Vec<String> {
        let texts = found.files.iter().filter(|(_, content)| matches!(content, Content::Text { .. }));
        texts.map(|(path, _)| path.file_name().expect("a name").to_string_lossy().into_owned()).collect()
    }

    fn services(host: &str, address: &str) -> String {
        let ports = "ports: [{name: http, port: 80}]";
        format!(
            "services:\n- {{hostname: {host}, namespace: a, {ports}, endpoints: [{{address: {address}}}]}}\n"
        )
    }

    #[test]
    fn a_change_in_a_folder_costs_the_changed_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            std::fs::write(folder.path().join("next"), text).expect("written");
            std::fs::rename(folder.path().join("next"), folder.path().join(name)).expect("renamed");
        };
        for file in 0..20 {
            write(&format!("{file:02}.yaml"), &services(&format!("s{file}.mesh"), "10.0.0.1"));
        }
        let (cluster, network) = (ClusterId::default(), Network::default());
        let mut last: Services = Arc::default();
        let mut parts = Parts::default();
        // Returns the files that were read, and the changes or problems.
        let mut read = || {
            let mut seen = FileStates::default();
            seen.note(folder.path());
            let found = Found::below(folder.path(), &seen, &parts).expect("listed");
            let anew = read_anew(&found);
            parts = found.parse(&cluster, &network, &last);
            let changes = parts.joined().map(|next| {
                let changes = super::super::changes_between(Some(&last), &next);
                last = next;
                changes.iter().map(|change| format!("{change:?}")).collect::<Vec<_>>()
            });
            (anew, changes)
        };
        let (anew, changes) = read();
        assert_eq!((anew.len(), changes.expect("no mistakes").len()), (20, 20));
        assert_eq!(read(), (Vec::new(), Ok(Vec::new())));

        write("07.yaml", &services("s7.mesh", "10.0.0.2"));
        std::fs::remove_file(folder.path().join("03.yaml")).expect("removed");
        let (anew, changes) = read();
        let changes = changes.expect("no mistakes");
        assert_eq!((anew, changes.len()), (vec!["07.yaml".to_owned()], 2));
        assert!(changes[0].starts_with("Put") && changes[0].contains("10.0.0.2"), "{changes:?}");
        assert!(changes[1].starts_with("Remove") && changes[1].contains("s3.mesh"), "{changes:?}");

        // A file with mistakes is read again each time, and the others are not.
        write("08.yaml", "services: [");
        write("09.yaml", &services("s7.mesh", "10.0.0.2"));
        let (anew, changes) = read();
        assert_eq!(anew, ["08.yaml", "09.yaml"]);
        let problems = changes.expect_err("two mistakes");
        assert!(problems.iter().any(|problem| problem.contains("08.yaml")), "{problems:?}");
        assert!(problems.iter().any(|problem| problem.contains("already in another file")), "{problems:?}");
        write("09.yaml", &services("s9.mesh", "10.0.0.1"));
        assert_eq!(read().0, ["08.yaml", "09.yaml"]);
        write("08.yaml", &services("s8.mesh", "10.0.0.1"));
        assert_eq!(read(), (vec!["08.yaml".to_owned()], Ok(Vec::new())));
    }
}
