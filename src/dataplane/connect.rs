//! Chooses an endpoint and dials it; if that fails, tries another one.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, getsockname};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::announce;
use super::balancer::Balancer;
use super::core::Core;
use super::entry::Entry;
use super::peek::Replay;
use super::upstreams::{InFlight, Verdict};
use isthmus_balance::{Ask, FULL};
use isthmus_model::endpoint::Encapsulation;
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_net::socket::{
    UNSENT_MAX, acknowledge_with_data, begin_to_connect, bound_unsent, dial_reason, keep_alive, relay_socket,
};
use isthmus_snapshot::candidates::{Candidate, Candidates};
use isthmus_snapshot::decision::Admission;
use isthmus_snapshot::policy::Tuning;
use isthmus_telemetry::local::RelayPath;

/// The largest number of endpoints that are tried for one connection.
const ATTEMPTS_MAX: usize = 3;

/// The attempts of one connection.
pub(crate) struct Attempts {
    candidates: Arc<Candidates>,
    /// The clusters whose endpoints may be chosen; `None` means all.
    clusters: Option<Arc<[ClusterId]>>,
    balancer: Rc<Balancer>,
    /// The time at which the first attempt began.
    started: Option<Instant>,
    /// The number of attempts so far.
    count: u8,
    /// The endpoints that were tried, by their indices among the candidates.
    tried: [u32; ATTEMPTS_MAX],
    /// The reason of each attempt that failed, in the order of `tried`.
    failed: [Option<Reason>; ATTEMPTS_MAX],
    /// The endpoint that closed after the hello, until another one shows whether the hello is at fault.
    suspect: Option<Box<Suspect>>,
}

/// An endpoint that closed after the hello without an answer.
struct Suspect {
    index: u32,
    in_flight: InFlight,
}

/// An endpoint that has accepted the connection.
pub(crate) struct Connected {
    /// The connection to the endpoint.
    pub(crate) socket: TcpStream,
    /// Counts the connection as one in flight to the endpoint, until this value is dropped.
    pub(crate) in_flight: InFlight,
    /// The protocol that a CONNECT stream carries to the endpoint.
    pub(crate) encapsulation: Encapsulation,
}

impl Connected {
    /// Sets the socket's options for long connections, once the connection is older than a clock tick: shorter connections skip
    /// these system calls. Returns true if this call has set them; `tuned` is true once any call has.
    pub(crate) fn tune(&self, core: &Core, entry: &Entry, tuned: &mut bool) -> bool {
        if *tuned || core.clock.now() == entry.opened.get() {
            return false;
        }
        *tuned = true;
        // If the kernel lacks an option, the connection works without it.
        let _ = keep_alive(&self.socket).and_then(|()| match entry.shares.get() {
            None => bound_unsent(&self.socket, UNSENT_MAX),
            // The socket of a connection under a limit of bandwidth has a bound already.
            Some(_) => Ok(()),
        });
        true
    }
}

impl Attempts {
    /// Creates the state before the first attempt.
    pub(crate) fn new(core: &Core, admission: Admission) -> Self {
        let balancer = core.balancers.of(&admission.candidates, &core.shared.upstreams, core.clock.now());
        let Admission { candidates, clusters, .. } = admission;
        Self {
            candidates,
            clusters,
            balancer,
            started: None,
            count: 0,
            tried: [0; ATTEMPTS_MAX],
            failed: [None; ATTEMPTS_MAX],
            suspect: None,
        }
    }

    fn tried(&self) -> &[u32] {
        &self.tried[..usize::from(self.count)]
    }

    /// Returns the settings of the route or service.
    pub(crate) fn tuning(&self) -> &Tuning {
        &self.candidates.tuning
    }

    /// Returns the time at which the endpoint accepted the connection, for which the clock is not read again.
    pub(crate) fn connected_at(&self, entry: &Entry) -> Instant {
        let connected = self.started.zip(entry.record.borrow().connect);
        connected.map_or_else(Instant::now, |(started, after)| started + after)
    }

