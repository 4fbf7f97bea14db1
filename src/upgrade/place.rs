//! The path of the upgrade socket, and the paths that are refused: the socket is a door to all connections of the gateway.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

/// The name of the socket in its folder.
const NAME: &str = "upgrade.sock";

/// Returns the path of the socket: in the runtime folder that the service manager has made (`RUNTIME_DIRECTORY`), else in the
/// state folder. Returns the reason if there is neither.
pub fn path(runtime: Option<&OsStr>, state: Option<&Path>) -> Result<PathBuf, String> {
    let first = runtime.and_then(|all| all.as_bytes().split(|byte| *byte == b':').next());
    let runtime = first.filter(|first| !first.is_empty()).map(|first| Path::new(OsStr::from_bytes(first)));
    let folder = runtime.or(state).ok_or(
        "there is no folder for the upgrade socket; set `state.dir` in the config, or RuntimeDirectory= in the systemd unit, and \
         restart the gateway",
    )?;
    Ok(folder.join(NAME))
}

/// Makes the folder of the socket, if it does not exist, and checks it: nobody else may write to it.
pub fn prepare(path: &Path) -> Result<(), String> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|error| {
        format!("cannot make the folder {} of the upgrade socket: {error}", folder.display())
    })?;
    check(path)
}

/// Checks the path of a socket: neither the folder nor an existing file may give other users a way in.
pub fn check(path: &Path) -> Result<(), String> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let user = geteuid().as_raw();
    let shown = path.display();
    let found = fs::metadata(folder)
        .map_err(|error| format!("cannot use the upgrade socket {shown}: its folder: {error}"))?;
    if found.mode() & 0o022 != 0 {
        return Err(format!(
            "cannot use the upgrade socket {shown}: other users may write to its folder; `chmod go-w {}`, or choose another folder",
            folder.display()
        ));
    }
    if found.uid() != user && found.uid() != 0 {
        return Err(format!(
            "cannot use the upgrade socket {shown}: its folder belongs to another user, {}",
            found.uid()
        ));
    }
    match fs::symlink_metadata(path) {
        Ok(file) if file.is_symlink() => {
            Err(format!("cannot use the upgrade socket {shown}: it is a symbolic link"))
        }
        Ok(file) if file.uid() != user => {
            Err(format!("cannot use the upgrade socket {shown}: it belongs to another user, {}", file.uid()))
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("cannot use the upgrade socket {shown}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn the_runtime_folder_comes_before_the_state_folder() {
        let state = Some(Path::new("/var/lib/isthmus"));
        let at = |runtime: Option<&str>, state| path(runtime.map(OsStr::new), state).ok();
        assert_eq!(at(Some("/run/a:/run/b"), state), Some("/run/a/upgrade.sock".into()));
        assert_eq!(at(None, state), Some("/var/lib/isthmus/upgrade.sock".into()));
        assert_eq!(at(Some(""), state), Some("/var/lib/isthmus/upgrade.sock".into()));
        assert_eq!(at(None, None), None);
    }

    #[test]
    fn shared_folders_and_links_are_refused() {
        let temporary = tempfile::tempdir().expect("a folder");
        let path = temporary.path().join("state").join(NAME);
        prepare(&path).expect("a new folder");
        let folder = path.parent().expect("a folder");
        for (mode, fits) in [(0o755, true), (0o775, false), (0o1777, false), (0o702, false), (0o700, true)] {
            fs::set_permissions(folder, Permissions::from_mode(mode)).expect("set");
            assert_eq!(check(&path).is_ok(), fits, "{mode:o}");
        }
        symlink("/nowhere", &path).expect("a link");
        assert!(check(&path).expect_err("a link").contains("symbolic link"));
    }
}
