//! The connections of checks that are being made: begun, and looked at together with one `poll` call.
//!
//! A check costs four system calls beside its part of the `poll`: `socket`, `connect`, `setsockopt` and `close`. It is ended
//! with a reset: a FIN would leave a socket of the gateway in TIME_WAIT for a minute after each check.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, sockopt};

use super::schedule::Due;
use crate::model::reason::Reason;
use crate::net::socket::{connect, dial_reason, reset_on_close};

/// The result of a check; `None`: it says nothing about the endpoint.
pub(super) type Outcome = Option<Result<(), Reason>>;

/// The checks that are being made.
#[derive(Default)]
pub(super) struct Sockets {
    open: Vec<Open>,
}

struct Open {
    address: SocketAddr,
    socket: OwnedFd,
    /// The end of its time, in milliseconds.
    deadline: u64,
    greeting: &'static [u8],
}

impl Sockets {
    /// Returns the number of checks that are being made.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Begins to connect; returns the outcome if that ends the check.
    pub(super) fn begin(&mut self, due: Due, now: u64) -> Option<Outcome> {
        let timeout = u64::try_from(due.timeout.as_millis()).unwrap_or(u64::MAX);
        match connect(due.address) {
            Ok(socket) => {
                let (address, greeting) = (due.address, due.greeting);
                self.open.push(Open { address, socket, deadline: now.saturating_add(timeout), greeting });
                None
            }
            Err(error) => Some(outcome(error)),
        }
    }

    /// Looks at all checks without waiting; returns those that have ended.
    pub(super) fn look(&mut self, now: u64) -> Vec<(SocketAddr, Outcome)> {
        if self.open.is_empty() {
            return Vec::new();
        }
        let mut descriptors: Vec<PollFd<'_>> =
            self.open.iter().map(|open| PollFd::new(&open.socket, PollFlags::OUT)).collect();
        let at_once = Timespec::try_from(Duration::ZERO).ok();
        if poll(&mut descriptors, at_once.as_ref()).is_err() {
            // Interrupted, or out of memory: the next look is soon.
            return Vec::new();
        }
        let ready: Vec<bool> = descriptors.iter().map(|one| !one.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        let mut ended = Vec::new();
        self.open.retain(|open| {
            let outcome = match ready.next() {
                Some(true) => open.finish(),
                _ if open.deadline <= now => Some(Err(Reason::EndpointTimeout)),
                _ => return true,
            };
            ended.push((open.address, outcome));
            false
        });
        ended
    }
}

impl Open {
    /// Ends a check whose endpoint has answered.
    fn finish(&self) -> Outcome {
        let accepted = match sockopt::socket_error(self.socket.as_fd()) {
            Ok(Ok(())) => true,
            // An endpoint that resets the connection has accepted it.
            Ok(Err(Errno::CONNRESET | Errno::PIPE)) => true,
            Ok(Err(error)) | Err(error) => return outcome(error),
        };
        if accepted && !self.greeting.is_empty() {
            // A new connection takes a few bytes at once. If the endpoint has reset it, nobody reads them.
            let _ = rustix::net::send(&self.socket, self.greeting, SendFlags::NOSIGNAL);
        }
        reset_on_close(&self.socket);
        Some(Ok(()))
    }
}

/// Returns what a failed connect says about the endpoint.
fn outcome(error: Errno) -> Outcome {
    match (error, dial_reason(error)) {
        // This host has no port, no descriptor or no memory left.
        (Errno::ADDRNOTAVAIL, _) | (_, Reason::Internal) => None,
        (_, reason) => Some(Err(reason)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Instant;

    use super::*;

    fn due(address: SocketAddr) -> Due {
        Due { address, timeout: Duration::from_millis(200), greeting: b"hello" }
    }

    /// Makes one check, with a clock of its own.
    fn check(due: Due) -> Outcome {
        let (mut sockets, began) = (Sockets::default(), Instant::now());
        if let Some(outcome) = sockets.begin(due, 0) {
            return outcome;
        }
        loop {
            let now = u64::try_from(began.elapsed().as_millis()).expect("short");
            if let Some((address, outcome)) = sockets.look(now).pop() {
                assert_eq!((address, sockets.len()), (due.address, 0));
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
        let _queued: Vec<OwnedFd> = (0..4).filter_map(|_| connect(address).ok()).collect();
        assert_eq!(check(due(address)), Some(Err(Reason::EndpointTimeout)));
    }

    #[test]
    fn a_fault_of_this_host_says_nothing_about_the_endpoint() {
        assert_eq!(outcome(Errno::MFILE), None);
        assert_eq!(outcome(Errno::ADDRNOTAVAIL), None);
        assert_eq!(outcome(Errno::HOSTUNREACH), Some(Err(Reason::EndpointUnreachable)));
    }
}
