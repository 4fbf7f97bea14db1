//! A dial of one endpoint, at one of its addresses after the other.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendFlags, getsockname};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::announce;
use crate::attempts::{Attempts, Replay};
use crate::core::Core;
use crate::entry::Entry;
use crate::permits::LimitRefusal;
use crate::upstreams::InFlight;
use isthmus_model::endpoint::Encapsulation;
use isthmus_model::reason::Reason;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_net::socket::{
    acknowledge_with_data, begin_to_connect, dial_reason, is_out_of_descriptors, relay_socket,
};
use isthmus_telemetry::local::RelayPath;

/// An endpoint that is dialled, at one of its addresses after the other.
pub(super) struct Target {
    /// The index of the endpoint among the candidates.
    pub(super) index: usize,
    /// The number of the attempt.
    pub(super) attempt: u8,
    pub(super) in_flight: InFlight,
    pub(super) encapsulation: Encapsulation,
    /// True if the endpoint expects a PROXY header.
    pub(super) announces: bool,
    /// The time at which the present address was dialled.
    pub(super) begun: Instant,
    /// The place of the address that is tried first.
    first: usize,
    /// The number of addresses that were tried before the present one.
    pub(super) before: usize,
    /// The number of addresses.
    count: usize,
}

impl Target {
    /// Begins an attempt at the candidate with this index; returns `None` if it is full.
    pub(super) fn begin(core: &Core, entry: &Entry, attempts: &mut Attempts, index: usize) -> Option<Self> {
        let begun = Instant::now();
        attempts.start(begun);
        let endpoint = attempts.upstream(index).clone();
        let max = attempts.candidate(index).connections_max;
        let in_flight = core.shared.upstreams.begin_below(endpoint, max, begun)?;
        let encapsulation = attempts.candidate(index).encapsulation;
        let header = attempts.tuning().header_for(encapsulation);
        if let Some(version) = header {
            announce::prepare(core, entry, version);
        }
        entry.dialled(attempts.candidate(index));
        Some(Self {
            index,
            attempt: attempts.begin(index),
            encapsulation,
            announces: header.is_some(),
            begun,
            first: in_flight.first_address(),
            before: 0,
            count: attempts.candidate(index).addresses().count(),
            in_flight,
        })
    }

    /// Begins to connect to the present address, and tries to send at once: on a fast network the endpoint has accepted by then.
    pub(super) fn dial(
        &self,
        core: &Core,
        entry: &Entry,
        attempts: &mut Attempts,
    ) -> Result<(TcpStream, Dialled), Reason> {
        let address = self.address(attempts);
        entry.dialled_at(address);
        let own = &core.shared.own;
        if own.is_own(address) || core.mesh.is_own_gateway(address) {
            return Err(Reason::EndpointUnreachable);
        }
        let socket = relay_socket(address).map_err(|error| no_socket(core, entry, error))?;
        if self.announces || attempts.replay.is_some() {
            acknowledge_with_data(&socket);
        }
        begin_to_connect(&socket, address).map_err(dial_reason)?;
        // The dial is registered before a byte is sent. So if the dial reaches a listener of this process, the listener finds the
        // registration.
        let local = own.has_port(address.port()).then(|| getsockname(&socket).ok()).flatten();
        let local = local.and_then(|local| SocketAddr::try_from(local).ok());
        entry.facts.borrow_mut().own_dial = local.map(|local| Box::new(own.dialling(local, address)));
        match self.send_first(&socket, entry, &mut attempts.replay) {
            Ok(()) => Ok((into_tokio(socket)?, Dialled::Connected)),
            Err(Errno::AGAIN | Errno::INPROGRESS | Errno::NOTCONN | Errno::ALREADY) => {
                Ok((into_tokio(socket)?, Dialled::Connecting))
            }
            Err(error) => Err(dial_reason(error)),
        }
    }

    /// Sends the endpoint its first bytes: the PROXY header if the endpoint expects one, and the bytes read from the client.
    pub(super) fn send_first(
        &self,
        socket: &impl AsFd,
        entry: &Entry,
        replay: &mut Option<Replay>,
    ) -> Result<(), Errno> {
        let sent = match replay {
            _ if self.announces => announce::send(socket, entry, replay.as_ref())?,
            Some(replay) => rustix::net::send(socket, &replay.bytes, SendFlags::NOSIGNAL)?,
            None => return Err(Errno::AGAIN),
        };
        if let Some(replay) = replay {
            replay.sent = sent;
            entry.count(true, RelayPath::Copy, sent);
        }
        Ok(())
    }

    /// Returns the present address.
    pub(super) fn address(&self, attempts: &Attempts) -> SocketAddr {
        let candidate = attempts.candidate(self.index);
        candidate.addresses().nth(self.place()).unwrap_or(candidate.key.address)
    }

    fn place(&self) -> usize {
        (self.first + self.before) % self.count
    }

    /// Returns true if the endpoint has an address that was not tried.
    pub(super) fn has_another_address(&self) -> bool {
        self.before + 1 < self.count
    }

    /// Passes from the present address, which has failed, to the next one.
    pub(super) fn try_next_address(&mut self, entry: &Entry, attempts: &Attempts, reason: Reason) {
        entry.add_detail(&format!("{}: {reason}", self.address(attempts)));
        self.before += 1;
        self.in_flight.prefer_address(self.place());
        self.begun = Instant::now();
    }
}

/// The state of a dial that has begun.
pub(super) enum Dialled {
    /// The endpoint has accepted, and was sent its first bytes.
    Connected,
    Connecting,
}

/// Returns the reason for which no socket can be opened to dial an endpoint.
fn no_socket(core: &Core, entry: &Entry, error: Errno) -> Reason {
    if !is_out_of_descriptors(error) {
        return dial_reason(error);
    }
    let text = "the gateway has no file descriptor left for a connection to an endpoint";
    core.refused(entry, LimitRefusal::new(Reason::LimitGlobal, Some(FullLimit::Descriptors), text))
}

/// Returns true if a failed dial says nothing about the endpoint, because this process is at fault.
pub(super) fn is_own_fault(reason: Reason) -> bool {
    matches!(reason, Reason::Internal | Reason::LimitGlobal)
}

fn into_tokio(socket: OwnedFd) -> Result<TcpStream, Reason> {
    TcpStream::from_std(socket.into()).map_err(|_| Reason::Internal)
}
