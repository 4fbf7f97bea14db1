//! Sockets of ended connections, which later connections of the same worker use.
//!
//! To make, configure and close a socket takes about 5 % of the processor time of a short connection. A socket is used again only
//! if its connection has ended in both directions: the endpoint has acknowledged all bytes and the end of the stream, and the
//! kernel has forgotten the connection. A `connect` with the address family `AF_UNSPEC` then discards what the socket has
//! received, and resets its addresses, counters and timers. The options of the socket stay, so a socket with other options than
//! those of [`relay_socket`](super::socket::relay_socket) must not be kept.
//!
//! If the endpoint ended the connection first, its acknowledgement takes a round trip. So the socket that was kept first is used
//! first.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{Shutdown, connect_unspec, getpeername, shutdown};

/// The number of spare sockets that one worker keeps.
const SPARES_MAX: usize = 64;

/// The spare sockets of one worker.
#[derive(Debug, Default)]
pub struct SpareSockets {
    ipv4: Spares,
    ipv6: Spares,
}

/// The spare sockets of one address family.
#[derive(Debug, Default)]
struct Spares {
    kept: VecDeque<OwnedFd>,
    /// The smallest number of `kept` sockets since the last call of [`SpareSockets::thin`].
    fewest: usize,
}

impl SpareSockets {
    /// Returns an unconnected socket of the address family; `None` if there is none, or if the connection of the one that was kept
    /// first has not ended yet.
    pub fn take(&mut self, address: SocketAddr) -> Option<OwnedFd> {
        let spares = self.of(address);
        let socket = spares.kept.pop_front()?;
        // A socket has a peer until the peer has acknowledged the end of the stream.
        if getpeername(&socket) != Err(Errno::NOTCONN) {
            // The peers of the others may answer sooner.
            spares.kept.push_back(socket);
            return None;
        }
        spares.fewest = spares.fewest.min(spares.kept.len());
        connect_unspec(&socket).ok()?;
        Some(socket)
    }

    /// Ends a connection to `address`, which the endpoint has ended; `ended` tells whether the end of the stream was sent to it.
    /// Keeps the socket if there are fewer than `most` spare sockets of its family; otherwise closes it.
    pub fn keep(&mut self, socket: OwnedFd, address: SocketAddr, ended: bool, most: usize) {
        // The kernel binds a socket to the interface of a scoped address, and the binding survives `connect_unspec`.
        let is_scoped = matches!(address, SocketAddr::V6(address) if address.scope_id() != 0);
        let kept = &mut self.of(address).kept;
        if kept.len() < most.min(SPARES_MAX)
            && !is_scoped
            && (ended || shutdown(&socket, Shutdown::Write).is_ok())
        {
            kept.push_back(socket);
        }
    }

    /// Closes the sockets that no connection has needed since the last call.
    pub fn thin(&mut self) {
        for spares in [&mut self.ipv4, &mut self.ipv6] {
            spares.kept.drain(..spares.fewest);
            spares.fewest = spares.kept.len();
        }
    }

    fn of(&mut self, address: SocketAddr) -> &mut Spares {
        if address.is_ipv4() { &mut self.ipv4 } else { &mut self.ipv6 }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::socket::{begin_to_connect, relay_socket};

    /// A connection to a listener on this address: both ends.
    fn connection(address: &str, spare: Option<OwnedFd>) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((address, 0)).expect("a port");
        let address = listener.local_addr().expect("bound");
        let socket = spare.map_or_else(|| relay_socket(address), Ok).expect("a socket");
        begin_to_connect(&socket, address).expect("connecting");
        let socket = TcpStream::from(socket);
        let (accepted, _) = listener.accept().expect("a connection");
        socket.set_nonblocking(false).expect("a socket");
        (socket, accepted)
    }

    /// Ends a connection, this end first.
    fn end(mut socket: TcpStream, mut accepted: TcpStream) -> OwnedFd {
        socket.shutdown(std::net::Shutdown::Write).expect("ended");
        accepted.read_to_end(&mut Vec::new()).expect("the end");
        drop(accepted);
        socket.read_to_end(&mut Vec::new()).expect("the end");
        socket.into()
    }

