//! Transfers that end complete or with a reset, and peers that stop reading.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use socket2::SockRef;

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::frames::{DATA, Frames, HEADERS, RST_STREAM, connect as ask, frame};
use crate::support::gateway::Gateway;
use crate::support::raw::{End, read_out};

const NAME: &str = "bulk.test";

fn gateway(timeouts: &str, backend: &Backend) -> Gateway {
    Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\ntimeouts: {{{timeouts}}}\nroutes: {{{NAME}: \"{}\"}}\n",
        backend.address
    ))
}

fn open(gateway: &Gateway) -> TcpStream {
    let mut client = connect(gateway.listener("default"));
    client.write_all(&hello(NAME)).expect("sent");
    client
}

fn skip_hello(stream: &mut TcpStream) {
    stream.read_exact(&mut vec![0; hello(NAME).len()]).expect("the hello");
}

/// Returns the byte at an offset of every transfer. The first one is that of a TLS handshake.
fn byte(place: usize) -> u8 {
    ((place * 31) >> 5).to_le_bytes()[0] ^ 0x16
}

/// A generator of random numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        usize::try_from((mixed ^ (mixed >> 27)) >> 8).expect("64 bits") % most
    }
}

/// Sends a transfer and its end; some of the bytes are urgent.
fn send_urgently(stream: &mut TcpStream, length: usize, seed: u64) {
    let mut random = Random(seed);
    let mut urgent: Vec<usize> = (0..12).map(|_| random.below(length)).collect();
    urgent.push(length - 1);
    urgent.sort_unstable();
    urgent.dedup();
    let mut sent = 0;
    for place in urgent {
        let before: Vec<u8> = (sent..place).map(byte).collect();
        stream.write_all(&before).expect("sent");
        SockRef::from(&*stream).send_out_of_band(&[byte(place)]).expect("sent");
        sent = place + 1;
    }
    let rest: Vec<u8> = (sent..length).map(byte).collect();
    stream.write_all(&rest).expect("sent");
    stream.shutdown(Shutdown::Write).expect("shut");
}

/// The gateway forwards urgent bytes at their position in the stream. A reader that reads urgent bytes inline therefore gets
/// every byte.
#[test]
fn urgent_bytes_cut_no_transfer_short() {
    const LENGTH: usize = 13 << 20;
    const RUNS: u64 = 100;
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let backend = Backend::start(move |mut stream| {
        skip_hello(&mut stream);
        let mut way = [0; 9];
        stream.read_exact(&mut way).expect("which way");
        let seed = u64::from_le_bytes(way[1..].try_into().expect("eight"));
        if way[0] == b'd' {
            send_urgently(&mut stream, LENGTH, seed);
        } else {
            // An endpoint that says nothing is silent. This is how a TLS handshake begins.
            stream.write_all(&[22]).expect("sent");
        }
        let came = read_out(&mut stream);
        let _ = tell.lock().expect("not poisoned").send(came);
    });
    let gateway = gateway("", &backend);
    let whole: Vec<u8> = (0..LENGTH).map(byte).collect();
    for seed in 0..RUNS {
        let mut down = open(&gateway);
        down.write_all(&[&b"d"[..], &seed.to_le_bytes()].concat()).expect("sent");
        let (came, end) = read_out(&mut down);
        assert_eq!((came.len(), end), (LENGTH, End::Fin), "down, seed {seed}");
        assert!(came == whole, "down, seed {seed}");
        drop(down);
        told.recv_timeout(Duration::from_secs(20)).expect("its end");
        let mut up = open(&gateway);
        up.write_all(&[&b"u"[..], &seed.to_le_bytes()].concat()).expect("sent");
        up.read_exact(&mut [0]).expect("answered");
        send_urgently(&mut up, LENGTH, seed);
        let (came, end) = told.recv_timeout(Duration::from_secs(20)).expect("its end");
        assert_eq!((came.len(), end), (LENGTH, End::Fin), "up, seed {seed}");
        assert!(came == whole, "up, seed {seed}");
    }
    assert_eq!(gateway.json("/api/v1/failures"), serde_json::json!([]));
    let spliced = gateway.metric("isthmus_relay_bytes_total", &["path=\"splice\""]);
    assert!(spliced > (RUNS as f64) * LENGTH as f64, "most of it goes over splice: {spliced}");
}

