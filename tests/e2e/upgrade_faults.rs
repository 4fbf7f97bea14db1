//! Upgrades that fail: a new process that cannot start, that dies or hangs in each step, an old process that dies, messages that no
//! Isthmus sends, and records of another version.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::hbone;
use crate::memory_budget::Cgroup;
use crate::support::backend::Backend;
use crate::support::client::hello;
use crate::support::dns::{Answer, NameServer};
use crate::support::gateway::{BINARY, Gateway, http};
use crate::support::handover::Handover;
use crate::support::hbone::Hbone;
use crate::support::{Stop, eventually, skip, within};
use crate::upgrade::{Line, NAME, config, open, put, replace, start_copy, works};

#[test]
fn a_new_process_that_cannot_start_leaves_the_old_one_as_it_was() {
    let backend = Backend::echo();
    let folder = tempfile::tempdir().expect("a folder");
    let line = start_copy(folder, &backend, &[]);
    let mut client = open(line.address());
    let mut refused = |why: &str| {
        let done = line.command();
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{text}");
        assert!(text.contains(why), "{why}: {text}");
        works(&mut client);
        works(&mut open(line.address()));
    };
    line.0.write_config("nonsense: true\n");
    refused("nonsense");
    line.0.write_config(&config(&backend, ""));
    let binary = line.0.folder().join("isthmus");
    replace(&binary, b"#!/bin/sh\nexit 7\n");
    refused("exit code 7");
    replace(&binary, b"no program");
    refused("cannot start");
    std::fs::remove_file(&binary).expect("removed");
    refused("cannot start");
    assert_eq!(line.0.metric("isthmus_upgrades_total", &["failed"]), 2.0);
    line.0.told("this process goes on");
    put(&binary);
    line.has_one_connection();
    assert_eq!(line.upgrade()["moved"], 1);
    works(&mut client);
    assert_eq!(line.0.metric("isthmus_upgrades_total", &["failed"]), 2.0, "the count goes on");
}

