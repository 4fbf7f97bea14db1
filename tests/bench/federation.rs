//! Measures how much a peer at ten times its limits delays another peer: `cargo bench --bench federation`.
//!
//! East has two peers, west and south, each a gateway of the real binary with a CA of its own. West exports ten times as many
//! services as `limits.services` admits, and changes some of them all the time; clients of west hold and try to open ten times
//! as many connections as `limits.connections` and `limits.newPerSecond` admit. Meanwhile the benchmark times the calls of
//! south's clients through east, and the changes of south's service until east has published them.
//!
//! Four kinds of phases alternate: west does nothing; it stays within its limits; it stays within them while a bare listener on
//! east's processor accepts and refuses the connections in excess; and east gets them all. Each turn gives ratios, and the printed
//! ratio is the median over all turns. The third kind shows what the clients in excess cost on the same two processors without
//! east. East runs on the first processor, because the other programs would run on other machines in practice. West's gateway
//! and clients have the lowest priority on the second processor, so that south's clients and the servers do not wait for them.
//! The benchmark fails only if a connection of south is refused, or if west was never above its limits.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "median.rs"]
mod median;
#[path = "processor.rs"]
mod processor;
#[path = "../support/mod.rs"]
mod support;

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use median::median;
use processor::{ENDS, measured, pin};
use support::backend::Backend;
use support::far::far_as;
use support::gateway::Gateway;
use support::organisation::{Organisation, free_port, start};
use support::raw::{self, connect_from};
use support::within;

/// If this environment variable is set, the process plays the clients of west or the bare listener; see [`play`].
const ROLE: &str = "ISTHMUS_BENCH_ROLE";
const WEST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 77);
const SOUTH: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 88);
/// West's limits in east.
const SERVICES: usize = 1_000;
const CONNECTIONS: usize = 100;
const NEW_PER_SECOND: usize = 100;
/// How many times its limits west asks for.
const EXCESS: usize = 10;
/// The number of west's services that change. East admits these services, because their names come first.
const CHANGING: usize = 50;
/// The time between two changes of west's services.
const CHANGE_EVERY: Duration = Duration::from_millis(50);
/// The round-trip times of south's calls over a distance: within a city, and across a continent.
const NEAR: Duration = Duration::from_millis(2);
const FAR: Duration = Duration::from_millis(40);
/// The pause before each call of south.
const PAUSE: Duration = Duration::from_millis(2);

/// How much is measured.
struct Plan {
    turns: usize,
    calls: usize,
    near_calls: usize,
    far_calls: usize,
    changes: usize,
}

const WHOLE: Plan = Plan { turns: 7, calls: 3_000, near_calls: 1_500, far_calls: 150, changes: 150 };
const SMALL: Plan = Plan { turns: 3, calls: 1_000, near_calls: 600, far_calls: 50, changes: 50 };

