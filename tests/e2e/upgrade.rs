//! Upgrades to a new process: sockets and live connections move, and no client notices. `upgrade_faults` has what goes wrong.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::hbone;
use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::federated::World;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::Hbone;
use crate::support::organisation;
use crate::support::proxy_header::v1;
use crate::support::raw::connect_from;
use crate::support::{Stop, eventually};

pub(crate) const NAME: &str = "a.test";
const STATE: &str = "state: {dir: state}\ndrain: {timeout: 5s}\n";

/// A gateway whose later processes end with the test.
pub(crate) struct Line(pub(crate) Gateway);

impl Line {
    /// Starts a gateway with one SNI listener and a route to the backend.
    pub(crate) fn start(backend: &Backend, more: &str) -> Self {
        Self(Gateway::start(&config(backend, more)))
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.listener("edge")
    }

    /// Runs `isthmus upgrade`.
    pub(crate) fn command(&self) -> Output {
        let admin = format!("http://{}", self.0.admin());
        Command::new(BINARY).args(["upgrade", "--admin", &admin]).output().expect("it runs")
    }

    /// Upgrades; returns what the API answers.
    #[track_caller]
    pub(crate) fn upgrade(&self) -> Value {
        // The earlier process of the last upgrade ends within moments.
        let (status, body) = eventually("the end of the earlier process", || {
            let answer = self.0.post("/api/v1/upgrade");
            (!answer.1.contains("still has connections")).then_some(answer)
        });
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    }

    /// Waits until the ends of all connections but one have been noticed.
    #[track_caller]
    pub(crate) fn has_one_connection(&self) {
        eventually("one connection", || {
            (self.0.metric("isthmus_connections_active", &[]) == 1.0).then_some(())
        });
    }

    /// Returns the ids of all processes that took part in upgrades.
    fn processes(&self) -> BTreeSet<u64> {
        let lines = self.0.log();
        let lines = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|line| line["process"].as_u64()).collect()
    }
}

impl Line {
    /// Kills all processes, and waits until none of their threads has the upgrade socket any more.
    #[track_caller]
    pub(crate) fn end(&self) {
        self.kill_all();
        let socket = self.0.folder().join("state/upgrade.sock");
        eventually("their end", || UnixStream::connect(&socket).is_err().then_some(()));
    }

    /// Kills all processes.
    fn kill_all(&self) {
        // Only processes of the binary are killed, should an id belong to another process meanwhile.
        let is_ours = |process: &u64| {
            let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            *process != u64::from(std::process::id()) && name.trim() == "isthmus"
        };
        let all = self.processes().into_iter().chain([self.0.process().into()]);
        // In one command, since an old process replaces a new one that is killed.
        let all = all.filter(is_ours).map(|process| process.to_string());
        let _ = Command::new("kill").arg("-9").args(all).status();
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.kill_all();
    }
}

pub(crate) fn config(backend: &Backend, more: &str) -> String {
    format!(
        "listeners: [{{name: edge, bind: \"127.0.0.1:0\"}}]\nroutes: {{{NAME}: \"{}\"}}\n{STATE}{more}",
        backend.address
    )
}

/// Opens a connection, and reads the echo of its hello.
pub(crate) fn open(address: SocketAddr) -> TcpStream {
    let mut client = connect(address);
    let sent = hello(NAME);
    client.write_all(&sent).expect("sent");
    echoed(&mut client, &sent);
    client
}

#[track_caller]
fn echoed(client: &mut TcpStream, sent: &[u8]) {
    let mut heard = vec![0; sent.len()];
    client.read_exact(&mut heard).expect("an echo");
    assert!(heard == sent, "the echo differs");
}

#[track_caller]
pub(crate) fn works(client: &mut TcpStream) {
    client.write_all(b"are you there?").expect("sent");
    echoed(client, b"are you there?");
}

/// Returns a byte that is different at neighbouring places.
fn pattern(at: usize) -> u8 {
    u8::try_from(at % 251).expect("below 251")
}

