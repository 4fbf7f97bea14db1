//! A running gateway: the real binary, and the addresses on which it listens, from its log.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::Result;

/// The gateway of this build.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_isthmus");

/// A running gateway; killed when dropped.
pub(crate) struct Gateway {
    pub(crate) child: Child,
    listening: BTreeMap<String, SocketAddr>,
}

impl Gateway {
    /// Starts a gateway of a build with the folder's config `isthmus.yaml`, whose log must be JSON, and waits until all these listeners
    /// listen. Each further line of the log is passed to `hand_on`, so that the gateway never blocks on a full pipe.
    pub(crate) fn start(
        binary: &Path,
        folder: &Path,
        listeners: &[&str],
        mut hand_on: impl FnMut(String) + Send + 'static,
    ) -> Result<Self> {
        let mut child = Command::new(binary)
            .args(["run", "-c", "isthmus.yaml"])
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stderr.take().ok_or("no stderr")?).lines();
        let mut listening = BTreeMap::new();
        while !listeners.iter().all(|name| listening.contains_key(*name)) {
            let line: Value = serde_json::from_str(&lines.next().ok_or("it has ended")??)?;
            if let ("listening", Some(listener), Some(address)) = (
                line["message"].as_str().unwrap_or_default(),
                line["listener"].as_str(),
                line["address"].as_str(),
            ) {
                listening.insert(listener.to_owned(), address.parse()?);
            }
        }
        std::thread::spawn(move || lines.map_while(std::result::Result::ok).for_each(&mut hand_on));
        Ok(Self { child, listening })
    }

    /// Returns the address of one of the listeners with which the gateway was started.
    pub(crate) fn address(&self, listener: &str) -> SocketAddr {
        self.listening[listener]
    }

    /// Sends a request without a body to the admin API, and returns the whole response.
    pub(crate) fn request(&self, method: &str, path: &str) -> Result<String> {
        let mut stream = TcpStream::connect(self.address("admin"))?;
        write!(stream, "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
