//! A process of the real binary, running as a gateway, with its config and logs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::{PATIENCE, eventually};

/// The binary under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_isthmus");

/// A running gateway; killed when dropped.
pub struct Gateway {
    child: Child,
    folder: TempDir,
    admin: SocketAddr,
    /// Lines of the program log (stderr, JSON).
    log: Arc<Mutex<Vec<String>>>,
    /// Lines of the access log (stdout, JSON).
    access: Arc<Mutex<Vec<Value>>>,
    /// The threads that read the two logs.
    readers: [JoinHandle<()>; 2],
}

/// The part of the config that all tests share: an ephemeral admin port, JSON logs, two workers.
const COMMON: &str = "admin: {bind: \"127.0.0.1:0\"}\ntelemetry: {log: {format: json}}\nworkers: 2\n";

impl Gateway {
    /// Starts a gateway with this config, whose listeners should bind `127.0.0.1:0`, and waits until the gateway is ready.
    pub fn start(config: &str) -> Self {
        Self::start_in(tempfile::tempdir().expect("a folder"), config, &[])
    }

    /// Starts a gateway in a folder that may hold further files, with these environment variables, and waits until it is ready.
    pub fn start_in(folder: TempDir, config: &str, environment: &[(&str, &str)]) -> Self {
        std::fs::write(folder.path().join("isthmus.yaml"), with_common(config)).expect("a config");
        let mut command = Command::new(BINARY);
        command
            .args(["run", "-c", "isthmus.yaml"])
            .current_dir(folder.path())
            .envs(environment.iter().copied());
        Self::spawn(command, folder)
    }

    /// Runs a command that starts a gateway, by itself or through a wrapper, and waits until the gateway is ready.
    pub fn spawn(command: Command, folder: TempDir) -> Self {
        let gateway = Self::launch(command, folder);
        gateway.ready();
        gateway
    }

    /// Starts a gateway with this config in a folder, without waiting until it is ready.
    pub fn start_unready(folder: TempDir, config: &str) -> Self {
        std::fs::write(folder.path().join("isthmus.yaml"), with_common(config)).expect("a config");
        let mut command = Command::new(BINARY);
        command.args(["run", "-c", "isthmus.yaml"]).current_dir(folder.path());
        Self::launch(command, folder)
    }

