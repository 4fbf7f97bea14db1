//! Operators' commands: signals, reload, drain, log level. The gateway obeys them in every state, or refuses them with a
//! reason.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::support::backend::Backend;
use crate::support::client::connect;
use crate::support::gateway::{BINARY, Gateway, http};
use crate::support::hang::Hang;
use crate::support::{eventually, skip};

fn config(more: &str) -> String {
    format!("listen: \"127.0.0.1:0\"\nroutes: {{live.test: \"127.0.0.1:9\"}}\n{more}")
}

/// Orders a reload of another config, which must succeed, and returns the response.
#[track_caller]
fn reload(gateway: &Gateway, text: &str) -> String {
    gateway.write_config(text);
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 200, "{body}");
    body
}

fn needs_restart(gateway: &Gateway) -> Vec<String> {
    let list = gateway.json("/api/v1/status")["config"]["needs_restart"].clone();
    serde_json::from_value(list).expect("a list of keys")
}

#[test]
fn a_log_level_with_a_typing_error_is_refused_and_changes_nothing() {
    let gateway = Gateway::start(&config(""));
    for level in ["debugg", "", "info,isthmus"] {
        let (status, body) = gateway.post(&format!("/api/v1/log-level?level={level}"));
        assert_eq!(status, 400, "{level}: {body}");
    }
    let (_, body) = gateway.post("/api/v1/log-level?level=debugg");
    assert!(body.contains("did you mean \\\"debug\\\"?"), "{body}");
    // The gateway goes on logging at the old level.
    gateway.reload(&config("timeouts: {idle: 1h}\n"));
    gateway.told("config applied");
    assert_eq!(gateway.post("/api/v1/log-level?level=error").0, 200);
}

#[test]
fn needs_restart_compares_the_file_with_the_process() {
    let gateway = Gateway::start(&config(""));
    let (other, same) = (config("workers: 1\n"), config(""));
    assert!(reload(&gateway, &other).contains("applied, except workers, which takes effect after a restart"));
    assert_eq!(needs_restart(&gateway), ["workers"]);
    // Another reload of the same value does not change the running process.
    let again = config("workers: 1\ntimeouts: {idle: 1h}\n");
    assert!(reload(&gateway, &again).contains("except workers"));
    assert_eq!(needs_restart(&gateway), ["workers"]);
    // A rejected file does not change `needs_restart` either.
    gateway.write_config("nonsense: 1\n");
    assert_eq!(gateway.post("/api/v1/reload").0, 400);
    assert_eq!(needs_restart(&gateway), ["workers"]);
    // No restart is needed for the value with which the process runs.
    assert!(reload(&gateway, &same).contains("\"applied\""));
    assert!(needs_restart(&gateway).is_empty());
}

#[test]
fn a_control_plane_without_listeners_becomes_ready() {
    let gateway = Gateway::start("xds: {bind: \"127.0.0.1:0\"}\n");
    let (status, body) = gateway.get("/readyz?verbose");
    assert_eq!(status, 200, "{body}");
    // A reload may add a listener.
    let backend = Backend::echo();
    let listening = format!(
        "xds: {{bind: \"127.0.0.1:0\"}}\nlisten: \"127.0.0.1:0\"\nroutes: {{\"-\": \"{}\"}}\n",
        backend.address
    );
    gateway.reload(&listening);
    eventually("it listens", || std::net::TcpStream::connect(gateway.listener("default")).ok());
}

/// Prints how long a command took. On a busy machine, the time alone says little.
fn timed<T>(order: &str, obey: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = obey();
    eprintln!("{order}: obeyed within {:?}", began.elapsed());
    result
}

