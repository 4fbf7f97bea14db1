//! An Envoy as a client of the demo, if one is installed: a child process that gets endpoints by xDS only.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::DemoError;
use super::stage::{CATALOG, Folder, Stage, WEB};
use isthmus_console::client;

/// The Envoy of the test environment, relative to the source folder.
const OF_THE_TESTS: &str = "target/interop/venv/bin/envoy";
/// The time within which Envoy must start.
const PATIENCE: Duration = Duration::from_secs(15);
/// The interval at which the demo checks whether Envoy has started.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// The number of bytes of Envoy's log that an error shows.
const LOG_SHOWN: usize = 2000;

/// A running Envoy; killed when dropped.
pub(super) struct Envoy {
    child: Child,
    /// The address at which Envoy accepts calls of the service.
    pub(super) listener: SocketAddr,
}

/// Returns the path of Envoy, if it is installed.
pub(super) fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates: Vec<PathBuf> =
        std::env::split_paths(&path).map(|folder| folder.join("envoy")).collect();
    candidates.extend(std::env::current_dir().ok().map(|folder| folder.join(OF_THE_TESTS)));
    candidates.into_iter().find(|program| program.is_file())
}

impl Envoy {
    /// Starts Envoy on net-east, and waits until it has the endpoints of its service.
    pub(super) async fn start(program: PathBuf, stage: &Stage) -> Result<Self, DemoError> {
        let folder = &stage.folder;
        let control = stage.east.gateway.listener("xds")?;
        let config = include_str!("envoy.yaml")
            .replace("{SOURCE}", &stage.east.client.to_string())
            .replace("{SERVICE}", CATALOG)
            .replace("{CONTROL_IP}", &control.ip().to_string())
            .replace("{CONTROL_PORT}", &control.port().to_string());
        let held = stage.certificates.held_by(WEB)?;
        folder.write("envoy.yaml", &config)?;
        folder.write("client.pem", &held.certificate_pem)?;
        folder.write("client-key.pem", &held.key_pem)?;
        let cannot = |error| DemoError::Io { what: format!("start {}", program.display()), error };
        let log = std::fs::File::create(folder.path("envoy.log")).map_err(cannot)?;
        let child = Command::new(&program)
            .args(["-c", "envoy.yaml", "--admin-address-path", "envoy-admin", "--use-dynamic-base-id"])
            .args(["--concurrency", "1", "--log-level", "error"])
            .current_dir(folder.root())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(cannot)?;
        // If the wait is cancelled, dropping `envoy` kills the process.
        let mut envoy = Self { child, listener: SocketAddr::from(([127, 0, 0, 1], 0)) };
        envoy.listener = envoy.ready(folder).await?;
        Ok(envoy)
    }

    async fn ready(&mut self, folder: &Folder) -> Result<SocketAddr, DemoError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(listener) = listener(folder).await {
                return Ok(listener);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(fault(folder, format!("ended with {status}")));
            }
            if Instant::now() > deadline {
                return Err(fault(folder, "did not become ready".to_owned()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        // Errors are ignored: the process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the address at which Envoy accepts calls, or `None` while it is not ready.
async fn listener(folder: &Folder) -> Option<SocketAddr> {
    let admin = std::fs::read_to_string(folder.path("envoy-admin")).ok()?;
    let ready = client::ask(admin.trim(), "GET", "/ready").await.ok()?;
    let listeners = client::ask(admin.trim(), "GET", "/listeners").await.ok()?.body;
    let address = listeners.lines().find_map(|line| line.strip_prefix("catalog::")?.parse().ok());
    address.filter(|_| ready.status == 200)
}

fn fault(folder: &Folder, what: String) -> DemoError {
    let log = std::fs::read_to_string(folder.path("envoy.log")).unwrap_or_default();
    let from = log.len().saturating_sub(LOG_SHOWN);
    DemoError::Envoy { what, log: log.get(from..).unwrap_or_default().to_owned() }
}