/// Sends and receives random amounts until told to stop; returns the longest time without a byte.
fn busy(address: SocketAddr, seed: usize, done: &AtomicBool) -> Duration {
    let (mut client, mut longest, mut turn) = (open(address), Duration::ZERO, seed);
    while !done.load(Ordering::Relaxed) {
        turn += 1;
        let length = [10, 2_000, 70_000, 300_000][turn % 4];
        let sent: Vec<u8> = (0..length).map(|at| pattern(at * 31 + turn * 7 + at / 251)).collect();
        let mut writer = client.try_clone().expect("a copy");
        thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&sent).expect("sent"));
            let (mut heard, mut last) = (Vec::with_capacity(length), Instant::now());
            let mut bytes = vec![0; 1 << 16];
            while heard.len() < length {
                let count = client.read(&mut bytes).expect("no reset");
                assert!(count > 0, "no end");
                longest = longest.max(last.elapsed());
                last = Instant::now();
                heard.extend_from_slice(&bytes[..count]);
            }
            assert!(heard == sent, "the echo differs");
        });
    }
    client.shutdown(Shutdown::Write).expect("shut down");
    assert_eq!(client.read(&mut [0]).expect("an end in order"), 0);
    longest
}

#[test]
fn idle_and_busy_connections_survive_upgrades_in_a_row_and_no_client_is_refused() {
    let backend = Backend::echo();
    let line = Line::start(&backend, "");
    let address = line.address();
    let mut idle: Vec<TcpStream> = (0..200).map(|_| open(address)).collect();
    let (done, opened) = (AtomicBool::new(false), AtomicUsize::new(0));
    let stalls = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let stop = Stop(&done);
        for seed in 0..50 {
            let (done, stalls) = (&done, &stalls);
            scope.spawn(move || stalls.lock().expect("not poisoned").push(busy(address, seed, done)));
        }
        scope.spawn(|| {
            // A connection for each request: none is refused.
            while !done.load(Ordering::Relaxed) {
                drop(open(address));
                opened.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut ended = 0.0;
        for round in 0..5 {
            let before = opened.load(Ordering::Relaxed);
            eventually("new connections", || (opened.load(Ordering::Relaxed) > before + 5).then_some(()));
            let answer = line.upgrade();
            let moved = answer["moved"].as_u64().expect("a number");
            assert!((200..=260).contains(&moved), "{round}: {answer}");
            let now = line.0.metric("isthmus_connections_total", &[]);
            assert!(now >= ended, "{round}: a counter goes back from {ended} to {now}");
            ended = now;
        }
        drop(stop);
    });
    let mut stalls = stalls.into_inner().expect("not poisoned");
    stalls.sort();
    eprintln!("longest time without a byte of each busy connection: {stalls:?}");
    assert_eq!(stalls.len(), 50);
    idle.iter_mut().for_each(works);
    let opened = 250 + opened.into_inner();
    let metric = |name: &str, labels: &[&str]| line.0.metric(name, labels);
    // The last counts of the old process, and the ends of the last connections, may come later.
    eventually("all connections to be counted", || {
        let (opened_total, active) = ("istio_tcp_connections_opened_total", "isthmus_connections_active");
        (metric(opened_total, &[]) == opened as f64 && metric(active, &[]) == 200.0).then_some(())
    });
    assert_eq!(metric("isthmus_upgrades_total", &["done"]), 5.0);
    assert!(metric("isthmus_upgrade_connections_total", &["moved"]) >= 5.0 * 250.0 - 250.0);
    assert!(metric("isthmus_relay_bytes_total", &["splice"]) > 0.0, "bulk is spliced in the new process");
    drop(idle);
    // Each connection has one line, with the id and the start of its own, wherever it has ended.
    let lines = eventually("all lines of the access log", || {
        let lines = line.0.access_log();
        (lines.len() >= opened).then_some(lines)
    });
    assert_eq!(lines.len(), opened);
    let ids: BTreeSet<u64> = lines.iter().map(|line| line["id"].as_u64().expect("an id")).collect();
    assert_eq!(ids.len(), opened, "no id is used twice");
    for one in &lines {
        assert_eq!(one["reason"], "ok", "{one}");
        assert!(one["bytes_up"].as_u64() > Some(100) && one["bytes_up"] == one["bytes_down"], "{one}");
    }
    assert_eq!(metric("isthmus_connections_total", &["ok"]), opened as f64);
}

#[test]
fn a_connection_keeps_its_state_wherever_it_is() {
    // The endpoint answers the hello, and then sends what it has once it is told how much.
    let backend = Backend::start(|mut stream| {
        let mut hello = [0; 4_096];
        let count = stream.read(&mut hello).expect("a hello");
        stream.write_all(&hello[..count]).expect("sent");
        let mut order = Vec::new();
        let _ = stream.read_to_end(&mut order);
        let length = String::from_utf8_lossy(&order).trim().parse::<usize>().unwrap_or_default();
        let bytes: Vec<u8> = (0..length).map(pattern).collect();
        let _ = stream.write_all(&bytes);
    });
    let balancer = Ipv4Addr::new(127, 0, 0, 9);
    let text = config(&backend, "limits: {perSource: {connections: 3}}\n")
        .replace("\"127.0.0.1:0\"", "\"127.0.0.1:0\", proxyProtocol: {mode: require, from: [127.0.0.9/32]}");
    let line = Line(Gateway::start(&text));
    let address = line.address();
    let client = |source: &str| {
        let mut client = connect_from(balancer, address);
        client.write_all(&v1(source, "198.51.100.1:443")).expect("sent");
        let sent = hello(NAME);
        client.write_all(&sent).expect("sent");
        let mut heard = vec![0; sent.len()];
        client.read_exact(&mut heard).map(|()| client)
    };
    // One has ended its direction, and reads nothing for now: the gateway holds bytes for it.
    let mut stalled = client("203.0.113.7:1000").expect("admitted");
    const LENGTH: usize = 40 << 20;
    stalled.write_all(LENGTH.to_string().as_bytes()).expect("sent");
    stalled.shutdown(Shutdown::Write).expect("shut down");
    let half: Vec<TcpStream> = (0..2).map(|_| client("203.0.113.7:1001").expect("admitted")).collect();
    eventually("bytes for the client", || {
        let all = line.0.json("/api/v1/connections");
        all.as_array()
            .expect("a list")
            .iter()
            .any(|one| one["bytes_down"].as_u64() > Some(1 << 20))
            .then_some(())
    });
    let before = line.0.json("/api/v1/connections");
    for _ in 0..3 {
        assert_eq!(line.upgrade()["moved"], 3);
    }
    let after = line.0.json("/api/v1/connections");
    let facts = |all: &Value| -> Vec<Value> {
        let all = all.as_array().expect("a list").iter();
        all.map(|one| {
            json!([
                one["id"],
                one["time"],
                one["source"],
                one["proxy"],
                one["sni"],
                one["endpoint"],
                one["route"]
            ])
        })
        .collect()
    };
    assert_eq!(facts(&before), facts(&after));
    // The source has its three connections.
    assert!(client("203.0.113.7:1002").is_err());
    line.0.logged("the limit", |line| line["reason"] == "limit_source");
    let mut heard = Vec::new();
    stalled.read_to_end(&mut heard).expect("an end in order");
    assert!(heard.len() == LENGTH && heard.iter().enumerate().all(|(at, byte)| *byte == pattern(at)));
    let ended = line.0.logged("its end", |line| line["bytes_down"].as_u64() >= Some(LENGTH as u64));
    assert_eq!((&ended["reason"], &ended["source"]), (&json!("ok"), &json!("203.0.113.7:1000")));
    eventually("a free place", || client("203.0.113.7:1003").ok());
    drop(half);
}

#[test]
fn a_new_config_that_refuses_a_connection_ends_it_as_a_reload_does() {
    let backend = Backend::echo();
    let line = Line::start(&backend, "");
    let (mut stays, mut ends) = (open(line.address()), open(line.address()));
    drop(ends.write_all(b"x"));
    echoed(&mut ends, b"x");
    // The reload is not ordered, so only the new process has the new config. The file watch may be quicker, which is the same.
    let other = config(&backend, "").replace(NAME, "b.test");
    line.0.write_config(&other);
    line.upgrade();
    assert!(ends.read(&mut [0]).is_err(), "a reset");
    assert!(stays.read(&mut [0]).is_err(), "a reset");
    line.0.logged("the cause", |line| line["reason"] == "config_removed");
    // A listener that is gone drains its connections in the old process.
    line.0.write_config(&config(&backend, ""));
    line.upgrade();
    let mut stays = open(line.address());
    line.0.write_config(&config(&backend, "").replace("name: edge", "name: other"));
    let answer = line.upgrade();
    if answer["left"] == 1 {
        works(&mut stays);
        let status = line.0.json("/api/v1/status");
        assert_eq!(status["taken_over"]["has_ended"], false);
        let refused = line.command();
        assert_eq!(refused.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("still has connections"), "{refused:?}");
    }
}

#[test]
fn a_signal_upgrades_and_a_unix_socket_of_the_admin_api_stays_where_it_is() {
    let backend = Backend::echo();
    let metrics = "telemetry: {log: {format: json}, metrics: {bind: \"127.0.0.1:0\"}, health: {bind: \"127.0.0.1:0\"}}\n";
    let line = Line::start(&backend, metrics);
    let mut client = open(line.address());
    let drained = line.0.post(&format!("/api/v1/endpoints/drain?address={}&service={NAME}", backend.address));
    assert_eq!(drained.0, 200, "{drained:?}");
    let [metrics, health] = ["metrics", "health"].map(|name| line.0.listener(name));
    line.0.signal("USR2");
    line.0.told("the old process has handed over its connections");
    works(&mut client);
    let get = |address, path| crate::support::gateway::http(address, "GET", path);
    assert!(get(metrics, "/metrics").1.contains("isthmus_upgrades_total{result=\"done\"} 1"));
    assert_eq!(get(health, "/readyz").0, 200);
    // The upgrade socket is private, and belongs to the new process.
    let upgrade = line.0.folder().join("state/upgrade.sock");
    let found = std::fs::symlink_metadata(&upgrade).expect("a socket");
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    let inode = found.ino();
    let status = Command::new(BINARY)
        .args(["status", "--admin", &format!("http://{}", line.0.admin())])
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&status.stdout);
    assert!(text.contains("took over from process") && text.contains("connections moved: 1"), "{text}");
    line.upgrade();
    assert_eq!(std::fs::symlink_metadata(&upgrade).expect("the same").ino(), inode);
    works(&mut client);
    // The order of the operator holds in the third process.
    let endpoints = line.0.json("/api/v1/endpoints");
    assert_eq!(endpoints[0]["state"], "draining", "{endpoints}");
}

