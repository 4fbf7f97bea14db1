//! Measures the gateway's memory and the latency of honest clients while a crowd attacks the gateway. The crowd is thousands of
//! clients with one source address that never send a whole hello, in processes of their own; the honest clients have a hundred
//! other source addresses.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::backend::Backend;
use super::eventually;
use super::gateway::Gateway;
use super::raw::{self, connect_from};

/// The source address of the crowd.
const CROWD: Ipv4Addr = Ipv4Addr::new(127, 0, 2, 1);
/// The number of honest source addresses.
pub const HONEST: u8 = 100;
/// The number of honest calls that are measured without the crowd.
const CALM_CALLS: usize = 2_000;

/// The pause after each honest call.
const PAUSE: Duration = Duration::from_millis(1);

/// The size of the crowd, and the settings of the gateway.
#[derive(Clone, Copy, Debug)]
pub struct Scene {
    /// The number of silent clients.
    pub silent: usize,
    /// The number of clients that send a byte a second.
    pub dripping: usize,
    /// `hello.timeout` in seconds.
    pub hello_timeout: u64,
    /// `limits.pendingHellos`; `None`: the default.
    pub pending_hellos: Option<usize>,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The limit on pending hellos that the gateway's status shows.
    pub pending_max: usize,
    /// The number of the crowd's connections that ended as `hello_timeout`.
    pub at_deadline: usize,
    /// The number of the crowd's connections that ended as `limit_global`.
    pub evicted: usize,
    /// The number of the crowd's connections that ended for any other reason.
    pub otherwise: usize,
    /// The longest time for which a connection of the crowd was open.
    pub longest: Duration,
    /// The gateway's resident memory in bytes before the crowd came.
    pub before: u64,
    /// The gateway's resident memory in bytes when it held the most connections.
    pub holding: u64,
    /// The gateway's largest resident memory in bytes.
    pub peak: u64,
    /// The gateway's resident memory in bytes after all connections ended.
    pub after: u64,
    /// The largest number of connections that the gateway had open at the same time.
    pub held: f64,
    /// The latency of honest calls without the crowd.
    pub calm: Latency,
    /// The latency of honest calls while the crowd attacked.
    pub beside: Latency,
    /// The number of honest connections that ended for another reason than `ok`.
    pub honest_refused: usize,
}

/// The number of calls, and statistics of the time that they took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    pub calls: usize,
    pub median: Duration,
    pub p99: Duration,
    pub longest: Duration,
}

impl Latency {
    fn of(mut all: Vec<Duration>) -> Self {
        all.sort_unstable();
        let at = |share: usize| all.get(all.len() * share / 100).copied().unwrap_or_default();
        let longest = all.last().copied().unwrap_or_default();
        Self { calls: all.len(), median: at(50), p99: at(99), longest }
    }
}

/// Returns the Python interpreter that runs the crowd's script, which needs no package.
pub fn python() -> Option<OsString> {
    let found = std::env::var_os("ISTHMUS_PYTHON").unwrap_or_else(|| "python3".into());
    let tried = Command::new(&found).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    tried.is_ok_and(|status| status.success()).then_some(found)
}

