//! The peers, and what is exchanged with them, as the API shows them.

use std::sync::Arc;

use crate::api;
use crate::api::peer::{Exchanged, PeerDetail};
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::snapshot::peer::Peer;
use crate::snapshot::service_view::ServiceView;

/// Returns the peers in the order of the file.
pub fn peers(snapshot: &Snapshot) -> Vec<api::peer::Peer> {
    let services = snapshot.services();
    let one = |peer: &Arc<Peer>| api::peer::Peer {
        name: peer.name.to_string(),
        identity: peer.who.as_ref().map(|who| who.gateway.to_string()),
        trust_alias: peer.who.as_ref().map(|who| who.alias.to_string()),
        exported: snapshot.exports_to(&peer.name).len(),
        imported: services.iter().filter(|service| is_of(service, peer)).count(),
    };
    snapshot.policy.peers.iter().map(one).collect()
}

/// Returns a peer with its services; `None` if the config has no such peer.
pub fn peer(snapshot: &Snapshot, name: &str) -> Option<PeerDetail> {
    let peer = snapshot.policy.peers.iter().find(|peer| *peer.name == *name)?;
    let rules = peer.imports.iter().flat_map(|rule| &rule.services);
    Some(PeerDetail {
        name: peer.name.to_string(),
        identity: peer.who.as_ref().map(|who| who.gateway.to_string()),
        from: peer.from.iter().map(ToString::to_string).collect(),
        exported: exported(snapshot, name),
        imported: imported(snapshot, peer),
        asked: rules.map(ToString::to_string).collect(),
        conflicts: snapshot.export_conflicts(name),
    })
}

/// Returns the services of ours that a peer may reach, in order of exported name.
fn exported(snapshot: &Snapshot, peer: &str) -> Vec<Exchanged> {
    let all = snapshot.exports_to(peer).into_iter();
    all.map(|export| exchanged(export.name, export.service, &export.service.namespace)).collect()
}

/// Returns the services of a peer, in order of their names here.
fn imported(snapshot: &Snapshot, peer: &Peer) -> Vec<Exchanged> {
    let one = |service: &ServiceView| {
        let import = service.import.as_ref()?;
        Some(exchanged(&import.exported_name, service, peer.namespace_of(&service.namespace)))
    };
    let of_peer = snapshot.services().into_iter().filter(|service| is_of(service, peer));
    of_peer.filter_map(|service| one(service)).collect()
}

fn is_of(service: &ServiceView, peer: &Peer) -> bool {
    service.import.as_ref().is_some_and(|import| import.peer == peer.name)
}

fn exchanged(name: &HostName, service: &ServiceView, namespace: &str) -> Exchanged {
    let ports = service.ports.iter().map(|port| format!("{}/{}", port.port, port.protocol.text()));
    Exchanged {
        exported_name: name.to_string(),
        service: service.name.to_string(),
        namespace: namespace.to_owned(),
        ports: ports.collect(),
    }
}
