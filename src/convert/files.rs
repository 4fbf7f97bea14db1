//! The files that a config names: where they are, and how much of them is read.

use std::cell::{Cell, RefCell};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::Program;

/// The largest config, and the largest size of all files that it names, in bytes.
const BYTES_MAX: u64 = 16 << 20;
/// The size that a smaller file counts as, because each one has a cost of its own.
const FILE_BYTES_MIN: u64 = 4 << 10;
/// The largest number of files that a name with `*` stands for.
const MATCHES_MAX: usize = 1_000;

/// The files that one config names.
pub(super) struct Files<'f> {
    /// The folder of the config.
    folder: &'f Path,
    program: Program,
    /// The bytes that may still be read.
    left: Cell<u64>,
    /// The names of files that were read at other places, with these places.
    replaced: RefCell<Vec<(String, PathBuf)>>,
}

/// A place of a file, and whether the program would look there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Named,
    Beside,
}

impl<'f> Files<'f> {
    pub(super) fn new(config: &'f Path, program: Program) -> Self {
        let folder = config.parent().unwrap_or_else(|| Path::new(""));
        Self { folder, program, left: Cell::new(BYTES_MAX), replaced: RefCell::default() }
    }

    /// Returns the names of files that were read at other places, with these places.
    pub(super) fn replaced(self) -> Vec<(String, PathBuf)> {
        self.replaced.into_inner()
    }

    /// Returns true if files were left unread because all together are too large.
    pub(super) fn are_too_large(&self) -> bool {
        self.left.get() == 0
    }

    /// Returns the content of a file: where its name says, or beside the config. Of a pattern of nginx, all files are read.
    pub(super) fn read(&self, named: &str) -> Option<String> {
        let is_pattern = self.program == Program::Nginx && named.contains(['*', '?', '[']);
        for (place, path) in self.places(Path::new(named), is_pattern) {
            let text = match is_pattern {
                true => self.matching(&path),
                false => self.one(&path),
            };
            let Some(text) = text else { continue };
            let mut replaced = self.replaced.borrow_mut();
            if place == Place::Beside && replaced.iter().all(|(known, _)| known != named) {
                replaced.push((named.to_owned(), path));
            }
            return Some(text);
        }
        None
    }

    /// Returns the places of a file.
    fn places(&self, named: &Path, is_pattern: bool) -> Vec<(Place, PathBuf)> {
        let mut places = Vec::new();
        // A name is relative to the folder of nginx's config, and to the working directory of HAProxy, which may be that folder.
        if named.is_absolute() || self.program != Program::Nginx {
            places.push((Place::Named, named.to_owned()));
        }
        if named.is_relative() {
            places.push((Place::Named, self.folder.join(named)));
        }
        let name = named.file_name().unwrap_or_default();
        // The last folder too, as in `maps/hosts.map` of a copy of /etc/haproxy.
        let last = named.parent().and_then(Path::file_name).unwrap_or_default();
        if !last.is_empty() {
            places.push((Place::Beside, self.folder.join(last).join(name)));
        }
        // All files beside the config that match a pattern are not those of another folder.
        if !is_pattern {
            places.push((Place::Beside, self.folder.join(name)));
        }
        places
    }

    /// Reads all files that match a path with one `*` in its last part, in the order of their names; `None` for another pattern.
    fn matching(&self, pattern: &Path) -> Option<String> {
        let (folder, name) = (pattern.parent()?, pattern.file_name()?.to_str()?);
        let (before, after) = name.split_once('*')?;
        let is_other = |text: &str| text.contains(['*', '?', '[', '\\']);
        if is_other(before) || is_other(after) || is_other(&folder.to_string_lossy()) {
            return None;
        }
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(folder).ok()? {
            if paths.len() == MATCHES_MAX {
                return None;
            }
            let path = entry.ok()?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_match = name.strip_prefix(before).is_some_and(|rest| rest.ends_with(after));
            // As in a shell, `*` matches no hidden file.
            if is_match && !(name.starts_with('.') && before.is_empty()) && path.is_file() {
                paths.push(path);
            }
        }
        paths.sort();
        let texts = paths.iter().map(|path| self.one(path)).collect::<Option<Vec<String>>>()?;
        Some(texts.join("\n"))
    }