fn main() {
    if let Ok(role) = std::env::var(ROLE) {
        return play(&role);
    }
    let plan = if std::env::var_os("ISTHMUS_BENCH_SMALL").is_some() { SMALL } else { WHOLE };
    pin(ENDS);
    let scene = Scene::start();
    // By row and turn, the figures of the four kinds of phases.
    let mut table: [Vec<[Duration; 4]>; 4] = Default::default();
    for _ in 0..plan.turns {
        let phases =
            [None, Some(Excess::None), Some(Excess::OnBareListener), Some(Excess::OnEast)].map(|west| {
                let _west = west.map(|excess| scene.call_from_west(excess));
                [
                    p99((0..plan.calls).map(|_| scene.call(SOUTH, scene.address)).collect()),
                    p99((0..plan.near_calls).map(|_| scene.call(SOUTH, scene.near)).collect()),
                    p99((0..plan.far_calls).map(|_| scene.call(SOUTH, scene.far)).collect()),
                    p99((0..plan.changes).map(|number| scene.change(number)).collect()),
                ]
            });
        for (row, turns) in table.iter_mut().enumerate() {
            turns.push(std::array::from_fn(|kind| phases[kind][row]));
        }
    }
    println!(
        "west asks for {EXCESS} times its limits: {} services of {SERVICES}, {} connections of {CONNECTIONS}, {} new ones a second \
         of {NEW_PER_SECOND}\n",
        SERVICES * EXCESS,
        CONNECTIONS * EXCESS,
        NEW_PER_SECOND * EXCESS
    );
    println!(
        "| p99 of south | west silent | within its limits | the excess on a bare listener | the excess on east |"
    );
    println!("|---|---|---|---|---|");
    let rows = [
        "a call, on loopback".to_owned(),
        format!("a call, over {} ms", NEAR.as_millis()),
        format!("a call, over {} ms", FAR.as_millis()),
        "a change, until it is published in east".to_owned(),
    ];
    for (what, turns) in rows.iter().zip(&table) {
        let cells: Vec<String> = (0..4)
            .map(|kind| {
                format!(
                    "{:.2} ms",
                    1e3 * median(turns.iter().map(|turn| turn[kind].as_secs_f64())).expect("turns")
                )
            })
            .collect();
        println!("| {what} | {} |", cells.join(" | "));
    }
    println!(
        "\n| the excess on east, in proportion to | west silent | within its limits | the excess on a bare listener |"
    );
    println!("|---|---|---|---|");
    for (what, turns) in rows.iter().zip(&table) {
        let cells: Vec<String> = (0..3)
            .map(|kind| {
                let ratios = || turns.iter().map(|turn| turn[3].as_secs_f64() / turn[kind].as_secs_f64());
                let (least, most) = (ratios().fold(f64::MAX, f64::min), ratios().fold(0.0, f64::max));
                format!("{:.3} ({least:.3} to {most:.3})", median(ratios()).expect("turns"))
            })
            .collect();
        println!("| {what} | {} |", cells.join(" | "));
    }
    scene.report();
}

/// East with both of its peers.
struct Scene {
    east: Gateway,
    west: Gateway,
    south: Gateway,
    address: SocketAddr,
    /// The same address over two distances, with south's source address.
    near: SocketAddr,
    far: SocketAddr,
}

/// Returns services with one endpoint each, as the text of a registry's file.
fn services(names: impl Iterator<Item = String>, weight: usize) -> String {
    let mut text = "services:\n".to_owned();
    for name in names {
        writeln!(
            text,
            "  - {{hostname: {name}.pay.svc.cluster.local, namespace: pay, ports: [{{name: p, port: 80}}], endpoints: \
             [{{address: 10.2.0.1, weight: {weight}}}]}}"
        )
        .expect("memory");
    }
    text
}

fn changing(prefix: &str, count: usize, weight: usize) -> String {
    services((0..count).map(|number| format!("{prefix}{number}")), weight)
}

fn replace(folder: &Path, text: &str) {
    let next = folder.join(".changing");
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join("changing.yaml")).expect("renamed");
}

