//! Reads files that operators name: regular files only (links are followed), up to a size limit.

use std::fs::{File, FileType, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The reason why a file could not be read; the text follows the path of the file.
#[derive(Debug, thiserror::Error)]
pub enum FileFault {
    /// The operating system's error.
    #[error("cannot be read: {0}")]
    System(#[from] io::Error),
    /// The path is not a regular file; the text names its kind.
    #[error("cannot be read: it is {0}, not a regular file")]
    Special(&'static str),
    /// The file is larger than this many bytes.
    #[error("cannot be read: it is larger than {} MiB", .0 >> 20)]
    TooLarge(u64),
}

/// Reads a regular file of at most `bytes_max` bytes. Blocks as long as the file system does.
pub fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, FileFault> {
    // Checked before opening: opening a pipe would wait for a writer.
    must_be_regular(&std::fs::metadata(path)?)?;
    let file = File::open(path)?;
    // The file may have been replaced between the check and the opening.
    must_be_regular(&file.metadata()?)?;
    read_all(file, bytes_max)
}

/// Reads a file of any kind, including a pipe or a terminal, for paths that an operator gives on the command line.
pub fn read_any(path: &Path, bytes_max: u64) -> Result<Vec<u8>, FileFault> {
    read_all(File::open(path)?, bytes_max)
}

fn read_all(file: File, bytes_max: u64) -> Result<Vec<u8>, FileFault> {
    let mut bytes = Vec::with_capacity(expected(&file, bytes_max));
    // The limit applies to the bytes read, not to the reported size: a device has no size, and a file may
    // grow.
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max { Err(FileFault::TooLarge(bytes_max)) } else { Ok(bytes) }
}

fn expected(file: &File, bytes_max: u64) -> usize {
    let size = file.metadata().map_or(0, |metadata| metadata.len());
    usize::try_from(size.min(bytes_max)).unwrap_or(0)
}

fn must_be_regular(metadata: &Metadata) -> Result<(), FileFault> {
    if metadata.is_file() { Ok(()) } else { Err(FileFault::Special(kind(metadata.file_type()))) }
}

fn kind(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        kind if kind.is_socket() => "a socket",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read_and_no_more_of_them_than_the_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), "12345").expect("written");
        std::os::unix::fs::symlink("file", at("link")).expect("linked");
        std::os::unix::fs::symlink("/dev/zero", at("endless")).expect("linked");
        let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo");
        assert!(made.success());
        let read = |name: &str, max| read(&at(name), max).map_err(|fault| fault.to_string());
        assert_eq!((read("file", 5), read("link", 5)), (Ok(b"12345".to_vec()), Ok(b"12345".to_vec())));
        assert!(read("file", 4).is_err_and(|text| text.contains("is larger than")));
        assert!(read("absent", 4).is_err_and(|text| text.contains("No such file")));
        for (name, what) in [("endless", "a device"), ("pipe", "a pipe"), (".", "a folder")] {
            assert!(read(name, 4).is_err_and(|text| text.contains(what)), "{name}");
        }
        // A device without a size.
        let endless = read_any(Path::new("/dev/zero"), 1 << 20);
        assert!(matches!(endless, Err(FileFault::TooLarge(_))));
    }
}
