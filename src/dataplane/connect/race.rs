//! The wait for an endpoint that is being dialled. If it does not accept soon, its next address or another endpoint is dialled beside
//! it, and the first one to accept is used (RFC 8305 §5). So a client does not wait for an endpoint that is gone.

use std::future::pending;
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use super::dial::{Dialled, Target, is_own_fault};
use crate::attempts::Attempts;
use crate::core::Core;
use crate::entry::Entry;
use isthmus_model::reason::Reason;
use isthmus_net::socket::dial_reason;
use isthmus_settings::tuning::LoadBalancing;

/// The least time for which an endpoint is waited for before another is dialled beside it (RFC 8305 §8).
const HEAD_START: Duration = Duration::from_millis(250);
/// The same as a multiple of the median of the endpoint's recent times.
const HEAD_START_USUAL: u32 = 4;

/// The result of waiting for an endpoint.
pub(super) enum RaceEnd {
    Connected(TcpStream),
    Failed(Reason),
    /// The connection was ordered to end, or its client has reset it.
    Cut(Reason),
}

/// A dial that has begun beside another one.
struct Beside {
    /// The endpoint; `None` if it is the next address of the same one.
    target: Option<Target>,
    socket: TcpStream,
    begun: Instant,
}

/// The wait for an endpoint, and for another one beside it.
pub(super) struct Race<'r> {
    pub(super) core: &'r Rc<Core>,
    pub(super) entry: &'r Rc<Entry>,
    pub(super) client: Option<&'r TcpStream>,
    pub(super) attempts: &'r mut Attempts,
}

