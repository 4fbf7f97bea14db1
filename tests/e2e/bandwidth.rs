//! Limits of bandwidth: `bytesPerSecond` of `limits.perService` and of `peers[].limits`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::boundary;
use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::{self, Hbone, Stream};
use crate::support::pki::PKI;
use crate::support::raw::connect_from;
use crate::support::stall::Stopwatch;

const NAME: &str = "bulk.test";
const MIB: u64 = 1 << 20;
const BLOCK: usize = 64 << 10;
/// The number of uploads that a backend can tell apart.
const UPLOADS: usize = 8;

/// A backend that sends without end to a client that asks with `d`, and counts the bytes of one that sends `u` and a number.
struct Bulk {
    backend: Backend,
    received: Arc<[AtomicU64; UPLOADS]>,
}

impl Bulk {
    /// Starts a backend that skips the first `head` bytes of each connection.
    fn start(head: usize) -> Self {
        let received: Arc<[AtomicU64; UPLOADS]> = Arc::default();
        let counts = received.clone();
        let backend = Backend::start(move |mut stream| {
            let mut asked = vec![0; head + 2];
            if stream.read_exact(&mut asked).is_err() {
                return;
            }
            let mut block = vec![22; BLOCK];
            if asked[head] == b'd' {
                while stream.write_all(&block).is_ok() {}
                return;
            }
            while let Ok(count @ 1..) = stream.read(&mut block) {
                counts[usize::from(asked[head + 1])].fetch_add(count as u64, Ordering::Relaxed);
            }
        });
        Self { backend, received }
    }

    /// Returns the number of bytes of this upload so far.
    fn received(&self, upload: u8) -> impl Fn() -> u64 + use<> {
        let received = self.received.clone();
        move || received[usize::from(upload)].load(Ordering::Relaxed)
    }
}

/// A connection or CONNECT stream to a backend.
enum Client {
    Sni(TcpStream),
    Hbone(Box<Stream>),
}

impl Client {
    /// Connects through a listener for SNI, and sends the hello.
    fn sni(gateway: &Gateway) -> Self {
        Self::sni_by(connect(gateway.listener("default")))
    }

    fn sni_by(mut client: TcpStream) -> Self {
        client.write_all(&hello(NAME)).expect("sent");
        Self::Sni(client)
    }

    fn hbone(connection: &Hbone, authority: &str) -> Self {
        Self::Hbone(Box::new(connection.open(authority).expect("admitted")))
    }

    fn write(&mut self, bytes: &[u8]) -> bool {
        match self {
            Self::Sni(client) => client.write_all(bytes).is_ok(),
            Self::Hbone(stream) => stream.write(bytes).is_ok(),
        }
    }

    /// Reads some bytes, and returns their number; 0 at the end.
    fn read(&mut self, bytes: &mut [u8]) -> usize {
        match self {
            Self::Sni(client) => client.read(bytes).unwrap_or(0),
            Self::Hbone(stream) => stream.read(BLOCK / 4).map_or(0, |read| read.len()),
        }
    }

    /// Downloads without end.
    fn download(mut self) -> Transfer {
        assert!(self.write(b"d0"));
        Transfer::run(move |moved| {
            let count = self.read(&mut vec![0; BLOCK]);
            moved.fetch_add(count as u64, Ordering::Relaxed);
            count > 0
        })
    }

    /// Uploads without end.
    fn upload(mut self, number: u8) -> Transfer {
        assert!(self.write(&[b'u', number]));
        let block = vec![0; BLOCK];
        Transfer::run(move |_| self.write(&block))
    }
}

/// A transfer that goes on in a thread until this value is dropped.
struct Transfer {
    moved: Arc<AtomicU64>,
    stops: Arc<AtomicBool>,
}

