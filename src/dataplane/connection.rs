//! One connection, from accept to its end.

use tokio::net::TcpStream;
use tokio::time::Instant;

use super::admission::{Asked, admit, admit_accepted, admit_caller, newest};
use super::attempts::{Attempts, Replay};
use super::carriers::accepted;
use super::connect::{Connected, connect};
use super::core::Registration;
use super::handover;
use super::hbone;
use super::hello::{is_carrier, is_hbone, note_hello, purpose_of};
use super::peek::{Accepted, Peeked, Unserved, peek};
use super::permits::LimitRefusal;
use super::refuse::{self, Farewell};
use super::relay::{self, Parked, relay};
use isthmus_decisions::decision::{Onward, Requested};
use isthmus_model::alert::Alert;
use isthmus_model::alpn::Protocols;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionProtocol;
use isthmus_model::service::CallerKind;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_net::handed::{HandedOver, Purpose};
use isthmus_net::socket::reset_on_close;

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
    /// The connection is a carrier that a peer's gateway opens; these are the bytes read so far.
    Carrier(Box<[u8]>),
}

/// Serves an accepted connection to its end, or until its bytes show that it is HBONE or a peer's link.
pub(crate) async fn serve(accepted: Accepted) {
    let (core, entry, refusal) = (accepted.core(), accepted.entry(), accepted.listener.refusal);
    match run(&accepted).await {
        Ending::Probe => core.finish_probe(entry),
        Ending::Greeted => {
            core.finish_probe(entry);
            let farewell = Farewell::of(refusal, Some(Alert::UnrecognizedName));
            refuse::at_once(core, &accepted.client, farewell);
        }
        Ending::Silent(reason) | Ending::Relayed(reason) => core.finish(entry, reason),
        // Connections that have not announced their source share a small limit. A client that is given time to read its alert
        // would keep other clients out, so this one is refused without waiting.
        Ending::Refused(reason) if entry.is_unannounced() => {
            core.finish(entry, reason);
            refuse::at_once(core, &accepted.client, Farewell::of(refusal, entry.alert(reason)));
        }
        Ending::Refused(reason) => {
            core.finish(entry, reason);
            let farewell = Farewell::of(refusal, entry.alert(reason));
            Box::pin(refuse::refuse(core, &accepted.client, farewell)).await;
        }
        Ending::Parked(parked) => {
            let (connected, parked) = *parked;
            let sockets = [&accepted.client, &connected.socket];
            handover::offer(core, entry, sockets, &connected.in_flight, &parked);
            let Accepted { registration, client, .. } = accepted;
            Box::pin(handover::go_on(registration, client, connected, parked)).await;
        }
        Ending::Hbone(hello) => {
            let Accepted { registration, listener, client } = accepted;
            hbone::take_over(registration, &listener, client, hello);
        }
        Ending::Carrier(hello) => {
            let Accepted { registration, client, .. } = accepted;
            let core = registration.core.clone();
            core.scope.spawn(Box::pin(accepted::serve(registration, client, hello)));
        }
        Ending::Link(purpose, hello) => {
            let Accepted { registration, client, .. } = accepted;
            hand_over_link(&registration, client, purpose, hello);
        }
    }
}

