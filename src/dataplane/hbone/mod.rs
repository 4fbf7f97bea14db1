//! HBONE: HTTP/2 CONNECT over mutual TLS, terminated by this gateway. Each stream is admitted, gets an endpoint and is
//! relayed on its own.
//!
//! ```text
//! hello peeked ─▶ worker with fewest ─▶ [`handshake`] ─▶ [`driver`] ─┬▶ [`stream`] ─▶ [`relay`]
//!                                          (paced)                   └▶ [`stream`] ─▶ [`relay`]
//! ```
//!
//! The handshake authenticates the caller (`tls::trust`); each stream is checked for what the caller may reach
//! (`snapshot::admit`).
//!
//! One stream must not slow down its neighbours. The bytes of a stream are read at once, so that they never fill the window
//! that all streams share; the stream's own window is opened again only when its endpoint has taken the bytes. The bytes
//! held meanwhile are counted ([`held`], `holders`); above the limits, stalled streams are ended.

pub(super) mod connection;
pub(super) mod delivery;
pub(crate) mod driver;
pub(crate) mod handshake;
pub(crate) mod held;
pub(super) mod load;
pub(crate) mod meter;
pub(crate) mod metered;
pub(crate) mod queue;
pub(super) mod refusals;
pub(super) mod relay;
pub(super) mod requests;
pub(super) mod stream;
pub(crate) mod transport;
pub(crate) mod turns;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::net::TcpStream;

use super::core::{Core, Registration};
use super::shared::{Arrival, HbonePlace, Message, Opening, WorkerHandle};
use handshake::{Failed, handshake};
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionProtocol;
use isthmus_settings::listener::Listener;
use transport::Transport;

/// Moves a connection whose hello has been read to the worker with the fewest HBONE connections, before the costly
/// handshake begins. This balances the load, because each HBONE connection carries many streams and lasts long.
pub(super) fn take_over(
    registration: Registration,
    listener: &Arc<Listener>,
    client: TcpStream,
    hello: Box<[u8]>,
) {
    let core = registration.core.clone();
    let fewest = with_fewest(&core);
    let room = (fewest != core.numbers.index())
        .then(|| core.shared.workers[fewest].mailbox.try_reserve().ok())
        .flatten();
    // The connection stays here if the mailbox of the other worker is full.
    let at = if room.is_some() { fewest } else { core.numbers.index() };
    let place = HbonePlace::take(&core.shared, at);
    let opening = Opening { listener: listener.clone(), hello, place };
    let Some(room) = room else {
        core.scope.spawn(serve(registration, client, opening));
        return;
    };
    match client.into_std() {
        Ok(socket) => {
            let arrival = Arrival::of(&registration.entry, socket.into(), opening);
            drop(registration);
            room.send(Message::Arrive(Box::new(arrival)));
        }
        // The socket could not be deregistered from this worker's runtime.
        Err(_) => core.finish(&registration.entry, Reason::Internal),
    }
}

/// Returns the index of the worker with the fewest HBONE connections; if no worker has fewer than this one, returns this one.
fn with_fewest(core: &Core) -> usize {
    let count = |(index, worker): &(usize, &WorkerHandle)| {
        (worker.hbone_connections.load(Ordering::Relaxed), *index != core.numbers.index())
    };
    let fewest = core.shared.workers.iter().enumerate().min_by_key(count);
    fewest.map_or_else(|| core.numbers.index(), |(index, _)| index)
}

/// Serves a connection that another worker has sent.
pub(super) fn arrive(core: &Rc<Core>, arrival: Arrival) {
    let (entry, socket, opening) = arrival.into_entry(&core.local, &core.permits, core.clock.now());
    let registration = core.register(Rc::new(entry));
    match TcpStream::from_std(socket.into()) {
        Ok(client) => core.scope.spawn(serve(registration, client, opening)),
        // The socket could not be registered with this worker's runtime.
        Err(_) => core.finish(&registration.entry, Reason::Internal),
    }
}

async fn serve(registration: Registration, client: TcpStream, opening: Opening) {
    let (core, entry) = (&registration.core, &registration.entry);
    let Opening { listener, hello, place: _place } = opening;
    entry.record.borrow_mut().protocol = ConnectionProtocol::Hbone;
    let limits = core.mesh.snapshot().policy.hbone;
    let transport = Transport::new(core.clone(), client, hello);
    match Box::pin(handshake(core, entry, &listener, &limits, transport)).await {
        Ok(agreed) => {
            let reason = Box::pin(driver::drive(core, entry, listener, limits, agreed)).await;
            core.finish_hbone(entry, reason);
        }
        Err(Failed { reason, detail }) => {
            entry.record.borrow_mut().detail = detail;
            core.finish(entry, reason);
        }
    }
}