impl Transfer {
    /// Runs `step` until it returns false.
    fn run(mut step: impl FnMut(&AtomicU64) -> bool + Send + 'static) -> Self {
        let (moved, stops): (Arc<AtomicU64>, Arc<AtomicBool>) = Default::default();
        let transfer = Self { moved: moved.clone(), stops: stops.clone() };
        std::thread::spawn(move || while !stops.load(Ordering::Relaxed) && step(&moved) {});
        transfer
    }

    fn moved(&self) -> impl Fn() -> u64 + use<> {
        let moved = self.moved.clone();
        move || moved.load(Ordering::Relaxed)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
    }
}

/// Returns the rates of transfers in bytes per second, over this time.
fn rates(counts: &[&dyn Fn() -> u64], over: Duration) -> Vec<f64> {
    let before: Vec<u64> = counts.iter().map(|count| count()).collect();
    let begun = Instant::now();
    std::thread::sleep(over);
    let time = begun.elapsed().as_secs_f64();
    counts.iter().zip(before).map(|(count, before)| (count() - before) as f64 / time).collect()
}

/// The time within which transfers have their rates.
const SETTLED_WITHIN: Duration = Duration::from_secs(40);

/// Waits until each transfer has this rate, and checks for four seconds that they do not exceed it. On a busy machine a transfer may
/// be slower for a while.
#[track_caller]
fn settle(what: &str, counts: &[&dyn Fn() -> u64], rate: f64) {
    let mut last = Vec::new();
    let begun = Instant::now();
    loop {
        if last.iter().all(|found| (found / rate - 1.0_f64).abs() < 0.1) && !last.is_empty() {
            break;
        }
        assert!(begun.elapsed() < SETTLED_WITHIN, "{what}: {last:?} instead of {rate}");
        last = rates(counts, Duration::from_secs(1));
    }
    // A transfer that stands still leaves its share to the others, so such a measurement is repeated.
    let found = loop {
        let watch = Stopwatch::start();
        let found = rates(counts, Duration::from_secs(4));
        let is_well = found.iter().all(|found| found / rate < 1.15);
        if is_well || watch.longest_stall() < Duration::from_millis(500) || begun.elapsed() > SETTLED_WITHIN {
            break found;
        }
    };
    let parts: Vec<String> = found.iter().map(|found| format!("{:.3}", found / rate)).collect();
    eprintln!("{what}: {} of the share of {:.2} MiB/s", parts.join(", "), rate / MIB as f64);
    assert!(found.iter().all(|found| found / rate < 1.15), "{what}: {found:?} instead of {rate}");
}

/// Checks a limit of 20 MiB/s for a service that `open` connects to: in each direction, divided, after a reload, and lifted.
/// `reload` applies a limit in MiB/s; 0 means none.
fn limits_a_service(bulk: &Bulk, open: &dyn Fn() -> Client, reload: &dyn Fn(u64), what: &str) {
    let rate = |mib: f64| mib * MIB as f64;
    let first = open().download();
    settle(&format!("{what} down"), &[&first.moved()], rate(20.0));
    let _upload = open().upload(1);
    settle(&format!("{what} up and down"), &[&first.moved(), &bulk.received(1)], rate(20.0));
    let (second, third) = (open().download(), open().download());
    let all: [&dyn Fn() -> u64; 3] = [&first.moved(), &second.moved(), &third.moved()];
    settle(&format!("{what} three down"), &all, rate(20.0 / 3.0));
    let uploads = [open().upload(2), open().upload(3)];
    let all: [&dyn Fn() -> u64; 3] = [&bulk.received(1), &bulk.received(2), &bulk.received(3)];
    settle(&format!("{what} three up"), &all, rate(20.0 / 3.0));
    drop((second, third, uploads));
    settle(&format!("{what} one again"), &[&first.moved(), &bulk.received(1)], rate(20.0));
    reload(5);
    settle(&format!("{what} after a reload"), &[&first.moved(), &bulk.received(1)], rate(5.0));
    reload(0);
    eventually("no limit", || {
        let found = rates(&[&first.moved(), &bulk.received(1)], Duration::from_secs(1));
        found.iter().all(|found| *found > rate(40.0)).then_some(())
    });
    reload(5);
    settle(&format!("{what} with a new limit"), &[&first.moved(), &bulk.received(1)], rate(5.0));
}