    fn one(&self, path: &Path) -> Option<String> {
        let file = std::fs::File::open(path).ok()?;
        let left = self.left.get();
        let text = text_of(file, left).ok();
        let size = text.as_ref().map_or(left, |text| FILE_BYTES_MIN.max(text.len() as u64));
        // A folder opens, but cannot be read.
        if text.is_some() || path.is_file() {
            self.left.set(left.saturating_sub(size));
        }
        text
    }
}

/// Reads a config; `-` is the standard input.
pub(super) fn config(path: &Path) -> std::io::Result<String> {
    match path == Path::new("-") {
        true => text_of(std::io::stdin().lock(), BYTES_MAX),
        false => text_of(std::fs::File::open(path)?, BYTES_MAX),
    }
}

fn text_of(source: impl std::io::Read, bytes_max: u64) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    let length = source.take(bytes_max + 1).read_to_end(&mut bytes)?;
    match u64::try_from(length).is_ok_and(|length| length <= bytes_max) {
        // HAProxy accepts any bytes, such as Latin-1 in a comment. `words` reports lines where they matter.
        true => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        false => Err(std::io::Error::other(format!("it is larger than {} MiB", BYTES_MAX >> 20))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a folder of one test with files, and returns its path.
    fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("isthmus-convert-{name}-{}", std::process::id()));
        _ = std::fs::remove_dir_all(&folder);
        for (path, text) in files {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a new folder");
            std::fs::write(path, text).expect("a new file");
        }
        folder
    }

    #[test]
    fn patterns_of_nginx_are_those_that_are_understood_in_their_own_folder() {
        let all =
            [("acl/10-deny.conf", "a"), ("acl/20-deny.conf", "b"), ("acl/.x.conf", "c"), ("x.conf", "d")];
        let folder = folder("patterns", &all);
        let config = folder.join("nginx.conf");
        let read = |named: &str| Files::new(&config, Program::Nginx).read(named);
        assert_eq!(read("acl/*.conf").as_deref(), Some("a\nb"));
        assert_eq!(read("/nowhere/acl/*.conf").as_deref(), Some("a\nb"));
        assert_eq!(read("acl/*.none").as_deref(), Some(""));
        for named in [
            "acl/[0-9]*.conf",
            "acl/*-deny*.conf",
            "acl/1?-deny.conf",
            "a*/10-deny.conf",
            "/nowhere/x/*.conf",
        ] {
            assert_eq!(read(named), None, "{named}");
        }
        std::fs::remove_dir_all(folder).expect("the folder");
    }

    #[test]
    fn a_file_is_read_where_the_program_looks_for_it_or_the_place_is_said() {
        let folder = folder("places", &[("maps/hosts.map", "a"), ("names.lst", "b"), ("Cargo.toml", "c")]);
        let config = folder.join("a.cfg");
        for (program, named, wanted, place) in [
            (Program::HaProxy, "maps/hosts.map", Some("a"), None),
            (Program::HaProxy, "/etc/haproxy/maps/hosts.map", Some("a"), Some("maps/hosts.map")),
            (Program::HaProxy, "/etc/lists/names.lst", Some("b"), Some("names.lst")),
            // The working directory of these tests has a file of this name too.
            (Program::Nginx, "Cargo.toml", Some("c"), None),
            (Program::HaProxy, "-", None, None),
        ] {
            let files = Files::new(&config, program);
            assert_eq!(files.read(named).as_deref(), wanted, "{named}");
            let places: Vec<PathBuf> = files.replaced().into_iter().map(|(_, path)| path).collect();
            assert_eq!(places, place.map(|place| folder.join(place)).into_iter().collect::<Vec<_>>());
        }
        std::fs::remove_dir_all(folder).expect("the folder");
    }

    #[test]
    fn all_files_together_have_a_largest_size() {
        let folder = folder("sizes", &[("small", "a")]);
        let config = folder.join("nginx.conf");
        let files = Files::new(&config, Program::Nginx);
        let count = (0..BYTES_MAX).take_while(|_| files.read("small").is_some()).count();
        assert_eq!((count as u64, files.are_too_large()), (BYTES_MAX / FILE_BYTES_MIN, true));
        std::fs::remove_dir_all(folder).expect("the folder");
    }
}
