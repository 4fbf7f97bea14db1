//! Kernel memory of connections whose peers stop reading: the bytes that the gateway's own sockets hold, measured by `ss`.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;

use socket2::{Domain, SockRef, Socket, Type};

use crate::support::backend::Backend;
use crate::support::client::hello;
use crate::support::gateway::Gateway;
use crate::support::{eventually, namespace, skip};

const NAME: &str = "bulk.test";
const MIB: u64 = 1 << 20;

/// The memory of one socket of the gateway, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    /// Bytes received and not read by the gateway.
    received: u64,
    /// The size of the receive buffer in bytes.
    received_max: u64,
    /// Bytes written and not acknowledged by the peer.
    written: u64,
}

impl Memory {
    fn of(skmem: &str) -> Option<Self> {
        let field = |name: &str| -> Option<u64> {
            skmem.split([',', '(', ')']).find_map(|field| field.strip_prefix(name)?.parse().ok())
        };
        Some(Self { received: field("r")?, received_max: field("rb")?, written: field("w")? })
    }
}

/// The gateway's sockets to its clients, and to one endpoint.
struct Sockets {
    clients: Vec<Memory>,
    endpoints: Vec<Memory>,
}

impl Sockets {
    fn of(gateway: &Gateway, endpoint: SocketAddr) -> Self {
        let listener = gateway.listener("default").port();
        let ask = |filter: String| {
            let told = Command::new("ss").args(["-tmnHO", "state", "all", &filter]).output().expect("ss");
            let lines = String::from_utf8_lossy(&told.stdout).into_owned();
            lines.lines().filter(|line| !line.starts_with("LISTEN")).filter_map(Memory::of).collect()
        };
        Self {
            clients: ask(format!("( sport = :{listener} )")),
            endpoints: ask(format!("( dport = :{} )", endpoint.port())),
        }
    }

    fn total(&self) -> u64 {
        self.clients.iter().chain(&self.endpoints).map(|memory| memory.received + memory.written).sum()
    }
}

fn has_ss(test: &str) -> bool {
    let has = Command::new("ss").arg("-V").output().is_ok_and(|told| told.status.success());
    if !has {
        skip(&format!("{test}: there is no ss"));
    }
    has
}

/// Returns a backend that has a small send buffer. The byte after the hello selects whether the backend sends without end or
/// echoes.
fn pouring() -> Backend {
    Backend::start(|mut stream| {
        SockRef::from(&stream).set_send_buffer_size(64 * 1024).expect("set");
        let mut first = vec![0; hello(NAME).len() + 1];
        if stream.read_exact(&mut first).is_err() {
            return;
        }
        if first.ends_with(b"d") {
            while stream.write_all(&[b'd'; 1 << 16]).is_ok() {}
            return;
        }
        let mut byte = [0];
        while stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte)).is_ok() {}
    })
}

/// Opens a client with a small receive buffer; `what` is the byte after its hello.
fn open(address: SocketAddr, what: u8) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_recv_buffer_size(64 * 1024).expect("set");
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
    socket.connect(&address.into()).expect("the gateway");
    let mut client = TcpStream::from(socket);
    client.write_all(&[hello(NAME), vec![what]].concat()).expect("sent");
    client
}

fn read(client: &mut TcpStream, mut count: u64) {
    let mut bytes = vec![0; 1 << 16];
    while count > 0 {
        let read = client.read(&mut bytes).expect("it goes on");
        assert!(read > 0, "it has ended");
        count = count.saturating_sub(read as u64);
    }
}

fn gateway(backend: &Backend, more: &str) -> Gateway {
    Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{{NAME}: \"{}\"}}\n{more}", backend.address))
}

/// Waits until the gateway's own count agrees with `ss` (within 5 %), that is, until the buffers do not grow any more.
fn settled(gateway: &Gateway, backend: &Backend) -> Sockets {
    eventually("the gateway sees what the kernel holds", || {
        let before = gateway.metric("isthmus_stalled_kernel_bytes", &[]);
        let sockets = Sockets::of(gateway, backend.address);
        let total = sockets.total() as f64;
        (total > 0.0 && (total - before).abs() < total / 20.0).then_some(sockets)
    })
}

/// Allows buffers of 16 MiB in both directions, as on hosts with fast long-distance links.
const LARGE: &str = "
ip link set lo up
echo 4096 16777216 16777216 > /proc/sys/net/ipv4/tcp_rmem
echo 4096 16777216 16777216 > /proc/sys/net/ipv4/tcp_wmem
";

