//! Chooses an endpoint and dials it; if that fails, tries another one.

mod race;

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, getsockname};
use tokio::net::TcpStream;
use tokio::time::Instant;

use self::race::{Accepted, Race, Target};
use super::announce;
use super::balancer::Balancer;
use super::core::Core;
use super::entry::Entry;
use super::peek::Replay;
use super::permits::Refused;
use super::upstreams::{Failure, InFlight, Verdict};
use isthmus_balance::{Ask, FULL};
use isthmus_decisions::decision::Admission;
use isthmus_model::alert::Description;
use isthmus_model::endpoint::Encapsulation;
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_net::socket::{
    UNSENT_MAX, acknowledge_with_data, begin_to_connect, bound_unsent, dial_reason, is_out_of_descriptors,
    keep_alive, relay_socket,
};
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::candidates::{Candidate, Candidates};
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
    /// The place, in `tried`, of the attempt that the connection is at: the last one, unless another was tried beside it.
    present: u8,
    /// The endpoints that were tried, by their indices among the candidates.
    tried: [u32; ATTEMPTS_MAX],
    /// The reason of each attempt that failed, in the order of `tried`.
    failed: [Option<Reason>; ATTEMPTS_MAX],
    /// The endpoint that refused the hello, until another one shows whether the hello is at fault.
    suspect: Option<Box<Suspect>>,
    /// The alert by which the endpoint of the present attempt refused the hello.
    pub(crate) alert: Option<Description>,
}

/// An endpoint that refused the hello.
struct Suspect {
    index: u32,
    in_flight: InFlight,
    refusal: Refusal,
}

/// The refusal of a hello.
#[derive(Clone, Copy)]
struct Refusal {
    reason: Reason,
    alert: Option<Description>,
}

