//! A gateway of the demo: a child process of this binary, its logs, and its admin API.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::DemoError;
use isthmus_api::requests;
use isthmus_console::client::{self, ApiResponse, ClientError};

/// The time within which the gateway must start, change or end.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// The listeners of the demo's gateways beside the admin API.
const LISTENERS: [&str; 3] = ["mesh", "plain", "xds"];
/// The interval of the checks while the demo waits for a state of the gateway.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// The number of lines that are kept of each log.
const LINES_MAX: usize = 4096;
/// The number of lines of the program log that an error shows.
const LINES_SHOWN: usize = 10;

/// A running gateway; killed when dropped.
pub(super) struct Gateway {
    pub(super) name: &'static str,
    /// The URL of its admin API.
    pub(super) admin: String,
    config: PathBuf,
    child: Child,
    output: Arc<Mutex<Output>>,
}

/// The output of a gateway.
#[derive(Default)]
struct Output {
    log: Vec<String>,
    listening: BTreeMap<String, SocketAddr>,
    access: Vec<Value>,
}

impl Gateway {
    /// Starts a gateway of one of the two networks.
    pub(super) async fn start(name: &'static str, config: PathBuf, text: &str) -> Result<Self, DemoError> {
        Self::start_with(name, config, text, &LISTENERS).await
    }

    /// Writes the config, starts the gateway, and waits until it is ready and has logged the addresses of these listeners.
    pub(super) async fn start_with(
        name: &'static str,
        config: PathBuf,
        text: &str,
        listeners: &[&str],
    ) -> Result<Self, DemoError> {
        write(&config, text)?;
        let cannot = |error| DemoError::Io { what: format!("start {name}"), error };
        let program = std::env::current_exe().map_err(cannot)?;
        let mut command = Command::new(program);
        command.arg("run").arg("-c").arg(&config).stdin(Stdio::null()).env_remove("RUST_LOG");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(cannot)?;
        let output = Arc::new(Mutex::new(Output::default()));
        read_lines(child.stdout.take(), &output, Output::access);
        read_lines(child.stderr.take(), &output, Output::log);
        let mut gateway = Self { name, admin: String::new(), config, child, output };
        let admin = gateway.until("did not log the addresses of its listeners", async |gateway| {
            Ok(gateway.listener_if_open("admin"))
        });
        gateway.admin = format!("http://{}", admin.await?);
        let ready = async |gateway: &Self| {
            let answer = client::ask(&gateway.admin, "GET", "/readyz").await;
            Ok(answer.is_ok_and(|answer| answer.status == 200).then_some(()))
        };
        gateway.until("did not become ready", ready).await?;
        // The log lines about listeners may arrive after the gateway is ready, so the demo waits for them too.
        let open = async |gateway: &Self| {
            Ok(listeners.iter().all(|name| gateway.listener_if_open(name).is_some()).then_some(()))
        };
        gateway.until("did not list the addresses of its listeners", open).await?;
        Ok(gateway)
    }

    /// Returns the address of a listener.
    pub(super) fn listener(&self, name: &str) -> Result<SocketAddr, DemoError> {
        self.listener_if_open(name).ok_or_else(|| self.fault(format!("has no listener {name}")))
    }

