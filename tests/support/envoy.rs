//! A real Envoy, on ports that the kernel chooses.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::eventually;
use super::gateway::raw_http;

/// A running Envoy; killed when dropped.
pub struct Envoy {
    child: Child,
    folder: TempDir,
    admin: SocketAddr,
}

/// Returns the path of Envoy: `ISTHMUS_ENVOY`, or the one that `tests/run` has installed.
pub fn installed() -> Option<OsString> {
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop/venv/bin/envoy");
    std::env::var_os("ISTHMUS_ENVOY").or_else(|| usual.exists().then(|| usual.into_os_string()))
}

impl Envoy {
    /// Starts Envoy with this config in a folder that may hold further files, and waits until Envoy is ready.
    #[track_caller]
    pub fn start(binary: &OsString, folder: TempDir, config: &str) -> Self {
        std::fs::write(folder.path().join("envoy.yaml"), config).expect("a config");
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let mut child = Command::new(binary)
            .args(["-c", "envoy.yaml", "--admin-address-path", "admin", "--use-dynamic-base-id"])
            .args(["--concurrency", "1", "--log-level", "error", "--file-flush-interval-msec", "50"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("Envoy starts");
        let admin = eventually("Envoy's admin address", || {
            if let Ok(Some(status)) = child.try_wait() {
                let log = std::fs::read_to_string(folder.path().join("log"));
                panic!("Envoy ended with {status}: {}", log.unwrap_or_default());
            }
            std::fs::read_to_string(folder.path().join("admin")).ok()?.trim().parse().ok()
        });
        let envoy = Self { child, folder, admin };
        eventually("Envoy's readiness", || (get(admin, "/ready").0 == 200).then_some(()));
        envoy
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Returns the address of a listener.
    #[track_caller]
    pub fn listener(&self, name: &str) -> SocketAddr {
        let (_, list) = get(self.admin, "/listeners");
        let address = list.lines().find_map(|line| line.strip_prefix(&format!("{name}::"))?.parse().ok());
        address.unwrap_or_else(|| panic!("no listener {name:?} in {list}"))
    }

    /// Returns the weights of a cluster's hosts, as Envoy's admin API shows them.
    pub fn weights(&self, cluster: &str) -> BTreeMap<SocketAddr, u32> {
        let (_, clusters) = get(self.admin, "/clusters");
        let host = |line: &str| {
            let (address, rest) = line.strip_prefix(cluster)?.strip_prefix("::")?.split_once("::")?;
            Some((address.parse().ok()?, rest.strip_prefix("weight::")?.parse().ok()?))
        };
        clusters.lines().filter_map(host).collect()
    }

    /// Returns the connect timeouts of the clusters that Envoy has got over xDS, each once.
    pub fn connect_timeouts(&self) -> BTreeSet<String> {
        let (_, dump) = get(self.admin, "/config_dump?resource=dynamic_active_clusters");
        let value = |line: &str| {
            Some(line.trim().strip_prefix("\"connect_timeout\": \"")?.split('"').next()?.to_owned())
        };
        dump.lines().filter_map(value).collect()
    }

    /// Returns the value of a counter or gauge.
    #[track_caller]
    pub fn stat(&self, name: &str) -> u64 {
        // The filter is a regular expression, in which the `|` of a cluster name would mean an alternative.
        let (_, stats) = get(self.admin, &format!("/stats?filter=^{}$", name.replace('|', ".")));
        let value = stats.lines().find_map(|line| line.strip_prefix(&format!("{name}: "))?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name} in {stats:?}"))
    }
}

/// Sends a `GET` to the admin API over HTTP/1.1, because the API refuses HTTP/1.0. The returned body may contain the chunk
/// headers of HTTP/1.1, but no line of text is split.
fn get(admin: SocketAddr, path: &str) -> (u16, String) {
    raw_http(admin, &format!("GET {path} HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n"))
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            eprintln!("--- Envoy's log\n{log}");
        }
    }
}