impl Scene {
    fn start() -> Self {
        let [east, west, south] =
            ["east", "west", "south"].map(|name| Organisation::new(name, &format!("{name}.example")));
        let ports = [(); 3].map(|()| free_port());
        let backend = Backend::echo();
        let admits = |from: Ipv4Addr, name: &str, limits: &str| {
            format!(
                "    from: [{from}/32]\n    export: [{{services: [echo.shop.mesh], as: \"{{service}}.{{namespace}}.east.global\"}}]\n\
                 \x20   import: [{{services: [\"*.{name}.global\"]}}]\n{limits}"
            )
        };
        let limits = format!(
            "    limits: {{services: {SERVICES}, connections: {CONNECTIONS}, newPerSecond: {NEW_PER_SECOND}}}\n"
        );
        let config = format!(
            "workers: 1\n{}exports: [{{services: [\"*.mesh\"]}}]\npeers:\n{}{}services:\n  - {{hostname: echo.shop.mesh, \
             namespace: shop, ports: [{{name: p, port: 80, targetPort: {}, protocol: TLS}}], endpoints: [{{address: 127.0.0.1}}]}}\n",
            east.base(ports[0]),
            west.as_peer("accept: true", &admits(WEST, "west", &limits)),
            south.as_peer("accept: true", &admits(SOUTH, "south", "")),
            backend.address.port()
        );
        let gateway = measured(|| start(east.folder(&[&west, &south]), &config));
        let peer = |organisation: &Organisation, port: u16, more: &str, changing: &str| {
            let name = organisation.name;
            let export = format!(
                "    from: [127.0.0.1/32]\n    export: [{{services: [\"*.pay.svc.cluster.local\"], as: \"{{service}}.{{namespace}}.{name}.global\"}}]\n"
            );
            let config = format!(
                "workers: 1\n{}networks: {{net-{name}: {{gateways: [{{address: 127.0.0.1, sniPort: {port}, \
                 hbonePort: {port}}}]}}}}\nregistries: [{{file: {{path: changing.yaml, cluster: {name}, network: net-{name}}}}}, \
                 {{file: {{path: fixed.yaml, cluster: {name}-fixed, network: net-{name}}}}}]\npeers:\n{}",
                organisation.base(port),
                east.as_peer(&format!("dial: \"127.0.0.1:{}\"", ports[0]), &export)
            );
            let folder = organisation.folder(&[&east]);
            replace(folder.path(), changing);
            std::fs::write(folder.path().join("fixed.yaml"), more).expect("written");
            start(folder, &config)
        };
        let fixed = services((0..SERVICES * EXCESS - CHANGING).map(|number| format!("s{number}")), 1);
        let west = with_lowest_priority(|| peer(&west, ports[1], &fixed, &changing("a", CHANGING, 1)));
        let south = peer(&south, ports[2], "services: []\n", &changing("a", 1, 1));
        let address = gateway.listener("mesh");
        let over = |round_trip| far_as(SOUTH, address, round_trip);
        let scene = Self { near: over(NEAR), far: over(FAR), east: gateway, west, south, address };
        within(Duration::from_secs(60), "south's service", || (scene.weight() == Some(1.0)).then_some(()));
        within(Duration::from_secs(60), "west's services", || {
            let peers = scene.east.json("/api/v1/peers").to_string();
            peers.contains(&format!("more than {SERVICES} services")).then_some(())
        });
        scene
    }

    /// One call of a client: a connection, its hello, and the echo.
    fn call(&self, source: Ipv4Addr, address: SocketAddr) -> Duration {
        std::thread::sleep(PAUSE);
        let begun = Instant::now();
        let mut client = connect_from(source, address);
        let hello = raw::hello(b"echo.shop.east.global");
        let mut echoed = vec![0; hello.len()];
        client.write_all(&hello).expect("sent");
        client.read_exact(&mut echoed).expect("south is served");
        assert_eq!(echoed, hello);
        begun.elapsed()
    }

    /// Returns what south's service weighs in east.
    fn weight(&self) -> Option<f64> {
        let (status, body) =
            self.east.get("/api/v1/horizon?network=net-east&cluster=east&service=a0.pay.south.global");
        let value: serde_json::Value = serde_json::from_str(&body).ok()?;
        (status == 200).then(|| {
            value["entries"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|entry| entry["standsFor"].as_f64())
                .sum()
        })
    }

    /// Changes south's service, and returns the time until east has published the change.
    fn change(&self, number: usize) -> Duration {
        let weight = 2 + number % 2;
        let text = changing("a", 1, weight);
        let begun = Instant::now();
        replace(self.south.folder(), &text);
        while self.weight() != Some(weight as f64) {
            assert!(begun.elapsed() < Duration::from_secs(20), "a change of south is not published");
            std::thread::sleep(Duration::from_micros(500));
        }
        begun.elapsed()
    }

    /// Lets west's clients call and its services change until the result is dropped.
    fn call_from_west(&self, excess: Excess) -> Calling {
        let call = |address: SocketAddr, times: usize| {
            with_lowest_priority(|| spawn(&format!("call {address} {times}")))
        };
        let processes = match excess {
            Excess::None => vec![call(self.address, 1)],
            Excess::OnEast => vec![call(self.address, EXCESS)],
            Excess::OnBareListener => {
                let bare = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
                let listener = measured(|| spawn(&format!("refuse {bare}")));
                within(Duration::from_secs(10), "the bare listener", || TcpStream::connect(bare).ok());
                // The clients end before their listener.
                vec![call(self.address, 1), call(bare, EXCESS - 1), listener]
            }
        };
        let (stop, stopped) = std::sync::mpsc::channel();
        let folder = self.west.folder().to_owned();
        let changes = std::thread::spawn(move || {
            let mut weight = 1;
            while stopped.recv_timeout(CHANGE_EVERY).is_err() {
                weight = 3 - weight;
                replace(&folder, &changing("a", CHANGING, weight));
            }
        });
        std::thread::sleep(Duration::from_secs(1));
        Calling { processes, stop, changes: Some(changes) }
    }

