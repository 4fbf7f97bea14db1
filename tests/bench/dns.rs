//! The cost of a DNS query: `cargo bench --bench dns`.
//!
//! The real binary answers queries for the addresses of 10,000 services over UDP on loopback; the client keeps 64 queries in
//! flight on one socket. The benchmark prints the answers per second, and the answers per second of the server's processor
//! time, which is the rate of one core. It fails only if a response is no authoritative answer.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "gateway.rs"]
mod gateway;
#[path = "process.rs"]
mod process;

use std::error::Error;
use std::fmt::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use gateway::{BINARY, Gateway};
use process::{memory, processor_time};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const SERVICES: usize = 10_000;
const MEASURED: Duration = Duration::from_secs(5);
/// The number of queries in flight.
const WINDOW: usize = 64;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let gateway = start(folder.path())?;
    let server = gateway.address("dns");
    for (what, name) in [
        ("an address", (|at| format!("s{at}.shop.east.global")) as fn(usize) -> String),
        ("a name that does not exist", |at| format!("n{at}.shop.east.global")),
    ] {
        let before = (processor_time(&gateway.child)?, Instant::now());
        let answers = flood(server, name)?;
        let (cost, time) = (processor_time(&gateway.child)? - before.0, before.1.elapsed());
        println!(
            "{what}: {:.0} queries/s; {:.0} queries per second of the server's processor time ({:.1} µs each)",
            answers as f64 / time.as_secs_f64(),
            answers as f64 / cost.as_secs_f64(),
            cost.as_secs_f64() * 1e6 / answers as f64
        );
    }
    let metrics = gateway.request("GET", "/metrics")?;
    for code in ["NOERROR", "NXDOMAIN"] {
        let counted =
            metrics.lines().find(|line| line.contains(&format!("dns_queries_total{{rcode=\"{code}\"}}")));
        println!("{}", counted.ok_or("the server has not counted its answers")?);
    }
    println!("memory: {} MiB with {SERVICES} services", memory(&gateway.child, "VmRSS")? >> 20);
    Ok(())
}

/// Sends queries for some seconds, and returns the number of answers.
fn flood(server: SocketAddr, name: fn(usize) -> String) -> Result<u64> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let queries: Vec<Vec<u8>> = (0..SERVICES).map(|at| query(&name(at))).collect();
    let (begun, mut answers, mut sent, mut waiting) = (Instant::now(), 0_u64, 0, 0);
    let mut buffer = [0; 1_500];
    while begun.elapsed() < MEASURED {
        while waiting < WINDOW {
            socket.send(&queries[sent % SERVICES])?;
            sent += 1;
            waiting += 1;
        }
        match socket.recv(&mut buffer) {
            Ok(length) if length > 12 && buffer[2] & 0x84 == 0x84 => {
                answers += 1;
                waiting -= 1;
            }
            Ok(_) => return Err("an answer that is none".into()),
            // All queries in flight were lost.
            Err(_) => waiting = 0,
        }
    }
    Ok(answers)
}

/// Returns a query for the IPv4 addresses of a name.
fn query(name: &str) -> Vec<u8> {
    let mut bytes = vec![7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        bytes.extend(u8::try_from(label.len()));
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.extend_from_slice(&[0, 0, 1, 0, 1]);
    bytes
}

fn start(folder: &Path) -> Result<Gateway> {
    let mut config = "admin: {bind: \"127.0.0.1:0\"}\ntelemetry: {log: {format: json}}\n\
         dnsServer: {bind: \"127.0.0.1:0\", zones: [global]}\nexports: [{services: [\"*.global\"]}]\nservices:\n"
        .to_owned();
    for index in 0..SERVICES {
        let [.., high, low] = index.to_be_bytes();
        writeln!(
            config,
            "  - {{hostname: s{index}.shop.east.global, namespace: shop, addresses: [10.1.{high}.{low}], ports: [{{name: p, port: 80}}]}}"
        )?;
    }
    std::fs::write(folder.join("isthmus.yaml"), config)?;
    Gateway::start(BINARY.as_ref(), folder, &["admin", "dns"], drop)
}
