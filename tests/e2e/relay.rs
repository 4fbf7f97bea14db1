//! The relay passes on every byte, every end and every reset. The answers of endpoints begin as TLS does, with 0x16.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hasher};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::support::backend::{Backend, reset};
use crate::support::client::{connect, hello};
use crate::support::gateway::Gateway;
use crate::support::{eventually, within};

fn gateway(backend: SocketAddr) -> Gateway {
    Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{relay.test: \"{backend}\"}}\n"))
}

/// Opens a connection through the gateway and sends its hello.
fn open(gateway: &Gateway) -> TcpStream {
    let mut client = connect(gateway.listener("default"));
    client.write_all(&hello("relay.test")).expect("sent");
    client
}

/// Reads and drops a hello of any length.
fn skip_hello(stream: &mut TcpStream) {
    let mut header = [0; 5];
    stream.read_exact(&mut header).expect("a record");
    let mut body = vec![0; usize::from(u16::from_be_bytes([header[3], header[4]]))];
    stream.read_exact(&mut body).expect("its body");
}

#[test]
fn the_hello_and_all_after_it_arrive_once_and_in_order() {
    let backend = Backend::echo();
    let gateway = gateway(backend.address);
    let mut client = connect(gateway.listener("default"));
    let mut sent = hello("relay.test");
    sent.extend((0..200_000_u32).flat_map(u32::to_be_bytes));
    let mut writer = client.try_clone().expect("cloned");
    let copy = sent.clone();
    thread::spawn(move || {
        writer.write_all(&copy).expect("sent");
        writer.shutdown(Shutdown::Write).expect("shut");
    });
    let mut received = Vec::new();
    client.read_to_end(&mut received).expect("echoed");
    assert!(received == sent, "{} bytes came back of {}", received.len(), sent.len());
    let line = gateway.logged("the end", |line| line["reason"] == "ok");
    assert_eq!(
        (line["bytes_up"].as_u64(), line["bytes_down"].as_u64()),
        (Some(sent.len() as u64), Some(sent.len() as u64))
    );
}

#[test]
fn a_client_that_has_ended_still_gets_its_answer() {
    let backend = Backend::start(|mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).expect("to the end");
        stream.write_all(format!("\x16got {}", all.len()).as_bytes()).expect("sent");
    });
    let gateway = gateway(backend.address);
    let mut client = open(&gateway);
    client.shutdown(Shutdown::Write).expect("shut");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("answered");
    assert_eq!(answer, format!("\x16got {}", hello("relay.test").len()));
    gateway.logged("the end", |line| line["reason"] == "ok");
}

#[test]
fn an_endpoint_that_has_ended_still_gets_what_the_client_sends() {
    let (got, gets) = mpsc::channel();
    let backend = Backend::start(move |mut stream| {
        skip_hello(&mut stream);
        stream.write_all(b"bye").expect("sent");
        stream.shutdown(Shutdown::Write).expect("shut");
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        got.send(all).expect("told");
    });
    let gateway = gateway(backend.address);
    let mut client = open(&gateway);
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("answered");
    assert_eq!(answer, "bye");
    client.write_all(b"more").expect("sent");
    drop(client);
    assert_eq!(gets.recv().expect("told"), b"more");
}

#[test]
fn a_reset_of_the_endpoint_is_a_reset_for_the_client() {
    let backend = Backend::start(|mut stream| {
        skip_hello(&mut stream);
        stream.write_all(b"\x16alf of it").expect("sent");
        let _ = stream.read(&mut [0; 1]);
        reset(&stream);
    });
    let gateway = gateway(backend.address);
    let mut client = open(&gateway);
    client.read_exact(&mut [0; 10]).expect("the first half");
    client.write_all(b"x").expect("sent");
    let error = client.read(&mut [0; 1]).expect_err("no orderly end");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    gateway.logged("the end", |line| line["reason"] == "endpoint_reset");
}

#[test]
fn a_reset_of_the_client_is_a_reset_for_the_endpoint() {
    let (ended, ends) = mpsc::channel();
    let backend = Backend::start(move |mut stream| {
        skip_hello(&mut stream);
        stream.write_all(b"\x16").expect("sent");
        let end = stream.read(&mut [0; 1]).map_err(|error| error.kind());
        ended.send(end).expect("told");
    });
    let gateway = gateway(backend.address);
    let mut client = open(&gateway);
    client.read_exact(&mut [0; 1]).expect("the first byte");
    reset(&client);
    drop(client);
    assert_eq!(ends.recv().expect("told"), Err(ErrorKind::ConnectionReset));
    gateway.logged("the end", |line| line["reason"] == "client_reset");
}

const GIBIBYTE: usize = 1 << 30;

/// Returns a backend that receives a gibibyte and sends another at the same time.
fn gibibyte_backend() -> Backend {
    Backend::start(|mut stream| {
        skip_hello(&mut stream);
        let mut writer = stream.try_clone().expect("cloned");
        let sender = thread::spawn(move || pour(&mut writer, GIBIBYTE, 0x16));
        let received = drain(&mut stream);
        sender.join().expect("sent");
        stream.shutdown(Shutdown::Write).expect("shut");
        assert_eq!(received, expected(GIBIBYTE, 3));
    })
}