    fn any(address: &str) -> SocketAddr {
        SocketAddr::new(address.parse().expect("an address"), 1)
    }

    #[test]
    fn a_socket_serves_one_connection_after_another_and_knows_nothing_of_the_one_before() {
        for address in ["127.0.0.1", "::1"] {
            let mut spares = SpareSockets::default();
            let mut numbers = Vec::new();
            for round in 0..20_u8 {
                let (mut socket, mut accepted) = connection(address, spares.take(any(address)));
                let after_first = round > 0;
                assert_eq!(after_first, numbers.last() == Some(&socket.as_raw_fd()), "{numbers:?}");
                numbers.push(socket.as_raw_fd());
                assert!(socket.nodelay().expect("read"));
                accepted.write_all(&[round; 9]).expect("written");
                let mut received = [0; 9];
                socket.read_exact(&mut received).expect("read");
                assert_eq!(received, [round; 9]);
                // Nobody reads these bytes.
                accepted.write_all(&[0xff; 999]).expect("written");
                socket.shutdown(std::net::Shutdown::Write).expect("ended");
                accepted.read_to_end(&mut Vec::new()).expect("the end");
                drop(accepted);
                spares.keep(socket.into(), any(address), true, 1);
            }
        }
    }

    #[test]
    fn the_socket_of_a_connection_that_has_not_ended_is_not_used() {
        let mut spares = SpareSockets::default();
        let address = any("127.0.0.1");
        let (ended_by_us, mut accepted) = connection("127.0.0.1", None);
        spares.keep(ended_by_us.into(), address, false, 9);
        assert_eq!(accepted.read(&mut [0]).expect("a FIN, not a reset"), 0);
        assert!(spares.take(address).is_none());
        accepted.write_all(b"the last bytes").expect("still open");
        assert!(spares.take(address).is_none());

        let (ended_by_endpoint, mut other) = connection("127.0.0.1", None);
        other.shutdown(std::net::Shutdown::Write).expect("ended");
        spares.keep(ended_by_endpoint.into(), address, false, 9);
        assert_eq!(other.read(&mut [0]).expect("a FIN, not a reset"), 0);
        // The first one is asked before the second one, and then after it.
        assert!(spares.take(address).is_none());
        assert!(spares.take(address).is_some());
        assert!(spares.take(address).is_none());
        drop(accepted);
        assert!(spares.take(address).is_some());
    }

    #[test]
    fn spares_are_few_and_those_that_nobody_needs_are_closed() {
        let mut spares = SpareSockets::default();
        let address = any("127.0.0.1");
        let ended = |address: &str| {
            let (socket, accepted) = connection(address, None);
            end(socket, accepted)
        };
        for _ in 0..3 {
            spares.keep(ended("127.0.0.1"), address, true, 2);
        }
        spares.keep(ended("::1"), any("::1"), true, 2);
        assert_eq!((spares.ipv4.kept.len(), spares.ipv6.kept.len()), (2, 1));
        let scoped =
            SocketAddr::V6(std::net::SocketAddrV6::new("fe80::1".parse().expect("an address"), 1, 0, 2));
        spares.keep(ended("::1"), scoped, true, 2);
        assert_eq!(spares.ipv6.kept.len(), 1);
        spares.thin();
        assert_eq!(spares.ipv4.kept.len(), 2, "they were not kept for a whole interval yet");
        let used = spares.take(address).expect("a spare");
        spares.keep(used, address, true, 2);
        spares.thin();
        assert_eq!((spares.ipv4.kept.len(), spares.ipv6.kept.len()), (1, 0));
        spares.thin();
        assert!(spares.take(address).is_none());
        for _ in 0..SPARES_MAX + 9 {
            spares.keep(ended("127.0.0.1"), address, true, usize::MAX);
        }
        assert_eq!(spares.ipv4.kept.len(), SPARES_MAX);
    }
}