impl Race<'_> {
    /// Waits until the endpoint that is dialled with `socket` accepts or fails, or the connection is ordered to end or reset by its
    /// client. If another endpoint accepts first, that one becomes `target`.
    pub(super) async fn run(mut self, target: &mut Target, mut socket: TcpStream) -> RaceEnd {
        let timeout = self.attempts.tuning().connect_timeout;
        let mut beside: Option<Beside> = None;
        let mut overtaken_at = self.may_overtake(target).then(|| target.begun + HEAD_START);
        loop {
            let present_until = target.begun + timeout;
            let beside_until = beside.as_ref().map(|beside| beside.begun + timeout);
            let times = [Some(present_until), beside_until, overtaken_at.filter(|_| beside.is_none())];
            let next = times.into_iter().flatten().min().unwrap_or(present_until);
            // Priority: an order to end, then the endpoints' answers, then the client's reset, then the times.
            let (is_beside, answer) = tokio::select! {
                biased;
                reason = self.entry.cut_ordered() => return RaceEnd::Cut(reason),
                answer = connected(Some(&socket)) => (false, answer),
                answer = connected(beside.as_ref().map(|beside| &beside.socket)) => (true, answer),
                () = reset(self.client) => return RaceEnd::Cut(Reason::ClientReset),
                () = sleep_until(next) => {
                    if next == present_until || Some(next) == beside_until {
                        (next != present_until, Err(Reason::EndpointTimeout))
                    } else if let Some(later) = later(target) {
                        overtaken_at = Some(later);
                        continue;
                    } else {
                        overtaken_at = None;
                        match self.dial_beside(target) {
                            Some((other, Dialled::Connecting)) => beside = Some(other),
                            Some((other, Dialled::Connected)) => {
                                return RaceEnd::Connected(self.pass_to(target, other, Reason::EndpointTimeout));
                            }
                            None => {}
                        }
                        continue;
                    }
                }
            };
            match (answer, beside.take()) {
                (Ok(()), other) if !is_beside => {
                    if other.is_some() {
                        self.stay_with(target);
                    }
                    return RaceEnd::Connected(socket);
                }
                (Ok(()), Some(other)) => {
                    return RaceEnd::Connected(self.pass_to(target, other, Reason::EndpointTimeout));
                }
                (Err(reason), Some(other)) if is_beside => {
                    self.give_up(other, reason);
                    self.stay_with(target);
                }
                (Err(reason), Some(other)) => {
                    socket = self.pass_to(target, other, reason);
                    overtaken_at = self.may_overtake(target).then(|| target.begun + HEAD_START);
                }
                (answer, None) => return RaceEnd::Failed(answer.err().unwrap_or(Reason::Internal)),
            }
        }
    }

    /// Returns true if another address or endpoint may be dialled beside the present one: not if the client's address decides on the
    /// endpoint, if endpoints have limits of connections, or if a PROXY header is sent first.
    fn may_overtake(&self, target: &Target) -> bool {
        !self.entry.is_raw()
            && !target.announces
            && self.attempts.tuning().policy != LoadBalancing::SourceHash
            && !self.attempts.is_limited()
    }

    /// Dials the next address of the endpoint, or another endpoint.
    fn dial_beside(&mut self, target: &mut Target) -> Option<(Beside, Dialled)> {
        let Self { core, entry, attempts, .. } = self;
        let begun = Instant::now();
        let mut other = None;
        let dialled = if target.has_another_address() {
            target.before += 1;
            let dialled = target.dial(core, entry, attempts);
            target.before -= 1;
            dialled
        } else {
            let index = attempts.another(core, entry)?;
            let new = Target::begin(core, entry, attempts, index)?;
            other.insert(new).dial(core, entry, attempts)
        };
        match dialled {
            Ok((socket, dialled)) => Some((Beside { target: other, socket, begun }, dialled)),
            Err(reason) => {
                if let Some(other) = other {
                    self.blame(&other, reason);
                }
                self.stay_with(target);
                None
            }
        }
    }

    /// Passes from the present address or endpoint, which has failed for this reason, to the one beside it. Returns that one's socket.
    fn pass_to(&mut self, target: &mut Target, other: Beside, reason: Reason) -> TcpStream {
        let Beside { target: new, socket, begun } = other;
        match new {
            None => {
                target.try_next_address(self.entry, self.attempts, reason);
                target.begun = begun;
            }
            Some(new) => {
                let old = std::mem::replace(target, new);
                self.blame(&old, reason);
            }
        }
        self.stay_with(target);
        socket
    }

    /// Drops a dial beside the present one, which has failed.
    fn give_up(&mut self, other: Beside, reason: Reason) {
        if let Some(other) = other.target {
            self.blame(&other, reason);
        }
    }

    fn blame(&mut self, target: &Target, reason: Reason) {
        if !is_own_fault(reason) {
            self.attempts.return_to(target.attempt);
            self.attempts.failed(self.core, &target.in_flight, reason);
        }
    }

    /// Records that the connection goes to this endpoint, if it accepts.
    fn stay_with(&mut self, target: &Target) {
        self.attempts.return_to(target.attempt);
        self.entry.goes_to(self.attempts.candidate(target.index));
        self.entry.dialled_at(target.address(self.attempts));
    }
}

/// Returns the end of the endpoint's head start, if its usual time makes that later than now.
fn later(target: &Target) -> Option<Instant> {
    let usual = target.in_flight.usual_connect().unwrap_or_default() * HEAD_START_USUAL;
    (target.begun.elapsed() < usual).then(|| target.begun + usual)
}

/// Waits until the client resets its connection; without end if it has no socket of its own.
async fn reset(client: Option<&TcpStream>) {
    if let Some(client) = client {
        let _ = client.ready(Interest::ERROR).await;
    } else {
        pending().await
    }
}

/// Waits until the endpoint accepts or refuses; without end if none is dialled.
async fn connected(socket: Option<&TcpStream>) -> Result<(), Reason> {
    let Some(socket) = socket else { return pending().await };
    socket.writable().await.map_err(|_| Reason::Internal)?;
    match socket.take_error() {
        Ok(None) => Ok(()),
        Ok(Some(error)) | Err(error) => Err(dial_reason(Errno::from_io_error(&error).unwrap_or(Errno::IO))),
    }
}