/// The connections of a process with many descriptors do not fit into one with few.
#[test]
fn an_upgrade_into_too_few_descriptors_is_refused_and_costs_nothing() {
    let backend = Backend::echo();
    let line = start_copy(tempfile::tempdir().expect("a folder"), &backend, &[]);
    let mut clients: Vec<TcpStream> = (0..120).map(|_| open(line.address())).collect();
    let binary = line.0.folder().join("isthmus");
    replace(&binary, format!("#!/bin/sh\nulimit -n 200 && exec {BINARY} \"$@\"\n").as_bytes());
    let done = line.command();
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{text}");
    for word in ["no room for the connections", "200 descriptors", "120 are open", "ulimit -n"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    clients.iter_mut().for_each(works);
    works(&mut open(line.address()));
    // With enough of them all move.
    replace(&binary, format!("#!/bin/sh\nulimit -n 1000 && exec {BINARY} \"$@\"\n").as_bytes());
    eventually("the end of the last connection", || {
        (line.0.metric("isthmus_connections_active", &[]) == 120.0).then_some(())
    });
    assert_eq!(line.upgrade()["moved"], 120);
    clients.iter_mut().for_each(works);
}

#[test]
fn an_upgrade_into_too_little_memory_is_refused() {
    let backend = Backend::echo();
    let line = Line::start(&backend, "");
    let mut client = open(line.address());
    let mut new = scripted(&line);
    drop(new.until("offered"));
    let room = json!({"descriptors": 1_000, "connections": 375, "memory": 100});
    new.send(&json!({"type": "ready", "room": room}), &[], &[]);
    let why = new.until("abort").json["why"].to_string();
    assert!(why.contains("100 bytes of its memory budget"), "{why}");
    eventually("the failed upgrade", || {
        (line.0.metric("isthmus_upgrades_total", &["failed"]) == 1.0).then_some(())
    });
    works(&mut client);
    works(&mut open(line.address()));
}

/// The new process judges the room by the limit of its own cgroup.
#[test]
fn an_upgrade_into_a_smaller_memory_cgroup_is_refused_and_costs_nothing() {
    const TEST: &str = "upgrade_faults::an_upgrade_into_a_smaller_memory_cgroup_is_refused_and_costs_nothing";
    /// They need half of what the small cgroup has.
    const CLIENTS: u32 = 2_000;
    let cgroups = [("small", 16 << 20), ("large", 512 << 20)].map(|(name, limit)| Cgroup::new(name, limit));
    let [Some(small), Some(large)] = cgroups else {
        return skip(&format!("{TEST}: no memory cgroup of version 1 can be made here"));
    };
    let backend = Backend::echo();
    let line = start_copy(tempfile::tempdir().expect("a folder"), &backend, &[]);
    let mut clients: Vec<TcpStream> = (0..CLIENTS).map(|_| open(line.address())).collect();
    let binary = line.0.folder().join("isthmus");
    let within = |cgroup: &Cgroup| format!("#!/bin/sh\n{} && exec {BINARY} \"$@\"\n", cgroup.enter());
    replace(&binary, within(&small).as_bytes());
    let done = line.command();
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{text}");
    for word in ["no room for the connections", "bytes of its memory budget left", "limits.memory"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    clients.iter_mut().for_each(works);
    works(&mut open(line.address()));
    replace(&binary, within(&large).as_bytes());
    eventually("the end of the last connection", || {
        (line.0.metric("isthmus_connections_active", &[]) == f64::from(CLIENTS)).then_some(())
    });
    assert_eq!(line.upgrade()["moved"], CLIENTS);
    clients.iter_mut().for_each(works);
}

/// A group whose sockets the new process cannot take stays, and the next one moves.
#[test]
fn a_group_of_connections_without_its_sockets_ends_nothing() {
    let backend = Backend::echo();
    let old = Old::start(&backend);
    let mut new = old.serve();
    let mut pairs: Vec<Pair> = (0..2).map(|id| pair(&backend, 17 + id)).collect();
    let group = |pair: &Pair| json!({"type": "connections", "records": [pair.record], "held": [[0, 0]]});
    let message = group(&pairs[0]).to_string().into_bytes();
    let length = u32::try_from(message.len()).expect("short").to_le_bytes();
    // The head names two descriptors, and the kernel has delivered none.
    new.send_raw(&[&length[..], &[0, 0, 0, 0, 2, 0], &message].concat(), &[]).expect("sent");
    let stays = new.until("taken").json["stays"].clone();
    assert!(stays[0].as_str().is_some_and(|why| why.contains("limit of descriptors")), "{stays}");
    let both: Vec<_> = pairs[1].inner.iter().map(AsFd::as_fd).collect();
    new.send(&group(&pairs[1]), &[], &both);
    assert_eq!(new.until("taken").json["stays"], json!([null]));
    let Pair { client, endpoint, .. } = &mut pairs[1];
    client.write_all(b"more").expect("sent");
    endpoint.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    let mut bytes = [0; 4];
    endpoint.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"more");
}

#[test]
fn an_upgrade_needs_a_folder_of_its_own() {
    let backend = Backend::echo();
    let text = config(&backend, "").replace("state: {dir: state}\n", "");
    let line = Line(Gateway::start(&text));
    let refused = line.command();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && text.contains("state.dir"), "{text}");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("state")).expect("made");
    std::fs::set_permissions(folder.path().join("state"), PermissionsExt::from_mode(0o777)).expect("set");
    let line = Line(Gateway::start_in(folder, &config(&backend, ""), &[]));
    let refused = line.command();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && text.contains("other users may write"), "{text}");
    works(&mut open(line.address()));
}

/// Connects to a gateway as its new process; the gateway may refuse for as long as the last one is not over.
fn scripted(line: &Line) -> Handover {
    let path = line.0.folder().join("state/upgrade.sock");
    eventually("a welcome", || {
        let mut new = Handover::new(UnixStream::connect(&path).ok()?);
        let hello = br#"{"type": "hello", "protocol": 1, "version": "9.9.9", "later": true}"#;
        let length = u32::try_from(hello.len()).expect("short").to_le_bytes();
        new.send_raw(&[&length[..], &[0; 6], hello].concat(), &[]).ok()?;
        let welcome = new.try_receive().ok()?.json;
        let is_welcome = welcome["type"] == "welcome";
        assert!(
            !is_welcome || welcome["instance"].as_str().is_some_and(|name| !name.is_empty()),
            "{welcome}"
        );
        is_welcome.then_some(new)
    })
}

