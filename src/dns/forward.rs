//! Questions about names of other zones, which other servers answer. Each query has its own socket, source port and id. An
//! attacker off the path has to guess port and id, and the case of the letters in the name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustls::crypto::SecureRandom;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::answer::{Question, Transport};
use super::waiting::Waiting;
use isthmus_tasks::shared::Shared;
use isthmus_telemetry::names::{Forwarded, NameMetrics};
use isthmus_tls::server::provider;

/// The time within which one server must answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// The number of attempts for one question. They go to the servers in turn, beginning with the one that answered last.
const ATTEMPTS: usize = 3;
/// The largest datagram that is read.
const DATAGRAM_BYTES_MAX: usize = 4_096;
/// An attempt ends after this number of datagrams that do not answer the question, because an attacker may be guessing.
const STRANGE_MAX: usize = 64;

/// Forwards questions to other servers.
pub struct Forwarder {
    upstream: Vec<SocketAddr>,
    /// The index in `upstream` of the server that answered last.
    answering: AtomicUsize,
    waiting: Waiting,
    /// The queries that wait for an answer; `None`: no server answers. Equal questions share one query.
    queries: Shared<Key, Option<Arc<[u8]>>>,
    /// The source of random ids.
    random: &'static dyn SecureRandom,
}

/// The bytes of a query without its id, and its transport.
type Key = (Vec<u8>, Transport);

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
        Self {
            upstream,
            answering: AtomicUsize::new(0),
            waiting: Waiting::new(pending),
            queries: Shared::default(),
            random: provider().secure_random,
        }
    }

    /// Returns true if there is no server to ask.
    pub fn is_off(&self) -> bool {
        self.upstream.is_empty()
    }

    /// Forwards a question of a client, and returns the answer of another server; `None` if none answers. If too many questions
    /// wait, one of the source that has the most fails at once. The future can be dropped; if it runs the query of several
    /// questions, another one of these begins it anew.
    pub async fn ask(&self, question: &Question, client: IpAddr, metrics: &NameMetrics) -> Option<Arc<[u8]>> {
        let key = (question.query(0)?, question.transport());
        let mut place = self.waiting.enter(client);
        let query = self.queries.share(key);
        // The order matters only if both are ready: then there is an answer.
        let answer = tokio::select! {
            biased;
            answer = query.result.get_or_init(|| self.answer(question)) => answer.clone(),
            () = place.lost() => {
                metrics.forwarded(Forwarded::Refused);
                return None;
            }
        };
        metrics.forwarded(if answer.is_some() { Forwarded::Answered } else { Forwarded::Failed });
        answer
    }

    /// Asks the servers in turn; `None` if none answers.
    async fn answer(&self, question: &Question) -> Option<Arc<[u8]>> {
        let (first, count) = (self.answering.load(Ordering::Relaxed), self.upstream.len());
        for attempt in 0..ATTEMPTS {
            // Names that no server answers take most of the places, so while places are rare, each server is asked once.
            if attempt >= count && self.waiting.is_crowded() {
                break;
            }
            let at = (first + attempt) % count.max(1);
            let server = *self.upstream.get(at)?;
            if let Ok(Some(answer)) = timeout(ANSWER_WITHIN, ask(server, question, self.random)).await {
                self.answering.store(at, Ordering::Relaxed);
                return Some(answer.into());
            }
        }
        None
    }
}

/// Asks one server; `None` if there is no answer.
async fn ask(server: SocketAddr, question: &Question, random: &dyn SecureRandom) -> Option<Vec<u8>> {
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
    use hickory_proto::op::{Message, MessageType, OpCode, Query as Asked};
    use hickory_proto::rr::{Name, RecordType};
    use tokio::time::Instant;

    use super::*;
    use crate::answer::{Extent, Verdict, answer};
    use crate::names::Names;
    use isthmus_snapshot::testing::Mesh;
    use isthmus_snapshot::virtual_addresses::Ranges;
    use isthmus_telemetry::recorder::Recorder;

    /// Returns a question for another server.
    fn question() -> Box<Question> {
        let mut query = Message::new(1, MessageType::Query, OpCode::Query);
        query.queries.push(Asked::query(Name::from_ascii("a.test.").expect("a name"), RecordType::A));
        let snapshot = Mesh::new(Vec::new(), Vec::new()).snapshot();
        let names = Names::new(snapshot.into(), Arc::default(), Ranges::default(), [127, 0, 0, 1].into());
        let bytes = query.to_vec().expect("encoded");
        match answer(&bytes, &names, Transport::Udp, Extent::Full) {
            Verdict::Forward(question) => question,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn three_servers_have_2_s_each_and_a_server_alone_is_asked_three_times() {
        let servers = async |count: usize| {
            let mut silent = Vec::new();
            for _ in 0..count {
                silent.push(UdpSocket::bind("127.0.0.1:0").await.expect("a free port"));
            }
            silent
        };
        for count in [1, 2, 4] {
            let silent = servers(count).await;
            let upstream = silent.iter().map(|server| server.local_addr().expect("bound")).collect();
            let (forwarder, begun) = (Forwarder::new(upstream, 8), Instant::now());
            let metrics = NameMetrics::new(&Recorder::default());
            let answer = forwarder.ask(&question(), [127, 0, 0, 1].into(), &metrics).await;
            assert_eq!((answer, begun.elapsed().as_secs()), (None, 6), "{count} servers");
        }
    }

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