#[test]
fn links_with_peers_go_on_under_the_same_name() {
    let world = World::new();
    let (west_port, east_port) = (world.west_ports[0], world.east_ports[0]);
    let west = world.west_config(west_port, &[west_port], 80) + "state: {dir: state}\n";
    let dial = SocketAddr::from(([127, 0, 0, 1], west_port));
    let east = world.east_config(dial, east_port) + "state: {dir: state}\n";
    let west = Line(organisation::start(world.west.folder(&[&world.east]), &west));
    let east = Line(organisation::start(world.east.folder(&[&world.west]), &east));
    let link = |line: &Line| {
        eventually("a live link", || {
            let peer = line.0.json("/api/v1/peers")[0].clone();
            let links: Vec<&Value> =
                peer["links"].as_array()?.iter().filter(|link| link["state"] == "live").collect();
            (peer["state"] == "live" && links.len() == 1 && peer["imported"].as_u64() > Some(0))
                .then(|| links[0]["instance"].clone())
        })
    };
    let names = [link(&west), link(&east)];
    for line in [&west, &east, &west] {
        line.upgrade();
        assert_eq!([link(&west), link(&east)], names);
    }
}

/// Replaces the admin address by a unix socket: the same file serves before and after.
#[test]
fn the_command_works_over_a_unix_socket() {
    let backend = Backend::echo();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let socket = format!("unix:{}", folder.path().join("admin.sock").display());
    let log = folder.path().join("log");
    let text = config(&backend, "").replace(
        "state: {dir: state}",
        &format!("state: {{dir: {}}}", folder.path().join("state").display()),
    );
    std::fs::write(
        &path,
        format!("admin: {{bind: \"{socket}\"}}\ntelemetry: {{log: {{format: json}}}}\n{text}"),
    )
    .expect("written");
    let mut first = Command::new(BINARY)
        .args(["run", "-c"])
        .arg(&path)
        .stderr(std::fs::File::create(&log).expect("a file"))
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let run =
        |command: &str| Command::new(BINARY).args([command, "--admin", &socket]).output().expect("it runs");
    eventually("readiness", || run("healthcheck").status.success().then_some(()));
    let mut processes = Vec::new();
    for _ in 0..3 {
        let done = eventually("an upgrade", || Some(run("upgrade")).filter(|done| done.status.success()));
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        let process =
            text.strip_prefix("process ").and_then(|rest| rest.split(',').next()).expect("an id").to_owned();
        processes.push(process);
        assert!(run("healthcheck").status.success(), "the socket stays: {text}");
    }
    assert!(first.wait().expect("it has ended").success());
    for process in &processes {
        let _ = Command::new("kill").args(["-TERM", process]).status();
    }
    eventually("the end", || (!folder.path().join("admin.sock").exists()).then_some(()));
}

