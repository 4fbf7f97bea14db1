//! Files of the state folder that are written whole: beside the file that they replace, which a rename then does.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The further suffix of a file while it is written.
pub const NEW: &str = ".new";

/// Writes a file beside the one that it replaces by a rename, so that the file is always complete. Creates its folder.
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

/// Moves a damaged file aside, for the operator to look at. Returns a text for the path that it has then.
pub fn set_aside(path: &Path) -> String {
    let aside = with_suffix(path, ".damaged");
    match fs::rename(path, &aside) {
        Ok(()) => aside.display().to_string(),
        Err(error) => format!("{}, because it cannot be renamed ({error})", path.display()),
    }
}

/// Returns a path with a further suffix of its file name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
