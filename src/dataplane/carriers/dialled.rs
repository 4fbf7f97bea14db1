//! A carrier that this gateway has opened: TLS as a client, then HTTP/2 as a server, whose streams are served as those of HBONE. They are
//! calls of the peer: its exports and its limits apply.

use std::convert::Infallible;
use std::fmt::Display;
use std::future::pending;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsConnector, TlsStream};

use super::accepted::retired;
use super::listener;
use super::pool::Carrier;
use crate::core::Core;
use crate::entry::{Entry, Peer};
use crate::hbone::driver::drive;
use crate::hbone::handshake::{Agreed, Failed, agree};
use crate::hbone::transport::Transport;
use crate::shared::HbonePlace;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord};
use isthmus_net::handed::Carrying;
use isthmus_settings::limits::HboneLimits;
use isthmus_settings::peer::{CARRY_PROTOCOL, Carry};
use isthmus_tls::client;
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::trust::describe;

/// The time limit of the handshakes.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// The time without streams after which a carrier would be closed: never, for all that matters.
const IDLE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Serves a carrier over a connection that was dialled, to its end.
pub(crate) async fn serve(core: Rc<Core>, carrying: Carrying, _place: HbonePlace) {
    let Carrying { socket, address, peer, gateway, alias, end, ended } = carrying;
    let listener = Arc::new(listener::of_peer(&peer));
    let counts = core.local.listener(&listener.name);
    counts.accepted();
    let record = ConnectionRecord {
        protocol: ConnectionProtocol::Hbone,
        ..ConnectionRecord::new(core.next_id(), SystemTime::now(), counts.name.clone(), address)
    };
    let registration = core.register(Rc::new(Entry::new(counts, record, core.clock.now())));
    let entry = &registration.entry;
    let limits = HboneLimits { idle: IDLE, ..core.mesh.snapshot().policy.hbone };
    let opening = Box::pin(open(&core, entry, &limits, socket, (&gateway, alias)));
    let opened = timeout(HANDSHAKE_WITHIN, opening).await;
    let opened = opened.unwrap_or_else(|_| {
        Err(Failed::new(Reason::EndpointTimeout, "the handshakes of TLS and HTTP/2 took too long"))
    });
    let opened = opened.and_then(|agreed| {
        let carrier = Carrier::new(peer, (address, gateway.shared()), Carry::FromPeer, None);
        let registered = core.shared.carriers.register(carrier).ok_or_else(|| {
            Failed::new(Reason::LimitSource, "this gateway has as many carriers to the peer as it may have")
        });
        Ok((agreed, registered?))
    });
    let (mut agreed, registered) = match opened {
        Ok(opened) => opened,
        Err(Failed { reason, detail }) => {
            let problem = detail.map_or_else(|| reason.to_string(), String::from);
            // The dialling task may have ended, here and below.
            let _ = ended.send(problem.replace("the caller", "the peer's gateway"));
            return core.finish_hbone(entry, reason);
        }
    };
    let carrier = registered.carrier().clone();
    agreed.carrier = Some(registered);
    let ordered = async {
        // An order that is never given leaves the carrier to its own end.
        if end.await.is_ok() {
            // Calls that are still admitted end by themselves; readmission ends the others.
            entry.retire();
        }
        pending::<Infallible>().await
    };
    let serving = Box::pin(drive(&core, entry, listener, limits, agreed));
    let (mut serving, mut ordered, mut ended) = (serving, pin!(ordered), Some(ended));
    let reason = loop {
        let why = tokio::select! {
            biased;
            never = &mut ordered => match never {},
            reason = &mut serving => break reason,
            () = retired(&core, entry), if ended.is_some() => "this gateway stops",
            () = carrier.until_left(), if ended.is_some() => "the peer's gateway stops",
        };
        // The dialling task opens another carrier.
        let _ = ended.take().map(|ended| ended.send(format!("the carrier takes no new calls, as {why}")));
        entry.retire();
    };
    let detail =
        entry.record.borrow().detail.as_deref().map_or(String::new(), |detail| format!(": {detail}"));
    let _ = ended.map(|ended| ended.send(format!("the carrier ended ({reason}{detail})")));
    core.finish_hbone(entry, reason);
}

/// Negotiates TLS and HTTP/2, and verifies that the server is the peer's gateway.
async fn open(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    limits: &HboneLimits,
    socket: OwnedFd,
    (gateway, alias): (&Identity, TrustDomain),
) -> Result<Agreed, Failed> {
    let internal = |error: &dyn Display| Failed::new(Reason::Internal, error.to_string());
    let socket = TcpStream::from_std(socket.into()).map_err(|error| internal(&error))?;
    let transport = Transport::new(core.clone(), socket, Box::default());
    let context = &core.shared.hbone.context;
    let (certificate, roots) = (context.certificate.clone(), context.trust.clone());
    let config = client::mutual(certificate, roots, alias, &[CARRY_PROTOCOL]);
    let config = config.map_err(|error| internal(&error))?;
    let mut trust = context.trust.clone();
    trust.see();
    let stream = TlsConnector::from(Arc::new(config)).connect(client::no_name(), transport).await;
    let stream = stream.map_err(|error| match tls_error_of(&error) {
        Some(fault) => Failed::new(Reason::TlsFailed, describe(fault)),
        None => Failed::new(Reason::EndpointReset, error.to_string()),
    })?;
    let proof = Proof::of_server(stream.get_ref().1, &mut trust);
    let proof = proof.map_err(|problem| Failed::new(Reason::IdentityUntrusted, problem))?;
    if proof.identity != *gateway {
        let text = format!("the gateway has the identity {}, expected {gateway}", proof.identity);
        return Err(Failed::new(Reason::IdentityDenied, text));
    }
    let held = core.hbone.held.of_identity(&proof.identity.shared());
    entry.record.borrow_mut().source_identity = Some(proof.identity.shared());
    let caller = Rc::new(Peer::new(proof, trust, held));
    entry.facts.borrow_mut().caller = Some(caller.clone());
    agree(core, limits, TlsStream::Client(stream), caller).await
}
