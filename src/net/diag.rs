//! The kernel's state of a TCP connection, requested over `NETLINK_SOCK_DIAG` (sock_diag(7)) as `ss` does. This needs no
//! privilege, and returns values for which a socket option would need `unsafe`.
//!
//! The kernel answers within the `send` call, so no function waits. A request costs two system calls. It is made for
//! connections that move no bytes or are about to be reset, never for busy ones.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use socket2::SockRef;

use isthmus_model::address::canonical_socket;

/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h).
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// `INET_DIAG_INFO` and `INET_DIAG_SKMEMINFO` (linux/inet_diag.h).
const INFO: u16 = 2;
const MEMORY: u16 = 7;
/// The sizes of `struct nlmsghdr`, `struct inet_diag_req_v2` and `struct inet_diag_msg` in bytes.
const HEADER: usize = 16;
const QUESTION: usize = 56;
const MESSAGE: usize = 72;
/// The size of the buffer for an answer, in bytes; larger than any answer, because `struct tcp_info` has about 250 bytes.
const ANSWER_MAX: usize = 2048;
/// The values of `idiag_timer`.
const RETRANSMIT: u8 = 1;
const PROBE: u8 = 4;

/// The number of unanswered retransmissions or window probes after which a peer may be dead.
const UNANSWERED: u8 = 3;
/// The number of unanswered retransmissions that are more than a lost packet.
const RESENT: u8 = 2;
/// The longest time for which a live peer may leave bytes unacknowledged.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(120);
/// The longest time for which a live peer may leave window probes unanswered. Three lost probes alone do not prove that a peer
/// is dead: the first three are sent within little more than a second, and a network can lose all of them.
const PROBES_ANSWERED_WITHIN: Duration = Duration::from_secs(15);

/// The state of a connection at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpState {
    /// The number of received bytes that were not read.
    pub unread: u32,
    /// The number of bytes that the peer has not acknowledged, whether sent or not.
    pub unacknowledged: u32,
    /// The timer that runs (`idiag_timer`).
    pub timer: u8,
    /// The number of packets that the timer has sent without an answer.
    pub unanswered: u8,
    /// The time since the peer's last acknowledgement.
    pub acknowledged: Duration,
    /// The time since the peer's last byte arrived; zero if the kernel does not report it.
    pub received: Duration,
    /// The kernel memory of the buffers, in bytes.
    pub memory: u32,
}

impl TcpState {
    /// Returns true if the peer is dead rather than slow: it leaves bytes unacknowledged, or window probes unanswered, for
    /// too long.
    pub fn is_dead(&self) -> bool {
        let within = match self.timer {
            RETRANSMIT => ACKNOWLEDGED_WITHIN,
            PROBE => PROBES_ANSWERED_WITHIN,
            _ => return false,
        };
        // The comparison with `within` alone is not enough: after a long silence the last acknowledgement is old, although
        // bytes that were sent a moment ago are not late.
        self.unanswered >= UNANSWERED && self.acknowledged >= within
    }

    /// Returns true if the peer has not acknowledged bytes for this time, although they were sent again.
    pub fn leaves_unacknowledged(&self, within: Duration) -> bool {
        self.timer == RETRANSMIT && self.unanswered >= RESENT && self.acknowledged >= within
    }
}

/// A netlink socket for requests.
#[derive(Debug)]
pub struct Diag(OwnedFd);

