//! Queries in datagrams. One task reads and answers them. Each forwarded question has a task of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::UdpSocket;

use super::answer::{Reply, Transport};
use super::rate::Rates;
use super::server::{Next, Server};
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stopped;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::names::Unanswered;

/// The longest query in bytes; longer queries must come over TCP.
const QUERY_BYTES_MAX: usize = 4_096;
/// The number of queries that are answered before the task yields.
const BATCH: usize = 64;
/// The pause after a failed read.
const REST: Duration = Duration::from_millis(50);
/// The shortest time between two log lines about failed reads.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Answers the queries of a socket until the order to stop.
pub async fn serve(server: Arc<Server>, socket: UdpSocket, scope: Scope, mut stopped: Stopped) {
    let socket = Arc::new(socket);
    let (mut rates, begun, said) = (Rates::default(), Instant::now(), LogThrottle::new(SAID_EVERY));
    let mut buffer = vec![0; QUERY_BYTES_MAX];
    loop {
        let readable = tokio::select! {
            biased;
            () = stopped.ordered() => return,
            readable = socket.readable() => readable,
        };
        if let Err(error) = readable {
            rest(&error, &said).await;
            continue;
        }
        let second = begun.elapsed().as_secs();
        for _ in 0..BATCH {
            match socket.try_recv_from(&mut buffer) {
                Ok((length, client)) => {
                    let query = buffer.get(..length).unwrap_or_default();
                    let Some(extent) = rates.judge(client.ip(), second) else {
                        server.metrics.unanswered(Unanswered::Rate);
                        continue;
                    };
                    match server.decide(query, client.ip(), Transport::Udp, extent) {
                        Next::Send(reply) => {
                            rates.charge(client.ip(), second, reply.bytes.len());
                            send(&server, &socket, &reply, client);
                        }
                        Next::Ask(question) => {
                            let (server, socket) = (server.clone(), socket.clone());
                            scope.spawn(async move {
                                let reply = server.ask(&question, client.ip()).await;
                                send(&server, &socket, &reply, client);
                            });
                        }
                        Next::Ignore => {}
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The error is about an earlier client that has gone (ICMP). The socket remains usable.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => {
                    rest(&error, &said).await;
                    break;
                }
            }
        }
        tokio::task::yield_now().await;
    }
}

async fn rest(error: &io::Error, said: &LogThrottle) {
    if let Some(times) = said.occurred() {
        tracing::warn!(listener = "dns", %error, times, "cannot read DNS queries");
    }
    tokio::time::sleep(REST).await;
}

/// Sends an answer. If the socket is full, the answer is dropped, and the client asks again.
fn send(server: &Server, socket: &UdpSocket, reply: &Reply, client: SocketAddr) {
    match socket.try_send_to(&reply.bytes, client) {
        Ok(_) => server.metrics.answered(reply.code.into()),
        Err(_) => server.metrics.unanswered(Unanswered::Send),
    }
}