/// Sends every command that does not end the process, and then `end`, which does. `reloads` says whether the config can be
/// read.
fn obeys(mut gateway: Gateway, end: &str, reloads: bool) {
    timed("POST log-level", || assert_eq!(gateway.post("/api/v1/log-level?level=debug").0, 200));
    timed("SIGUSR1", || {
        let reopened = || gateway.log().iter().filter(|line| line.contains("log files reopened")).count();
        let before = reopened();
        gateway.signal("USR1");
        eventually("logs reopened", || (reopened() > before).then_some(()));
    });
    timed("SIGHUP", || {
        let applied = || gateway.metric("isthmus_config_reloads_total", &[]);
        let before = applied();
        gateway.signal("HUP");
        if reloads {
            eventually("it is reloaded", || (applied() > before).then_some(()));
        } else {
            assert_eq!(gateway.post("/api/v1/log-level?level=info").0, 200);
        }
    });
    timed(end, || {
        if end == "POST /drain" {
            assert_eq!(gateway.post("/drain").0, 202);
        } else {
            gateway.signal(end);
        }
        assert!(gateway.ended().success());
    });
}

const ENDS: [&str; 3] = ["TERM", "INT", "POST /drain"];

#[test]
fn orders_are_obeyed_during_the_start() {
    for end in ENDS {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("hung.yaml"), "services: []\n").expect("written");
        let Some(_hang) = Hang::of(&folder.path().join("hung.yaml")) else { return };
        let registry =
            "registries: [{file: {path: hung.yaml, cluster: west}}]\naggregator: {startTimeout: 1h}\n";
        let gateway = Gateway::start_unready(folder, &config(registry));
        assert_eq!(gateway.get("/readyz").0, 503);
        obeys(gateway, end, false);
    }
}

#[test]
fn a_reload_that_is_asked_for_during_the_start_is_done_after_it() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("hung.yaml"), "services: []\n").expect("written");
    let Some(_hang) = Hang::of(&folder.path().join("hung.yaml")) else { return };
    let registry = "registries: [{file: {path: hung.yaml, cluster: west}}]\naggregator: {startTimeout: 2s}\n";
    let gateway = Gateway::start_unready(folder, &config(registry));
    gateway.signal("HUP");
    // The response arrives when the reload is done.
    assert_eq!(gateway.post("/api/v1/reload").0, 200);
    assert_eq!(gateway.get("/readyz").0, 200);
    // One reload may be done for both requests, and the log then names both causes in the order in which they came.
    let causes = ["SIGHUP", "SIGHUP, POST /api/v1/reload", "POST /api/v1/reload, SIGHUP"];
    let causes = causes.map(|causes| format!("\"why\":\"{causes}\""));
    eventually("the signal is obeyed", || {
        gateway.log().iter().any(|line| causes.iter().any(|why| line.contains(why))).then_some(())
    });
}

#[test]
fn orders_are_obeyed_while_the_config_cannot_be_read_to_its_end() {
    for end in ENDS {
        let gateway = Gateway::start(&config(""));
        let Some(_hang) = Hang::of(&gateway.config_path()) else { return };
        gateway.signal("HUP");
        obeys(gateway, end, false);
    }
}

#[test]
fn a_reading_of_the_config_that_hangs_is_no_obstacle_to_another() {
    let gateway = Gateway::start(&config(""));
    let Some(_hang) = Hang::of(&gateway.config_path()) else { return };
    gateway.signal("HUP");
    // Another file replaces the hanging one, as if the mount had been renewed.
    timed("reload", || assert!(reload(&gateway, &config("timeouts: {idle: 1h}\n")).contains("applied")));
}

#[test]
fn signals_are_obeyed_while_the_first_reading_of_the_config_hangs() {
    for end in ["TERM", "INT"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("isthmus.yaml");
        std::fs::write(&path, config("")).expect("written");
        let Some(_hang) = Hang::of(&path) else { return };
        let mut child = run(&path);
        let process = child.id().to_string();
        eventually("it reads", || {
            let tasks = std::fs::read_dir(format!("/proc/{process}/task")).ok()?;
            let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
            names.map(|name| name.starts_with("isthmus-files")).find(|reads| *reads).map(drop)
        });
        for signal in ["HUP", "USR1", end] {
            let sent = Command::new("kill").args(["-s", signal, &process]).status();
            assert!(sent.expect("kill").success());
        }
        let status = timed(end, || eventually("the end", || child.try_wait().expect("a child")));
        assert!(status.success(), "{status}");
    }
}