    /// Returns the candidate with this index.
    fn candidate(&self, index: usize) -> &Candidate {
        &self.candidates.endpoints()[index]
    }

    /// Records that an endpoint is being dialled.
    fn begin(&mut self, index: usize) {
        let next = self.tried.get_mut(usize::from(self.count));
        debug_assert!(next.is_some(), "more attempts than a connection may make");
        if let Some(next) = next {
            *next = u32::try_from(index).unwrap_or(u32::MAX);
            self.count += 1;
        }
    }

    /// Records that the endpoint of the last attempt failed before it took the connection.
    pub(crate) fn failed(&mut self, core: &Core, in_flight: &InFlight, reason: Reason) {
        self.note_failed(reason);
        self.blame(core, self.tried().last().copied(), in_flight, reason);
    }

    fn note_failed(&mut self, reason: Reason) {
        let present = self.count.checked_sub(1).and_then(|present| self.failed.get_mut(usize::from(present)));
        debug_assert!(present.is_some(), "an attempt failed that was not begun");
        if let Some(present) = present {
            *present = Some(reason);
        }
    }

    /// Counts a failure of the endpoint with this index, which may eject it.
    fn blame(&self, core: &Core, index: Option<u32>, in_flight: &InFlight, reason: Reason) {
        let candidates = &self.candidates;
        if core.shared.upstreams.failed(in_flight, candidates, reason) == Verdict::Ejected {
            let endpoint = index.map(|index| self.candidate(index as usize).key.address.to_string());
            tracing::warn!(service = &*candidates.group, endpoint, %reason, "an endpoint is ejected after repeated failures");
        }
    }

    /// Records that the endpoint of the last attempt ended the connection before its first byte. If it closed in order after the
    /// hello, the hello may be at fault: only the next endpoint shows it.
    pub(crate) fn not_taken(&mut self, core: &Core, in_flight: InFlight, reason: Reason) {
        if reason != Reason::EndpointClosed {
            return self.failed(core, &in_flight, reason);
        }
        let is_first = !self.failed.contains(&Some(Reason::EndpointClosed));
        self.note_failed(reason);
        // If two endpoints have closed after the same hello, none is at fault, whatever further ones do.
        let index = self.tried().last().copied().unwrap_or_default();
        self.suspect = is_first.then(|| Box::new(Suspect { index, in_flight }));
    }

    /// Counts the failure of an endpoint that closed after the hello, as no other endpoint has shown that the hello is at fault:
    /// one has answered, or none is left to try.
    pub(crate) fn settle(&mut self, core: &Core) {
        if let Some(suspect) = self.suspect.take() {
            self.blame(core, Some(suspect.index), &suspect.in_flight, Reason::EndpointClosed);
        }
    }

    /// Returns the failed endpoints and the reasons of their failures, as text for the record of the connection, which another
    /// endpoint has accepted.
    fn failures(&self) -> Option<String> {
        let failed = self.tried().iter().zip(&self.failed);
        let text = |(index, reason): (&u32, &Option<Reason>)| {
            Some(format!("{}: {}", self.candidate(*index as usize).key.address, (*reason)?))
        };
        let texts: Vec<String> = failed.filter_map(text).collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }

    /// Returns true if the time limit for all attempts together, which runs from the first one, allows another one.
    fn has_time(&self, core: &Core) -> bool {
        self.started.is_none_or(|started| started.elapsed() < core.snapshot().policy.timeouts.connect_total)
    }

    /// Chooses the next endpoint to try; returns its index among the candidates.
    fn next(&self, core: &Core, entry: &Entry) -> Result<usize, Reason> {
        let last = self.failed.iter().rev().find_map(|reason| *reason);
        if let Some(last) = last
            && (usize::from(self.count) >= ATTEMPTS_MAX || !self.has_time(core))
        {
            return Err(last);
        }
        let ask = Ask {
            candidates: &self.candidates,
            clusters: self.clusters.as_deref(),
            tried: self.tried(),
            source: Some(entry.source().ip()),
        };
        let chosen = self.balancer.choose(&ask, self.clusters.as_ref(), &mut || core.random());
        chosen.map_err(|reason| {
            if reason == Reason::LimitService {
                entry.add_detail(FULL);
            }
            last.unwrap_or(reason)
        })
    }
}