#[test]
fn a_client_that_stops_reading_costs_little_more_than_what_may_be_unsent() {
    const TEST: &str = "kernel_memory::a_client_that_stops_reading_costs_little_more_than_what_may_be_unsent";
    // Together they hold less than half of what they may, so that no buffer is bounded.
    const STALLED: usize = 6;
    if !has_ss(TEST) || !namespace::inside(TEST, LARGE) {
        return;
    }
    let backend = pouring();
    let gateway = gateway(&backend, "workers: 1\ntimeouts: {stalled: 20s}\n");
    let address = gateway.listener("default");
    // The clients read for a while, fast enough for the kernel to enlarge the buffers.
    let mut clients: Vec<TcpStream> = (0..STALLED).map(|_| open(address, b'd')).collect();
    clients.iter_mut().for_each(|client| read(client, 64 * MIB));
    let sockets = settled(&gateway, &backend);
    let most = |of: &[Memory], count: fn(&Memory) -> u64| of.iter().map(count).max().unwrap_or_default();
    let (written, received) =
        (most(&sockets.clients, |of| of.written), most(&sockets.endpoints, |of| of.received));
    eprintln!(
        "{STALLED} stalled downloads: {:.2} MiB of kernel memory each; at most {written} bytes written to a client and \
         {received} received from an endpoint",
        sockets.total() as f64 / (STALLED as u64 * MIB) as f64
    );
    assert_eq!((sockets.clients.len(), sockets.endpoints.len()), (STALLED, STALLED));
    // The limit covers the unsent bytes (at most 1.5 MiB), the client's receive window, and the kernel's overhead.
    assert!(written <= 2 * MIB, "{written} bytes wait for a client");
    drop(clients);
}

#[test]
fn clients_that_stop_reading_get_small_buffers_before_any_is_reset() {
    const TEST: &str = "kernel_memory::clients_that_stop_reading_get_small_buffers_before_any_is_reset";
    const STALLED: usize = 48;
    // The gateway's limit for the memory of all its sockets together. The gateway uses this value if the kernel does not show
    // how much memory TCP may use, as in a network namespace.
    const MOST: u64 = 256 * MIB;
    /// The receive buffer of a bounded socket has at most this number of bytes.
    const SMALL: u64 = 512 * 1024;
    if !has_ss(TEST) || !namespace::inside(TEST, LARGE) {
        return;
    }
    let backend = pouring();
    // The limit is one of all workers, so it does not matter which of them has the connections.
    let gateway = gateway(&backend, "workers: 4\nhbone: {stalled: 1s}\n");
    let address = gateway.listener("default");
    let mut echo = open(address, b'e');
    let mut reader = open(address, b'd');
    let clients: Vec<TcpStream> = (0..STALLED).map(|_| open(address, b'd')).collect();
    let small =
        |sockets: &Sockets| sockets.endpoints.iter().filter(|memory| memory.received_max <= SMALL).count();
    let (sockets, counted) = eventually("all are bounded", || {
        read(&mut reader, MIB);
        let sockets = Sockets::of(&gateway, backend.address);
        let counted = gateway.metric("isthmus_stalled_kernel_bytes", &[]);
        (small(&sockets) >= STALLED && counted > (MOST / 2) as f64).then_some((sockets, counted))
    });
    eprintln!(
        "{STALLED} stalled downloads: {} MiB, {:.0} MiB counted",
        sockets.total() / MIB,
        counted / MIB as f64
    );
    // New connections get small buffers at once.
    let late = open(address, b'd');
    eventually("one more", || {
        read(&mut reader, MIB);
        (small(&Sockets::of(&gateway, backend.address)) > STALLED).then_some(())
    });
    echo.write_all(b"x").expect("sent");
    echo.read_exact(&mut [0]).expect("an answer");
    read(&mut reader, 16 * MIB);
    assert_eq!(gateway.access_log(), Vec::<serde_json::Value>::new(), "nobody is reset");
    // One whose bytes are read, however late, goes on.
    let mut clients = clients.into_iter();
    read(&mut clients.next().expect("48 clients"), 32 * MIB);
    drop((clients, late));
    eventually("no memory is counted", || {
        read(&mut reader, MIB);
        (gateway.metric("isthmus_stalled_kernel_bytes", &[]) < (MOST / 8) as f64).then_some(())
    });
}