    fn listener_if_open(&self, name: &str) -> Option<SocketAddr> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).listening.get(name).copied()
    }

    /// Sends a `GET` to the admin API and parses the JSON.
    pub(super) async fn json(&self, path: &str) -> Result<Value, DemoError> {
        Ok(client::ask(&self.admin, "GET", path).await?.json()?)
    }

    /// Returns the answer of `explain`.
    pub(super) async fn explain(&self, parameters: &[(&str, &str)]) -> Result<Value, DemoError> {
        self.json(&requests::EXPLAIN.with(parameters)).await
    }

    /// Returns the sum of a metric's samples whose labels contain all of these texts.
    pub(super) async fn metric(&self, name: &str, labels: &[&str]) -> Result<f64, DemoError> {
        let body = client::ask(&self.admin, "GET", requests::METRICS.path).await?.body;
        let samples = body.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
        let ours = samples.filter(|line| labels.iter().all(|label| line.contains(label)));
        Ok(ours.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// Returns the number of connections to a service (or route) that ended with the reason `ok`.
    pub(super) async fn ended_well(&self, service: &str) -> Result<f64, DemoError> {
        let labels = [format!("service=\"{service}\""), "reason=\"ok\"".to_owned()];
        self.metric("isthmus_connections_total", &[&labels[0], &labels[1]]).await
    }

    /// Replaces the config file and reloads it.
    pub(super) async fn reload(&self, text: &str) -> Result<ApiResponse, ClientError> {
        let failed = |error: DemoError| ClientError::Refused(error.to_string());
        let next = self.config.with_extension("next");
        write(&next, text).map_err(failed)?;
        // The rename replaces the file atomically, so that no reader sees a part of it.
        std::fs::rename(&next, &self.config)
            .map_err(|error| failed(DemoError::Io { what: format!("rename {}", next.display()), error }))?;
        client::ask(&self.admin, "POST", requests::RELOAD.path).await
    }

    /// Returns the matching lines of the access log.
    pub(super) fn access(&self, matches: impl Fn(&Value) -> bool) -> Vec<Value> {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        output.access.iter().filter(|line| matches(line)).cloned().collect()
    }

    /// Sends SIGTERM, so that the gateway drains.
    pub(super) fn terminate(&self) -> Result<(), DemoError> {
        let cannot = |error: rustix::io::Errno| DemoError::Io {
            what: format!("send {} SIGTERM", self.name),
            error: error.into(),
        };
        kill_process(Pid::from_child(&self.child), Signal::TERM).map_err(cannot)
    }

    /// Kills the gateway, to simulate a crash.
    pub(super) fn kill(&mut self) {
        // Errors are ignored: the process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits until the gateway's process has ended.
    pub(super) async fn ended(&mut self) -> Result<ExitStatus, DemoError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(self.fault("did not exit".to_owned()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until `ready` returns a value.
    pub(super) async fn until<T>(
        &mut self,
        otherwise: &str,
        ready: impl AsyncFn(&Self) -> Result<Option<T>, DemoError>,
    ) -> Result<T, DemoError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(value) = ready(self).await? {
                return Ok(value);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(self.fault(format!("ended with {status}")));
            }
            if Instant::now() > deadline {
                return Err(self.fault(otherwise.to_owned()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Returns the error for a gateway that does not behave as expected, with the last lines of its log.
    pub(super) fn fault(&self, what: String) -> DemoError {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        let from = output.log.len().saturating_sub(LINES_SHOWN);
        DemoError::Gateway { gateway: self.name, what, log: output.log[from..].join("\n") }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Output {
    fn log(&mut self, line: String) {
        let fields: Value = serde_json::from_str(&line).unwrap_or_default();
        if fields["message"] == "listening"
            && let (Some(name), Some(address)) = (fields["listener"].as_str(), fields["address"].as_str())
            && let Ok(address) = address.parse()
        {
            self.listening.insert(name.to_owned(), address);
        }
        if self.log.len() < LINES_MAX {
            self.log.push(line);
        }
    }

    fn access(&mut self, line: String) {
        if self.access.len() < LINES_MAX
            && let Ok(fields) = serde_json::from_str(&line)
        {
            self.access.push(fields);
        }
    }
}

/// Reads lines in its own thread until the process closes the stream.
fn read_lines(
    from: Option<impl Read + Send + 'static>,
    output: &Arc<Mutex<Output>>,
    take: impl Fn(&mut Output, String) + Send + 'static,
) {
    let Some(from) = from else {
        return;
    };
    let output = output.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            take(&mut output.lock().unwrap_or_else(PoisonError::into_inner), line);
        }
    });
}

fn write(path: &Path, text: &str) -> Result<(), DemoError> {
    std::fs::write(path, text)
        .map_err(|error| DemoError::Io { what: format!("write {}", path.display()), error })
}