/// Exchanges a gibibyte in each direction as the client, and checks the bytes by a hash, and the access log line.
fn exchange_a_gibibyte(gateway: &Gateway) {
    let mut client = open(gateway);
    let mut writer = client.try_clone().expect("cloned");
    let sender = thread::spawn(move || {
        pour(&mut writer, GIBIBYTE, 3);
        writer.shutdown(Shutdown::Write).expect("shut");
    });
    let received = drain(&mut client);
    sender.join().expect("sent");
    assert_eq!(received, expected(GIBIBYTE, 0x16));
    let line = gateway.logged("the end", |line| line["reason"] == "ok");
    assert_eq!(line["bytes_down"].as_u64(), Some(GIBIBYTE as u64));
}

/// Returns the bytes relayed so far: by splicing, and by copying.
fn relayed(gateway: &Gateway) -> (f64, f64) {
    let by = |path: &str| gateway.metric("isthmus_relay_bytes_total", &[&format!("path=\"{path}\"")]);
    (by("splice"), by("copy"))
}

#[test]
fn a_gibibyte_each_way_goes_over_splice() {
    let gateway = gateway(gibibyte_backend().address);
    exchange_a_gibibyte(&gateway);
    let (spliced, copied) = relayed(&gateway);
    assert!(spliced >= 0.95 * 2.0 * GIBIBYTE as f64, "spliced {spliced}, copied {copied}");
    eprintln!(
        "spliced {spliced:.0} bytes, copied {copied:.0}: {:.3} % over splice",
        spliced / (spliced + copied) * 100.0
    );
}

/// A worker has 16 pipes for splicing. While stalled connections occupy all of them, the worker copies the bytes of its other
/// connections.
#[test]
fn a_gibibyte_each_way_is_copied_where_all_pipes_are_taken() {
    const PIPES: usize = 16;
    let backend = gibibyte_backend();
    let (stop, stopped) = mpsc::channel::<()>();
    let stopped = std::sync::Mutex::new(stopped);
    // This backend reads nothing until the end of the test.
    let stalled = Backend::start(move |stream| {
        let _ = stopped.lock().expect("not poisoned").recv();
        drop(stream);
    });
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nworkers: 1\nroutes: {{relay.test: \"{}\", stalled.test: \"{}\"}}\n",
        backend.address, stalled.address
    ));
    let pipes = || {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", gateway.process())).expect("listed");
        let targets = folder.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        targets.filter(|target| target.to_string_lossy().starts_with("pipe:")).count()
    };
    let before = pipes();
    for _ in 0..PIPES {
        let mut client = connect(gateway.listener("default"));
        client.write_all(&hello("stalled.test")).expect("sent");
        // The write blocks when all buffers are full, and fails when the gateway ends.
        thread::spawn(move || while client.write_all(&[0; 1 << 16]).is_ok() {});
    }
    // A pipe has two descriptors.
    eventually("all pipes to be taken", || (pipes() >= before + 2 * PIPES).then_some(()));
    let (spliced_before, copied_before) = relayed(&gateway);
    exchange_a_gibibyte(&gateway);
    let (spliced, copied) = relayed(&gateway);
    let (spliced, copied) = (spliced - spliced_before, copied - copied_before);
    assert!(copied >= 0.95 * 2.0 * GIBIBYTE as f64, "spliced {spliced}, copied {copied}");
    drop(stop);
}

fn block(seed: u8) -> Vec<u8> {
    (0..1 << 16).map(|index: u32| (index.wrapping_mul(31) >> 3).to_le_bytes()[0] ^ seed).collect()
}

fn pour(stream: &mut TcpStream, total: usize, seed: u8) {
    let block = block(seed);
    for _ in 0..total / block.len() {
        stream.write_all(&block).expect("sent");
    }
}

/// Reads to the end; returns the number of bytes, and a hash over them.
fn drain(stream: &mut TcpStream) -> (usize, u64) {
    let mut bytes = vec![0; 1 << 18];
    let (mut count, mut hasher, mut held) = (0, DefaultHasher::new(), Vec::new());
    loop {
        let read = stream.read(&mut bytes).expect("read");
        if read == 0 {
            break;
        }
        count += read;
        held.extend_from_slice(&bytes[..read]);
        // The hasher gets blocks of one size, because its result depends on how the bytes are cut.
        let whole = held.len() / (1 << 16) * (1 << 16);
        held.drain(..whole).as_slice().chunks(1 << 16).for_each(|block| hasher.write(block));
    }
    hasher.write(&held);
    (count, hasher.finish())
}

fn expected(total: usize, seed: u8) -> (usize, u64) {
    let block = block(seed);
    let mut hasher = DefaultHasher::new();
    for _ in 0..total / block.len() {
        hasher.write(&block);
    }
    hasher.write(&[]);
    (total, hasher.finish())
}