/// Connects to an endpoint and sends it the bytes read from the client. If no attempt succeeds, returns the reason why the last
/// attempt failed. A reset of `client` ends the attempt, and no endpoint is blamed; a client that has only closed its direction waits.
pub(crate) async fn connect(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    client: Option<&TcpStream>,
    attempts: &mut Attempts,
    replay: &mut Option<Replay>,
) -> Result<Connected, Reason> {
    loop {
        let index = attempts.next(core, entry)?;
        let max = attempts.candidate(index).connections_max;
        let mut begun = Instant::now();
        attempts.started.get_or_insert(begun);
        let endpoint = attempts.balancer.endpoint(index).clone();
        let counted = core.shared.upstreams.begin_below(endpoint, max, begun);
        // Another worker may have taken the last place since the choice.
        let Some(in_flight) = counted else { continue };
        let encapsulation = attempts.candidate(index).encapsulation;
        let tuning = &attempts.candidates.tuning;
        let timeout = tuning.connect_timeout;
        let header = tuning.header_for(encapsulation);
        if let Some(version) = header {
            announce::prepare(core, entry, version);
        }
        let announces = header.is_some();
        entry.dialled(attempts.candidate(index));
        attempts.begin(index);
        let count = attempts.candidate(index).addresses().count();
        let first = in_flight.first_address();
        let mut tried = 0;
        let dialled = loop {
            let candidate = attempts.candidate(index);
            let address = candidate.addresses().nth((first + tried) % count).unwrap_or(candidate.key.address);
            entry.dialled_at(address);
            if let Some(replay) = replay {
                entry.take_back(std::mem::take(&mut replay.sent));
            }
            let dialled = match dial_endpoint(core, entry, address, announces, replay) {
                Ok(Dialled::Connected(socket)) => Ok(socket),
                // Boxed, so that the future is not part of the connection's own future while bytes are relayed.
                Ok(Dialled::Connecting(socket)) => {
                    match Box::pin(accepted(entry, client, socket, timeout)).await {
                        Accepted::Cut(reason) => return Err(reason),
                        Accepted::Failed(reason) => Err(reason),
                        Accepted::Connected(socket) if announces => {
                            let sent = send_first(&socket, entry, announces, replay);
                            sent.map(|()| socket).map_err(dial_reason)
                        }
                        Accepted::Connected(socket) => Ok(socket),
                    }
                }
                Err(reason) => Err(reason),
            };
            tried += 1;
            match dialled {
                Err(reason) if reason != Reason::Internal && tried < count && attempts.has_time(core) => {
                    in_flight.prefer_address((first + tried) % count);
                    entry.add_detail(&format!("{address}: {reason}"));
                    begun = Instant::now();
                }
                dialled => break dialled,
            }
        };
        match dialled {
            Ok(socket) => {
                let now = Instant::now();
                in_flight.connected(now.duration_since(begun));
                taken_up(core, entry, attempts, now);
                return Ok(Connected { socket, in_flight, encapsulation });
            }
            // A fault of this process says nothing about the endpoint.
            Err(Reason::Internal) => return Err(Reason::Internal),
            Err(reason) => attempts.failed(core, &in_flight, reason),
        }
    }
}