#[test]
fn a_new_process_that_dies_in_any_step_costs_only_what_it_holds() {
    let backend = Backend::echo();
    let line = Line::start(&backend, "");
    let mut client = open(line.address());
    let mut goes_on = |step: &str, line: &Line| {
        eventually(step, || (line.0.metric("isthmus_upgrades_total", &["failed"]) >= 1.0).then_some(()));
        works(&mut client);
        works(&mut open(line.address()));
    };
    drop(scripted(&line));
    goes_on("before the sockets", &line);
    let mut new = scripted(&line);
    drop(new.until("offered"));
    drop(new);
    goes_on("before it is ready", &line);
    let mut new = scripted(&line);
    drop(new.until("offered"));
    new.send(&json!({"type": "ready"}), &[], &[]);
    drop(new.until("go"));
    drop(new);
    goes_on("before it serves", &line);
    let mut new = scripted(&line);
    drop(new.until("offered"));
    new.send(&json!({"type": "failed", "why": "no disk"}), &[], &[]);
    line.0.told("no disk");
    // What no Isthmus sends.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, b'[', b']']] {
        let path = line.0.folder().join("state/upgrade.sock");
        let mut lies = Handover::new(UnixStream::connect(&path).expect("connected"));
        let _ = lies.send_raw(bytes, &[]);
        let end = loop {
            match lies.try_receive() {
                Ok(message) if message.json["type"] == "abort" => break true,
                Ok(_) => {}
                Err(_) => break true,
            }
        };
        assert!(end);
    }
    goes_on("after lies", &line);
    // It dies with connections that it has not answered for: they go on in the old process. It has the port, which closes with it.
    line.has_one_connection();
    let mut new = scripted(&line);
    let sockets = new.until("sockets").descriptors;
    drop(new.until("offered"));
    new.send(&json!({"type": "ready"}), &[], &[]);
    drop(new.until("go"));
    new.send(&json!({"type": "serving", "taken": []}), &[], &[]);
    let given = new.until("connections");
    assert_eq!((given.json["records"].as_array().map(Vec::len), given.descriptors.len()), (Some(1), 2));
    drop((new, sockets, given));
    works(&mut client);
    eventually("nobody listens", || TcpStream::connect(line.address()).is_err().then_some(()));
}

fn kill(signal: &str, process: &Value) {
    let status = Command::new("kill").args([signal, &process.to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()), "{process}");
}

#[test]
fn a_new_process_that_is_killed_while_the_old_one_has_connections_is_replaced() {
    let (echo, sni) = (Backend::echo(), Backend::echo());
    let line = Line(Gateway::start_in(hbone::folder(), &with_streams(&echo, &sni), &[]));
    let address = line.0.listener("hbone");
    let caller = Hbone::connect(address, hbone::caller()).expect("let in");
    let mut stream = caller.open("echo.shop.mesh:80").expect("admitted");
    let mut client = open(address);
    let done = AtomicBool::new(false);
    let opened = AtomicUsize::new(0);
    let second = thread::scope(|scope| {
        let _stop = Stop(&done);
        scope.spawn(|| {
            // No connection is refused. One that the killed process has accepted is its loss.
            while !done.load(Ordering::Relaxed) {
                let mut client = TcpStream::connect(address).expect("somebody listens");
                client.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
                let sent = hello(NAME);
                let echoed =
                    client.write_all(&sent).and_then(|()| client.read_exact(&mut vec![0; sent.len()]));
                opened.fetch_add(usize::from(echoed.is_ok()), Ordering::Relaxed);
                thread::sleep(Duration::from_millis(5));
            }
        });
        let first = line.upgrade()["process"].clone();
        works(&mut client);
        kill("-KILL", &first);
        client.read_exact(&mut [0]).expect_err("the connection of the killed process");
        let second = eventually("another process", || {
            let is_told = |text: &&String| text.contains("another one of this program was started");
            let told = line.0.log().into_iter().find(|text| is_told(&text))?;
            serde_json::from_str::<Value>(&told).ok()?.get("process").cloned()
        });
        // A request waits until the other process answers.
        eventually("the other process to serve", || {
            (line.0.json("/api/v1/status")["taken_over"]["process"] == line.0.process()).then_some(())
        });
        let before = opened.load(Ordering::Relaxed);
        eventually("new connections", || (opened.load(Ordering::Relaxed) > before + 5).then_some(()));
        assert_eq!(stream.echo("the old process goes on"), Ok("the old process goes on".to_owned()));
        second
    });
    // A process that is ordered to stop is not replaced.
    kill("-TERM", &second);
    eventually("nobody listens", || TcpStream::connect(address).is_err().then_some(()));
    assert_eq!(stream.echo("and on"), Ok("and on".to_owned()));
    assert!(TcpStream::connect(address).is_err());
}

