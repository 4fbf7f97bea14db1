//! Files in the state folder that are replaced as a whole: the new content is written to a second file, which is then
//! renamed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The additional suffix of a file while it is being written.
pub const NEW: &str = ".new";

/// Replaces a file. The content is written to a second file, which is then renamed, so the file is always complete. Creates
/// the folder of the file if it does not exist.
pub fn write_whole(place: &Path, write: impl FnOnce(File) -> io::Result<File>) -> io::Result<()> {
    let folder = place.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let new = with_suffix(place, NEW);
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    remove(&new)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    write(file)?.sync_all()?;
    fs::rename(&new, place)?;
    File::open(folder)?.sync_all()
}

/// Removes a file or a folder, if it exists.
pub fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Renames a damaged file so that the operator can look at it. Returns a clause about the file that says where it is then.
pub fn set_aside(path: &Path) -> String {
    let aside = with_suffix(path, ".damaged");
    match fs::rename(path, &aside) {
        Ok(()) => format!("was renamed to {}", aside.display()),
        Err(error) => format!("cannot be renamed to {} ({error})", aside.display()),
    }
}

/// Returns a path with an additional suffix.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clause_about_a_damaged_file_says_whether_it_was_renamed() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, aside) = (folder.path().join("list"), folder.path().join("list.damaged"));
        fs::write(&file, "text").expect("written");
        assert_eq!(set_aside(&file), format!("was renamed to {}", aside.display()));
        let failed = set_aside(&file);
        assert!(failed.starts_with(&format!("cannot be renamed to {} (", aside.display())), "{failed}");
    }
}
