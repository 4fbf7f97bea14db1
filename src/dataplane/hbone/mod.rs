//! HBONE: HTTP/2 CONNECT over mutual TLS, ended here. Each stream is admitted, given an endpoint and relayed by itself.
//!
//! ```text
//! hello peeked ─▶ worker with fewest ─▶ [`handshake`] ─▶ [`tunnel`] ─┬▶ [`stream`] ─▶ [`relay`]
//!                                        (paced: lane)               └▶ [`stream`] ─▶ [`relay`]
//! ```
//!
//! What one stream does must not be felt by its neighbours: what has come for a stream is read at once, so that it
//! never fills what all streams share, and its window is opened again only when its endpoint has taken the bytes. What
//! streams hold meanwhile is counted ([`held`]); where that is too much, those that stand still end.

pub(super) mod delivery;
pub(super) mod handshake;
pub(super) mod held;
pub(super) mod lane;
pub(super) mod meter;
pub(super) mod queue;
pub(super) mod relay;
pub(super) mod stream;
pub(super) mod transport;
pub(super) mod tunnel;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::net::TcpStream;

use super::connection::Leave;
use super::table::{Arrival, Entry, Opening};
use super::worker::{Desk, Message, Shared, Worker};
use crate::model::reason::Reason;
use crate::snapshot::policy::Listener;
use handshake::{Failed, handshake};
use transport::Transport;

/// A connection's place among those of a worker, for as long as it lives.
pub(crate) struct Counted {
    shared: Arc<Shared>,
    worker: usize,
}

impl Counted {
    fn with(shared: &Arc<Shared>, worker: usize) -> Self {
        shared.desks[worker].tunnels.fetch_add(1, Ordering::Relaxed);
        Self { shared: shared.clone(), worker }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.shared.desks[self.worker].tunnels.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes a connection over whose hello has been read: to the worker that has fewest of them, before the costly part
/// begins, as few connections carry many streams and stay for long.
pub(super) fn take_over(
    worker: &Rc<Worker>,
    entry: &Rc<Entry>,
    listener: &Arc<Listener>,
    client: TcpStream,
    hello: Box<[u8]>,
) {
    let fewest = with_fewest(worker);
    let room =
        (fewest != worker.index).then(|| worker.shared.desks[fewest].mailbox.try_reserve().ok()).flatten();
    // Where the other takes none, it stays here.
    let at = if room.is_some() { fewest } else { worker.index };
    let counted = Counted::with(&worker.shared, at);
    let opening = Opening { listener: listener.clone(), hello, counted };
    let Some(room) = room else {
        worker.scope.spawn(serve(worker.clone(), entry.clone(), client, opening));
        return;
    };
    match client.into_std() {
        Ok(socket) => {
            let arrival = Arrival::of(entry, socket.into(), opening);
            worker.forget(entry);
            room.send(Message::Arrive(Box::new(arrival)));
        }
        Err(_) => lost(worker, entry),
    }
}

/// The worker with the fewest HBONE connections; this one where none has fewer.
fn with_fewest(worker: &Worker) -> usize {
    let count =
        |(index, desk): &(usize, &Desk)| (desk.tunnels.load(Ordering::Relaxed), *index != worker.index);
    worker.shared.desks.iter().enumerate().min_by_key(count).map_or(worker.index, |(index, _)| index)
}

/// Takes in a connection that another worker has sent.
pub(super) fn arrive(worker: &Rc<Worker>, arrival: Arrival) {
    let (entry, socket, opening) = arrival.into_entry(worker.clock.now());
    let entry = Rc::new(entry);
    worker.enter(&entry);
    match TcpStream::from_std(socket.into()) {
        Ok(client) => worker.scope.spawn(serve(worker.clone(), entry, client, opening)),
        Err(_) => lost(worker, &entry),
    }
}

/// The socket could not be taken from one worker's runtime into that of another.
fn lost(worker: &Worker, entry: &Entry) {
    worker.told(entry, Reason::Internal, false);
    worker.leave(entry);
}

async fn serve(worker: Rc<Worker>, entry: Rc<Entry>, client: TcpStream, opening: Opening) {
    let _leave = Leave(&worker, &entry);
    let Opening { listener, hello, counted: _counted } = opening;
    entry.story.borrow_mut().handshake = true;
    let limits = worker.snapshot().policy.hbone;
    let transport = Transport::new(worker.clone(), client, hello);
    match Box::pin(handshake(&worker, &entry, &listener, &limits, transport)).await {
        Ok(agreed) => {
            let reason = Box::pin(tunnel::drive(&worker, &entry, listener, limits, agreed)).await;
            worker.tunnel_ended(&entry, reason);
        }
        Err(Failed { reason, detail }) => {
            entry.story.borrow_mut().detail = detail;
            worker.told(&entry, reason, false);
        }
    }
}