#[test]
fn the_bandwidth_of_a_service_is_divided_among_busy_sni_connections() {
    let bulk = Bulk::start(hello(NAME).len());
    let config = |limit: u64| {
        let limits = format!("limits: {{perService: {{bytesPerSecond: {limit}MiB}}}}\n");
        let limits = if limit == 0 { "" } else { &limits };
        format!("listen: \"127.0.0.1:0\"\nroutes: {{{NAME}: \"{}\"}}\n{limits}", bulk.backend.address)
    };
    let gateway = Gateway::start(&config(20));
    limits_a_service(&bulk, &|| Client::sni(&gateway), &|limit| gateway.reload(&config(limit)), "SNI");
    // The transfers have ended, but a connection that is open and quiet takes no share.
    let _quiet = Client::sni(&gateway);
    let busy = Client::sni(&gateway).download();
    settle("SNI beside a quiet one", &[&busy.moved()], 5.0 * MIB as f64);
    let used = eventually("the use of the limit", || {
        let status = gateway.json("/api/v1/status");
        let used = status["limits"]["bandwidth"][0].clone();
        let is_moved = used["bytes_down"].as_u64().is_some_and(|bytes| bytes > MIB && bytes < 10 * MIB);
        (used["busy_down"] == 1 && is_moved).then_some(used)
    });
    assert_eq!((&used["of"], &used["limit"]), (&"the route \"bulk.test\"".into(), &(5 * MIB).into()));
    assert_eq!(gateway.json("/api/v1/status")["limits"]["per_service"]["bytes_per_second"], 5 * MIB);
    assert_eq!(gateway.json("/api/v1/config")["limits"]["perService"]["bytesPerSecond"], 5 * MIB);
    let explained = gateway.json(&format!("/api/v1/explain?sni={NAME}"))["steps"].to_string();
    assert!(explained.contains("5242880 bytes per second in each direction"), "{explained}");
    assert_eq!(
        gateway.metric("isthmus_limit", &["limit=\"per_service_bytes_per_second\""]),
        5.0 * MIB as f64
    );
    eventually("the metric", || {
        let labels = ["of=\"the route \\\"bulk.test\\\"\"", "direction=\"down\""];
        let moved = gateway.metric("isthmus_bandwidth_used_bytes_per_second", &labels);
        (moved > MIB as f64).then_some(())
    });
}

#[test]
fn the_bandwidth_of_a_service_is_divided_among_busy_streams() {
    let bulk = Bulk::start(0);
    let config = |limit: u64| {
        let limits = format!("limits: {{perService: {{bytesPerSecond: {limit}MiB}}}}\n");
        let limits = if limit == 0 { "" } else { &limits };
        format!("{BASE}{limits}services:\n{}", service("bulk.shop.mesh", 80, &bulk.backend, ""))
    };
    let gateway = Gateway::start_in(folder(), &config(20), &[]);
    let connection = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let open = || Client::hbone(&connection, "bulk.shop.mesh:80");
    limits_a_service(&bulk, &open, &|limit| gateway.reload(&config(limit)), "HBONE");
}

/// Lets 20 clients download without end, then one more, and asserts that the 20 have only some times its bytes at a time when an equal
/// share of all connections would have given them 20 times as many. The shares are those of the second before, so at first one of
/// the 20 may have the whole limit.
fn gets_as_much_as_a_crowd(what: &str, crowd: &dyn Fn() -> Client, one: Client) {
    let crowd: Vec<Transfer> = (0..20).map(|_| crowd().download()).collect();
    eventually("all of the crowd download", || crowd.iter().all(|other| other.moved()() > 0).then_some(()));
    let moved = || crowd.iter().map(|other| other.moved()()).sum::<u64>();
    let before = moved();
    let one = one.download();
    eventually("the single download", || (one.moved()() >= 6 * MIB).then_some(()));
    let others = moved() - before;
    eprintln!("{what}: 6 MiB beside {} KiB of the crowd", others >> 10);
    assert!(others < 28 * MIB, "{what}: {others}");
}

