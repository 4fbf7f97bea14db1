//! The files of a config, and their merged tree. Services go straight from the text to their reader and are
//! not in the tree.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use isthmus_document::environment::Environment;
use isthmus_document::form::{self, Form};
use isthmus_document::key::Key;
use isthmus_document::problem::{self, FileId, Position, Problems};
use isthmus_document::reader::{Fields, check};
use isthmus_document::scalar;
use isthmus_document::services::{KeptPositions, ServiceReader};
use isthmus_document::tree::{Node, Source, Stream, Value, parse};

use isthmus_files::file;

use super::table::{Include, Root};

/// The largest file in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// The largest number of files of a config.
const FILES_MAX: usize = 10_000;

/// The kinds of file that are accepted as the main config file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Regular files, and links to them.
    Regular,
    /// Files of any kind, including pipes and terminals, because the command line may name one.
    Anything,
}

/// The merged contents of the files.
pub(super) struct Files {
    /// `None`: no file could be read.
    pub(super) root: Option<Node>,
    pub(super) services: ServiceReader,
    pub(super) problems: Problems,
    /// True if every file was read to its end, so that an absent key is in none of them.
    pub(super) complete: bool,
    /// The names by which the files were found.
    pub(super) names: Names,
}

/// The files that a config consists of, and the names of files that would become a part of it.
#[derive(Default)]
pub(super) struct Names {
    /// The canonical paths of the files that were read.
    read: BTreeSet<PathBuf>,
    /// The folders that were listed, each with its pattern.
    listed: Vec<(PathBuf, String)>,
}

impl Names {
    /// Returns true if a file is a part of the config, or will be one as soon as it exists.
    pub(super) fn contain(&self, path: &Path) -> bool {
        let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let is_listed = |(folder, pattern): &(PathBuf, String)| {
            path.parent() == Some(&absolute(folder)) && is_match(pattern, &name)
        };
        self.read.contains(path) || self.listed.iter().any(is_listed)
    }
}

/// Reads the file with its includes, or all files of the directory.
pub(super) fn read(
    path: &Path,
    main: What,
    environment: Environment<'_>,
    before: &mut dyn FnMut(&Path),
) -> Files {
    let mut reading = Reading {
        main: if path.is_dir() { What::Regular } else { main },
        environment,
        before,
        files: Files {
            root: None,
            services: ServiceReader::new(KeptPositions::Endpoints),
            problems: Problems::new(),
            complete: true,
            names: Names::default(),
        },
        services: 0,
    };
    if path.is_dir() {
        reading.directory(path);
    } else {
        reading.main(path);
    }
    reading.files
}

struct Reading<'e> {
    /// The kinds of file that are accepted as the main config file.
    main: What,
    environment: Environment<'e>,
    /// Called with each file and directory before it is read.
    before: &'e mut dyn FnMut(&Path),
    files: Files,
    /// The number of items of `services` that were read, which is the index of the next item.
    services: usize,
}

