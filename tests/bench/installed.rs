//! The programs of others that are installed on this machine.

use std::env;
use std::path::PathBuf;

/// Returns the path of an installed program. Daemons may be in a folder that is only on root's `PATH`.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Returns the path of Envoy: what `ISTHMUS_ENVOY` names, what `tests/run` has installed, or what is on the `PATH`.
pub(crate) fn find_envoy() -> Option<PathBuf> {
    let named = env::var_os("ISTHMUS_ENVOY").map(PathBuf::from);
    let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let of_tests =
        std::path::absolute(target.join("interop/venv/bin/envoy")).ok().filter(|file| file.is_file());
    named.or(of_tests).or_else(|| find("envoy"))
}
