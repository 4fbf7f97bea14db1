//! The connections of running checks, polled together with one `poll` call.
//!
//! A check costs two system calls beside its part of the `poll`, whether it passes or fails: `connect`, and another `connect`.
//! If the endpoint has accepted, the second call has the address family `AF_UNSPEC` and resets the connection (a FIN would leave
//! it in TIME_WAIT for a minute after each check). If not, the second call has the same address again and returns why. Either
//! leaves a socket that the next check uses again. A new socket for each check would take a third more processor time.
//!
//! The handshake is completed before the reset. Without its last packet the check would cost less, but a program that
//! accepts nothing would pass all checks: its queue of connections would never be full.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, connect_unspec};

use super::schedule::Due;
use crate::clock::milliseconds;
use isthmus_model::reason::Reason;
use isthmus_net::socket::{begin_to_connect, dial_reason, reset_on_close, unconnected};

/// The result of a check; `None` if the check says nothing about the endpoint.
pub(super) type Outcome = Option<Result<(), Reason>>;

/// The checks that are running.
#[derive(Default)]
pub(super) struct Sockets {
    open: Vec<Open>,
    /// Unconnected sockets of earlier checks, kept for further ones: those of IPv4, then those of IPv6.
    free: [Vec<OwnedFd>; 2],
}

struct Open {
    due: Due,
    socket: OwnedFd,
    /// The time at which the check fails, in milliseconds since the checks began.
    deadline: u64,
}

impl Sockets {
    /// Returns the number of running checks.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Closes the unconnected sockets that are kept for further checks.
    pub(super) fn rest(&mut self) {
        self.free = Default::default();
    }

    fn free(&mut self, address: SocketAddr) -> &mut Vec<OwnedFd> {
        &mut self.free[usize::from(address.is_ipv6())]
    }

    /// Begins to connect. Returns the outcome if the check has ended already.
    pub(super) fn begin(&mut self, due: Due, now: u64) -> Option<Outcome> {
        let address = due.address;
        let socket = match self.free(address).pop().map_or_else(|| unconnected(address), Ok) {
            Ok(socket) => socket,
            Err(error) => return Some(outcome(error)),
        };
        match begin_to_connect(&socket, address) {
            Ok(()) => {
                let deadline = now.saturating_add(milliseconds(due.timeout));
                self.open.push(Open { due, socket, deadline });
                None
            }
            // The socket is closed: older kernels leave the local address of a failed call set, and a later check would use it.
            Err(error) => Some(outcome(error)),
        }
    }

    /// Polls all checks without waiting, and returns those that have ended. At most `places` sockets stay open.
    pub(super) fn look(&mut self, now: u64, places: usize) -> Vec<(Due, Outcome)> {
        if self.open.is_empty() {
            return Vec::new();
        }
        let mut descriptors: Vec<PollFd<'_>> =
            self.open.iter().map(|open| PollFd::new(&open.socket, PollFlags::OUT)).collect();
        if poll(&mut descriptors, Some(&Timespec::default())).is_err() {
            // The call was interrupted or the kernel is out of memory: the next call follows soon.
            return Vec::new();
        }
        let found: Vec<PollFlags> = descriptors.iter().map(PollFd::revents).collect();
        let mut found = found.into_iter();
        let mut ended = Vec::new();
        for open in std::mem::take(&mut self.open) {
            match found.next() {
                Some(found) if !found.is_empty() => {
                    let (outcome, is_connected) = open.finish(found);
                    ended.push((open.due, outcome));
                    if !is_connected || open.reset() {
                        self.keep(open.due.address, open.socket, places);
                    }
                }
                _ if open.deadline <= now => ended.push((open.due, Some(Err(Reason::EndpointTimeout)))),
                _ => self.open.push(open),
            }
        }
        ended
    }

    /// Keeps the unconnected socket of a check of this address, if fewer than `places` sockets are open.
    fn keep(&mut self, address: SocketAddr, socket: OwnedFd, places: usize) {
        let sockets = self.open.len() + self.free.iter().map(Vec::len).sum::<usize>();
        if sockets < places {
            self.free(address).push(socket);
        }
    }
}

impl Open {
    /// Returns the outcome of a check whose endpoint has answered with what `poll` found, and true if the socket is connected
    /// still. Sends the greeting if it is.
    fn finish(&self, found: PollFlags) -> (Outcome, bool) {
        // Without one of these flags, the connection is open and has no error.
        if found.intersects(PollFlags::ERR | PollFlags::HUP) {
            // The call does not connect again: it returns the error of the connection that has failed, and undoes it.
            match begin_to_connect(&self.socket, self.due.address) {
                Ok(()) => {}
                // An endpoint that resets the connection has accepted it.
                Err(Errno::CONNRESET | Errno::PIPE) => return (Some(Ok(())), false),
                Err(error) => return (outcome(error), false),
            }
        }
        if !self.due.greeting.is_empty() {
            // The send buffer of a new connection has room for a few bytes. If the endpoint has reset the connection,
            // nobody reads them.
            let _ = rustix::net::send(&self.socket, self.due.greeting, SendFlags::NOSIGNAL);
        }
        (Some(Ok(())), true)
    }