/// A slow reader delays no other client, and the bytes that wait for it are bounded.
#[test]
fn a_slow_reader_gets_everything() {
    const TOTAL: usize = 64 << 20;
    let backend = Backend::start(|mut stream| {
        skip_hello(&mut stream);
        pour(&mut stream, TOTAL, 1);
    });
    let gateway = gateway(backend.address);
    let mut slow = open(&gateway);
    slow.read_exact(&mut [0; 1]).expect("it flows");
    // Meanwhile another client receives everything.
    let mut quick = open(&gateway);
    assert_eq!(drain(&mut quick).0, TOTAL);
    assert_eq!(drain(&mut slow).0, TOTAL - 1);
}

/// Idle connections cost no buffer and no pipe.
#[test]
fn idle_connections_cost_little() {
    const COUNT: usize = 500;
    let backend = Backend::echo();
    let gateway = gateway(backend.address);
    let descriptors = |gateway: &Gateway| {
        std::fs::read_dir(format!("/proc/{}/fd", gateway.process())).expect("listed").count()
    };
    let length = hello("relay.test").len();
    let mut warm: Vec<TcpStream> = (0..50).map(|_| open(&gateway)).collect();
    warm.iter_mut().for_each(|client| client.read_exact(&mut vec![0; length]).expect("echoed"));
    let (descriptors_before, memory_before) = (descriptors(&gateway), gateway.memory());
    let mut clients: Vec<TcpStream> = (0..COUNT).map(|_| open(&gateway)).collect();
    clients.iter_mut().for_each(|client| client.read_exact(&mut vec![0; length]).expect("echoed"));
    let descriptors_more = descriptors(&gateway) - descriptors_before;
    let each = gateway.memory().saturating_sub(memory_before) / COUNT;
    eprintln!("{each} bytes of memory and {} descriptors per idle connection", descriptors_more / COUNT);
    assert_eq!(descriptors_more, 2 * COUNT, "two sockets each, and no pipe");
    assert!(each <= 8 * 1024, "{each} bytes each");
    drop(clients);
    eventually("all closed", || (descriptors(&gateway) <= descriptors_before).then_some(()));
}

/// A connection ends if no byte is relayed for as long as the config says.
#[test]
fn idle_and_half_closed_connections_end_in_time() {
    let backend = Backend::start(|mut stream| {
        let mut bytes = [0; 4096];
        // Reads to the end, and then keeps its direction open.
        while let Ok(count) = stream.read(&mut bytes) {
            if count == 0 {
                thread::park();
            }
            let _ = stream.write_all(b".");
        }
    });
    let config = |timeouts: &str| {
        format!(
            "listen: \"127.0.0.1:0\"\ntimeouts: {timeouts}\nroutes: {{relay.test: \"{}\"}}\n",
            backend.address
        )
    };
    let idle = Gateway::start(&config("{idle: 4s}"));
    let mut client = open(&idle);
    client.read_exact(&mut [0; 1]).expect("it flows");
    assert_eq!(client.read(&mut [0; 1]).map_err(|error| error.kind()), Err(ErrorKind::ConnectionReset));
    idle.logged("the end", |line| line["reason"] == "idle_timeout");
    let half = Gateway::start(&config("{halfClose: 1s}"));
    let mut client = open(&half);
    client.read_exact(&mut [0; 1]).expect("it flows");
    client.shutdown(Shutdown::Write).expect("shut");
    assert_eq!(client.read(&mut [0; 1]).map_err(|error| error.kind()), Err(ErrorKind::ConnectionReset));
    half.logged("the end", |line| line["reason"] == "half_close_timeout");
}

/// Returns the seconds until the keep-alive probe of each connection whose own port this is.
fn probes_due(port: u16) -> Vec<u32> {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("read");
    let due = |line: &str| {
        // The local and the peer's address, the state, two queues, and `2:` and a time in hundredths of a second.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_of = fields.get(1)?.ends_with(&format!(":{port:04X}")) && fields.get(3) == Some(&"01");
        let time = fields.get(5)?.strip_prefix("02:").filter(|_| is_of)?;
        Some(u32::from_str_radix(time, 16).ok()? / 100)
    };
    table.lines().filter_map(due).collect()
}

/// The kernel does not probe the peers of connections that became silent together at the same moment.
#[test]
fn keep_alive_probes_are_spread() {
    const COUNT: usize = 60;
    let backend = Backend::echo();
    let gateway = gateway(backend.address);
    let length = hello("relay.test").len();
    let mut clients: Vec<TcpStream> = (0..COUNT).map(|_| open(&gateway)).collect();
    clients.iter_mut().for_each(|client| client.read_exact(&mut vec![0; length]).expect("echoed"));
    let port = gateway.listener("default").port();
    let spread = || {
        let due = probes_due(port);
        let seconds: BTreeSet<u32> = due.iter().copied().collect();
        (due.len() == COUNT && seconds.len() >= 25).then_some(seconds)
    };
    let seconds = within(Duration::from_secs(40), "the probes to be spread", spread);
    let (first, last) = (seconds.first().expect("some"), seconds.last().expect("some"));
    assert!(last - first >= 25 && *last <= 90, "from {first} s to {last} s");
}