#[test]
fn signals_are_obeyed_while_the_process_to_take_over_from_does_not_answer() {
    for end in ["TERM", "INT"] {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .expect("set");
        std::fs::write(folder.path().join("isthmus.yaml"), config("")).expect("written");
        let socket = folder.path().join("upgrade.sock");
        let silent = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
        let mut command = Command::new(BINARY);
        command.args(["run", "-c", "isthmus.yaml", "--take-over"]).arg(&socket).current_dir(folder.path());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let _connected = silent.accept().expect("a new process");
        for signal in ["HUP", "USR1", "USR2", end] {
            let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
            assert!(sent.expect("kill").success());
        }
        let status = timed(end, || eventually("the end", || child.try_wait().expect("a child")));
        assert!(status.success(), "{status}");
    }
}

#[test]
fn a_drain_without_a_target_stops_the_gateway_and_names_the_command_that_does() {
    for (command, warns) in [("stop", false), ("drain", true)] {
        let mut gateway = Gateway::start(&config(""));
        let admin = format!("http://{}", gateway.admin());
        let done = Command::new(BINARY).args([command, "--admin", &admin]).output().expect("it runs");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(
            done.status.success() && said.contains("`isthmus stop` stops the gateway") == warns,
            "{said}"
        );
        assert_eq!(done.stdout, b"draining\n");
        assert!(gateway.ended().success());
    }
}

#[test]
fn a_config_that_is_no_file_is_refused_at_once() {
    let gateway = Gateway::start(&config(""));
    std::fs::remove_file(gateway.config_path()).expect("removed");
    let made = Command::new("mkfifo").arg(gateway.config_path()).status().expect("mkfifo");
    assert!(made.success());
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 400);
    assert!(body.contains("it is a pipe, not a regular file"), "{body}");
    obeys(gateway, "TERM", true);
}

/// Returns a gateway that has lost lines of its access log, which is a pipe, and the other end of that pipe.
fn with_a_log_that_nobody_reads() -> (Gateway, std::fs::File) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("isthmus.yaml"), full_config("")).expect("written");
    let made = Command::new("mkfifo").arg(folder.path().join("log")).status().expect("mkfifo");
    assert!(made.success());
    // The file is opened for reading and writing, so that the open does not block; nobody reads from it.
    let log = std::fs::OpenOptions::new().read(true).write(true).open(folder.path().join("log"));
    let log = log.expect("opened");
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" run -c isthmus.yaml >log", BINARY]).current_dir(folder.path());
    let gateway = Gateway::spawn(command, folder);
    fill_the_log(&gateway);
    (gateway, log)
}

#[test]
fn orders_are_obeyed_while_nobody_reads_the_log() {
    for end in ENDS {
        let (gateway, _log) = with_a_log_that_nobody_reads();
        gateway.told("lines of the access log were lost: the reader of the log does not read");
        obeys(gateway, end, true);
    }
}

#[test]
fn a_log_that_nobody_reads_is_given_up_for_another_by_a_reload() {
    let (gateway, _log) = with_a_log_that_nobody_reads();
    // Failures are listed also if their log lines were lost.
    assert_eq!(gateway.json("/api/v1/failures").as_array().map(Vec::len), Some(1000));
    std::fs::write(gateway.config_path(), full_config("accessLog: {path: other.log}")).expect("written");
    assert_eq!(gateway.post("/api/v1/reload").0, 200);
    nonsense(&gateway);
    let other = gateway.folder().join("other.log");
    eventually("the other log", || {
        let text = std::fs::read_to_string(&other).ok()?;
        text.lines().next_back().is_some_and(|line| line.contains("not_tls")).then_some(())
    });
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&other).expect("there").permissions());
    assert_eq!(mode & 0o137, 0, "{mode:o}");
}

