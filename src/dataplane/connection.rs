//! One connection, from accept to its end.

use std::rc::Rc;
use std::sync::Arc;

use tokio::net::TcpStream;

use super::connect::{Attempts, connect};
use super::hbone;
use super::peek::{First, Peeked, peek};
use super::refuse;
use super::relay::{self, relay};
use super::table::Entry;
use super::worker::Worker;
use crate::model::address::canonical_socket;
use crate::model::reason::Reason;
use crate::net::socket::reset_on_close;
use crate::snapshot::admit::admit_source;
use crate::snapshot::policy::Listener;

/// How a connection ended.
enum Ending {
    /// Gone before its first byte: a load balancer's probe.
    Probe,
    /// Nobody is there, or nobody who would understand.
    Silent(Reason),
    /// The client is told why.
    Refused(Reason),
    /// It was passed on, and both sides know.
    Relayed(Reason),
    /// It is of the other kind; these are the bytes read so far.
    Hbone(Box<[u8]>),
}

/// Serves an accepted connection.
pub(crate) async fn serve(worker: Rc<Worker>, entry: Rc<Entry>, listener: Arc<Listener>, client: TcpStream) {
    let leave = Leave(&worker, &entry);
    entry.local.set(client.local_addr().ok().map(canonical_socket));
    match run(&worker, &entry, &listener, &client).await {
        Ending::Probe => worker.told(&entry, Reason::ClientGone, true),
        Ending::Silent(reason) | Ending::Relayed(reason) => worker.told(&entry, reason, false),
        Ending::Refused(reason) => {
            worker.told(&entry, reason, false);
            refuse::refuse(&worker, &client, reason).await;
        }
        Ending::Hbone(hello) => {
            leave.stay();
            hbone::take_over(&worker, &entry, &listener, client, hello);
        }
    }
}

/// Leaves the table at its end, also where the task is dropped half-way, or panics.
pub(super) struct Leave<'a>(pub(super) &'a Rc<Worker>, pub(super) &'a Rc<Entry>);

impl Leave<'_> {
    /// Somebody else goes on with the connection.
    fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

async fn run(worker: &Rc<Worker>, entry: &Rc<Entry>, listener: &Arc<Listener>, client: &TcpStream) -> Ending {
    if let Err(reason) = admit_source(listener, entry.source.ip()) {
        return Ending::Refused(reason);
    }
    let (admission, first) = match peek(worker, entry, listener, client).await {
        Peeked::Admitted(admission, first) => (admission, first),
        Peeked::Hbone(hello) => return Ending::Hbone(hello),
        Peeked::Own => {
            // A reset says to the dial, which is ours, that the endpoint has not taken the connection.
            reset_on_close(client);
            return Ending::Silent(Reason::EndpointUnreachable);
        }
        Peeked::Probe => return Ending::Probe,
        Peeked::Gone => return Ending::Silent(Reason::ClientGone),
        Peeked::Refused(reason @ (Reason::NotTls | Reason::HelloTimeout)) => return Ending::Silent(reason),
        Peeked::Refused(reason) => return Ending::Refused(reason),
    };
    let mut first: Option<First> = Some(first);
    let mut attempts = Attempts::new(admission);
    loop {
        let connected = match connect(worker, entry, &mut attempts, &mut first).await {
            Ok(connected) => connected,
            Err(reason) => return Ending::Refused(reason),
        };
        match relay(worker, entry, client, &connected, &mut first).await {
            relay::End::Closed(reason) => return Ending::Relayed(reason),
            relay::End::NotTaken(again) => {
                attempts.failed(worker, &connected.in_flight, Reason::EndpointReset);
                if again == relay::Again::No {
                    return Ending::Relayed(Reason::EndpointReset);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataplane::connect::Connected;

    fn of_connection<F>(_: impl FnOnce(Rc<Worker>, Rc<Entry>, Arc<Listener>, TcpStream) -> F) -> usize {
        size_of::<F>()
    }

    fn of_relay<'a, F>(
        _: impl FnOnce(&'a Rc<Worker>, &'a Rc<Entry>, &'a TcpStream, &'a Connected, &'a mut Option<First>) -> F,
    ) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_futures_of_a_connection_are_small() {
        let (relay, connection) = (of_relay(relay), of_connection(serve));
        assert!(
            relay <= 192 && connection <= 976,
            "relay: {relay} bytes, the whole connection: {connection}"
        );
    }
}
