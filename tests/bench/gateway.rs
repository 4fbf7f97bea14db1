//! A running gateway with one registry, whose log of built snapshots is kept.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::Result;
use super::process::processor_time;

/// A running gateway whose log goes to a file.
pub(crate) struct Gateway {
    pub(crate) child: Child,
    admin: SocketAddr,
    pub(crate) xds: SocketAddr,
    pub(crate) started: Instant,
    folder: TempDir,
}

impl Gateway {
    /// Starts it with a config in the folder, and returns once it listens.
    pub(crate) fn start_with(folder: TempDir, config: &str) -> Result<Self> {
        let path = folder.path().join("isthmus.yaml");
        let common = "admin: {bind: \"127.0.0.1:0\"}\ntelemetry: {accessLog: off, log: {level: debug, format: json}}\n";
        std::fs::write(&path, format!("{config}{common}"))?;
        let started = Instant::now();
        let mut child = Command::new(env!("CARGO_BIN_EXE_isthmus"))
            .args(["run", "-c"])
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stderr.take().ok_or("no stderr")?).lines();
        let mut listening = std::collections::BTreeMap::new();
        while listening.len() < 2 {
            let line = lines.next().ok_or("the gateway ended")??;
            let line: Value = serde_json::from_str(&line)?;
            if let ("listening", Some(listener), Some(address)) = (
                line["message"].as_str().unwrap_or_default(),
                line["listener"].as_str(),
                line["address"].as_str(),
            ) {
                listening.insert(listener.to_owned(), address.parse()?);
            }
        }
        let address = |listener: &str| listening.get(listener).copied().ok_or("it does not listen");
        let (admin, xds) = (address("admin")?, address("xds")?);
        // Read on, so that the gateway is never kept waiting; only what is measured is kept.
        let mut kept = std::fs::File::create(folder.path().join("built"))?;
        std::thread::spawn(move || {
            for line in lines.map_while(std::result::Result::ok).filter(|line| line.contains("world built")) {
                let _ = writeln!(kept, "{line}");
            }
        });
        Ok(Self { child, admin, xds, started, folder })
    }

    /// The registry's status, once it is as asked for.
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

    pub(crate) fn get(&self, path: &str) -> Result<Value> {
        let mut stream = TcpStream::connect(self.admin)?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
        Ok(serde_json::from_str(body)?)
    }

    /// Processor time that it spends while this is done, in seconds.
    pub(crate) fn spent_in(&self, work: impl FnOnce()) -> Result<f64> {
        let before = processor_time(&self.child)?;
        work();
        Ok((processor_time(&self.child)? - before).as_secs_f64())
    }

    /// How long each snapshot took to build, in microseconds.
    pub(crate) fn buildings(&self) -> Result<Vec<f64>> {
        let text = std::fs::read_to_string(self.folder.path().join("built"))?;
        let took = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            microseconds(line["took"].as_str()?)
        };
        Ok(text.lines().filter_map(took).collect())
    }

    /// Ends it as an operator does.
    pub(crate) fn end(&mut self) -> Result<()> {
        Command::new("kill").args(["-s", "TERM", &self.child.id().to_string()]).status()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A duration as the log writes it, such as `87.3µs` or `1.2ms`.
fn microseconds(text: &str) -> Option<f64> {
    let units = [("ns", 1e-3), ("µs", 1.0), ("ms", 1e3), ("s", 1e6)];
    units.iter().find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor))
}