#[test]
fn a_source_or_identity_with_one_download_is_not_slowed_down_by_one_with_twenty() {
    let limits = "limits: {perService: {bytesPerSecond: 4MiB}}\n";
    let bulk = Bulk::start(hello(NAME).len());
    let routes = format!("listen: \"127.0.0.1:0\"\nroutes: {{{NAME}: \"{}\"}}\n", bulk.backend.address);
    let gateway = Gateway::start(&format!("{routes}{limits}"));
    let open = |source: [u8; 4]| Client::sni_by(connect_from(source, gateway.listener("default")));
    gets_as_much_as_a_crowd("SNI", &|| open([127, 0, 0, 2]), open([127, 0, 0, 3]));

    let bulk = Bulk::start(0);
    let services = service("bulk.shop.mesh", 80, &bulk.backend, "");
    let gateway = Gateway::start_in(folder(), &format!("{BASE}{limits}services:\n{services}"), &[]);
    let batch = PKI.issue(&[], Some("spiffe://cluster.local/ns/shop/sa/batch"));
    let connect = |identity| Hbone::connect(gateway.listener("hbone"), identity).expect("let in");
    let (batch, cart) = (connect(hbone::client(Some(batch), &["h2"])), connect(caller()));
    let open = |connection: &Hbone| Client::hbone(connection, "bulk.shop.mesh:80");
    gets_as_much_as_a_crowd("HBONE", &|| open(&batch), open(&cart));
}

/// A peer's SNI connections and streams share one limit. Where the service has a limit, too, the smaller share applies.
#[test]
fn the_bandwidth_of_a_peer_is_divided_among_all_of_its_callers() {
    let sni = "outbound_.80_._.echo.shop.east.global";
    let (of_sni, of_hbone) = (Bulk::start(hello(sni).len()), Bulk::start(0));
    let organisations = boundary::Organisations::new();
    let west = |limit: u64| {
        let exported = ", export: [{services: [\"*.shop.mesh\"], as: \"{service}.{namespace}.east.global\"}]";
        format!("{exported}, limits: {{bytesPerSecond: {limit}MiB}}")
    };
    let config =
        |limit: u64, more: &str| boundary::config(&of_sni.backend, &of_hbone.backend, &west(limit)) + more;
    let gateway = Gateway::start_in(organisations.folder(), &config(20, ""), &[]);
    let address = gateway.listener("hbone");
    let connection = Hbone::connect(address, boundary::cart(&organisations.west)).expect("let in");
    let ours = Hbone::connect(address, caller()).expect("let in");
    let rate = |mib: f64| mib * MIB as f64;

    let stream = Client::hbone(&connection, "pay.shop.east.global:80").download();
    settle("a peer's stream", &[&stream.moved()], rate(20.0));
    let mut client = connect_from(boundary::WEST, address);
    client.write_all(&hello(sni)).expect("sent");
    let client = Client::Sni(client).download();
    let both: [&dyn Fn() -> u64; 2] = [&stream.moved(), &client.moved()];
    settle("a peer's stream and connection", &both, rate(10.0));
    let own = Client::hbone(&ours, "pay.shop.mesh:80").download();
    eventually("a caller of our own, without a limit", || {
        (rates(&[&own.moved()], Duration::from_secs(1))[0] > rate(25.0)).then_some(())
    });
    drop(own);
    gateway.reload(&config(20, "limits: {perService: {bytesPerSecond: 4MiB}}\n"));
    settle("the smaller share: the service's", &both, rate(4.0));
    gateway.reload(&config(6, "limits: {perService: {bytesPerSecond: 4MiB}}\n"));
    settle("the smaller share: the peer's", &both, rate(3.0));
}