/// A process with part of the crowd; killed when dropped.
struct Part {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Part {
    fn start(python: &OsString, address: SocketAddr, count: usize, kind: &str, seconds: u64) -> Self {
        let mut child = Command::new(python)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/crowd.py"))
            .args([address.ip().to_string(), address.port().to_string(), CROWD.to_string()])
            .args([count.to_string(), kind.to_owned(), seconds.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, lines }
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes one call of an honest client (connects, sends its hello, and reads the echo), and returns the time that the call took.
fn call(number: u8, address: SocketAddr) -> Duration {
    let begun = Instant::now();
    let mut client = connect_from(Ipv4Addr::new(127, 0, 1, number), address);
    let hello = raw::hello(b"a.test");
    let mut echoed = vec![0; hello.len()];
    client.write_all(&hello).expect("sent");
    client.read_exact(&mut echoed).unwrap_or_else(|error| panic!("source {number} is not served: {error}"));
    assert_eq!(echoed, hello);
    begun.elapsed()
}

/// Makes calls from one honest source address after another while `goes_on` returns true. Returns the time that each call took.
fn calls(address: SocketAddr, mut goes_on: impl FnMut(usize) -> bool) -> Vec<Duration> {
    let mut took = Vec::new();
    while goes_on(took.len()) {
        let number = u8::try_from(took.len() % usize::from(HONEST)).expect("below the number of sources");
        took.push(call(number + 1, address));
        // Without pauses the honest clients would be an attack themselves.
        std::thread::sleep(PAUSE);
    }
    took
}

/// Returns the resident memory of a process in bytes.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a field");
    line.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).expect("a number") * 1024
}

/// Runs a scene; the error says why this host cannot run it.
pub fn play(scene: Scene) -> Result<Seen, String> {
    let Some(python) = python() else { return Err("there is no python3".to_owned()) };
    let backend = Backend::echo();
    let limits =
        scene.pending_hellos.map_or_else(String::new, |most| format!("limits: {{pendingHellos: {most}}}\n"));
    let gateway = Gateway::start(&format!(
        "listeners: [{{name: sni, bind: \"127.0.0.1:0\", hello: {{timeout: {}s}}}}]\nroutes: {{a.test: \"{}\"}}\n{limits}",
        scene.hello_timeout, backend.address
    ));
    let address = gateway.listener("sni");
    let all = scene.silent + scene.dripping;
    let mut seen = Seen::default();
    let status = gateway.json("/api/v1/status");
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap_or_default()).expect("fits");
    seen.pending_max = number(&status["limits"]["pending_hellos"]);
    let needed = scene.pending_hellos.unwrap_or_default().max(seen.pending_max) + 300;
    if number(&status["limits"]["descriptors"]) < needed {
        return Err(format!(
            "the gateway may have {} descriptors, and needs {needed}",
            status["limits"]["descriptors"]
        ));
    }
    seen.calm = Latency::of(calls(address, |made| made < CALM_CALLS));
    let idle = || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(());
    eventually("the end of the calm", idle);
    seen.before = resident(gateway.process());
    let seconds = scene.hello_timeout + 60;
    let mut parts = [("silent", scene.silent), ("drip", scene.dripping)]
        .map(|(kind, count)| Part::start(&python, address, count, kind, seconds));
    // Honest clients call as long as a client of the crowd is connected.
    let begun = Instant::now();
    let took = calls(address, |made| {
        if made % 20 == 0 {
            let (now, held) =
                (resident(gateway.process()), gateway.metric("isthmus_connections_active", &[]));
            seen.peak = seen.peak.max(now);
            if held > seen.held {
                (seen.held, seen.holding) = (held, now);
            }
            return parts.iter_mut().any(Part::is_running) && begun.elapsed() < Duration::from_secs(seconds);
        }
        true
    });
    seen.beside = Latency::of(took);
    for part in &mut parts {
        let mut line = part.line();
        if line.trim() == "connected" {
            line = part.line();
        }
        let told: Value = serde_json::from_str(&line).map_err(|error| format!("{line:?}: {error}"))?;
        if let Some(why) = told["skipped"].as_str() {
            return Err(why.to_owned());
        }
        assert_eq!(told["open"], 0, "clients are left open: {told}");
        let longest = Duration::from_secs_f64(told["longest"].as_f64().unwrap_or_default());
        seen.longest = seen.longest.max(longest);
    }
    eventually("the end of all", idle);
    seen.after = resident(gateway.process());
    let lines = eventually("their lines", || {
        let lines = gateway.access_log();
        (lines.len() >= all + seen.calm.calls + seen.beside.calls).then_some(lines)
    });
    let crowd = format!("{CROWD}:");
    for line in &lines {
        let of_crowd = line["source"].as_str().is_some_and(|source| source.starts_with(&crowd));
        match (of_crowd, line["reason"].as_str().unwrap_or_default()) {
            (true, "hello_timeout") => seen.at_deadline += 1,
            (true, "limit_global") => seen.evicted += 1,
            (true, _) => seen.otherwise += 1,
            (false, "ok") => {}
            (false, _) => seen.honest_refused += 1,
        }
    }
    Ok(seen)
}
