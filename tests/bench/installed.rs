//! The programs of others that are installed on this machine.

use std::env;
use std::path::PathBuf;

/// Returns the path of an installed program. Daemons may be in a folder that is only on root's `PATH`.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// The arguments with which HAProxy uses the config `haproxy.cfg` of its folder, in the foreground.
pub(crate) const HAPROXY_ARGUMENTS: [&str; 3] = ["-db", "-f", "haproxy.cfg"];

/// The arguments with which Envoy uses the config `envoy.yaml` of its folder, with one worker and no log.
pub(crate) const ENVOY_ARGUMENTS: [&str; 7] =
    ["-c", "envoy.yaml", "--concurrency", "1", "--disable-hot-restart", "-l", "off"];