impl Diag {
    /// Opens the socket. Returns `None` if the kernel or a sandbox refuses.
    pub fn open() -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = (AddressFamily::NETLINK, SocketType::DGRAM);
        let socket = rustix::net::socket_with(kind.0, kind.1, flags, Some(SOCK_DIAG)).ok()?;
        rustix::net::connect(&socket, &SocketAddrNetlink::new(0, 0)).ok()?;
        Some(Self(socket))
    }

    /// Returns the state of a connected socket; `None` if the kernel does not report it.
    pub fn state(&self, socket: &impl AsFd) -> Option<TcpState> {
        let socket = SockRef::from(socket);
        let local = without_mapping(socket.local_addr().ok()?.as_socket()?);
        let peer = without_mapping(socket.peer_addr().ok()?.as_socket()?);
        self.ask(local, peer).ok()
    }

    fn ask(&self, local: SocketAddr, peer: SocketAddr) -> io::Result<TcpState> {
        let mut answer = [0; ANSWER_MAX];
        // Discards the late answer to an earlier request.
        while rustix::net::recv(&self.0, &mut answer, RecvFlags::DONTWAIT).is_ok() {}
        rustix::net::send(&self.0, &question(local, peer), SendFlags::NOSIGNAL)?;
        let (count, _) = rustix::net::recv(&self.0, &mut answer, RecvFlags::DONTWAIT)?;
        read(&answer[..count]).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Returns true if the kernel answers requests. This is tested once, with a connection of this process to itself.
pub fn is_answered() -> bool {
    static ANSWERED: OnceLock<bool> = OnceLock::new();
    *ANSWERED.get_or_init(|| {
        let tried = || -> io::Result<bool> {
            let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
            let socket = std::net::TcpStream::connect(listener.local_addr()?)?;
            Ok(Diag::open().and_then(|diag| diag.state(&socket)).is_some())
        };
        tried().unwrap_or(false)
    })
}

/// Converts an IPv4-mapped address to IPv4, because the kernel lists it as IPv4; other addresses keep their scope.
fn without_mapping(address: SocketAddr) -> SocketAddr {
    match canonical_socket(address) {
        mapped @ SocketAddr::V4(_) => mapped,
        SocketAddr::V6(_) => address,
    }
}

fn question(local: SocketAddr, peer: SocketAddr) -> [u8; HEADER + QUESTION] {
    const FAMILY_INET: u8 = 2;
    const FAMILY_INET6: u8 = 10;
    const PROTOCOL_TCP: u8 = 6;
    let mut bytes = [0; HEADER + QUESTION];
    let length = u32::try_from(bytes.len()).unwrap_or_default();
    bytes[0..4].copy_from_slice(&length.to_ne_bytes());
    bytes[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
    let request = &mut bytes[HEADER..];
    request[0] = if local.is_ipv4() { FAMILY_INET } else { FAMILY_INET6 };
    request[1] = PROTOCOL_TCP;
    request[2] = 1 << (INFO - 1) | 1 << (MEMORY - 1);
    // Connections in all states match.
    request[4..8].fill(0xff);
    request[8..10].copy_from_slice(&local.port().to_be_bytes());
    request[10..12].copy_from_slice(&peer.port().to_be_bytes());
    put_address(&mut request[12..28], local.ip());
    put_address(&mut request[28..44], peer.ip());
    if let SocketAddr::V6(local) = local {
        request[44..48].copy_from_slice(&local.scope_id().to_ne_bytes());
    }
    // No cookie (`INET_DIAG_NOCOOKIE`).
    request[48..56].fill(0xff);
    bytes
}

fn put_address(place: &mut [u8], address: IpAddr) {
    match address {
        IpAddr::V4(address) => place[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => place.copy_from_slice(&address.octets()),
    }
}

/// Parses the answer; `None` if it is an error or malformed.
fn read(answer: &[u8]) -> Option<TcpState> {
    if short(answer, 4)? != BY_FAMILY {
        return None;
    }
    let message = answer.get(HEADER..)?;
    let mut state = TcpState {
        timer: *message.get(2)?,
        unanswered: *message.get(3)?,
        unread: word(message, 56)?,
        unacknowledged: word(message, 60)?,
        ..TcpState::default()
    };
    let mut rest = message.get(MESSAGE..)?;
    while rest.len() >= 4 {
        let length = usize::from(short(rest, 0)?);
        let value = rest.get(4..length)?;
        match short(rest, 2)? {
            // The fields `tcpi_last_data_recv` and `tcpi_last_ack_recv`, in milliseconds.
            INFO => {
                state.received = Duration::from_millis(word(value, 52)?.into());
                state.acknowledged = Duration::from_millis(word(value, 56)?.into());
            }
            // Received bytes (`SK_MEMINFO_RMEM_ALLOC`) and bytes that wait to be sent
            // (`SK_MEMINFO_WMEM_QUEUED`).
            MEMORY => state.memory = word(value, 0)?.saturating_add(word(value, 20)?),
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(state)
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).expect("a free port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        (client, listener.accept().expect("accepted").0)
    }

    #[test]
    fn the_kernel_tells_what_a_socket_holds() {
        if !is_answered() {
            // The kernel of this host does not answer; end-to-end tests that need the answers report that.
            return;
        }
        let diag = Diag::open().expect("the kernel answers");
        let (mut client, server) = pair("127.0.0.1:0");
        client.write_all(b"0123456789").expect("sent");
        assert_eq!(diag.state(&client).map(|state| state.unacknowledged), Some(0));
        assert_eq!(diag.state(&server).map(|state| state.unread), Some(10));
        client.set_nonblocking(true).expect("set");
        while client.write(&[0; 1 << 16]).is_ok() {}
        let (full, holding) = (diag.state(&server).expect("told"), diag.state(&client).expect("told"));
        assert!(full.memory >= full.unread && full.unread > 10, "{full:?}");
        assert!(holding.memory > 0 && holding.unacknowledged > 0, "{holding:?}");
        assert!(!holding.is_dead(), "its window is full, and its peer says so: {holding:?}");
        drop((client, server));
    }

    #[test]
    fn late_is_dead_and_slow_is_not() {
        let state = |timer, unanswered, acknowledged| {
            let acknowledged = Duration::from_secs(acknowledged);
            TcpState { timer, unanswered, acknowledged, ..TcpState::default() }.is_dead()
        };
        assert!(state(RETRANSMIT, 3, 120));
        assert!(!state(RETRANSMIT, 3, 119));
        assert!(!state(RETRANSMIT, 0, 4_000), "sent a moment ago, after a long silence");
        assert!(state(PROBE, 3, 15));
        assert!(!state(PROBE, 0, 4_000), "each probe is answered, for as long as it takes");
        assert!(!state(PROBE, 3, 2), "a network may lose three probes in a row");
        assert!(!state(2, 9, 4_000), "the keep-alive timer ends the connection itself");
    }
}