impl Refusal {
    fn is_about_hello(self) -> bool {
        self.alert.is_some_and(Description::is_about_hello)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self { reason: refusal.reason, detail: refusal.alert.map(|alert| alert.text().into()) }
    }
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
            present: 0,
            tried: [0; ATTEMPTS_MAX],
            failed: [None; ATTEMPTS_MAX],
            suspect: None,
            alert: None,
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
            self.present = self.count;
            self.count += 1;
        }
    }

    /// Records that the endpoint of the present attempt failed before it took the connection.
    pub(crate) fn failed(&mut self, core: &Core, in_flight: &InFlight, reason: Reason) {
        self.note_failed(reason);
        self.blame(core, self.present(), in_flight, reason.into());
    }

    /// Returns the index of the endpoint of the present attempt.
    fn present(&self) -> u32 {
        self.tried().get(usize::from(self.present)).copied().unwrap_or_default()
    }

    fn note_failed(&mut self, reason: Reason) {
        debug_assert!(self.present < self.count, "an attempt failed that was not begun");
        if let Some(present) = self.failed.get_mut(usize::from(self.present)) {
            *present = Some(reason);
        }
    }

    /// Counts a failure of the endpoint with this index, which may eject it.
    fn blame(&self, core: &Core, index: u32, in_flight: &InFlight, failure: Failure) {
        let reason = failure.reason;
        let verdict = core.shared.upstreams.failed(in_flight, &self.candidates, failure);
        self.report(index, reason, verdict);
    }

    /// Logs the ejection of the endpoint with this index, if it is ejected.
    fn report(&self, index: u32, reason: Reason, verdict: Verdict) {
        if verdict == Verdict::Ejected {
            let endpoint = self.candidate(index as usize).key.address;
            tracing::warn!(service = &*self.candidates.group, %endpoint, %reason, "an endpoint is ejected after repeated failures");
        }
    }

    /// Records that the endpoint of the present attempt has been sent the hello, at `now`.
    pub(crate) fn asked(&self, core: &Core, in_flight: &InFlight, now: Instant) {
        let verdict = core.shared.upstreams.asked(in_flight, Some(&self.candidates), now);
        self.report(self.present(), Reason::EndpointSilent, verdict);
    }

    /// Records that the client has left, after it had waited for this time for the first byte of the endpoint of the present attempt.
    pub(crate) fn silent(&self, core: &Core, in_flight: &InFlight, waited: Duration) {
        let verdict = core.shared.upstreams.silent(in_flight, &self.candidates, waited);
        self.report(self.present(), Reason::EndpointSilent, verdict);
    }

    /// Records that the endpoint of the present attempt ended or refused the connection in place of a ServerHello. If it refused the
    /// hello, the hello may be at fault: only the next endpoint shows it.
    pub(crate) fn not_taken(&mut self, core: &Core, in_flight: InFlight, reason: Reason) {
        if !reason.refuses_hello() {
            return self.failed(core, &in_flight, reason);
        }
        let is_first = !self.has_refused_hello();
        self.note_failed(reason);
        let refusal = Refusal { reason, alert: self.alert.take() };
        if is_first {
            self.suspect = Some(Box::new(Suspect { index: self.present(), in_flight, refusal }));
        } else {
            self.pardon(core, &in_flight, refusal);
        }
    }

    /// Records that the endpoint of the present attempt refused the hello by bytes that are passed on, because no other endpoint can be
    /// tried.
    pub(crate) fn refused_last(&mut self, core: &Core, in_flight: &InFlight, reason: Reason) {
        let refusal = Refusal { reason, alert: self.alert.take() };
        if self.has_refused_hello() || refusal.is_about_hello() {
            self.pardon(core, in_flight, refusal);
        } else {
            self.blame(core, self.present(), in_flight, refusal.into());
        }
    }

    fn has_refused_hello(&self) -> bool {
        self.failed.iter().flatten().any(|reason| reason.refuses_hello())
    }

    /// Records that an endpoint refused the hello, for which the hello may be at fault. If two endpoints refuse the same hello, none is
    /// at fault, whatever further ones do.
    fn pardon(&mut self, core: &Core, in_flight: &InFlight, refusal: Refusal) {
        let upstreams = &core.shared.upstreams;
        if let Some(Suspect { index: _, in_flight, refusal }) = self.suspect.take().map(|suspect| *suspect) {
            upstreams.failed_perhaps(&in_flight, &self.candidates, refusal.into());
        }
        upstreams.failed_perhaps(in_flight, &self.candidates, refusal.into());
    }

    /// Counts the failure of an endpoint that refused the hello, as no other endpoint has shown that the hello is at fault: one has
    /// answered, or none is left to try. An alert that speaks of the hello never counts for ejection.
    pub(crate) fn settle(&mut self, core: &Core) {
        let Some(Suspect { index, in_flight, refusal }) = self.suspect.take().map(|suspect| *suspect) else {
            return;
        };
        if refusal.is_about_hello() {
            self.pardon(core, &in_flight, refusal);
        } else {
            self.blame(core, index, &in_flight, refusal.into());
        }
    }

    /// Returns the index of another endpoint that can be tried.
    pub(crate) fn another(&self, core: &Core, entry: &Entry) -> Option<usize> {
        let may_try = usize::from(self.count) < ATTEMPTS_MAX && self.has_time(core);
        may_try.then(|| self.choose(core, entry).ok()).flatten()
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
        self.choose(core, entry).map_err(|reason| {
            if reason == Reason::LimitService {
                entry.add_detail(FULL);
                let full = entry.record.borrow().limit_key().map(FullLimit::Endpoints);
                full.into_iter().for_each(|full| core.shared.limits.refusals.record(full));
            }
            last.unwrap_or(reason)
        })
    }

    /// Chooses an endpoint that has not failed as often for other services as the settings of this one allow.
    fn choose(&self, core: &Core, entry: &Entry) -> Result<usize, Reason> {
        let ask = Ask {
            candidates: &self.candidates,
            clusters: self.clusters.as_deref(),
            tried: self.tried(),
            source: Some(entry.source().ip()),
        };
        loop {
            let index = self.balancer.choose(&ask, self.clusters.as_ref(), &mut || core.random())?;
            match core.shared.upstreams.adopt(self.balancer.endpoint(index), &self.candidates) {
                Some(reason) => {
                    self.report(u32::try_from(index).unwrap_or(u32::MAX), reason, Verdict::Ejected)
                }
                None => return Ok(index),
            }
        }
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
        // Another worker may have taken the last place since the choice.
        let Some(mut target) = Target::begin(core, entry, attempts, index) else { continue };
        let dialled = loop {
            if let Some(replay) = replay {
                entry.take_back(std::mem::take(&mut replay.sent));
            }
            let dialled = match target.dial(core, entry, attempts, replay) {
                Ok((socket, Dialled::Connected)) => Ok(socket),
                // Boxed, so that the future is not part of the connection's own future while bytes are relayed.
                Ok((socket, Dialled::Connecting)) => {
                    let race = Race { core, entry, client, attempts: &mut *attempts, replay: &mut *replay };
                    match Box::pin(race.run(&mut target, socket)).await {
                        Accepted::Cut(reason) => return Err(reason),
                        Accepted::Failed(reason) => Err(reason),
                        Accepted::Connected(socket) if target.announces => {
                            let sent = send_first(&socket, entry, true, replay);
                            sent.map(|()| socket).map_err(dial_reason)
                        }
                        Accepted::Connected(socket) => Ok(socket),
                    }
                }
                Err(reason) => Err(reason),
            };
            match dialled {
                Err(reason)
                    if !is_own_fault(reason) && target.has_another_address() && attempts.has_time(core) =>
                {
                    target.try_next_address(entry, attempts, reason);
                }
                dialled => break dialled,
            }
        };
        let Target { in_flight, encapsulation, begun, .. } = target;
        match dialled {
            Ok(socket) => {
                let now = Instant::now();
                in_flight.connected(now.duration_since(begun));
                taken_up(core, entry, attempts, now);
                return Ok(Connected { socket, in_flight, encapsulation });
            }
            Err(reason) if is_own_fault(reason) => return Err(reason),
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

/// The state of a dial that has begun.
enum Dialled {
    /// The endpoint has accepted, and was sent its first bytes.
    Connected,
    Connecting,
}

/// Begins to connect, and tries to send at once: on a fast network the endpoint has accepted by then.
fn dial_endpoint(
    core: &Core,
    entry: &Entry,
    address: SocketAddr,
    announces: bool,
    replay: &mut Option<Replay>,
) -> Result<(TcpStream, Dialled), Reason> {
    let own = &core.shared.own;
    if own.is_own(address) || core.is_own_gateway(address) {
        return Err(Reason::EndpointUnreachable);
    }
    let socket = relay_socket(address).map_err(|error| no_socket(core, entry, error))?;
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
        Ok(()) => Ok((into_tokio(socket)?, Dialled::Connected)),
        Err(Errno::AGAIN | Errno::INPROGRESS | Errno::NOTCONN | Errno::ALREADY) => {
            Ok((into_tokio(socket)?, Dialled::Connecting))
        }
        Err(error) => Err(dial_reason(error)),
    }
}

/// Returns the reason for which no socket can be opened to dial an endpoint.
fn no_socket(core: &Core, entry: &Entry, error: Errno) -> Reason {
    if !is_out_of_descriptors(error) {
        return dial_reason(error);
    }
    let text = "the gateway has no file descriptor left for a connection to an endpoint";
    core.refused(entry, Refused::new(Reason::LimitGlobal, Some(FullLimit::Descriptors), text))
}

/// Returns true if a failed dial says nothing about the endpoint, because this process is at fault.
fn is_own_fault(reason: Reason) -> bool {
    matches!(reason, Reason::Internal | Reason::LimitGlobal)
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