impl Reading<'_> {
    fn main(&mut self, path: &Path) {
        let Some((file, text)) = self.text(path, None) else { return };
        let Some(mut root) = self.tree(file, &text) else { return };
        if matches!(root.value, Value::Null) {
            let fault = "found an empty file; the smallest config has the key listen and one route";
            return self.files.problems.error(root.position, &problem::Path::Root, fault);
        }
        let include = take(&mut root, Root::INCLUDE.name());
        self.files.root = Some(root);
        let Some(include) = include else { return };
        let at = problem::Path::Root.key(Root::INCLUDE.name());
        check(&include, &Include::KIND, &at, &mut self.files.problems);
        if include.text().is_some() {
            self.include(path, &include, &at);
        }
        for (index, item) in include.items().iter().enumerate() {
            self.include(path, item, &at.index(index));
        }
    }

    fn directory(&mut self, path: &Path) {
        (self.before)(path);
        let id = self.files.problems.add_file(path);
        self.files.names.listed.push((path.to_owned(), "*.yaml".to_owned()));
        let (Some(id), found) = (id, listing(path, "*.yaml")) else { return };
        let whole = Position::whole(id);
        match found {
            Err(error) => self.whole_file(whole, format!("cannot be listed: {error}")),
            Ok(found) if found.is_empty() => {
                self.whole_file(whole, "found no *.yaml file in this directory".to_owned());
            }
            Ok(found) => {
                for file in found {
                    self.add(&file, None);
                }
                if self.files.root.is_none() && self.files.problems.is_empty() {
                    self.whole_file(whole, "found only empty files in this directory".to_owned());
                }
            }
        }
    }

    fn whole_file(&mut self, at: Position, message: String) {
        self.files.problems.error(at, &problem::Path::Root, message);
    }

    /// Returns the files of an include.
    fn include(&mut self, from: &Path, node: &Node, path: &problem::Path<'_>) {
        let Some(Ok(wanted)) = node.text().map(scalar::path) else { return };
        let wanted = relative_to(from, wanted);
        // The parent of a bare name is empty, which is not a folder.
        let directory = wanted.parent().filter(|parent| !parent.as_os_str().is_empty());
        let (directory, name) = (directory.unwrap_or_else(|| Path::new(".")), wanted.file_name());
        if directory.to_string_lossy().contains('*') {
            let fault = format!("found {node}; '*' is allowed only in the last part of a path");
            return self.files.problems.error(node.position, path, fault);
        }
        let pattern = name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !pattern.contains('*') {
            return self.add(&wanted, Some((node, path)));
        }
        (self.before)(directory);
        self.files.names.listed.push((directory.to_owned(), pattern.clone()));
        match listing(directory, &pattern) {
            Ok(found) if found.is_empty() => {
                self.files.problems.warn(node.position, path, format!("{node} matches no file"));
            }
            Ok(found) => {
                for file in found.iter().filter(|file| !self.is_seen(file)).cloned().collect::<Vec<_>>() {
                    self.add(&file, Some((node, path)));
                }
            }
            // A missing folder is an error: it may be a volume that is not mounted, and its routes would be removed.
            Err(error) => {
                let fault = format!("cannot list the folder {}: {error}", directory.display());
                self.files.problems.error(node.position, path, fault);
                self.files.complete = false;
            }
        }
    }

    fn is_seen(&self, path: &Path) -> bool {
        path.canonicalize().is_ok_and(|path| self.files.names.read.contains(&path))
    }

    /// Reads a file and merges it into the tree.
    fn add(&mut self, path: &Path, named: Option<(&Node, &problem::Path<'_>)>) {
        if let Some((node, at)) = named.filter(|_| self.is_seen(path)) {
            let fault = format!("{} is included twice", path.display());
            return self.files.problems.error(node.position, at, fault);
        }
        let Some((file, text)) = self.text(path, named) else { return };
        let Some(mut root) = self.tree(file, &text) else { return };
        if let Value::Mapping(entries) = &root.value
            && let Some((key, _)) = entries.iter().find(|(key, _)| &*key.text == Root::INCLUDE.name())
        {
            let fault = "found an include in a file that is itself included; list all files under include of the main file";
            let at = problem::Path::Root;
            self.files.problems.error(key.position, &at.key(Root::INCLUDE.name()), fault);
            take(&mut root, Root::INCLUDE.name());
        }
        match (&mut self.files.root, &root.value) {
            (_, Value::Null) => {}
            (None, _) => self.files.root = Some(root),
            (Some(into), _) => merge(into, root, &problem::Path::Root, &mut self.files.problems),
        }
    }

    fn text(&mut self, path: &Path, named: Option<(&Node, &problem::Path<'_>)>) -> Option<(FileId, String)> {
        let file = self.files.problems.add_file(path)?;
        (self.before)(path);
        let text = match self.files.names.read.len() {
            0 => read_text(path, self.main),
            1..FILES_MAX => read_text(path, What::Regular),
            _ => Err((
                0,
                format!(
                    "cannot be read: the config already has {FILES_MAX} files, the largest number allowed"
                ),
            )),
        };
        match text {
            Ok(text) => {
                self.files.names.read.insert(path.canonicalize().unwrap_or_else(|_| path.to_owned()));
                Some((file, text))
            }
            Err((line, message)) => {
                let whole = Position { line, column: line.min(1), ..Position::whole(file) };
                match named.filter(|_| line == 0) {
                    Some((node, at)) => {
                        let fault = format!("{}: {message}", path.display());
                        self.files.problems.error(node.position, at, fault);
                    }
                    None => self.whole_file(whole, message),
                }
                self.files.complete = false;
                None
            }
        }
    }

    fn tree(&mut self, file: FileId, text: &str) -> Option<Node> {
        let (first, services) = (self.services, &mut self.files.services);
        let mut last = first;
        let mut item = |index: usize, node: Node, problems: &mut Problems| {
            services.read(first + index, &node, problems);
            last = first + index + 1;
        };
        let stream = Stream { key: Root::SERVICES.name(), item: &mut item };
        let source = Source { file, text, environment: Some(self.environment) };
        let root = parse(source, Some(stream), &mut self.files.problems);
        self.services = last;
        self.files.complete &= root.is_some();
        root
    }
}

/// Resolves a path written in a file; relative paths start at the file's folder.
pub(super) fn relative_to(file: &Path, path: &Path) -> PathBuf {
    file.parent().unwrap_or_else(|| Path::new("")).join(path)
}

/// Returns the absolute path without `.` and `..`. Links are not followed, so this never waits for a file system.
pub(super) fn absolute(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            part => out.push(part),
        }
    }
    out
}