/// The old process has an older state than the one that has died.
#[test]
fn a_process_that_replaces_a_dead_one_knows_what_drains_had_left_there() {
    let (echo, sni) = (Backend::echo(), Backend::echo());
    let config =
        with_streams(&echo, &sni) + "networks: {west: {gateways: [{address: 192.0.2.3, sniPort: 15443}]}}\n";
    let with = |drain: &str| format!("{config}drains: [{{network: west, {drain}}}]\n");
    let line = Line(Gateway::start_in(hbone::folder(), &with("to: 50%"), &[]));
    let left = || line.0.json("/api/v1/drains")[0]["left_percent"].clone();
    assert_eq!(left(), 50);
    let caller = Hbone::connect(line.0.listener("hbone"), hbone::caller()).expect("let in");
    let mut stream = caller.open("echo.shop.mesh:80").expect("admitted");
    let first = line.upgrade()["process"].clone();
    line.0.reload(&with("to: 0%"));
    let kept = line.0.folder().join("state/beliefs");
    let belief = "{\"drain\":{\"registry\":null,\"target\":{\"Network\":\"west\"},\"left\":0,";
    eventually("what is left to be kept", || {
        std::fs::read_to_string(&kept).ok()?.contains(belief).then_some(())
    });
    line.0.reload(&with("to: 99%"));
    kill("-KILL", &first);
    eventually("the other process to serve", || {
        (line.0.json("/api/v1/status")["taken_over"]["process"] == line.0.process()).then_some(())
    });
    assert_eq!(left(), 0);
    assert_eq!(stream.echo("the old process goes on"), Ok("the old process goes on".to_owned()));
}

/// Its kernel accepts connections for a process that hangs, so its clients would wait for ever.
#[test]
fn a_new_process_that_hangs_once_it_serves_is_replaced() {
    let (echo, sni) = (Backend::echo(), Backend::echo());
    let line = Line(Gateway::start_in(hbone::folder(), &with_streams(&echo, &sni), &[]));
    let address = line.0.listener("hbone");
    // The old process lives for as long as the stream.
    let caller = Hbone::connect(address, hbone::caller()).expect("let in");
    let mut stream = caller.open("echo.shop.mesh:80").expect("admitted");
    let first = line.upgrade()["process"].clone();
    kill("-STOP", &first);
    within(Duration::from_secs(60), "another process", || {
        line.0.log().iter().any(|line| line.contains("another one of this program was started")).then_some(())
    });
    line.0.told("answered nothing for 10 s");
    works(&mut open(address));
    assert_eq!(stream.echo("the old process goes on"), Ok("the old process goes on".to_owned()));
}

