//! Chooses an endpoint and dials it; another one when that fails.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{SendFlags, getsockname};
use tokio::net::TcpStream;

use super::core::Core;
use super::entry::Entry;
use super::peek::First;
use super::upstreams::{InFlight, Verdict};
use crate::balance::{Ask, choose};
use crate::model::endpoint::Encapsulation;
use crate::model::reason::Reason;
use crate::net::socket::{dial, dial_reason};
use crate::snapshot::admit::Admission;
use crate::telemetry::local::RelayPath;

/// Endpoints that one connection may be tried on.
const ATTEMPTS_MAX: usize = 3;

/// The attempts of one connection.
pub(crate) struct Attempts {
    admission: Admission,
    started: Instant,
    tried: Vec<SocketAddr>,
    /// Why those of `tried` failed that did.
    failed: [Option<Reason>; ATTEMPTS_MAX],
}

/// An endpoint that has accepted the connection.
pub(crate) struct Connected {
    pub(crate) socket: TcpStream,
    pub(crate) in_flight: InFlight,
    /// What a CONNECT stream carries to it.
    pub(crate) tunnel: Encapsulation,
}

impl Attempts {
    pub(crate) fn new(admission: Admission) -> Self {
        Self { admission, started: Instant::now(), tried: Vec::new(), failed: [None; ATTEMPTS_MAX] }
    }

    /// The endpoint of the last attempt failed before it had taken the connection.
    pub(crate) fn failed(&mut self, core: &Core, in_flight: &InFlight, reason: Reason) {
        let present = self.tried.len().checked_sub(1).and_then(|present| self.failed.get_mut(present));
        debug_assert!(present.is_some(), "an attempt failed that was not begun");
        if let Some(present) = present {
            *present = Some(reason);
        }
        let candidates = &self.admission.candidates;
        if core.shared.upstreams.failed(in_flight, candidates, reason) == Verdict::Ejected {
            let endpoint = self.tried.last().map(ToString::to_string);
            tracing::warn!(service = &*candidates.group, endpoint, %reason, "endpoint ejected");
        }
    }

    /// Returns the endpoints that failed and why, in words, for a connection that another endpoint took.
    fn failures(&self) -> Option<Box<str>> {
        let failed = self.tried.iter().zip(&self.failed);
        let texts: Vec<String> =
            failed.filter_map(|(endpoint, reason)| Some(format!("{endpoint}: {}", (*reason)?))).collect();
        (!texts.is_empty()).then(|| texts.join(", ").into())
    }

    /// The next endpoint to try, by its index among the candidates.
    fn next(&self, core: &Core, entry: &Entry) -> Result<usize, Reason> {
        let total = core.snapshot().policy.timeouts.connect_total;
        let late = !self.tried.is_empty() && self.started.elapsed() >= total;
        let last = self.failed.iter().rev().find_map(|reason| *reason);
        if let Some(last) = last
            && (self.tried.len() >= ATTEMPTS_MAX || late)
        {
            return Err(last);
        }
        let ask = Ask {
            candidates: &self.admission.candidates,
            clusters: self.admission.clusters.as_deref(),
            tried: &self.tried,
            source: Some(entry.source.ip()),
        };
        choose(&ask, &*core.shared.upstreams, &mut || core.random(), &mut ())
            .map_err(|reason| last.unwrap_or(reason))
    }
}

/// Connects to an endpoint and sends it what has been read; the error is the last attempt's.
pub(crate) async fn connect(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    attempts: &mut Attempts,
    first: &mut Option<First>,
) -> Result<Connected, Reason> {
    loop {
        let index = attempts.next(core, entry)?;
        let candidate = &attempts.admission.candidates.endpoints()[index];
        let (address, tunnel) = (candidate.key.address, candidate.encapsulation);
        let timeout = attempts.admission.candidates.tuning.connect_timeout;
        entry.story.borrow_mut().dialled(candidate);
        let in_flight = core.shared.upstreams.begin(candidate);
        attempts.tried.push(address);
        if let Some(first) = first {
            entry.take_back(std::mem::take(&mut first.sent));
        }
        let dialled = match dial_endpoint(core, entry, address, first) {
            Ok(Dialled::Connected(socket)) => Ok(socket),
            Ok(Dialled::Connecting(socket)) => {
                // An order to end wins, then the endpoint, then its time.
                tokio::select! {
                    biased;
                    reason = entry.cut_ordered() => return Err(reason),
                    connected = connected(socket) => connected,
                    () = tokio::time::sleep(timeout) => Err(Reason::EndpointTimeout),
                }
            }
            Err(reason) => Err(reason),
        };
        match dialled {
            Ok(socket) => {
                taken_up(core, entry, attempts);
                return Ok(Connected { socket, in_flight, tunnel });
            }
            // A fault of our own says nothing about the endpoint.
            Err(Reason::Internal) => return Err(Reason::Internal),
            Err(reason) => attempts.failed(core, &in_flight, reason),
        }
    }
}

fn taken_up(core: &Core, entry: &Entry, attempts: &Attempts) {
    let after = attempts.started.elapsed();
    core.local.connected(after);
    let mut story = entry.story.borrow_mut();
    if let Some(failures) = attempts.failures() {
        story.detail = Some(failures);
    }
    story.connect = Some(after);
    if story.destination.is_none() {
        drop(story);
        let destination = core.local.destination(&entry.record(None, "".into()));
        destination.opened();
        entry.story.borrow_mut().destination = Some(destination);
    }
}

enum Dialled {
    Connected(TcpStream),
    Connecting(TcpStream),
}

/// Begins to connect, and tries to send at once: on a fast network the endpoint has accepted by then.
fn dial_endpoint(
    core: &Core,
    entry: &Entry,
    address: SocketAddr,
    first: &mut Option<First>,
) -> Result<Dialled, Reason> {
    let own = &core.shared.own;
    if own.is_own(address) || core.is_own_gateway(address) {
        return Err(Reason::EndpointUnreachable);
    }
    let socket = dial(address).map_err(dial_reason)?;
    // Before a byte is sent: whoever has read one then finds it.
    let local = own.has_port(address.port()).then(|| getsockname(&socket).ok()).flatten();
    let local = local.and_then(|local| SocketAddr::try_from(local).ok());
    entry.story.borrow_mut().own_dial = local.map(|local| Box::new(own.dialling(local)));
    let sent = match first {
        Some(first) => rustix::net::send(&socket, &first.bytes, SendFlags::NOSIGNAL),
        None => Err(Errno::AGAIN),
    };
    match sent {
        Ok(sent) => {
            if let Some(first) = first {
                first.sent = sent;
                entry.count(true, RelayPath::Copy, sent);
            }
            into_tokio(socket).map(Dialled::Connected)
        }
        Err(Errno::AGAIN | Errno::INPROGRESS | Errno::NOTCONN | Errno::ALREADY) => {
            into_tokio(socket).map(Dialled::Connecting)
        }
        Err(error) => Err(dial_reason(error)),
    }
}

fn into_tokio(socket: OwnedFd) -> Result<TcpStream, Reason> {
    TcpStream::from_std(socket.into()).map_err(|_| Reason::Internal)
}

/// Waits until the endpoint has accepted or refused.
async fn connected(socket: TcpStream) -> Result<TcpStream, Reason> {
    socket.writable().await.map_err(|_| Reason::Internal)?;
    match socket.take_error() {
        Ok(None) => Ok(socket),
        Ok(Some(error)) | Err(error) => Err(dial_reason(Errno::from_io_error(&error).unwrap_or(Errno::IO))),
    }
}