#[test]
fn hbone_connections_end_in_the_old_process_after_goaway() {
    let (echo, sni) = (Backend::echo(), Backend::echo());
    let config = format!(
        "{}{STATE}routes: {{{NAME}: \"{}\"}}\nservices:\n{}",
        hbone::BASE,
        sni.address,
        hbone::service("echo.shop.mesh", 80, &echo, "")
    );
    let config = config.replace("protocol: hbone", "protocol: auto");
    let line = Line(Gateway::start_in(hbone::folder(), &config, &[]));
    let address = line.0.listener("hbone");
    let mut sni = open(address);
    let first = Hbone::connect(address, hbone::caller()).expect("let in");
    let mut stream = first.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!(stream.echo("before"), Ok("before".to_owned()));
    let answer = line.upgrade();
    assert_eq!(answer["moved"], 1);
    assert!(answer["left"].as_u64() >= Some(1), "{answer}");
    works(&mut sni);
    // The running stream goes on, and new ones belong to the new process.
    assert_eq!(stream.echo("after"), Ok("after".to_owned()));
    let second = Hbone::connect(address, hbone::caller()).expect("let in");
    assert_eq!(second.open("echo.shop.mesh:80").expect("admitted").echo("new"), Ok("new".to_owned()));
    drop((stream, first));
    eventually("the end of the old process", || {
        (line.0.json("/api/v1/status")["taken_over"]["has_ended"] == true).then_some(())
    });
    works(&mut sni);
}