/// Takes a connection through its phases: what its first bytes ask for, the endpoints to which it is admitted, the one that accepts
/// it, and the relay.
async fn run(accepted: &Accepted) -> Ending {
    let (core, entry, client) = (accepted.core(), accepted.entry(), &accepted.client);
    if let Err(reason) = admit_accepted(&accepted.listener, entry) {
        return Ending::Refused(reason);
    }
    let mut attempts = match peek(accepted, decide).await {
        Ok(attempts) => attempts,
        Err(unserved) => return unserved_end(unserved, client),
    };
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

/// Decides by the first bytes of a connection on its server, and admits a connection to an endpoint.
fn decide(accepted: &Accepted, peeked: &Peeked<'_>) -> Result<Attempts, Unserved> {
    let (core, entry) = (accepted.core(), accepted.entry());
    if accepted.is_own() {
        return Err(Unserved::Own);
    }
    if peeked.hello.is_none() {
        entry.record.borrow_mut().protocol = ConnectionProtocol::Tcp;
    }
    // A reload may have narrowed the listener's `from` since the connection was accepted.
    let snapshot = core.mesh.snapshot();
    let listener = newest(&snapshot, &accepted.listener);
    admit_caller(listener, entry).map_err(Unserved::Refused)?;
    let (requested, alpn) = match &peeked.hello {
        None => (Requested::Nothing, None),
        Some(hello) => {
            if !snapshot.policy.peers.is_empty()
                && let Some(purpose) = purpose_of(listener.protocol, hello)
            {
                return Err(Unserved::Link(purpose, peeked.bytes.into()));
            }
            if !snapshot.policy.peers.is_empty() && is_carrier(listener.protocol, hello) {
                return Err(Unserved::Carrier(peeked.bytes.into()));
            }
            let alpn = hello.alpn.unwrap_or(Protocols::NONE);
            let is_hbone = is_hbone(listener.protocol, hello);
            if is_hbone && alpn.iter().any(|name| name == b"h2") {
                return Err(Unserved::Hbone(peeked.bytes.into()));
            }
            note_hello(&mut entry.record.borrow_mut(), hello);
            if is_hbone {
                let text =
                    "the listener accepts only HBONE, but the hello does not offer the ALPN protocol h2";
                entry.explain(text);
                return Err(Unserved::Refused(Reason::AlpnRefused));
            }
            (Requested::ServerName(hello.server_name), Some(alpn))
        }
    };
    let asked =
        Asked { listener, requested, alpn, identity: None, kind: CallerKind::default(), is_passed_on: false };
    let mut attempts = admit(core, &snapshot, entry, &asked).map_err(Unserved::Refused)?;
    if let Some(hello) = &peeked.hello
        && matches!(attempts.onward.as_deref(), Some(Onward::Gateway(_)))
        && core.shared.passed_on.returns(hello.random, entry.source().ip(), Instant::now())
    {
        entry.explain(
            "this gateway has passed the same hello on to another network a moment ago: the gateway there takes it for one of a client on \
             its own network; its networks[].cidrs must not contain the addresses from which calls of other networks arrive",
        );
        return Err(Unserved::Refused(Reason::HopLimit));
    }
    attempts.replay = replay(peeked);
    Ok(attempts)
}

/// Keeps the bytes that were peeked for the endpoint; `None` if there are none. Bytes behind a hello, or other bytes, may be a request,
/// so they are sent to one endpoint only.
fn replay(peeked: &Peeked<'_>) -> Option<Replay> {
    let Peeked { hello, bytes } = *peeked;
    let repeatable = hello.is_some_and(|hello| hello.length == bytes.len());
    (!bytes.is_empty()).then(|| Replay { bytes: bytes.into(), sent: 0, repeatable })
}

/// Returns the end of a connection that no endpoint serves.
fn unserved_end(unserved: Unserved, client: &TcpStream) -> Ending {
    match unserved {
        Unserved::Own => {
            // This gateway has dialled itself. The reset tells its dialling task that no endpoint has taken the connection.
            reset_on_close(client);
            Ending::Silent(Reason::EndpointUnreachable)
        }
        Unserved::Probe => Ending::Probe,
        Unserved::Greeted => Ending::Greeted,
        Unserved::Gone => Ending::Silent(Reason::ClientGone),
        Unserved::Refused(reason @ (Reason::NotTls | Reason::HelloTimeout)) => Ending::Silent(reason),
        Unserved::Refused(reason) => Ending::Refused(reason),
        Unserved::Hbone(hello) => Ending::Hbone(hello),
        Unserved::Link(purpose, hello) => Ending::Link(purpose, hello),
        Unserved::Carrier(hello) => Ending::Carrier(hello),
    }
}

/// Hands the connection of a peer's gateway to the server of peer links, which has its own limits.
fn hand_over_link(registration: &Registration, client: TcpStream, purpose: Purpose, first: Box<[u8]>) {
    let Registration { core, entry } = registration;
    let Ok(socket) = client.into_std() else { return core.finish(entry, Reason::Internal) };
    let (source, listener) = (entry.source(), entry.listener.name.clone());
    match core.shared.links.try_send(HandedOver { socket: socket.into(), source, listener, purpose, first }) {
        Ok(()) => core.finish_handed_over(entry),
        Err(_) => {
            let text = "too many connections of peers wait to be served";
            let refused = LimitRefusal::new(Reason::LimitGlobal, Some(FullLimit::Links), text);
            core.finish(entry, core.refused(entry, refused));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::core::Core;
    use crate::entry::Entry;

    fn of_connection<F>(_: impl FnOnce(Accepted) -> F) -> usize {
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
