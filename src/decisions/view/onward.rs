//! The gateways of other networks to which this gateway passes calls of clients on its own network on
//! (`networks.NET.egress: gateway`). They are those of the view of a client that calls other networks directly, with its weights.

use std::fmt::Debug;
use std::sync::Arc;

use super::{Asker, ClientKind, Entry, EntryKind, Tunnel, Viewer, view_by};
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, Health, Weight};
use isthmus_model::place::{ClusterId, Distance};
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::peer::peer_of;
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::{Candidate, Candidates, EndpointKey, Role};
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// A source of the gateways to which calls are passed on. The data path keeps what it has computed; `explain` computes it.
pub trait FarGateways: Debug {
    /// Returns the gateways to which a call of a service port and subset can be passed on; `None` if there are none.
    fn of(
        &self,
        snapshot: &Snapshot,
        service: &Arc<ServiceView>,
        port: &PortView,
        subset: &str,
        asked: AskedBy,
    ) -> Option<Arc<Candidates>>;
}

/// Computes the gateways at each call.
#[derive(Clone, Copy, Debug)]
pub struct Computed;

impl FarGateways for Computed {
    fn of(
        &self,
        snapshot: &Snapshot,
        service: &Arc<ServiceView>,
        port: &PortView,
        subset: &str,
        asked: AskedBy,
    ) -> Option<Arc<Candidates>> {
        onward(snapshot, service, port, subset, asked).map(Arc::new)
    }
}

/// Returns the gateways of other networks to which a call of a service port and subset can be passed on; `None` if there are none.
pub fn onward(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &PortView,
    subset: &str,
    asked: AskedBy,
) -> Option<Candidates> {
    let (tunnel, client) = match asked {
        AskedBy::MeshName => (Tunnel::Sni, ClientKind::Envoy),
        AskedBy::Hostname => (Tunnel::Sni, ClientKind::Grpc),
        AskedBy::Authority => (Tunnel::Hbone, ClientKind::Envoy),
        AskedBy::Tcp => return None,
    };
    let node = &snapshot.policy.node;
    let (network, cluster) = (node.network.clone(), node.cluster.clone());
    let viewer = Viewer { network, cluster, tunnel, client, ..Viewer::default() };
    let entries = view_by(snapshot, service, port, subset, &viewer, Asker::Gateway)?.entries;
    // Organisations that are joined with the name have other names for it.
    let owner = service.import.as_ref().map(|import| &*import.peer);
    let leads = |entry: &&Entry| entry.kind == EntryKind::Gateway && peer_of(&entry.network) == owner;
    // Clients speak one TLS mode to the address of their own gateway, that of the first network.
    let mode = entries.iter().filter(leads).min_by_key(|entry| &entry.network)?.tls;
    let gateways = || entries.iter().filter(leads).filter(|entry| entry.tls == mode);
    let first = gateways().map(|entry| entry.priority).min()?;
    let group: Arc<str> = format!("{}:{}", service.name, port.port).into();
    let candidates: Vec<Candidate> = gateways()
        .map(|entry| Candidate {
            key: EndpointKey { group: group.clone(), address: entry.address },
            others: None,
            weight: Weight::new(entry.weight).unwrap_or(Weight::ONE),
            left: if entry.role == Role::Reserve { 0 } else { PARTS },
            is_backup: entry.priority > first,
            connections_max: None,
            health: Health::Healthy,
            // A gateway of the config seldom has a cluster, and logs are to say where the call went.
            cluster: match entry.cluster.as_str() {
                "" => ClusterId::new(entry.network.as_str()),
                _ => entry.cluster.clone(),
            },
            locality: entry.locality.clone(),
            distance: Distance::Elsewhere,
            encapsulation: Encapsulation::None,
        })
        .collect();
    // A gateway of another network is sent the client's bytes alone.
    let tuning = snapshot.policy.tuning.of(&service.name);
    let tuning = match tuning.send_proxy {
        None => tuning.clone(),
        Some(_) => Arc::new(Tuning { send_proxy: None, ..Tuning::clone(tuning) }),
    };
    Some(Candidates::new(group, tuning, candidates))
}