/// Returns the path that a key gives. A relative path starts at the folder of the file with the key.
pub(super) fn path_of(fields: &Fields<'_>, key: &Key<form::Path>, problems: &Problems) -> Option<PathBuf> {
    let (path, node) = fields.found(key)?;
    Some(relative_to(problems.file(node.position.file), &path))
}

/// Reads the text of a file. An error consists of the line, which is 0 for the whole file, and the message.
fn read_text(path: &Path, what: What) -> Result<String, (u32, String)> {
    let bytes = match what {
        What::Regular => file::read(path, FILE_BYTES_MAX),
        What::Anything => file::read_any(path, FILE_BYTES_MAX),
    };
    let bytes = bytes.map_err(|fault| (0, fault.to_string()))?;
    String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        (u32::try_from(line).unwrap_or(u32::MAX), "found a byte that is not UTF-8".to_owned())
    })
}

/// Returns the files of a directory whose names match, sorted. Folders and special files are left out. A file whose kind cannot be determined, such as a link without a target, is in the list, so
/// that the caller reports why it cannot be read.
fn listing(directory: &Path, pattern: &str) -> io::Result<Vec<PathBuf>> {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if is_match(pattern, &name) && fs::metadata(entry.path()).map_or(true, |data| data.is_file()) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Returns true if a pattern selects a file by its name. A hidden file is selected only by a pattern that begins with a dot.
fn is_match(pattern: &str, name: &str) -> bool {
    (!name.starts_with('.') || pattern.starts_with('.')) && matches(pattern, name)
}

/// Returns true if a name matches a pattern in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((prefix, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(prefix) else {
        return false;
    };
    let parts: Vec<&str> = rest.split('*').collect();
    let Some((suffix, middle)) = parts.split_last() else {
        return true;
    };
    for part in middle {
        let Some(at) = name.find(part) else {
            return false;
        };
        name = &name[at + part.len()..];
    }
    name.ends_with(suffix)
}

fn take(root: &mut Node, wanted: &str) -> Option<Node> {
    let Value::Mapping(entries) = &mut root.value else {
        return None;
    };
    let at = entries.iter().position(|(key, _)| &*key.text == wanted)?;
    Some(entries.remove(at).1)
}

/// Merges two nodes: maps are merged, lists appended; any other value that both have is a problem.
fn merge(into: &mut Node, from: Node, path: &problem::Path<'_>, problems: &mut Problems) {
    let first = into.position;
    match (&mut into.value, from.value) {
        (Value::Mapping(into), Value::Mapping(from)) => {
            let known: HashMap<Box<str>, usize> =
                into.iter().enumerate().map(|(at, (key, _))| (key.text.clone(), at)).collect();
            for (key, node) in from {
                match known.get(&key.text) {
                    Some(at) => merge(&mut into[*at].1, node, &path.key(&key.text), problems),
                    None => into.push((key, node)),
                }
            }
        }
        (Value::Sequence(into), Value::Sequence(from)) => into.extend(from),
        _ => {
            let first = problems.place(first);
            problems.error(from.position, path, format!("set twice; first at {first}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_characters() {
        for (pattern, name, fits) in [
            ("*.yaml", "a.yaml", true),
            ("*.yaml", ".yaml", true),
            ("*.yaml", "a.yaml~", false),
            ("a*b*c", "abc", true),
            ("a*b*c", "a1b2b3c", true),
            ("a*b*c", "acb", false),
            ("ab*ba", "aba", false),
            ("*", "", true),
            ("plain", "plain", true),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