#[test]
fn an_upgrade_that_waits_begins_when_the_earlier_process_has_ended() {
    let (echo, sni) = (Backend::echo(), Backend::echo());
    let line = Line(Gateway::start_in(hbone::folder(), &with_streams(&echo, &sni), &[]));
    let caller = Hbone::connect(line.0.listener("hbone"), hbone::caller()).expect("let in");
    let mut stream = caller.open("echo.shop.mesh:80").expect("admitted");
    line.upgrade();
    let refused = line.command();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && text.contains("`isthmus upgrade --wait`"), "{text}");
    let admin = format!("http://{}", line.0.admin());
    let mut waiting = Command::new(BINARY)
        .args(["upgrade", "--wait", "--admin", &admin])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    // Reloads and other orders are obeyed meanwhile.
    assert_eq!(line.0.post("/api/v1/reload").0, 200);
    assert_eq!(stream.echo("on"), Ok("on".to_owned()));
    assert!(waiting.try_wait().expect("a child").is_none(), "the earlier process has the stream");
    drop((stream, caller));
    let done = waiting.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success() && text.contains("has taken over"), "{text}");
    assert_ne!(line.0.json("/api/v1/status")["taken_over"]["process"], Value::Null);
    works(&mut open(line.0.listener("hbone")));
}

/// Returns a config with CONNECT streams, which end in the process that has them, and connections by SNI on one listener.
fn with_streams(echo: &Backend, sni: &Backend) -> String {
    let config = format!(
        "{}state: {{dir: state}}\ndrain: {{timeout: 60s}}\nroutes: {{{NAME}: \"{}\"}}\nservices:\n{}",
        hbone::BASE,
        sni.address,
        hbone::service("echo.shop.mesh", 80, echo, "")
    );
    config.replace("protocol: hbone", "protocol: auto")
}

#[test]
fn a_new_process_that_hangs_with_connections_gets_none_of_them() {
    let backend = Backend::echo();
    let line = Line(Gateway::start(&config(&backend, "").replace("timeout: 5s", "timeout: 60s")));
    let mut client = open(line.address());
    let mut new = scripted(&line);
    drop(new.until("offered"));
    new.send(&json!({"type": "ready"}), &[], &[]);
    drop(new.until("go"));
    new.send(&json!({"type": "serving", "taken": []}), &[], &[]);
    let given = new.until("connections");
    // Until it is known which process goes on with the connection, its bytes wait.
    works(&mut client);
    line.0.told("does not answer");
    // An answer that comes too late cannot be sent, so that no byte is read twice.
    let late = json!({"type": "taken", "stays": [null]}).to_string().into_bytes();
    let length = u32::try_from(late.len()).expect("short").to_le_bytes();
    assert!(new.send_raw(&[&length[..], &[0; 6], &late].concat(), &[]).is_err());
    drop(given);
    works(&mut client);
}

/// Serves as a new process that takes connections and knows what to do with them.
#[test]
fn a_record_says_all_that_another_program_needs() {
    let backend = Backend::echo();
    let line = Line::start(&backend, "");
    let mut clients: Vec<TcpStream> = (0..130).map(|_| open(line.address())).collect();
    let mut new = scripted(&line);
    drop(new.until("offered"));
    // A second new process is refused meanwhile.
    let second =
        Handover::new(UnixStream::connect(line.0.folder().join("state/upgrade.sock")).expect("connected"));
    assert_eq!({ second }.try_receive().expect("an answer").json["type"], "abort");
    new.send(&json!({"type": "ready"}), &[], &[]);
    drop(new.until("go"));
    new.send(&json!({"type": "serving", "taken": []}), &[], &[]);
    drop(new.until("committed"));
    let mut all = Vec::new();
    while all.len() < clients.len() {
        let given = new.until("connections");
        let records = given.json["records"].as_array().expect("a list").clone();
        assert!(records.len() <= 120 && given.descriptors.len() == 2 * records.len());
        new.send(&json!({"type": "taken", "stays": vec![Value::Null; records.len()]}), &[], &[]);
        let mut sockets = given.descriptors.into_iter();
        for record in records {
            all.push((record, sockets.next().expect("two"), sockets.next().expect("two")));
        }
    }
    for (record, client, endpoint) in &all {
        let connection = &record["connection"];
        assert_eq!(connection["route"], NAME, "{record}");
        assert_eq!(connection["endpoint"], backend.address.to_string());
        assert!(connection["bytes_up"] == connection["bytes_down"] && record["answered"] == true, "{record}");
        // The scripted process relays by hand.
        let (mut client, mut endpoint) = (
            TcpStream::from(client.try_clone().expect("a copy")),
            TcpStream::from(endpoint.try_clone().expect("a copy")),
        );
        let source = connection["source"].as_str().expect("an address");
        let source: SocketAddr = source.parse().expect("an address");
        let ours = clients.iter_mut().find(|one| one.local_addr().expect("bound") == source).expect("ours");
        client.set_nonblocking(false).expect("set");
        endpoint.set_nonblocking(false).expect("set");
        ours.write_all(b"by hand").expect("sent");
        let mut bytes = [0; 7];
        for (from, to) in [(0, 1), (1, 0)] {
            let ends = [&mut client, &mut endpoint];
            let [a, b] = ends;
            let (from, to) = if (from, to) == (0, 1) { (a, b) } else { (b, a) };
            from.read_exact(&mut bytes).expect("read");
            to.write_all(&bytes).expect("sent");
        }
        ours.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"by hand");
    }
    drop(new.until("passed"));
    drop(new.until("left"));
}