#[test]
fn drains_without_a_state_folder_hold_in_the_new_process() {
    let backend = Backend::echo();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).expect("set");
    let run = folder.path().to_str().expect("a path").to_owned();
    let config = config(&backend, "").replace("state: {dir: state}\n", "");
    let line = Line(Gateway::start_in(folder, &config, &[("RUNTIME_DIRECTORY", &run)]));
    let admin = format!("http://{}", line.0.admin());
    let order = |arguments: &[&str]| {
        let done = Command::new(BINARY).args(arguments).args(["--admin", &admin]).output().expect("it runs");
        assert!(done.status.success(), "{done:?}");
    };
    order(&["drain", "network", "west", "--over", "1h", "--until", "2h", "--force", "--reason", "CHG-1"]);
    order(&["drain", "peer", "globex", "--over", "0s", "--to", "25%", "--force"]);
    let lasting = || {
        let mut drains = line.0.json("/api/v1/drains");
        drains.as_array_mut().expect("a list").iter_mut().for_each(|one| one["ramp_left_s"] = Value::Null);
        drains
    };
    let before = eventually("two drains", || Some(lasting()).filter(|all| all[1]["name"].is_string()));
    line.upgrade();
    assert_eq!(lasting(), before, "at once");
    order(&["undrain", "network", "west"]);
    eventually("one drain", || (lasting().as_array()?.len() == 1).then_some(()));
    line.upgrade();
    assert_eq!(lasting(), json!([before[1]]));
}

