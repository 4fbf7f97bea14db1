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

pub(super) mod handshake;
pub(super) mod held;
pub(super) mod lane;
pub(super) mod meter;
pub(super) mod relay;
pub(super) mod stream;
pub(super) mod transport;
pub(super) mod tunnel;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::net::TcpStream;

use super::connection::Leave;
use super::table::{Arrival, Entry};
use super::worker::{Message, Worker};
use crate::model::reason::Reason;
use crate::snapshot::policy::Listener;
use handshake::{Failed, handshake};
use transport::Transport;

/// Takes a connection over whose hello has been read: to the worker that has fewest of them, before the costly part
/// begins, as few connections carry many streams and stay for long.
pub(super) fn take_over(
    worker: &Rc<Worker>,
    entry: &Rc<Entry>,
    listener: &Arc<Listener>,
    client: TcpStream,
    hello: Box<[u8]>,
) {
    let to = worker.least_tunnels();
    worker.shared.tunnels[to].fetch_add(1, Ordering::Relaxed);
    let client = match to == worker.index {
        true => Some(client),
        false => send_over(worker, entry, listener, client, &hello, to),
    };
    if let Some(client) = client {
        worker.scope.spawn(serve(worker.clone(), entry.clone(), listener.clone(), client, hello, to));
    }
}

/// Sends a connection to another worker; given back where that takes none.
fn send_over(
    worker: &Rc<Worker>,
    entry: &Rc<Entry>,
    listener: &Arc<Listener>,
    client: TcpStream,
    hello: &[u8],
    to: usize,
) -> Option<TcpStream> {
    let Some(mailbox) = worker.shared.mailboxes.get().and_then(|all| all.get(to)) else {
        return Some(client);
    };
    let Ok(permit) = mailbox.try_reserve() else {
        return Some(client);
    };
    let Ok(socket) = client.into_std() else {
        worker.shared.tunnels[to].fetch_sub(1, Ordering::Relaxed);
        worker.told(entry, Reason::Internal, false);
        worker.leave(entry);
        return None;
    };
    let arrival = Arrival::of(entry, listener.clone(), socket.into(), hello.into());
    worker.forget(entry);
    permit.send(Message::Arrive(Box::new(arrival)));
    None
}

/// Takes in a connection that another worker has sent.
pub(super) fn arrive(worker: &Rc<Worker>, arrival: Arrival) {
    let (entry, listener, socket, hello) = arrival.into_entry(worker.clock.now());
    let entry = Rc::new(entry);
    worker.enter(&entry);
    match TcpStream::from_std(socket.into()) {
        Ok(client) => {
            worker.scope.spawn(serve(worker.clone(), entry, listener, client, hello, worker.index));
        }
        Err(_) => {
            worker.shared.tunnels[worker.index].fetch_sub(1, Ordering::Relaxed);
            worker.told(&entry, Reason::Internal, false);
            worker.leave(&entry);
        }
    }
}

/// Counts a connection among those of a worker for as long as it lives.
struct Counted<'a>(&'a Worker, usize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.shared.tunnels[self.1].fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve(
    worker: Rc<Worker>,
    entry: Rc<Entry>,
    listener: Arc<Listener>,
    client: TcpStream,
    hello: Box<[u8]>,
    counted: usize,
) {
    let _leave = Leave(&worker, &entry);
    let _counted = Counted(&worker, counted);
    entry.story.borrow_mut().handshake = true;
    let limits = worker.snapshot().policy.hbone;
    let transport = Transport::new(worker.clone(), client, hello);
    match Box::pin(handshake(&worker, &entry, &limits, transport)).await {
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
