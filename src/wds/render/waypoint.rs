//! The waypoint of a service, as a viewer's ztunnels get it.

use super::{Made, by_hostname, network_address, proxy};
use isthmus_decisions::view::{Viewer, view};
use isthmus_model::endpoint::HBONE_PORT;
use isthmus_model::identity::Identity;
use isthmus_model::service::{ServiceKey, Waypoint};
use isthmus_proto::istio::workload as proto;
use isthmus_proto::istio::workload::gateway_address::Destination;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::{Part, ServiceView};

/// The waypoint of a service, as ztunnels get it.
#[derive(Default)]
pub(super) struct WaypointOf<'a> {
    pub(super) told: Option<&'a Waypoint>,
    pub(super) address: Option<proto::GatewayAddress>,
    /// The workload of a waypoint that is known only by its address.
    pub(super) workload: Option<Made>,
    /// The identities of the waypoints to which gateways lead, although ztunnels get no waypoint.
    pub(super) behind: Vec<&'a Identity>,
}

impl<'a> WaypointOf<'a> {
    pub(super) fn services(&self) -> impl Iterator<Item = &'a (ServiceKey, u32)> {
        self.told.into_iter().flat_map(|told| told.services())
    }
}

/// Returns the waypoint of a service: the one that the viewer's cluster declares, or one at an address near the viewer, or else the one
/// to which all endpoints are led, such as one behind a gateway. A ztunnel expects the identity of the waypoint that it gets, or
/// else one of those of the service, to which those of other waypoints behind gateways belong.
pub(super) fn waypoint<'a>(
    snapshot: &'a Snapshot,
    found: &'a ServiceView,
    viewer: &Viewer,
) -> WaypointOf<'a> {
    let of = |part: &'a Part| part.service.waypoint.as_deref();
    let is_near = |part: &Part| viewer.is_near(snapshot, &part.origin.network, &part.origin.cluster);
    let own = found.parts.iter().filter(|part| part.origin.cluster == viewer.cluster).find_map(of);
    let is_at_address = |waypoint: &&Waypoint| matches!(waypoint, Waypoint::Address { .. });
    let near = || found.parts.iter().filter(|part| is_near(part)).filter_map(of).find(is_at_address);
    match own.or_else(near) {
        Some(Waypoint::Address { address, identity }) => {
            let network = &viewer.network;
            let uid = format!("Waypoint/{network}/{address}");
            // Without an identity the ztunnel finds no workload, and refuses the calls: the waypoint is never passed by.
            let workload = identity.as_ref().and_then(|identity| proxy(uid, network, address.ip(), identity));
            let destination = Some(Destination::Address(network_address(network, address.ip())));
            let address = proto::GatewayAddress { destination, hbone_mtls_port: address.port().into() };
            return WaypointOf { address: Some(address), workload, ..WaypointOf::default() };
        }
        Some(told) => return by_services(told),
        None => {}
    }
    let mut leading = found.parts.iter().filter(|part| !part.service.endpoints.is_empty()).map(of);
    let first = leading.next().flatten().filter(|first| !first.services().is_empty());
    if let Some(first) = first
        && leading.all(|other| other == Some(first))
        && first.services().iter().all(|(key, _)| is_reachable(snapshot, key, viewer))
    {
        return by_services(first);
    }
    let far = found.parts.iter().filter(|part| !is_near(part)).filter_map(of);
    let behind = far.flat_map(|waypoint| snapshot.waypoint_identities(waypoint)).collect();
    WaypointOf { behind, ..WaypointOf::default() }
}

/// Returns true if the viewer gets endpoints of a waypoint: near ones, or those of another network if an export rule names it.
fn is_reachable(snapshot: &Snapshot, waypoint: &ServiceKey, viewer: &Viewer) -> bool {
    let reaches = |found: &ServiceView| {
        let port = found.port(HBONE_PORT)?;
        Some(!view(snapshot, found, port, "", viewer)?.entries.is_empty())
    };
    snapshot.waypoint_service(waypoint).and_then(|found| reaches(found)).unwrap_or_default()
}

fn by_services(told: &Waypoint) -> WaypointOf<'_> {
    let address = told.services().first().map(|(key, _)| by_hostname(key));
    WaypointOf { told: Some(told), address, ..WaypointOf::default() }
}
