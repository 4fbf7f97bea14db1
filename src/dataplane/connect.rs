//! Connects to one of the endpoints to which a connection was admitted; if an attempt fails, makes another one.

mod dial;
mod race;

use std::rc::Rc;

use tokio::net::TcpStream;
use tokio::time::Instant;

use self::dial::{Dialled, Target, is_own_fault};
use self::race::{Race, RaceEnd};
use super::attempts::Attempts;
use super::carriers::call::{Refused, call};
use super::core::Core;
use super::entry::Entry;
use super::onward::tunnel;
use super::upstreams::InFlight;
use isthmus_decisions::decision::Onward;
use isthmus_model::endpoint::Encapsulation;
use isthmus_model::reason::Reason;
use isthmus_net::socket::{UNSENT_MAX, bound_unsent, dial_reason, keep_alive};

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

/// Connects to an endpoint and sends it the bytes read from the client. If no attempt succeeds, returns the reason why the last
/// attempt failed. A reset of `client` ends the attempt, and no endpoint is blamed; a client that has only closed its direction waits.
pub(crate) async fn connect(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    client: Option<&TcpStream>,
    attempts: &mut Attempts,
) -> Result<Connected, Reason> {
    let onward = attempts.onward.clone();
    if let Some(Onward::Carrier(to)) = onward.as_deref() {
        let (socket, in_flight) = Box::pin(call(core, entry, client, to, attempts)).await?;
        taken_up(core, entry, attempts, Instant::now());
        // The workloads end a stream that carries their own tunnel by a cancellation, on a carrier as anywhere.
        let encapsulation = if entry.is_stream() { Encapsulation::Hbone } else { Encapsulation::None };
        return Ok(Connected { socket, in_flight, encapsulation });
    }
    loop {
        let index = attempts.next(core, entry)?;
        // Another worker may have taken the last place since the choice.
        let Some(mut target) = Target::begin(core, entry, attempts, index) else { continue };
        let dialled = loop {
            if let Some(replay) = &mut attempts.replay {
                entry.take_back(std::mem::take(&mut replay.sent));
            }
            let dialled = match target.dial(core, entry, attempts) {
                Ok((socket, Dialled::Connected)) => Ok(socket),
                // Boxed, so that the future is not part of the connection's own future while bytes are relayed.
                Ok((socket, Dialled::Connecting)) => {
                    let race = Race { core, entry, client, attempts: &mut *attempts };
                    match Box::pin(race.run(&mut target, socket)).await {
                        RaceEnd::Cut(reason) => return Err(reason),
                        RaceEnd::Failed(reason) => Err(reason),
                        RaceEnd::Connected(socket) if target.announces => {
                            let sent = target.send_first(&socket, entry, &mut attempts.replay);
                            sent.map(|()| socket).map_err(dial_reason)
                        }
                        RaceEnd::Connected(socket) => Ok(socket),
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
        let address = target.address(attempts);
        let Target { in_flight, mut encapsulation, begun, .. } = target;
        let dialled = match (dialled, onward.as_deref()) {
            (Ok(socket), Some(Onward::Gateway(to))) if entry.is_stream() => {
                // The workloads end a stream that carries their own tunnel by a cancellation.
                encapsulation = Encapsulation::Hbone;
                match Box::pin(tunnel::open(core, entry, socket, address, to)).await {
                    Err(Refused { reason, is_elsewhere: false }) => return Err(reason),
                    opened => opened.map_err(|refused| refused.reason),
                }
            }
            (dialled, _) => dialled,
        };
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
    let after = attempts.taken(now);
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