    /// Runs a command that starts a gateway, without waiting until it is ready.
    pub fn launch(mut command: Command, folder: TempDir) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("RUST_LOG");
        let mut child = command.spawn().expect("the binary starts");
        let (log, of_log) = collect(child.stderr.take().expect("piped"), |line| Some(line.to_owned()));
        let (access, of_access) =
            collect(child.stdout.take().expect("piped"), |line| serde_json::from_str(line).ok());
        let admin = eventually("the admin address in the log", || {
            if let Ok(Some(status)) = child.try_wait() {
                panic!("the gateway ended with {status}: {:?}", log.lock().expect("not poisoned"));
            }
            listening(&log.lock().expect("not poisoned"), "admin")
        });
        Self { child, folder, admin, log, access, readers: [of_log, of_access] }
    }

    /// Waits until the gateway is ready.
    #[track_caller]
    pub fn ready(&self) {
        eventually("readiness", || (self.get("/readyz").0 == 200).then_some(()));
    }

    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join("isthmus.yaml")
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Returns the processor time that the process has used.
    pub fn processor_time(&self) -> Duration {
        processor_time(self.process())
    }

    /// Returns the memory of its own that the process holds now, in bytes. Pages of the program file do not count.
    pub fn memory(&self) -> usize {
        self.status_of_memory("RssAnon:")
    }

    /// Returns the peak of the memory that the process held, in bytes.
    pub fn peak_memory(&self) -> usize {
        self.status_of_memory("VmHWM:")
    }

    fn status_of_memory(&self, field: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process())).expect("a process");
        let line = status.lines().find(|line| line.starts_with(field)).expect("its memory");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("a number") * 1024
    }

    /// Returns the address of a listener. Waits for the log line with the address, which may arrive after the gateway is ready.
    #[track_caller]
    pub fn listener(&self, name: &str) -> SocketAddr {
        eventually(&format!("listener {name:?}"), || listening(&self.log(), name))
    }

    /// Sends a `GET` to the admin API; returns the status code and body.
    pub fn get(&self, path: &str) -> (u16, String) {
        http(self.admin, "GET", path)
    }

    /// Sends a `GET` to the admin API; returns the body parsed as JSON.
    #[track_caller]
    pub fn json(&self, path: &str) -> Value {
        let (status, body) = self.get(path);
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }

    pub fn post(&self, path: &str) -> (u16, String) {
        http(self.admin, "POST", path)
    }

    /// Replaces the config file (and adds the common part), without ordering a reload.
    pub fn write_config(&self, config: &str) {
        // A rename replaces the file in one step, as an editor does.
        let next = self.folder.path().join(".next");
        std::fs::write(&next, with_common(config)).expect("written");
        std::fs::rename(next, self.config_path()).expect("renamed");
    }

    /// Writes another config and applies it with a reload.
    #[track_caller]
    pub fn reload(&self, config: &str) {
        self.write_config(config);
        let (status, body) = self.post("/api/v1/reload");
        assert_eq!(status, 200, "{body}");
    }

    /// Returns the sum of the samples of a metric whose labels contain all of these texts.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let (_, body) = self.get("/metrics");
        body.lines()
            .filter(|line| !line.starts_with('#'))
            .filter(|line| line.split(['{', ' ']).next() == Some(name))
            .filter(|line| labels.iter().all(|label| line.contains(label)))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Returns the lines of the access log so far.
    pub fn access_log(&self) -> Vec<Value> {
        self.access.lock().expect("not poisoned").clone()
    }

    /// Waits for an access log line that matches, and returns it.
    #[track_caller]
    pub fn logged(&self, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || self.access_log().into_iter().find(|line| matches(line)))
    }

    /// Returns the program log so far.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("not poisoned").clone()
    }

    /// Waits for a line of the program log that contains this text; the gateway may write the line after the event.
    #[track_caller]
    pub fn told(&self, text: &str) {
        eventually(text, || self.log().iter().any(|line| line.contains(text)).then_some(()));
    }

    /// Sends the signal of this name to the gateway.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(status.expect("kill").success());
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("it ends");
    }

    /// Waits until the process has ended and its last lines have been read.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        let status = eventually("the end of the process", || child.try_wait().expect("a child"));
        // A process that has taken over writes on.
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.readers.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        status
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log.lock().map(|log| log.join("\n")).unwrap_or_default();
            eprintln!("--- log of the gateway\n{log}");
            let access = self.access.lock().map(|lines| lines.clone()).unwrap_or_default();
            eprintln!("--- its access log ({} lines, the last 20)", access.len());
            access.iter().rev().take(20).for_each(|line| eprintln!("{line}"));
        }
    }
}

/// Returns the processor time that a process has used.
pub fn processor_time(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("its times");
    let (_, fields) = stat.rsplit_once(") ").expect("a name");
    let ticks: u64 = fields.split(' ').skip(11).take(2).map(|time| time.parse::<u64>().expect("ticks")).sum();
    // A tick of `/proc` is 10 ms on every Linux.
    Duration::from_millis(ticks * 10)
}

/// Returns a config with the common part.
pub fn with_common(config: &str) -> String {
    let has = |key: &str| config.lines().any(|line| line.starts_with(key));
    let common = COMMON.lines().filter(|line| !has(line.split(':').next().unwrap_or(line)));
    common.map(|line| format!("{line}\n")).chain([config.to_owned()]).collect()
}

/// Returns the address of a listener from the last line `listening` about it in a JSON log.
fn listening(log: &[String], name: &str) -> Option<SocketAddr> {
    log.iter().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok()).find_map(|line| {
        let ours = line["message"] == "listening" && line["listener"] == name;
        ours.then(|| line["address"].as_str()?.parse().ok()).flatten()
    })
}

fn collect<T: Send + 'static>(
    from: impl Read + Send + 'static,
    take: impl Fn(&str) -> Option<T> + Send + 'static,
) -> (Arc<Mutex<Vec<T>>>, JoinHandle<()>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if let Some(value) = take(&line) {
                sink.lock().expect("not poisoned").push(value);
            }
        }
    });
    (lines, reader)
}

/// Sends a request over a new connection. The request is HTTP/1.0, so that the body ends with the stream.
pub fn http(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    raw_http(address, &format!("{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Length: 0\r\n\r\n"))
}

/// Sends these bytes as a request over a new connection, and returns the status code and body of the response.
pub fn raw_http(address: SocketAddr, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).expect("the admin API");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut response = Vec::new();
    stream.read_to_end(&mut response).expect("an answer");
    let response = String::from_utf8(response).expect("text");
    let (head, body) = response.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (status, body.to_owned())
}