    /// Resets the connection. Returns false if the kernel is out of memory: then the connection is reset when the socket is
    /// closed.
    fn reset(&self) -> bool {
        let is_reset = connect_unspec(&self.socket).is_ok();
        if !is_reset {
            reset_on_close(&self.socket);
        }
        is_reset
    }
}

/// Returns what a failed `connect` says about the endpoint.
fn outcome(error: Errno) -> Outcome {
    match (error, dial_reason(error)) {
        // This host is out of ports, descriptors or memory, so the check says nothing about the endpoint.
        (Errno::ADDRNOTAVAIL, _) | (_, Reason::Internal) => None,
        (_, reason) => Some(Err(reason)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    fn due(address: SocketAddr) -> Due {
        Due { address, index: 0, timeout: Duration::from_millis(200), greeting: b"hello" }
    }

    /// Makes one check, with its own clock.
    fn check(due: Due) -> Outcome {
        check_with(&mut Sockets::default(), due)
    }

    fn check_with(sockets: &mut Sockets, due: Due) -> Outcome {
        let began = Instant::now();
        if let Some(outcome) = sockets.begin(due, 0) {
            return outcome;
        }
        loop {
            let now = u64::try_from(began.elapsed().as_millis()).expect("short");
            if let Some((ended, outcome)) = sockets.look(now, 1).pop() {
                assert_eq!((ended, sockets.len()), (due, 0));
                return outcome;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_endpoint_that_accepts_passes_and_is_greeted_and_reset() {
        use std::io::Read;
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        assert_eq!(check(due(listener.local_addr().expect("bound"))), Some(Ok(())));
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut read = Vec::new();
        let error = stream.read_to_end(&mut read).expect_err("a reset");
        assert_eq!((error.kind(), &read[..]), (std::io::ErrorKind::ConnectionReset, &b"hello"[..]));
    }

    #[test]
    fn an_endpoint_that_refuses_or_is_silent_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        drop(listener);
        assert_eq!(check(due(address)), Some(Err(Reason::EndpointRefused)));
        let silent =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        silent.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bound");
        silent.listen(0).expect("listening");
        let address = silent.local_addr().expect("bound").as_socket().expect("an address");
        let _queued: Vec<_> = (0..4)
            .map(|_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(50)))
            .collect();
        assert_eq!(check(due(address)), Some(Err(Reason::EndpointTimeout)));
    }

    #[test]
    fn an_endpoint_that_accepts_and_resets_passes() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let due = due(listener.local_addr().expect("bound"));
        let mut sockets = Sockets::default();
        for round in 0..2 {
            assert_eq!(sockets.begin(due, 0), None);
            let accepted = socket2::Socket::from(listener.accept().expect("a connection").0);
            accepted.set_linger(Some(Duration::ZERO)).expect("a socket");
            drop(accepted);
            assert_eq!(sockets.look(1, 1), [(due, Some(Ok(())))]);
            assert_eq!(sockets.free[0].len(), 1, "round {round}: the socket is used again");
        }
    }

    #[test]
    fn one_socket_makes_one_check_after_another_whatever_they_find() {
        let good = TcpListener::bind("127.0.0.1:0").expect("a port");
        let bad = TcpListener::bind("127.0.0.1:0").and_then(|gone| gone.local_addr()).expect("a port");
        let good_address = good.local_addr().expect("bound");
        let mut sockets = Sockets::default();
        let mut numbers = Vec::new();
        for round in 0..50 {
            let (address, expected) = match round % 3 {
                0 => (bad, Err(Reason::EndpointRefused)),
                _ => (good_address, Ok(())),
            };
            assert_eq!(check_with(&mut sockets, due(address)), Some(expected), "round {round}");
            if expected.is_ok() {
                drop(good.accept().expect("a connection of its own"));
            }
            numbers.extend(sockets.free[0].iter().map(std::os::fd::AsRawFd::as_raw_fd));
            assert!(sockets.free[0].len() <= 1, "no more than places");
        }
        assert_eq!((numbers.len(), numbers.iter().collect::<BTreeSet<_>>().len()), (50, 1), "{numbers:?}");
        sockets.rest();
        assert!(sockets.free[0].is_empty());
    }

    #[test]
    fn a_fault_of_this_host_says_nothing_about_the_endpoint() {
        assert_eq!(outcome(Errno::MFILE), None);
        assert_eq!(outcome(Errno::ADDRNOTAVAIL), None);
        assert_eq!(outcome(Errno::HOSTUNREACH), Some(Err(Reason::EndpointUnreachable)));
    }
}
