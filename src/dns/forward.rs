//! Questions about names of other zones, which other servers answer. Each question has its own socket, source port and id. An
//! attacker off the path has to guess port and id, and the case of the letters in the name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rustls::crypto::SecureRandom;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::answer::{Question, Reply, Transport};
use isthmus_telemetry::names::{Forwarded, NameMetrics};
use isthmus_tls::server::provider;

/// The time within which one server must answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// The number of attempts for one question. They go to the servers in turn.
const ATTEMPTS: usize = 3;
/// The largest datagram that is read.
const DATAGRAM_BYTES_MAX: usize = 4_096;
/// An attempt ends after this number of datagrams that do not answer the question, because an attacker may be guessing.
const STRANGE_MAX: usize = 64;

/// Forwards questions to other servers.
pub struct Forwarder {
    upstream: Vec<SocketAddr>,
    /// One permit for each question that may wait for its answer.
    permits: Semaphore,
    /// The source of random ids.
    random: &'static dyn SecureRandom,
}

/// Returns true if a client may ask for names of other zones. A server that resolved them for everybody could be used for
/// attacks.
pub fn may_ask(client: IpAddr) -> bool {
    match client.to_canonical() {
        IpAddr::V4(ip) => {
            // Shared address space (RFC 6598), which clusters use for pods.
            let is_shared = ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64;
            ip.is_loopback() || ip.is_private() || ip.is_link_local() || is_shared
        }
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

impl Forwarder {
    /// Makes a forwarder to these servers; at most `pending` questions wait at a time.
    pub fn new(upstream: Vec<SocketAddr>, pending: usize) -> Self {
        Self { upstream, permits: Semaphore::new(pending), random: provider().secure_random }
    }

    /// Returns true if there is no server to ask.
    pub fn is_off(&self) -> bool {
        self.upstream.is_empty()
    }

    /// Forwards a question and returns the answer for the client. If the future is dropped, its socket is closed.
    pub async fn ask(&self, question: &Question, metrics: &NameMetrics) -> Reply {
        let Ok(_permit) = self.permits.try_acquire() else {
            metrics.forwarded(Forwarded::Refused);
            return question.failed();
        };
        for server in self.upstream.iter().cycle().take(ATTEMPTS) {
            if let Ok(Some(answer)) = timeout(ANSWER_WITHIN, attempt(*server, question, self.random)).await {
                metrics.forwarded(Forwarded::Answered);
                return question.relay(answer);
            }
        }
        metrics.forwarded(Forwarded::Failed);
        question.failed()
    }
}

/// Asks one server; `None` if there is no answer.
async fn attempt(server: SocketAddr, question: &Question, random: &dyn SecureRandom) -> Option<Vec<u8>> {
    let mut id = [0; 2];
    random.fill(&mut id).ok()?;
    let query = question.query(u16::from_be_bytes(id))?;
    let answer = over_udp(server, question, &query).await?;
    // A truncated answer over UDP may fit over TCP.
    let is_truncated = answer.get(2).is_some_and(|flags| flags & 2 != 0);
    if is_truncated && question.transport() == Transport::Tcp {
        return over_tcp(server, question, &query).await;
    }
    Some(answer)
}

async fn over_udp(server: SocketAddr, question: &Question, query: &[u8]) -> Option<Vec<u8>> {
    let local: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((local, 0)).await.ok()?;
    // A connected socket receives datagrams from this server only.
    socket.connect(server).await.ok()?;
    socket.send(query).await.ok()?;
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    for _ in 0..STRANGE_MAX {
        let length = socket.recv(&mut buffer).await.ok()?;
        if buffer.get(..length).is_some_and(|answer| question.is_answered_by(query, answer)) {
            buffer.truncate(length);
            return Some(buffer);
        }
    }
    None
}

async fn over_tcp(server: SocketAddr, question: &Question, query: &[u8]) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await.ok()?;
    stream.write_all(&u16::try_from(query.len()).ok()?.to_be_bytes()).await.ok()?;
    stream.write_all(query).await.ok()?;
    let mut answer = vec![0; usize::from(stream.read_u16().await.ok()?)];
    stream.read_exact(&mut answer).await.ok()?;
    question.is_answered_by(query, &answer).then_some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clients_near_by_may_have_other_names_resolved() {
        let may = |text: &str| may_ask(text.parse().expect("an address"));
        for near in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.9.9",
            "100.64.0.1",
            "::1",
            "fd00::1",
            "fe80::1",
            "::ffff:10.0.0.1",
        ] {
            assert!(may(near), "{near}");
        }
        for far in ["192.0.2.1", "8.8.8.8", "100.128.0.1", "2001:db8::1", "::ffff:8.8.8.8", "0.0.0.0"] {
            assert!(!may(far), "{far}");
        }
    }
}