/// Returns a whole config, including the part that [`Gateway::start`] would add, with further keys of `telemetry`.
fn full_config(telemetry: &str) -> String {
    let more = if telemetry.is_empty() { String::new() } else { format!(", {telemetry}") };
    config(&format!(
        "admin: {{bind: \"127.0.0.1:0\"}}\nworkers: 2\ntelemetry: {{log: {{format: json}}{more}}}\n"
    ))
}

/// Makes a connection whose end is a line in the log.
fn nonsense(gateway: &Gateway) {
    let mut client = connect(gateway.listener("default"));
    // The write may fail, because the gateway may close the connection as soon as it sees that this is not TLS.
    let _ = client.write_all(b"GET / HTTP/1.1\r\n\r\n");
    let _ = client.read_to_end(&mut Vec::new());
}

/// Makes connections until the gateway loses log lines.
fn fill_the_log(gateway: &Gateway) {
    let address = gateway.listener("default");
    let full = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    if full.load(Ordering::Relaxed) {
                        return;
                    }
                    let mut client = connect(address);
                    let _ = client.write_all(b"GET / HTTP/1.1\r\n\r\n");
                    let _ = client.read_to_end(&mut Vec::new());
                }
            });
        }
        eventually("lines are lost", || {
            (gateway.metric("isthmus_access_log_dropped_total", &[]) > 0.0).then_some(())
        });
        full.store(true, Ordering::Relaxed);
    });
}

#[test]
fn orders_are_obeyed_and_lost_lines_counted_while_the_disk_is_full() {
    for end in ENDS {
        let gateway = Gateway::start(&full_config("accessLog: {path: /dev/full}"));
        (0..20).for_each(|_| nonsense(&gateway));
        eventually("all are counted", || {
            (gateway.metric("isthmus_access_log_dropped_total", &[]) >= 20.0).then_some(())
        });
        gateway.told("lines of the access log were lost: cannot write: No space left on device");
        obeys(gateway, end, true);
    }
}

#[test]
fn an_access_log_that_cannot_be_opened_is_an_error_at_start_and_at_reload() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    std::fs::write(&path, full_config("accessLog: {path: nope/a.log}")).expect("written");
    let output = run(&path).wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("telemetry.accessLog.path: cannot open") && said.contains("nope/a.log"), "{said}");
    let validated = Command::new(BINARY).args(["validate", "--strict"]).arg(&path).output().expect("it runs");
    let said = String::from_utf8_lossy(&validated.stdout);
    assert!(!validated.status.success() && said.contains("nope/a.log"), "{said}");
    // A reload with such a config changes nothing.
    let gateway = Gateway::start(&full_config(""));
    gateway.write_config(&full_config("accessLog: {path: nope/a.log}").replace("live.test", "new.test"));
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 400, "{body}");
    assert!(body.contains("nope/a.log"), "{body}");
    assert_eq!(gateway.json("/api/v1/explain?sni=new.test")["verdict"], "refused");
    nonsense(&gateway);
    gateway.logged("the log goes on", |line| line["reason"] == "not_tls");
}

#[test]
fn orders_are_obeyed_while_a_file_with_very_many_mistakes_is_read() {
    let mistakes: String = (0..20_000).map(|index| format!("tiemouts{index}: {{idle: 1h}}\n")).collect();
    for end in ENDS {
        let gateway = Gateway::start(&config(""));
        gateway.write_config(&format!("{}{mistakes}", config("")));
        gateway.signal("HUP");
        obeys(gateway, end, false);
    }
    let gateway = Gateway::start(&config(""));
    gateway.write_config(&format!("{}{mistakes}", config("")));
    let (status, body) = timed("POST reload", || gateway.post("/api/v1/reload"));
    assert_eq!(status, 400);
    let problems: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let problems = problems["problems"].as_array().expect("a list");
    assert_eq!(problems.len(), 101);
    assert!(problems[100].as_str().is_some_and(|text| text.contains("and 19900 more")), "{}", problems[100]);
}