/// A scripted old process, whose new process is real.
struct Old {
    folder: tempfile::TempDir,
    socket: UnixListener,
    edge: TcpListener,
    child: std::process::Child,
}

impl Old {
    fn start(backend: &Backend) -> Self {
        Self::start_with(&config(backend, ""))
    }

    fn start_with(config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).expect("set");
        let socket = UnixListener::bind(folder.path().join("upgrade.sock")).expect("bound");
        let edge = TcpListener::bind("127.0.0.1:0").expect("a port");
        edge.set_nonblocking(true).expect("set");
        let text = format!("admin: {{bind: \"127.0.0.1:0\"}}\nworkers: 1\n{config}");
        std::fs::write(folder.path().join("isthmus.yaml"), text).expect("written");
        let child = Command::new(BINARY)
            .args(["run", "-c", "isthmus.yaml", "--take-over", "upgrade.sock"])
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::from(std::fs::File::create(folder.path().join("log")).expect("a file")))
            .spawn()
            .expect("it starts");
        Self { folder, socket, edge, child }
    }

    /// Greets the new process as a process with this id, and offers the socket of its listener.
    fn greet(&self, process: u32) -> Handover {
        self.greet_with(process, &json!({"type": "offered"}))
    }

    /// Greets the new process, and ends the offer with this message.
    fn greet_with(&self, process: u32, offered: &Value) -> Handover {
        let mut new = Handover::new(self.socket.accept().expect("a new process").0);
        assert_eq!(new.until("hello").json["protocol"], 1);
        let welcome = json!({"type": "welcome", "protocol": 1, "version": "0.0.1", "process": process, "instance": "one"});
        new.send(&welcome, &[], &[]);
        let sockets = json!([{"kind": "listener", "key": "127.0.0.1:0"}, {"kind": "unheard of", "key": ""}]);
        let edge = self.edge.as_fd();
        new.send(&json!({"type": "sockets", "sockets": sockets}), &[], &[edge, edge]);
        new.send(offered, &[], &[]);
        new
    }

    fn serve(&self) -> Handover {
        let mut new = self.greet(std::process::id());
        drop(new.until("ready"));
        let counters = json!([
            {"name": "isthmus_config_reloads_total", "labels": [["result", "applied"]], "by": 7},
            {"name": "of_another_version_total", "labels": [], "by": 7},
        ]);
        new.send(&json!({"type": "counters", "counters": counters, "histograms": []}), &[], &[]);
        new.send(&json!({"type": "go", "next_id": 1_000_000}), &[], &[]);
        let serving = new.until("serving").json;
        assert_eq!(serving["taken"], json!([{"kind": "listener", "key": "127.0.0.1:0"}]));
        new.send(&json!({"type": "committed"}), &[], &[]);
        new
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).expect("a log")
    }

    fn admin(&self) -> SocketAddr {
        eventually("the admin address", || {
            let log = self.log();
            let line = log.lines().rev().find(|line| line.contains("listening listener=\"admin\""))?;
            line.rsplit("address=").next()?.trim().parse().ok()
        })
    }
}

impl Drop for Old {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- log of the new process\n{}", self.log());
        }
    }
}

/// A connection as an old process has it: what the client and the endpoint hold, and what the old process holds.
struct Pair {
    client: TcpStream,
    endpoint: TcpStream,
    inner: [TcpStream; 2],
    record: Value,
}

