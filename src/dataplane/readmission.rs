//! Ends live connections that a new config file or a new trust bundle does not admit any more.

use std::rc::Rc;

use super::admission::admit_caller;
use super::bandwidth;
use super::carriers::listener;
use super::connections::AT_ONCE;
use super::core::Core;
use super::entry::Entry;
use isthmus_decisions::admit::readmit;
use isthmus_decisions::decision::{AdmissionRequest, Requested};
use isthmus_model::authority::Authority;
use isthmus_model::reason::Reason;
use isthmus_model::service::CallerKind;
use isthmus_settings::peer::{Carry, peer_of_place};
use isthmus_snapshot::Snapshot;

/// Ends the connections that the config file or the trust bundle does not admit any more; connections of removed listeners
/// drain. The other connections are counted for their services and peers, because the file may have added a limit.
pub(crate) async fn readmit_all(core: Rc<Core>) {
    let snapshot = core.mesh.shared_snapshot();
    bandwidth::configure(&core.shared.limits.bandwidths, &snapshot);
    let entries = core.connections.entries();
    verify_peers(&entries).await;
    for some in entries.chunks(AT_ONCE) {
        for entry in some {
            if !is_still_admitted(&snapshot, entry) {
                let distrust = entry.facts.borrow().caller.as_ref().and_then(|caller| caller.distrust());
                if let Some(distrust) = distrust {
                    entry.explain(distrust);
                }
                entry.cut(Reason::ConfigRemoved);
            } else if core.connections.has(entry) {
                count_for_limits(&core, entry);
            }
        }
        tokio::task::yield_now().await;
    }
}

fn count_for_limits(core: &Core, entry: &Rc<Entry>) {
    if entry.facts.borrow().admitted_by.is_none() {
        return;
    }
    if let Some(permit) = &mut *entry.permit.borrow_mut() {
        permit.count_for_service(&entry.record.borrow());
    }
    bandwidth::join(core, entry);
}

/// Verifies the certificates of authenticated peers against the current trust bundle. The task yields after each one,
/// because each costs as much as a handshake if the bundle has changed.
async fn verify_peers(entries: &[Rc<Entry>]) {
    for entry in entries {
        if entry.is_stream() {
            // Its connection has the same peer.
            continue;
        }
        let Some(peer) = entry.facts.borrow().caller.clone() else { continue };
        peer.is_trusted();
        tokio::task::yield_now().await;
    }
}

/// Returns true if the config file and the trust bundle still admit a connection.
pub(crate) fn is_still_admitted(snapshot: &Snapshot, entry: &Entry) -> bool {
    let (facts, record) = (entry.facts.borrow(), entry.record.borrow());
    if facts.caller.as_ref().is_some_and(|caller| !caller.is_trusted()) {
        return false;
    }
    let authority = record.authority().and_then(|authority| Authority::parse(authority).ok());
    let of_peer = peer_of_place(&entry.listener.name);
    if of_peer.is_some_and(|peer| !snapshot.policy.carries(peer, Carry::FromPeer)) {
        return false;
    }
    let of_carriers = of_peer.map(listener::of_peer);
    let configured = snapshot.listener(&entry.listener.name).map(|listener| &**listener);
    let Some(listener) = configured.or(of_carriers.as_ref()) else {
        return true;
    };
    if facts.admitted_by.is_none() && !entry.carries_streams() {
        // A connection without a permit is checked when its hello is complete, and a stream when it is admitted.
        return true;
    }
    if admit_caller(listener, entry).is_err() {
        return false;
    }
    let Some(permit) = &facts.admitted_by else {
        // The streams of an HBONE connection have their own entries, which are checked separately.
        return true;
    };
    let question = AdmissionRequest {
        listener,
        requested: match &authority {
            Some(authority) => Requested::Authority(authority),
            None if entry.is_raw() => Requested::Nothing,
            None => Requested::ServerName(record.sni.as_deref()),
        },
        source: Some(record.source.ip()),
        alpn: None,
        identity: facts.caller.as_ref().map(|caller| &caller.proof.identity),
        // None of these decides whether an open connection may go on, only where a new one leads.
        kind: CallerKind::default(),
        draw: None,
        is_passed_on: false,
        far: None,
        local: record.local.map(|local| local.ip()),
    };
    readmit(snapshot, &question, permit)
}
