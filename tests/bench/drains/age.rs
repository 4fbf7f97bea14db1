//! Connections of five protocols under `maxConnectionAge`.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustls::{ServerConnection, StreamOwned};

use crate::support::backend::Backend;
use crate::support::client::{hello, tls};
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;

/// The number of connections of each protocol.
const EACH: usize = 200;
/// The time over which connections are opened.
const OPENED_WITHIN: Duration = Duration::from_secs(5);
/// The stack of a thread, of which there are two per connection.
const STACK: usize = 256 << 10;
/// The time after an age at which a connection that has no pause is reset.
const GRACE: Duration = Duration::from_secs(35);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// A request in TLS each 200 ms, answered at once.
    Requests,
    /// Transactions of five queries, each answered after 20 ms in three parts, and then a pause of up to 3 s.
    Database,
    /// A request that is answered after 3 to 8 s; the next one follows at once.
    LongPoll,
    /// Downloads of 4 MiB at about 500 KiB/s; the next one follows after 100 ms.
    Bulk,
    /// One request, and nothing more.
    Idle,
}

impl Protocol {
    const ALL: [Self; 5] = [Self::Requests, Self::Database, Self::LongPoll, Self::Bulk, Self::Idle];

    fn name(self) -> &'static str {
        match self {
            Self::Requests => "tls-requests",
            Self::Database => "database",
            Self::LongPoll => "long-poll",
            Self::Bulk => "bulk",
            Self::Idle => "idle",
        }
    }

    fn host(self) -> String {
        format!("{}.test", self.name())
    }

    /// Answers the request of this number.
    fn answer(self, to: &mut impl Write, number: u64) -> io::Result<()> {
        match self {
            Self::Requests | Self::Idle => to.write_all(&[b'.'; 100]),
            Self::Database => {
                for _ in 0..3 {
                    thread::sleep(Duration::from_millis(20));
                    to.write_all(&[b'.'; 700])?;
                }
                Ok(())
            }
            Self::LongPoll => {
                thread::sleep(Duration::from_millis(3_000 + number * 1_237 % 5_000));
                to.write_all(&[b'.'; 50])
            }
            Self::Bulk => {
                let part = vec![b'.'; 64 << 10];
                for _ in 0..64 {
                    to.write_all(&part)?;
                    thread::sleep(Duration::from_millis(125));
                }
                Ok(())
            }
        }
    }

    fn answer_bytes(self) -> usize {
        match self {
            Self::Requests | Self::Idle => 100,
            Self::Database => 2_100,
            Self::LongPoll => 50,
            Self::Bulk => 4 << 20,
        }
    }

    /// Returns the pause before the request of this number; `None`: there is no such request.
    fn pause(self, number: u64) -> Option<Duration> {
        match self {
            Self::Requests => Some(Duration::from_millis(200)),
            Self::Database if number.is_multiple_of(5) => Some(Duration::from_millis(number * 977 % 3_000)),
            Self::Database | Self::LongPoll => Some(Duration::ZERO),
            Self::Bulk => Some(Duration::from_millis(100)),
            Self::Idle => (number == 0).then_some(Duration::ZERO),
        }
    }

    fn serve(self, stream: TcpStream) -> io::Result<()> {
        match self {
            Self::Requests => {
                let config = PKI.server(&self.host());
                let connection = ServerConnection::new(config).map_err(io::Error::other)?;
                self.serve_on(&mut StreamOwned::new(connection, stream))
            }
            _ => {
                let mut stream = stream;
                // The hello is that of a client, and what follows needs no handshake.
                stream.read_exact(&mut vec![0; hello(&self.host()).len()])?;
                self.serve_on(&mut stream)
            }
        }
    }

    fn serve_on(self, stream: &mut (impl Read + Write)) -> io::Result<()> {
        for number in 0.. {
            stream.read_exact(&mut [0; 10])?;
            self.answer(stream, number)?;
            stream.flush()?;
        }
        Ok(())
    }
}

/// The end of a connection, as its client saw it.
struct End {
    age: Duration,
    /// True if the end was a FIN.
    is_fin: bool,
    /// True if a request had no answer, or only a part of it.
    is_asking: bool,
    answers: u64,
}

/// Waits for a pause; returns true if the connection has ended meanwhile, which a client sees before its next request.
fn has_ended_within(pause: Duration, socket: &TcpStream) -> bool {
    let begun = Instant::now();
    socket.set_read_timeout(Some(pause.max(Duration::from_millis(1)))).expect("set");
    let found = socket.peek(&mut [0]);
    socket.set_read_timeout(None).expect("set");
    // Bytes that the server has sent by itself, such as a session ticket, are read with the next answer.
    if found.as_ref().is_ok_and(|bytes| *bytes > 0) {
        thread::sleep(pause.saturating_sub(begun.elapsed()));
    }
    found.is_ok_and(|bytes| bytes == 0)
}

