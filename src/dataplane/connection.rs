//! One connection, from accept to its end.

use std::rc::Rc;
use std::sync::Arc;

use tokio::net::TcpStream;

use super::attempts::Attempts;
use super::connect::{Connected, connect};
use super::core::{Core, Registration};
use super::entry::Entry;
use super::handover;
use super::hbone;
use super::peek::{Peeked, peek};
use super::permits::Refused;
use super::refuse::{self, Farewell};
use super::relay::{self, Parked, relay};
use isthmus_decisions::admit::{admit_proxy, admit_source};
use isthmus_model::alert::Alert;
use isthmus_model::reason::Reason;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_net::handed::{HandedOver, Purpose};
use isthmus_net::socket::reset_on_close;
use isthmus_settings::listener::{Listener, ProxyProtocol};

/// How a connection ended, as its client sees it.
enum Ending {
    /// The client closed the connection before its first byte: a load balancer's probe.
    Probe,
    /// The client is a gateway that asks by a hello whether this process answers.
    Greeted,
    /// The client has gone or would not understand an alert, so nothing is sent.
    Silent(Reason),
    /// The client is sent a TLS alert.
    Refused(Reason),
    /// The connection was relayed, and both peers have received its end.
    Relayed(Reason),
    /// The connection has stopped at a safe point, because another process may go on with it.
    Parked(Box<(Connected, Parked)>),
    /// The connection is HBONE; these are the bytes read so far.
    Hbone(Box<[u8]>),
    /// The connection is a peer's link or enrolment, which another part of the program serves; these are the bytes read so
    /// far.
    Link(Purpose, Box<[u8]>),
}

/// Serves an accepted connection to its end, or until its bytes show that it is HBONE or a peer's link.
pub(crate) async fn serve(registration: Registration, listener: Arc<Listener>, client: TcpStream) {
    let (core, entry) = (&registration.core, &registration.entry);
    match run(core, entry, &listener, &client).await {
        Ending::Probe => core.finish_probe(entry),
        Ending::Greeted => {
            core.finish_probe(entry);
            let farewell = Farewell::of(listener.refusal, Some(Alert::UnrecognizedName));
            refuse::at_once(core, &client, farewell);
        }
        Ending::Silent(reason) | Ending::Relayed(reason) => core.finish(entry, reason),
        // Connections that have not announced their source share a small limit. A client that is given time to read its alert
        // would keep other clients out, so this one is refused without waiting.
        Ending::Refused(reason) if entry.is_unannounced() => {
            core.finish(entry, reason);
            refuse::at_once(core, &client, Farewell::of(listener.refusal, entry.alert(reason)));
        }
        Ending::Refused(reason) => {
            core.finish(entry, reason);
            Box::pin(refuse::refuse(core, &client, Farewell::of(listener.refusal, entry.alert(reason))))
                .await;
        }
        Ending::Parked(parked) => {
            let (connected, parked) = *parked;
            handover::offer(core, entry, [&client, &connected.socket], &connected.in_flight, &parked);
            Box::pin(handover::go_on(registration, client, connected, parked)).await;
        }
        Ending::Hbone(hello) => hbone::take_over(registration, &listener, client, hello),
        Ending::Link(purpose, hello) => hand_over_link(core, entry, client, purpose, hello),
    }
}

/// Hands the connection of a peer's gateway to the server of peer links, which has its own limits.
fn hand_over_link(core: &Core, entry: &Entry, client: TcpStream, purpose: Purpose, first: Box<[u8]>) {
    let Ok(socket) = client.into_std() else { return core.finish(entry, Reason::Internal) };
    let (source, listener) = (entry.source(), entry.listener.name.clone());
    match core.shared.links.try_send(HandedOver { socket: socket.into(), source, listener, purpose, first }) {
        Ok(()) => core.finish_handed_over(entry),
        Err(_) => {
            let text = "too many connections of peers wait to be served";
            let refused = Refused::new(Reason::LimitGlobal, Some(FullLimit::Links), text);
            core.finish(entry, core.refused(entry, refused));
        }
    }
}

/// Decides on a connection before a byte is read, by the client's address, or by the proxy's address where a PROXY header
/// is required.
pub(crate) fn admit_accepted(listener: &Listener, entry: &Entry) -> Result<(), Reason> {
    admit_proxy(listener, entry.peer().ip()).inspect_err(|_| {
        let text = format!("the address {} is not in the listener's proxyProtocol.from", entry.peer().ip());
        entry.explain(text);
    })?;
    // Where a PROXY header is required, the source is checked after the header is read.
    let is_known = listener.proxy_protocol == ProxyProtocol::Forbid || entry.proxy().is_some();
    if is_known { admit_source(listener, entry.source().ip()) } else { Ok(()) }
}

async fn run(core: &Rc<Core>, entry: &Rc<Entry>, listener: &Arc<Listener>, client: &TcpStream) -> Ending {
    if let Err(reason) = admit_accepted(listener, entry) {
        return Ending::Refused(reason);
    }
    let (admission, replay) = match peek(core, entry, listener, client).await {
        Peeked::Admitted(admission, replay) => (admission, replay),
        Peeked::Hbone(hello) => return Ending::Hbone(hello),
        Peeked::Link(purpose, hello) => return Ending::Link(purpose, hello),
        Peeked::Own => {
            // This gateway has dialled itself. The reset tells its dialling task that no endpoint has taken the connection.
            reset_on_close(client);
            return Ending::Silent(Reason::EndpointUnreachable);
        }
        Peeked::Probe => return Ending::Probe,
        Peeked::Greeted => return Ending::Greeted,
        Peeked::Gone => return Ending::Silent(Reason::ClientGone),
        Peeked::Refused(reason @ (Reason::NotTls | Reason::HelloTimeout)) => return Ending::Silent(reason),
        Peeked::Refused(reason) => return Ending::Refused(reason),
    };
    let mut attempts = Attempts::new(core, admission, replay);
    loop {
        let connected = match connect(core, entry, Some(client), &mut attempts).await {
            Ok(connected) => connected,
            Err(reason) => {
                attempts.settle(core);
                return Ending::Refused(reason);
            }
        };
        match relay(core, entry, client, &connected, &mut attempts).await {
            relay::End::Closed(reason) => return Ending::Relayed(reason),
            relay::End::Parked(parked) => return Ending::Parked(Box::new((connected, *parked))),
            relay::End::NotTaken(reason, retry) => {
                attempts.not_taken(core, connected.in_flight, reason);
                if retry == relay::Retry::GiveUp {
                    attempts.settle(core);
                    return Ending::Relayed(reason);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_connection<F>(_: impl FnOnce(Registration, Arc<Listener>, TcpStream) -> F) -> usize {
        size_of::<F>()
    }

    fn of_relay<'a, F>(
        _: impl FnOnce(&'a Rc<Core>, &'a Rc<Entry>, &'a TcpStream, &'a Connected, &'a mut Attempts) -> F,
    ) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_futures_of_a_connection_are_small() {
        let (relay, connection) = (of_relay(relay), of_connection(serve));
        // The future of a connection fills one size class of the allocator: 640 bytes.
        assert!(
            relay <= 224 && connection <= 640,
            "relay: {relay} bytes, the whole connection: {connection}"
        );
    }
}