fn pair(backend: &Backend, id: u64) -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let both = || {
        let outer = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let inner = listener.accept().expect("accepted").0;
        inner.set_nonblocking(true).expect("set");
        outer.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        (outer, inner)
    };
    let ((client, of_client), (endpoint, of_endpoint)) = (both(), both());
    let source = client.local_addr().expect("bound").to_string();
    let address = backend.address.to_string();
    let direction = json!({"read_out": false, "ended": false, "urgent": false, "owed": null});
    let connection = json!({
        "id": id, "time": {"secs_since_epoch": 1_700_000_000, "nanos_since_epoch": 0}, "listener": "edge", "protocol": "sni",
        "source": source, "sni": "612e74657374", "route": NAME, "endpoint": address, "attempts": 1, "cancelled": false,
        "duration": {"secs": 0, "nanos": 0}, "bytes_up": 100, "bytes_down": 200,
    });
    let record = json!({
        "connection": connection, "permit": "route", "endpoint": {"group": NAME, "first": address},
        "age": {"secs": 3, "nanos": 0}, "idle": 2, "up": direction, "down": direction, "answered": true, "failure": null,
    });
    Pair { client, endpoint, inner: [of_client, of_endpoint], record }
}

#[test]
fn records_of_another_version_stay_and_lies_change_nothing() {
    let backend = Backend::echo();
    let old = Old::start(&backend);
    let mut new = old.serve();
    let mut pairs: Vec<Pair> = (0..5).map(|id| pair(&backend, 17 + id)).collect();
    pairs[1].record["connection"]["later"] = json!(1);
    pairs[2].record["up"].as_object_mut().expect("an object").remove("ended");
    pairs[3].record["connection"]["listener"] = json!("nobody");
    let held = json!([[3, 4], [1, 0], [0, 0], [0, 1], [0, 0]]);
    let records: Vec<Value> = pairs.iter().map(|pair| pair.record.clone()).collect();
    let descriptors: Vec<_> = pairs.iter().flat_map(|pair| pair.inner.iter().map(AsFd::as_fd)).collect();
    new.send(&json!({"type": "connections", "records": records, "held": held}), b"abcdefgXY", &descriptors);
    let taken = new.until("taken").json;
    let stays = taken["stays"].as_array().expect("a list");
    let stays: Vec<bool> = stays.iter().map(|one| !one.is_null()).collect();
    assert_eq!(stays, [false, true, true, true, false], "{taken}");
    // What the old process held goes first.
    let Pair { client, endpoint, .. } = &mut pairs[0];
    let mut bytes = [0; 4];
    endpoint.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    endpoint.read_exact(&mut bytes[..3]).expect("read");
    assert_eq!(&bytes[..3], b"abc");
    client.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"defg");
    client.write_all(b"more").expect("sent");
    endpoint.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"more");
    // The others are still those of the old process, which has kept its descriptors.
    for pair in &mut pairs[1..4] {
        pair.client.write_all(b"here").expect("sent");
        pair.inner[0].set_nonblocking(false).expect("set");
        pair.inner[0].read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"here");
    }
    let admin = old.admin();
    let get = |path| http(admin, "GET", path).1;
    let live: Value = serde_json::from_str(&get("/api/v1/connections")).expect("JSON");
    let of = |id: u64| live.as_array().expect("a list").iter().find(|one| one["id"] == id).cloned();
    let first = of(17).expect("it is live");
    assert!(of(18).is_none() && of(21).is_some(), "{live}");
    assert!(first["duration"].as_f64().is_none_or(|seconds| seconds >= 3.0), "{first}");
    assert_eq!((&first["bytes_up"], &first["bytes_down"]), (&json!(107), &json!(204)), "{first}");
    let metrics = eventually("the count of moved connections", || {
        let metrics = get("/metrics");
        metrics.contains("isthmus_upgrade_connections_total{outcome=\"moved\"} 2\n").then_some(metrics)
    });
    assert!(metrics.contains("isthmus_config_reloads_total{result=\"applied\"} 7\n"), "{metrics}");
    assert!(!metrics.contains("of_another_version_total"));
    // Parts that do not fit together end the conversation, and nothing else.
    let lie = pair(&backend, 99);
    let message = json!({"type": "connections", "records": [lie.record], "held": [[usize::MAX, 2]]});
    new.send(&message, b"x", &[lie.inner[0].as_fd(), lie.inner[1].as_fd()]);
    assert!(new.try_receive().is_err(), "no answer");
    let mut client = open(old.edge.local_addr().expect("bound"));
    works(&mut client);
    let Pair { client, endpoint, .. } = &mut pairs[0];
    client.write_all(b"last").expect("sent");
    endpoint.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"last");
}

