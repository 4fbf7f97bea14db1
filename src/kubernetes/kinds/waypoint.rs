//! Gateways of the Gateway API as waypoints of ztunnels: the traffic that they take, and of which namespaces.

use serde::de::IgnoredAny;

use super::class_gateway::AllowedNamespaces;
use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, objects};
use crate::table::{ObjectKey, Table, Touched};

/// The label that says which traffic a waypoint takes.
const WAYPOINT_FOR: &str = "istio.io/waypoint-for";
/// The port and protocol of the listener whose `allowedRoutes` say which namespaces may use the waypoint.
const PORT: i64 = 15_008;
const PROTOCOL: &str = "HBONE";

objects! {
    /// `Gateway` of `gateway.networking.k8s.io/v1`.
    Waypoint { metadata: Meta, spec: WaypointSpec, status: WaypointStatus, }
    WaypointSpec { listeners: Vec<WaypointListener>, }
    WaypointListener { port: i64, protocol: String, allowed_routes: WaypointRoutes, }
    WaypointRoutes { namespaces: AllowedNamespaces, }
    WaypointStatus { addresses: Vec<IgnoredAny>, }
}

impl Watched for Waypoint {
    const FACTS: Facts = Facts {
        plural: "gateways",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_custom: true,
        namespaces: Namespaces::Every,
        objects_max: 10_000,
        is_wanted: |spec| spec.ambient,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, WaypointRecord>;

    fn record(&self, _: &mut Reading<'_>) -> Option<WaypointRecord> {
        // A Gateway has addresses once its controller has deployed it.
        if self.status.addresses.is_empty() {
            return None;
        }
        let of_ztunnels =
            |listener: &&WaypointListener| listener.port == PORT && listener.protocol == PROTOCOL;
        let listener = self.spec.listeners.iter().find(of_ztunnels);
        let (services, workloads) = match self.metadata.labels.get(WAYPOINT_FOR).map(String::as_str) {
            None | Some("service") => (true, false),
            Some("workload") => (false, true),
            Some("all") => (true, true),
            Some(_) => (false, false),
        };
        Some(WaypointRecord {
            services,
            workloads,
            namespaces: listener
                .map(|listener| listener.allowed_routes.namespaces.clone())
                .unwrap_or_default(),
        })
    }

    fn touch(_: Touched<ObjectKey, WaypointRecord>, tables: &mut Tables) {
        tables.dirty.mark_ambient();
    }
}

/// A Gateway that may be a waypoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WaypointRecord {
    /// True if it takes the traffic to services.
    pub(crate) services: bool,
    /// True if it takes the traffic to workloads.
    pub(crate) workloads: bool,
    /// The namespaces whose services and workloads may use it.
    pub(crate) namespaces: AllowedNamespaces,
}