/// Returns a backend that sends without end or reads nothing; the byte after the hello selects which.
fn tireless() -> Backend {
    Backend::start(|mut stream| {
        skip_hello(&mut stream);
        let mut way = [0];
        stream.read_exact(&mut way).expect("which way");
        match way[0] {
            b'd' => while stream.write_all(&[b'd'; 1 << 16]).is_ok() {},
            _ => std::thread::park_timeout(Duration::from_secs(60)),
        }
    })
}

#[test]
fn a_peer_that_reads_nothing_is_reset_in_time_and_one_that_reads_slowly_is_not() {
    let backend = tireless();
    let gateway = gateway("stalled: 3s", &backend);
    let mut slow = open(&gateway);
    slow.write_all(b"d").expect("sent");
    let began = Instant::now();
    let mut client = open(&gateway);
    client.write_all(b"d").expect("sent");
    let mut uploader = open(&gateway);
    uploader.write_all(b"u").expect("sent");
    let upload = std::thread::spawn(move || while uploader.write_all(&[0; 1 << 16]).is_ok() {});
    let ended = || gateway.access_log().iter().filter(|line| line["reason"] == "stalled").count();
    let mut read = vec![0; 1 << 20];
    while ended() < 2 && began.elapsed() < Duration::from_secs(30) {
        // Reads part of the data that has arrived meanwhile.
        let count = slow.read(&mut read).expect("it goes on");
        assert!(count > 0);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(ended(), 2, "the client that reads nothing, and the endpoint that does not");
    assert!(began.elapsed() >= Duration::from_secs(3));
    upload.join().expect("reset");
    let line = gateway.logged("the end", |line| line["reason"] == "stalled");
    assert_eq!((&line["ended_by"], line["detail"].is_string()), (&"gateway".into(), true), "{line}");
    assert!(slow.read(&mut read).expect("it goes on") > 0);
    assert_eq!(read_out(&mut client).1, End::Reset);
}

#[test]
fn a_stream_of_which_nothing_is_read_is_reset_in_time() {
    let endless = Backend::start(|mut stream| while stream.write_all(&[b'z'; 1 << 16]).is_ok() {});
    let services = service("bulk.shop.mesh", 80, &endless, "");
    let config = format!("{BASE}timeouts: {{stalled: 3s}}\nservices:\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    raw.send(&ask(1, "bulk.shop.mesh:80")).expect("sent");
    raw.until(HEADERS).expect("an answer");
    // The gateway never widens the window of the stalled stream.
    let reset = raw.until(RST_STREAM).expect("the connection lives");
    assert_eq!(reset.stream, 1);
    gateway.logged("its end", |line| line["reason"] == "stalled");
    raw.send(&[ask(3, "bulk.shop.mesh:80"), frame(DATA, 0, 3, b"x")].concat()).expect("the others go on");
}

/// A TLS server answers a hello at once. If an endpoint has not answered and the client has ended, the gateway therefore does
/// not wait long.
#[test]
fn a_client_that_has_ended_before_any_answer_does_not_stay_for_long() {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    let backend = Backend::serve(listener, |mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
        std::thread::park_timeout(Duration::from_secs(120));
    });
    let gateway = gateway("halfClose: 0s", &backend);
    let client = open(&gateway);
    client.shutdown(Shutdown::Write).expect("shut");
    drop(client);
    // The deadline is longer than that of other tests, because the wait of 30 s itself is tested.
    let began = Instant::now();
    while gateway.access_log().is_empty() && began.elapsed() < Duration::from_secs(50) {
        std::thread::sleep(Duration::from_millis(100));
    }
    let line = gateway.logged("its end", |_| true);
    assert_eq!(line["reason"], "half_close_timeout", "{line}");
    assert!((29e3..45e3).contains(&line["duration_ms"].as_f64().expect("a number")), "{line}");
}