/// Records that an endpoint has accepted the connection, at `now`.
fn taken_up(core: &Core, entry: &Entry, attempts: &Attempts, now: Instant) {
    let after = attempts.started.map_or(Duration::ZERO, |started| now.duration_since(started));
    core.local.connected(after);
    if let Some(failures) = attempts.failures() {
        entry.add_detail(&failures);
    }
    let (mut facts, mut record) = (entry.facts.borrow_mut(), entry.record.borrow_mut());
    record.connect = Some(after);
    if facts.destination.is_none() {
        let destination = core.local.destination(&record);
        destination.opened();
        facts.destination = Some(destination);
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
    announces: bool,
    replay: &mut Option<Replay>,
) -> Result<Dialled, Reason> {
    let own = &core.shared.own;
    if own.is_own(address) || core.is_own_gateway(address) {
        return Err(Reason::EndpointUnreachable);
    }
    let socket = relay_socket(address).map_err(dial_reason)?;
    if announces || replay.is_some() {
        acknowledge_with_data(&socket);
    }
    begin_to_connect(&socket, address).map_err(dial_reason)?;
    // The dial is registered before a byte is sent. So if the dial reaches a listener of this process, the listener finds the
    // registration.
    let local = own.has_port(address.port()).then(|| getsockname(&socket).ok()).flatten();
    let local = local.and_then(|local| SocketAddr::try_from(local).ok());
    entry.facts.borrow_mut().own_dial = local.map(|local| Box::new(own.dialling(local, address)));
    match send_first(&socket, entry, announces, replay) {
        Ok(()) => into_tokio(socket).map(Dialled::Connected),
        Err(Errno::AGAIN | Errno::INPROGRESS | Errno::NOTCONN | Errno::ALREADY) => {
            into_tokio(socket).map(Dialled::Connecting)
        }
        Err(error) => Err(dial_reason(error)),
    }
}

/// Sends an endpoint its first bytes: the PROXY header if the endpoint expects one, and the bytes read from the client.
fn send_first(
    socket: &impl AsFd,
    entry: &Entry,
    announces: bool,
    replay: &mut Option<Replay>,
) -> Result<(), Errno> {
    let sent = match replay {
        _ if announces => announce::send(socket, entry, replay.as_ref())?,
        Some(replay) => rustix::net::send(socket, &replay.bytes, SendFlags::NOSIGNAL)?,
        None => return Err(Errno::AGAIN),
    };
    if let Some(replay) = replay {
        replay.sent = sent;
        entry.count(true, RelayPath::Copy, sent);
    }
    Ok(())
}

fn into_tokio(socket: OwnedFd) -> Result<TcpStream, Reason> {
    TcpStream::from_std(socket.into()).map_err(|_| Reason::Internal)
}

/// The result of waiting for an endpoint.
enum Accepted {
    Connected(TcpStream),
    Failed(Reason),
    /// The connection was ordered to end, or its client has reset it.
    Cut(Reason),
}

/// Waits until the endpoint accepts or refuses, the timeout passes, or the connection is ordered to end or reset by its client.
async fn accepted(
    entry: &Entry,
    client: Option<&TcpStream>,
    socket: TcpStream,
    timeout: Duration,
) -> Accepted {
    // Priority: an order to end, then the endpoint's answer, then the client's reset, then the timeout.
    tokio::select! {
        biased;
        reason = entry.cut_ordered() => Accepted::Cut(reason),
        connected = connected(socket) => connected.map_or_else(Accepted::Failed, Accepted::Connected),
        () = reset(client) => Accepted::Cut(Reason::ClientReset),
        () = tokio::time::sleep(timeout) => Accepted::Failed(Reason::EndpointTimeout),
    }
}

/// Waits until the client resets its connection; without end if it has no socket of its own.
async fn reset(client: Option<&TcpStream>) {
    if let Some(client) = client {
        let _ = client.ready(Interest::ERROR).await;
    } else {
        std::future::pending().await
    }
}

/// Waits until the endpoint accepts or refuses.
async fn connected(socket: TcpStream) -> Result<TcpStream, Reason> {
    socket.writable().await.map_err(|_| Reason::Internal)?;
    match socket.take_error() {
        Ok(None) => Ok(socket),
        Ok(Some(error)) | Err(error) => Err(dial_reason(Errno::from_io_error(&error).unwrap_or(Errno::IO))),
    }
}