fn calls(
    protocol: Protocol,
    stream: &mut (impl Read + Write),
    socket: &TcpStream,
    opened: Instant,
    seed: u64,
) -> End {
    let mut end = End { age: Duration::ZERO, is_fin: false, is_asking: false, answers: 0 };
    let mut answer = vec![0; protocol.answer_bytes()];
    let error = loop {
        // The pauses of connections are not in step.
        let Some(pause) = protocol.pause(end.answers + if end.answers > 0 { seed * 5 } else { 0 }) else {
            break stream.read_exact(&mut [0]).expect_err("the idle one gets nothing");
        };
        if has_ended_within(pause, socket) {
            break io::ErrorKind::UnexpectedEof.into();
        }
        end.is_asking = true;
        if let Err(error) = stream.write_all(b"a request\n").and_then(|()| stream.flush()) {
            break error;
        }
        if let Err(error) = stream.read_exact(&mut answer) {
            break error;
        }
        end.is_asking = false;
        end.answers += 1;
    };
    end.age = opened.elapsed();
    end.is_fin = error.kind() == io::ErrorKind::UnexpectedEof;
    end
}

/// Opens a connection, and uses it until its end.
fn use_one(protocol: Protocol, address: SocketAddr, seed: u64) -> End {
    thread::sleep(OPENED_WITHIN.mul_f64((seed % 97) as f64 / 97.0));
    let opened = Instant::now();
    match protocol {
        Protocol::Requests => {
            let mut stream = tls(address, &protocol.host()).expect("a handshake");
            stream.sock.set_read_timeout(None).expect("set");
            let socket = stream.sock.try_clone().expect("another descriptor");
            calls(protocol, &mut stream, &socket, opened, seed)
        }
        _ => {
            let mut stream = TcpStream::connect(address).expect("connected");
            stream.write_all(&hello(&protocol.host())).expect("sent");
            let socket = stream.try_clone().expect("another descriptor");
            calls(protocol, &mut stream, &socket, opened, seed)
        }
    }
}

pub(crate) fn show(age: Duration) {
    let backends: Vec<Backend> = Protocol::ALL
        .into_iter()
        // Errors are those of the end, which the client counts.
        .map(|protocol| Backend::start(move |stream| drop(protocol.serve(stream))))
        .collect();
    let route = |(protocol, backend): (Protocol, &Backend)| {
        format!(
            "  {}: {{endpoints: [\"{}\"], maxConnectionAge: {}s}}\n",
            protocol.host(),
            backend.address,
            age.as_secs()
        )
    };
    let routes: String = Protocol::ALL.into_iter().zip(&backends).map(route).collect();
    let gateway = Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes:\n{routes}"));
    let address = gateway.listener("default");
    println!("\nmaxConnectionAge: {} s, {EACH} connections of each protocol\n", age.as_secs());
    let clients: Vec<_> = Protocol::ALL
        .into_iter()
        .flat_map(|protocol| (0..EACH).map(move |seed| (protocol, seed as u64)))
        .map(|(protocol, seed)| {
            let client = thread::Builder::new().stack_size(STACK);
            let client = client.spawn(move || use_one(protocol, address, seed)).expect("a thread");
            (protocol, client)
        })
        .collect();
    let ends: Vec<(Protocol, End)> =
        clients.into_iter().map(|(protocol, client)| (protocol, client.join().expect("no panic"))).collect();
    print(age, &ends);
    let retired = |end: &str| gateway.metric("isthmus_connections_retired_total", &["cause=\"age\"", end]);
    let (pauses, resets) = (retired("end=\"pause\""), retired("end=\"reset\""));
    println!("\nisthmus_connections_retired_total: {pauses} in a pause, {resets} reset at the hard end");
    let of = |which: &dyn Fn(&End) -> bool| ends.iter().filter(|(_, end)| which(end)).count();
    let cut = of(&|end| end.is_asking && end.is_fin);
    println!(
        "requests without an answer: {} reset at the hard end, {cut} others",
        of(&|end| end.is_asking && !end.is_fin)
    );
    assert_eq!(pauses + resets, ends.len() as f64, "another end");
    assert!(of(&|end| !end.is_fin) as f64 <= resets, "a reset that is not counted");
}

fn print(age: Duration, ends: &[(Protocol, End)]) {
    println!(
        "| protocol | answers | FIN | reset | without an answer (FIN, reset) | ends from – to | in each sixth of this time |"
    );
    println!("|---|---|---|---|---|---|---|");
    for protocol in Protocol::ALL {
        let of: Vec<&End> = ends.iter().filter(|(of, _)| *of == protocol).map(|(_, end)| end).collect();
        let count = |which: &dyn Fn(&&&End) -> bool| of.iter().filter(which).count();
        let ages: Vec<Duration> = of.iter().map(|end| end.age).collect();
        let (first, last) = (ages.iter().min().expect("some"), ages.iter().max().expect("some"));
        let mut parts = [0; 6];
        for age in &ages {
            let at = (*age - *first).as_secs_f64() / (*last - *first).as_secs_f64().max(0.001) * 6.0;
            let part = (1..6).take_while(|part| at >= f64::from(*part)).count();
            parts[part] += 1;
        }
        println!(
            "| {} | {} | {} | {} | {}, {} | {:.1} – {:.1} s | {parts:?} |",
            protocol.name(),
            of.iter().map(|end| end.answers).sum::<u64>(),
            count(&|end| end.is_fin),
            count(&|end| !end.is_fin),
            count(&|end| end.is_asking && end.is_fin),
            count(&|end| end.is_asking && !end.is_fin),
            first.as_secs_f64(),
            last.as_secs_f64(),
        );
        // The gateway counts in seconds.
        assert!(*first >= age.mul_f64(0.9) - Duration::from_secs(1), "too early: {first:?}");
        assert!(*last <= age.mul_f64(1.1) + GRACE + Duration::from_secs(5), "too late: {last:?}");
    }
}
