//! A gateway that watches a registry; the build times of its snapshots are recorded.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::Result;
use super::gateway::Gateway;
use super::process::processor_time;

/// The file that receives the log lines about built snapshots.
const BUILT: &str = "built";

/// A running gateway with a registry and an xDS server.
pub(crate) struct Watching {
    gateway: Gateway,
    pub(crate) started: Instant,
    folder: TempDir,
}

impl Watching {
    /// Starts a gateway of this build with this config in the folder, and waits until it listens.
    pub(crate) fn start_with(binary: &Path, folder: TempDir, config: &str) -> Result<Self> {
        let common = "admin: {bind: \"127.0.0.1:0\"}\ntelemetry: {accessLog: off, log: {level: debug, format: json}}\n";
        std::fs::write(folder.path().join("isthmus.yaml"), format!("{config}{common}"))?;
        let mut kept = File::create(folder.path().join(BUILT))?;
        let started = Instant::now();
        let gateway = Gateway::start(binary, folder.path(), &["admin", "xds"], move |line| {
            if line.contains("world built") {
                let _ = writeln!(kept, "{line}");
            }
        })?;
        Ok(Self { gateway, started, folder })
    }

    pub(crate) fn child(&self) -> &Child {
        &self.gateway.child
    }

    /// Returns the address of the gateway's xDS server.
    pub(crate) fn xds(&self) -> SocketAddr {
        self.gateway.address("xds")
    }

    /// Waits until the registry's status fulfils a condition, and returns that status.
    pub(crate) fn wait_for(&self, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(300) {
            let status = self.get("/api/v1/registries")?;
            if let Some(registry) = status.get(0).filter(|registry| is_so(registry)) {
                return Ok(registry.clone());
            }
            sleep(Duration::from_millis(20));
        }
        Err(format!("it never came: {}", self.get("/api/v1/registries")?).into())
    }

    fn get(&self, path: &str) -> Result<Value> {
        let answer = self.gateway.request("GET", path)?;
        let (_, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
        Ok(serde_json::from_str(body)?)
    }

    /// Returns the processor time that the gateway spends while `work` runs, in seconds.
    pub(crate) fn spent_in(&self, work: impl FnOnce()) -> Result<f64> {
        let before = processor_time(&self.gateway.child)?;
        work();
        Ok((processor_time(&self.gateway.child)? - before).as_secs_f64())
    }

    /// Returns the build time of each snapshot, in microseconds.
    pub(crate) fn buildings(&self) -> Result<Vec<f64>> {
        let text = std::fs::read_to_string(self.folder.path().join(BUILT))?;
        let took = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            microseconds(line["took"].as_str()?)
        };
        Ok(text.lines().filter_map(took).collect())
    }

    /// Stops the gateway as an operator does.
    pub(crate) fn end(&mut self) -> Result<()> {
        Command::new("kill").args(["-s", "TERM", &self.gateway.child.id().to_string()]).status()?;
        self.gateway.child.wait()?;
        Ok(())
    }
}

/// Parses a duration as the log writes it, such as `87.3µs` or `1.2ms`; returns microseconds.
fn microseconds(text: &str) -> Option<f64> {
    let units = [("ns", 1e-3), ("µs", 1.0), ("ms", 1e3), ("s", 1e6)];
    units.iter().find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor))
}
