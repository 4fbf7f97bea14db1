//! The admin API on a unix socket: who may connect, how a restart and a stop treat the socket's file, and the commands.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::support::eventually;
use crate::support::gateway::BINARY;

const CONFIG: &str = "listen: \"127.0.0.1:0\"\nroutes: {a.test: 127.0.0.9:1}\nadmin: {bind: \"unix:admin.sock\"}\n\
                      drain: {timeout: 20s}\ntelemetry: {accessLog: off}\n";

/// A gateway whose admin listener is `admin.sock` in its folder.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) socket: PathBuf,
}

impl Process {
    fn spawn(folder: &Path) -> Self {
        std::fs::write(folder.join("isthmus.yaml"), CONFIG).expect("written");
        let mut command = Command::new(BINARY);
        command.args(["run", "-c", "isthmus.yaml"]).current_dir(folder);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        Self { child, socket: folder.join("admin.sock") }
    }

    pub(crate) fn start(folder: &Path) -> Self {
        let process = Self::spawn(folder);
        eventually("readiness", || (process.try_get("/readyz")?.0 == 200).then_some(()));
        process
    }

    /// Sends a request with a `Host` that a TCP listener would refuse.
    fn try_get(&self, path: &str) -> Option<(u16, String)> {
        ask(&self.socket, &format!("GET {path} HTTP/1.0\r\nHost: gateway.example\r\n\r\n"))
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        eventually("the end", || self.child.try_wait().expect("a child"))
    }

    fn log(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
        text
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(socket: &Path, request: &str) -> Option<(u16, String)> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

pub(crate) fn isthmus(arguments: &[&str], admin: Option<&str>) -> Output {
    let mut command = Command::new(BINARY);
    command.args(arguments).env_remove("ISTHMUS_ADMIN");
    command.envs(admin.map(|admin| ("ISTHMUS_ADMIN", admin)));
    command.output().expect("the binary runs")
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

#[test]
fn the_socket_is_private_and_every_command_reads_over_it() {
    let folder = folder();
    let process = Process::start(folder.path());
    let mode = std::fs::metadata(&process.socket).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let url = format!("unix:{}", process.socket.display());
    for arguments in [
        &["status"][..],
        &["exposed"],
        &["failures"],
        &["explain", "a.test"],
        &["horizon", "--network", "", "-o", "json"],
        &["get", "listeners"],
        &["get", "config"],
        &["healthcheck"],
        &["log-level", "info"],
        &["reload"],
    ] {
        for by_variable in [true, false] {
            let option = ["--admin", &url];
            let given = if by_variable { arguments.to_vec() } else { [arguments, &option].concat() };
            let output = isthmus(&given, by_variable.then_some(url.as_str()));
            assert!(output.status.success(), "{given:?}: {output:?}");
            assert!(!output.stdout.is_empty(), "{given:?}");
        }
    }
    // The option `--admin` takes precedence over the environment variable.
    let output = isthmus(&["status", "--admin", &url], Some("unix:/nowhere"));
    assert!(output.status.success(), "{output:?}");
    // The socket refuses requests that a web page could send, unknown paths and wrong methods, as a TCP listener does.
    let refused = |request: &str| ask(&process.socket, request).map(|(status, _)| status);
    assert_eq!(refused("POST /drain HTTP/1.0\r\nHost: a\r\nOrigin: http://a\r\n\r\n"), Some(403));
    assert_eq!(refused("GET /api/v1/nothing HTTP/1.0\r\nHost: a\r\n\r\n"), Some(404));
    assert_eq!(refused("GET /api/v1/reload HTTP/1.0\r\nHost: a\r\n\r\n"), Some(405));
    // Silent clients do not keep a client that sends a request from being served.
    let silent: Vec<UnixStream> =
        (0..200).map(|_| UnixStream::connect(&process.socket).expect("connected")).collect();
    assert_eq!(process.try_get("/livez").map(|(status, _)| status), Some(200));
    drop(silent);
}

#[test]
fn a_dead_sockets_file_is_replaced_a_live_one_is_an_error_and_a_stop_removes_it() {
    let folder = folder();
    let mut first = Process::start(folder.path());
    let mut second = Process::spawn(folder.path());
    assert_eq!(second.ended().code(), Some(1));
    let log = second.log();
    assert!(log.contains("cannot listen on unix:admin.sock (admin): a running process listens"), "{log}");
    assert!(first.try_get("/readyz").is_some(), "the first is not disturbed");
    first.child.kill().expect("killed");
    first.ended();
    assert!(first.socket.exists(), "a killed process leaves its file");
    let mut third = Process::start(folder.path());
    third.signal("TERM");
    assert_eq!(third.ended().code(), Some(0));
    assert!(!third.socket.exists());
    let output = isthmus(&["status", "--admin", &format!("unix:{}", third.socket.display())], None);
    assert_eq!(output.status.code(), Some(3));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("cannot reach the admin API at unix:"), "{told}");
}

#[test]
fn a_successor_takes_the_socket_over_when_the_draining_gateway_has_ended() {
    let folder = folder();
    let mut first = Process::start(folder.path());
    // This connection keeps the first gateway from ending its drain.
    let listeners = first.try_get("/api/v1/listeners").expect("an answer").1;
    let listeners: serde_json::Value = serde_json::from_str(&listeners).expect("JSON");
    let address = listeners[0]["address"].as_str().expect("an address");
    let held = std::net::TcpStream::connect(address).expect("connected");
    (&held).write_all(&[22, 3, 1]).expect("the beginning of a hello");
    first.signal("TERM");
    eventually("the drain", || {
        let (_, text) = first.try_get("/readyz")?;
        text.contains("serving: draining").then_some(())
    });
    let second = Process::spawn(folder.path());
    held.shutdown(Shutdown::Both).expect("ended");
    assert_eq!(first.ended().code(), Some(0));
    eventually("the successor", || (second.try_get("/readyz")?.0 == 200).then_some(()));
}

#[test]
fn a_second_signal_leaves_no_socket_behind() {
    let folder = folder();
    let mut process = Process::start(folder.path());
    let listeners = process.try_get("/api/v1/listeners").expect("an answer").1;
    let listeners: serde_json::Value = serde_json::from_str(&listeners).expect("JSON");
    let address = listeners[0]["address"].as_str().expect("an address");
    let held = std::net::TcpStream::connect(address).expect("connected");
    (&held).write_all(&[22, 3, 1]).expect("the beginning of a hello");
    process.signal("TERM");
    eventually("the drain", || process.try_get("/readyz")?.1.contains("serving: draining").then_some(()));
    process.signal("TERM");
    assert_eq!(process.ended().code(), Some(1));
    assert!(!process.socket.exists(), "the file of the socket is left behind");
    drop(held);
}