#[test]
fn a_successor_serves_at_once_while_its_predecessor_drains() {
    let backend = Backend::echo();
    let listen = |listen: &str, admin: &str, health: &str| {
        format!(
            "listen: \"{listen}\"\nroutes: {{\"*\": \"{}\"}}\ndrain: {{timeout: 1h}}\nadmin: {{bind: \"{admin}\"}}\n\
             telemetry: {{log: {{format: json}}, metrics: {{bind: \"{health}\"}}}}\nworkers: 2\n",
            backend.address
        )
    };
    let any = "127.0.0.1:0";
    let mut before = Gateway::start(&listen(any, any, any));
    let own = |name: &str| before.listener(name).to_string();
    let (mesh, admin, metrics) = (own("default"), own("admin"), own("metrics"));
    let same = listen(&mesh, &admin, &metrics);
    // A second gateway cannot bind the first gateway's addresses until the first gateway drains.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    std::fs::write(&path, listen(any, &admin, &metrics)).expect("written");
    let output = run(&path).wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("Address already in use") && !output.status.success(), "{said}");
    // This connection keeps the first gateway from ending its drain.
    let hello = crate::support::raw::hello(b"live.test");
    let mut held = connect(mesh.parse().expect("an address"));
    held.write_all(&hello).expect("sent");
    let mut echo = vec![0; hello.len()];
    held.read_exact(&mut echo).expect("passed on");
    before.signal("TERM");
    before.told("\"draining\"");
    std::fs::write(&path, same).expect("written");
    let mut after = run(&path);
    let mut log = BufReader::new(after.stderr.take().expect("piped")).lines().map_while(Result::ok);
    let warned = log.by_ref().find(|line| line.contains("still uses the address"));
    assert!(warned.is_some());
    assert!(log.by_ref().any(|line| line.contains("\"default\"") && line.contains("listening")));
    let mut client = connect(mesh.parse().expect("an address"));
    client.write_all(&hello).expect("sent");
    client.read_exact(&mut echo).expect("passed on by the successor");
    assert!(before.is_running());
    // The successor gets its admin address when the predecessor has ended.
    drop(held);
    assert!(before.ended().success());
    assert!(log.by_ref().any(|line| line.contains("\"admin\"") && line.contains("listening")));
    let (status, _) = http(admin.parse().expect("an address"), "POST", "/drain");
    assert_eq!(status, 202);
    drop(client);
    assert!(eventually("its end", || after.try_wait().expect("a child")).success());
}

#[test]
fn too_few_threads_are_an_error_and_no_panic() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    std::fs::write(&path, full_config("")).expect("written");
    let (mut refused, mut started) = (0, 0);
    for gibibytes in [2_u64, 4, 6, 8, 10, 14, 18, 40] {
        let mut command = Command::new("prlimit");
        command.arg(format!("--as={}", gibibytes << 30)).arg(BINARY).arg("run").arg("-c").arg(&path);
        // Each thread reserves half a gibibyte of address space.
        command.env("RUST_MIN_STACK", (512_u64 << 20).to_string());
        let Ok(mut child) = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn() else {
            return skip("too few threads: there is no prlimit");
        };
        let mut lines = Vec::new();
        for line in BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok) {
            let listens = line.contains("\"default\"") && line.contains("listening");
            lines.push(line);
            if listens {
                break;
            }
        }
        assert!(lines.iter().all(|line| !line.contains("panicked")), "{gibibytes} GiB: {lines:?}");
        if lines.last().is_some_and(|line| line.contains("listening")) {
            started += 1;
            child.kill().expect("killed");
            child.wait().expect("it ends");
        } else {
            refused += 1;
            assert_eq!(child.wait().expect("it ends").code(), Some(1), "{lines:?}");
            assert!(lines.iter().any(|line| line.contains("cannot start")), "{gibibytes} GiB: {lines:?}");
        }
    }
    assert!(refused > 0 && started > 0, "{refused} refused, {started} started");
}

/// Starts the binary with a config; its log is piped.
fn run(path: &Path) -> Child {
    let mut command = Command::new(BINARY);
    command.arg("run").arg("-c").arg(path).env_remove("RUST_LOG").stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}