/// The connections reach the new process after the time of the drain.
#[test]
fn a_drain_that_is_over_closes_the_connections_that_an_upgrade_brings() {
    const SERVICE: &str = "b.test";
    let backend = Backend::echo();
    let line = Line::start(
        &backend,
        &format!(
            "node: {{cluster: c, network: net}}\nexports: [{{services: [{SERVICE}]}}]\nservices:\n- hostname: {SERVICE}\n  namespace: shop\n  \
             ports: [{{name: p, port: 443, protocol: TLS}}]\n  endpoints: [{{address: {}, ports: {{p: {}}}}}]\n",
            backend.address.ip(),
            backend.address.port()
        ),
    );
    let connected = || {
        let (mut client, sent) = (connect(line.address()), hello(SERVICE));
        client.write_all(&sent).expect("sent");
        echoed(&mut client, &sent);
        client
    };
    let clients: Vec<TcpStream> = (0..6).map(|_| connected()).collect();
    let endpoint = backend.address.to_string();
    let admin = format!("http://{}", line.0.admin());
    let order =
        ["drain", "endpoint", &endpoint, "--over", "0s", "--close-after", "0s", "--force", "--admin", &admin];
    let done = Command::new(BINARY).args(order).output().expect("it runs");
    assert!(done.status.success(), "{done:?}");
    // The drain itself is over at once, and its last regular look comes some seconds later.
    thread::sleep(Duration::from_secs(11));
    line.upgrade();
    for mut client in clients {
        client.set_read_timeout(Some(Duration::from_secs(90))).expect("set");
        assert_eq!(client.read(&mut [0]).expect("it ends in order"), 0);
    }
}

/// Puts the binary at a path, in one step.
pub(crate) fn put(path: &Path) {
    let next = path.with_extension("next");
    // A file that is being written cannot be executed, and another thread may start a process meanwhile.
    if std::fs::hard_link(BINARY, &next).is_err() {
        std::fs::copy(BINARY, &next).expect("copied");
    }
    std::fs::rename(next, path).expect("renamed");
}

/// Replaces a file in one step, as package managers do.
pub(crate) fn replace(path: &Path, by: &[u8]) {
    let next = path.with_extension("next");
    std::fs::write(&next, by).expect("written");
    std::fs::set_permissions(&next, std::fs::Permissions::from_mode(0o755)).expect("set");
    std::fs::rename(next, path).expect("renamed");
}

/// Starts a gateway by a copy of the binary.
pub(crate) fn start_copy(folder: TempDir, backend: &Backend, environment: &[(&str, &str)]) -> Line {
    let binary = folder.path().join("isthmus");
    put(&binary);
    std::fs::write(
        folder.path().join("isthmus.yaml"),
        crate::support::gateway::with_common(&config(backend, "")),
    )
    .expect("a config");
    let mut command = Command::new(binary);
    command.args(["run", "-c", "isthmus.yaml"]).current_dir(folder.path()).envs(environment.iter().copied());
    Line(Gateway::spawn(command, folder))
}

#[test]
fn the_service_manager_learns_the_main_process_of_a_replaced_program_file() {
    let backend = Backend::echo();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify.sock");
    let manager = UnixDatagram::bind(&path).expect("bound");
    manager.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    let mut notes: Vec<String> = Vec::new();
    let until = |notes: &mut Vec<String>, text: &str| {
        while !notes.iter().any(|note| note.lines().any(|line| line.starts_with(text))) {
            let mut bytes = [0; 4_096];
            let count = manager.recv(&mut bytes).expect("a notification in time");
            notes.push(String::from_utf8_lossy(&bytes[..count]).into_owned());
        }
    };
    let notify = path.to_str().expect("a path").to_owned();
    let line = start_copy(
        folder,
        &backend,
        &[("NOTIFY_SOCKET", &notify), ("WATCHDOG_USEC", "2000000"), ("WATCHDOG_PID", "1")],
    );
    until(&mut notes, "READY=1");
    let mut client = open(line.address());
    put(&line.0.folder().join("isthmus"));
    notes.clear();
    let answer = line.upgrade();
    until(&mut notes, "READY=1");
    let main: Vec<&str> =
        notes.iter().flat_map(|note| note.lines()).filter_map(|line| line.strip_prefix("MAINPID=")).collect();
    let process = answer["process"].to_string();
    assert!(!main.is_empty() && main.iter().all(|main| *main == process), "{notes:?} {process}");
    assert!(!notes.iter().any(|note| note.contains("STOPPING=1")), "{notes:?}");
    // The new process feeds the watchdog, whoever it was meant for.
    until(&mut notes, "WATCHDOG=1");
    works(&mut client);
}
