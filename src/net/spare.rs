//! Unconnected sockets of ended connections, which later connections of the same worker use.
//!
//! To make, configure and close a socket takes about 5 % of the processor time of a short connection. Only a socket whose
//! connection has ended in both directions is kept: the endpoint has acknowledged all bytes and the end of the stream, and the
//! kernel has forgotten the connection. A `connect` with the address family `AF_UNSPEC` then discards what the socket has
//! received, and resets its addresses, counters and timers. The options of the socket stay, so a socket with other options than
//! those of [`relay_socket`](super::socket::relay_socket) must not be kept.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{connect_unspec, getpeername};

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
    free: Vec<OwnedFd>,
    /// The smallest number of `free` sockets since the last call of [`SpareSockets::thin`].
    fewest: usize,
}

impl SpareSockets {
    /// Returns a spare socket of the address family; `None` if there is none.
    pub fn take(&mut self, address: SocketAddr) -> Option<OwnedFd> {
        let spares = self.of(address);
        let socket = spares.free.pop();
        spares.fewest = spares.fewest.min(spares.free.len());
        socket
    }

    /// Keeps the socket of a connection to `address` if the connection has ended in both directions, and if there are fewer than
    /// `most` spare sockets of its family. Otherwise closes the socket.
    pub fn keep(&mut self, socket: OwnedFd, address: SocketAddr, most: usize) {
        // The kernel binds a socket to the interface of a scoped address, and the binding survives `connect_unspec`.
        let is_scoped = matches!(address, SocketAddr::V6(address) if address.scope_id() != 0);
        let has_room = self.of(address).free.len() < most.min(SPARES_MAX);
        // A socket has a peer until the peer has acknowledged the end of the stream.
        let has_ended = || getpeername(&socket) == Err(Errno::NOTCONN);
        if has_room && !is_scoped && has_ended() && connect_unspec(&socket).is_ok() {
            self.of(address).free.push(socket);
        }
    }

    /// Closes the sockets that no connection has needed since the last call.
    pub fn thin(&mut self) {
        for spares in [&mut self.ipv4, &mut self.ipv6] {
            spares.free.truncate(spares.free.len() - spares.fewest);
            spares.fewest = spares.free.len();
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
    use crate::net::socket::{begin_to_connect, relay_socket};

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
                spares.keep(socket.into(), any(address), 1);
            }
        }
    }

    #[test]
    fn the_socket_of_a_connection_that_has_not_ended_is_closed() {
        let mut spares = SpareSockets::default();
        let address = any("127.0.0.1");
        let (open, mut accepted) = connection("127.0.0.1", None);
        spares.keep(open.into(), address, 9);
        assert_eq!(accepted.read(&mut [0]).expect("a FIN, not a reset"), 0);
        let (ended_by_endpoint, mut accepted) = connection("127.0.0.1", None);
        accepted.shutdown(std::net::Shutdown::Write).expect("ended");
        spares.keep(ended_by_endpoint.into(), address, 9);
        assert_eq!(accepted.read(&mut [0]).expect("a FIN, not a reset"), 0);
        let (ended_by_us, mut accepted) = connection("127.0.0.1", None);
        ended_by_us.shutdown(std::net::Shutdown::Write).expect("ended");
        spares.keep(ended_by_us.into(), address, 9);
        assert_eq!(accepted.read(&mut [0]).expect("a FIN, not a reset"), 0);
        assert!(spares.take(address).is_none());
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
            spares.keep(ended("127.0.0.1"), address, 2);
        }
        spares.keep(ended("::1"), any("::1"), 2);
        assert_eq!((spares.ipv4.free.len(), spares.ipv6.free.len()), (2, 1));
        let scoped =
            SocketAddr::V6(std::net::SocketAddrV6::new("fe80::1".parse().expect("an address"), 1, 0, 2));
        spares.keep(ended("::1"), scoped, 2);
        assert_eq!(spares.ipv6.free.len(), 1);
        spares.thin();
        assert_eq!(spares.ipv4.free.len(), 2, "they were not kept for a whole interval yet");
        let used = spares.take(address).expect("a spare");
        spares.keep(used, address, 2);
        spares.thin();
        assert_eq!((spares.ipv4.free.len(), spares.ipv6.free.len()), (1, 0));
        spares.thin();
        assert!(spares.take(address).is_none());
        for _ in 0..SPARES_MAX + 9 {
            spares.keep(ended("127.0.0.1"), address, usize::MAX);
        }
        assert_eq!(spares.ipv4.free.len(), SPARES_MAX);
    }
}
