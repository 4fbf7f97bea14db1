//! The waypoints of services and workloads, which istiod names by the host name or an address of their service.

use std::sync::Arc;

use super::{HeldService, Reading, shortened};
use crate::convert::WaypointName;
use isthmus_model::service::{ServiceKey, Waypoint};

impl Reading {
    /// Returns the services whose waypoint is not known, a sentence each.
    pub(crate) fn waypoints_ignored(&self) -> Vec<String> {
        let is_unknown = |held: &HeldService| {
            held.waypoints.iter().any(|(name, _)| self.waypoint_of(name.as_ref()).is_none())
        };
        let unknown = self.services.iter().filter(|(_, held)| is_unknown(held));
        let line = |(name, _): (&Arc<str>, _)| {
            format!(
                "{name}: istiod names a waypoint that it has not sent, so HBONE callers are not connected to it"
            )
        };
        shortened(&unknown.map(|one| line(one).into()).collect::<Vec<Arc<str>>>())
    }

    /// Returns the service that a name of a waypoint means; `None` if istiod has not sent it.
    pub(super) fn waypoint_of(&self, name: Option<&WaypointName>) -> Option<ServiceKey> {
        match name? {
            WaypointName::Service(key) => Some(key.clone()),
            WaypointName::Address(ip) => self.virtual_addresses.get(ip).cloned(),
        }
    }

    /// Returns the waypoint of a service, without services if none of them is known.
    pub(super) fn waypoint_of_service(&self, held: &HeldService) -> Option<Waypoint> {
        if held.waypoints.is_empty() {
            return None;
        }
        let services = held
            .waypoints
            .iter()
            .filter_map(|(name, share)| Some((self.waypoint_of(name.as_ref())?, *share)));
        Some(Waypoint::Services { services: services.collect(), takes_ingress: held.takes_ingress })
    }
}
