//! The waypoint of a service, with its endpoints on this network.

use std::sync::Arc;

use super::ServiceView;
use crate::Snapshot;
use crate::candidates::{Candidate, Candidates, EndpointKey};
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, HBONE_PORT, Health, Weight};
use isthmus_model::identity::Identity;
use isthmus_model::place::{Distance, Locality};
use isthmus_model::service::{ServiceKey, Waypoint};
use isthmus_registry::shard::Origin;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::tuning::Tuning;

/// The waypoint proxy that accepts HBONE connections for a service.
#[derive(Clone, Debug)]
pub struct WaypointView {
    /// The waypoint, as its registry gives it.
    pub told: Arc<Waypoint>,
    /// The only candidate of a waypoint at an address; `None`: the candidates are those of the waypoint's services.
    pub by_address: Option<Arc<Candidates>>,
}

impl Snapshot {
    /// Returns the service of a waypoint; `None` if no registry has it.
    pub fn waypoint_service(&self, key: &ServiceKey) -> Option<&Arc<ServiceView>> {
        self.service(key.hostname.as_str()).filter(|found| found.key == *key)
    }

    /// Returns the endpoints on this network of the service of a waypoint; `None` if no registry has a service with such a port.
    pub fn waypoint_candidates(&self, key: &ServiceKey) -> Option<&Arc<Candidates>> {
        self.waypoint_service(key)?.port(HBONE_PORT)?.candidates("", AskedBy::Authority)
    }

    /// Returns the identities of a waypoint; one may occur several times.
    pub fn waypoint_identities<'a>(&'a self, waypoint: &'a Waypoint) -> impl Iterator<Item = &'a Identity> {
        let own = match waypoint {
            Waypoint::Address { identity, .. } => identity.as_ref(),
            Waypoint::Services { .. } => None,
        };
        let services = waypoint.services().iter().filter_map(|(key, _)| self.waypoint_service(key));
        own.into_iter().chain(services.flat_map(|service| service.identities()))
    }
}

impl WaypointView {
    /// Makes the view of a waypoint of the service `hostname`.
    pub(super) fn new(told: &Arc<Waypoint>, hostname: &str, origin: &Origin, tuning: &Arc<Tuning>) -> Self {
        let Waypoint::Address { address, .. } = &**told else {
            return Self { told: told.clone(), by_address: None };
        };
        let group: Arc<str> = format!("{hostname}:waypoint").into();
        let candidate = Candidate {
            key: EndpointKey { group: group.clone(), address: *address },
            others: None,
            weight: Weight::ONE,
            health: Health::Healthy,
            left: PARTS,
            is_backup: false,
            connections_max: None,
            cluster: origin.cluster.clone(),
            locality: Locality::default(),
            distance: Distance::Elsewhere,
            // Waypoints accept only HBONE.
            encapsulation: Encapsulation::Hbone,
        };
        let candidates = Arc::new(Candidates::new(group, tuning.clone(), vec![candidate]));
        Self { told: told.clone(), by_address: Some(candidates) }
    }

    /// Returns the services of the waypoint that have a share of the calls, each with its share and its candidates on this network.
    pub fn candidates<'a>(
        &'a self,
        snapshot: &'a Snapshot,
    ) -> impl Iterator<Item = (&'a ServiceKey, u32, &'a Arc<Candidates>)> {
        let shares = self.told.services().iter().filter(|(_, share)| *share > 0);
        shares.filter_map(|(key, share)| Some((key, *share, snapshot.waypoint_candidates(key)?)))
    }
}