#[test]
fn an_old_process_that_dies_leaves_its_sockets_to_the_new_one() {
    let backend = Backend::echo();
    let dead = Command::new("true").spawn().map(|mut child| (child.id(), child.wait())).expect("it runs").0;
    let steps: [&dyn Fn(&mut Handover); 3] = [&|_| {}, &|new| drop(new.until("ready")), &|new| {
        drop(new.until("ready"));
        new.send(&json!({"type": "go", "next_id": 5}), &[], &[]);
    }];
    for (number, step) in steps.into_iter().enumerate() {
        let old = Old::start(&backend);
        let mut new = old.greet(dead);
        step(&mut new);
        drop(new);
        let address = old.edge.local_addr().expect("bound");
        works(&mut open(address));
        let admin = old.admin();
        assert_eq!(http(admin, "GET", "/readyz"), (200, "ok\n".to_owned()), "step {number}");
    }
}

#[test]
fn a_new_process_waits_for_names_only_if_the_program_of_the_old_one_tells_none() {
    let (backend, servers) = (Backend::echo(), NameServer::start());
    servers.answer("db.test", Answer::Failure);
    let old = |start_timeout: &str| {
        Old::start_with(&format!(
            "listeners: [{{name: edge, bind: \"127.0.0.1:0\"}}]\nroutes: {{{NAME}: \"db.test:{}\"}}\n\
             dns: {{servers: [\"{}\"]}}\naggregator: {{startTimeout: {start_timeout}}}\n",
            backend.address.port(),
            servers.address
        ))
    };
    // What the old process does not know, nobody waits for.
    let tells = old("10m");
    drop(tells.greet_with(std::process::id(), &json!({"type": "offered", "beliefs": []})).until("ready"));
    let asked = servers.asked("db.test");
    let silent = old("10m");
    let mut new = silent.greet(std::process::id());
    eventually("questions in vain", || (servers.asked("db.test") >= asked + 8).then_some(()));
    new.stream.set_nonblocking(true).expect("set");
    let received = new.try_receive().map(|message| message.json);
    assert_eq!(received.expect_err("nothing").kind(), std::io::ErrorKind::WouldBlock);
    new.stream.set_nonblocking(false).expect("set");
    servers.points("db.test", backend.address.ip());
    drop(new.until("ready"));
    servers.answer("db.test", Answer::Failure);
    drop(old("1s").greet(std::process::id()).until("ready"));
}

#[test]
fn a_new_process_ends_when_the_old_one_goes_on() {
    let backend = Backend::echo();
    for abort in [true, false] {
        let mut old = Old::start(&backend);
        let mut new = old.greet(std::process::id());
        drop(new.until("ready"));
        if abort {
            new.send(&json!({"type": "abort", "why": "no reason"}), &[], &[]);
        }
        // Without a word: the old process lives, so only one of the two may serve.
        drop(new);
        let child = &mut old.child;
        let status = eventually("its end", || child.try_wait().expect("a child"));
        assert_eq!(status.code(), Some(1), "{}", old.log());
        assert!(!abort || old.log().contains("no reason"), "{}", old.log());
    }
    // Nobody listens there.
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("isthmus.yaml"), config(&backend, "")).expect("written");
    let done = Command::new(BINARY)
        .args(["run", "-c", "isthmus.yaml", "--take-over", "nowhere.sock"])
        .current_dir(folder.path())
        .output()
        .expect("it runs");
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("nowhere.sock"), "{done:?}");
}