    fn report(&self) {
        let count = |peer: &str, reason: &str| {
            let labels = [format!("peer=\"{peer}\""), format!("reason=\"{reason}\"")];
            self.east.metric("isthmus_peer_connections_total", &[&labels[0], &labels[1]])
        };
        let all =
            |peer: &str| self.east.metric("isthmus_peer_connections_total", &[&format!("peer=\"{peer}\"")]);
        let refused = count("west", "limit_source");
        println!(
            "\nconnections of west: {refused:.0} refused as limit_source, {:.0} otherwise; of south: {:.0}, all of them ok",
            all("west") - refused,
            all("south")
        );
        assert_eq!(all("south"), count("south", "ok"), "south is refused something");
        assert!(refused > 10.0 * NEW_PER_SECOND as f64, "west was never above its limits");
    }
}

/// Where the connections go that west's clients open beyond its limits.
enum Excess {
    None,
    OnBareListener,
    OnEast,
}

/// The calls and changes of west; they end when this is dropped.
struct Calling {
    processes: Vec<Child>,
    stop: std::sync::mpsc::Sender<()>,
    changes: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Calling {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        let _ = self.stop.send(());
        if let Some(changes) = self.changes.take() {
            let _ = changes.join();
        }
        // The gateway handles the bytes that wait in sockets before the next phase begins.
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Starts this program in a role.
fn spawn(role: &str) -> Child {
    let mut command = Command::new("/proc/self/exe");
    command.env(ROLE, role).stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts")
}

/// Plays a role until the process is killed: `call ADDRESS TIMES`, the clients of west at this many times its limits, or
/// `refuse ADDRESS`, the bare listener.
fn play(role: &str) {
    let words: Vec<&str> = role.split(' ').collect();
    let address: SocketAddr = words[1].parse().expect("an address");
    match words[0] {
        "call" => press(address, words[2].parse().expect("a number")),
        _ => refuse_all(address),
    }
}

/// Acts as the clients of west at this many times its limits of connections.
fn press(address: SocketAddr, times: usize) {
    let hello = raw::hello(b"echo.shop.east.global");
    let mut held = std::collections::VecDeque::new();
    let (begun, mut opened) = (Instant::now(), 0_usize);
    loop {
        let due = Duration::from_secs_f64(opened as f64 / (NEW_PER_SECOND * times) as f64);
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        opened += 1;
        let mut client = connect_from(WEST, address);
        let _ = client.write_all(&hello);
        held.push_back(client);
        if held.len() > CONNECTIONS * times {
            held.pop_front();
        }
    }
}

/// Refuses each connection with the alert that east sends, and does nothing else.
fn refuse_all(address: SocketAddr) {
    let listener = TcpListener::bind(address).expect("a free port");
    let mut scratch = vec![0; 16 * 1024];
    for client in listener.incoming() {
        let Ok(mut client) = client else { continue };
        let _ = client.set_nonblocking(true);
        // internal_error, as east answers `limit_source`.
        let _ = client.write_all(&[21, 3, 3, 0, 2, 2, 80]);
        let _ = client.shutdown(Shutdown::Write);
        let _ = client.read(&mut scratch);
    }
}

fn p99(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() * 99 / 100]
}

/// Runs `start` on a thread of the lowest priority, which the processes that it starts inherit.
fn with_lowest_priority<T: Send>(start: impl FnOnce() -> T + Send) -> T {
    let run = || {
        rustix::process::nice(19).expect("every process may lower its priority");
        start()
    };
    std::thread::scope(|scope| scope.spawn(run).join().expect("it starts"))
}
