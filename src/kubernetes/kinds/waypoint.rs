//! Gateways of the Gateway API as waypoints, and their classes: the traffic that they take, and its namespaces. `index::waypoints`
//! finds the waypoint of a service.

use std::sync::Arc;

use super::class_gateway::AllowedNamespaces;
use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, TypedAddress, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::name::HostName;

/// The label that says which traffic a waypoint takes, or the waypoints of a class.
const WAYPOINT_FOR: &str = "istio.io/waypoint-for";
/// The port and protocol of the listener whose `allowedRoutes` say which namespaces may use the waypoint.
const PORT: i64 = 15_008;
const PROTOCOL: &str = "HBONE";

objects! {
    /// `Gateway` of `gateway.networking.k8s.io/v1`.
    Waypoint { metadata: Meta, spec: WaypointSpec, status: WaypointStatus, }
    WaypointSpec { gateway_class_name: String, listeners: Vec<WaypointListener>, }
    WaypointListener { port: i64, protocol: String, allowed_routes: WaypointRoutes, }
    WaypointRoutes { namespaces: AllowedNamespaces, }
    WaypointStatus { addresses: Vec<TypedAddress>, }
    /// `GatewayClass` of `gateway.networking.k8s.io/v1`.
    WaypointClass { metadata: Meta, }
}

impl Watched for Waypoint {
    const FACTS: Facts = Facts {
        plural: "gateways",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_custom: true,
        namespaces: Namespaces::Every,
        objects_max: 10_000,
        is_wanted: |spec| spec.waypoints,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, WaypointRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<WaypointRecord> {
        // A Gateway has addresses once its controller has deployed it.
        if self.status.addresses.is_empty() {
            return None;
        }
        let of_ztunnels =
            |listener: &&WaypointListener| listener.port == PORT && listener.protocol == PROTOCOL;
        let listener = self.spec.listeners.iter().find(of_ztunnels);
        let hostname = self.status.addresses.iter().find(|address| address.kind == "Hostname");
        Some(WaypointRecord {
            hostname: hostname.and_then(|address| HostName::parse(&address.value).ok()),
            class: reading.texts.text(&self.spec.gateway_class_name),
            traffic: Traffic::of(&self.metadata),
            namespaces: listener
                .map(|listener| listener.allowed_routes.namespaces.clone())
                .unwrap_or_default(),
        })
    }

    fn touch(_: Touched<ObjectKey, WaypointRecord>, tables: &mut Tables) {
        // Any service may use it, and any workload.
        (tables.dirty.is_all, tables.dirty.all_pods) = (true, true);
    }
}

impl Watched for WaypointClass {
    const FACTS: Facts = Facts {
        plural: "gatewayclasses",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_custom: true,
        namespaces: Namespaces::None,
        is_wanted: |spec| spec.waypoints,
        ..Facts::CORE
    };

    type Rows = Table<Arc<str>, Traffic>;

    fn record(&self, _: &mut Reading<'_>) -> Option<Traffic> {
        Traffic::of(&self.metadata)
    }

    fn touch(_: Touched<Arc<str>, Traffic>, tables: &mut Tables) {
        (tables.dirty.is_all, tables.dirty.all_pods) = (true, true);
    }
}

/// The traffic that a waypoint takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// True if the waypoint takes the traffic to services.
    pub(crate) services: bool,
    /// True if the waypoint takes the traffic to workloads.
    pub(crate) workloads: bool,
}

impl Traffic {
    /// The traffic of a waypoint whose labels, and whose class, say nothing.
    const DEFAULT: Self = Self { services: true, workloads: false };

    /// Returns the traffic that the label of an object names; `None` if there is no such label.
    fn of(metadata: &Meta) -> Option<Self> {
        let named = metadata.labels.get(WAYPOINT_FOR)?;
        let is = |text: &str| named == text || named == "all";
        Some(Self { services: is("service"), workloads: is("workload") })
    }
}

/// A Gateway that may be a waypoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WaypointRecord {
    /// The host name of its Service, if the status has one; else the Service has its name.
    pub(crate) hostname: Option<HostName>,
    class: Arc<str>,
    /// The traffic that its label names; `None`: the label of its class does.
    traffic: Option<Traffic>,
    /// The namespaces whose services and workloads may use it.
    pub(crate) namespaces: AllowedNamespaces,
}

impl WaypointRecord {
    /// Returns the traffic that the waypoint takes.
    pub(crate) fn traffic(&self, tables: &Tables) -> Traffic {
        let of_class = || tables.waypoint_classes.get(&self.class).copied();
        self.traffic.or_else(of_class).unwrap_or(Traffic::DEFAULT)
    }
}

/// The annotation with the percentage of the calls that the canary waypoint takes.
const CANARY_WEIGHT: &str = "istio.io/use-waypoint-canary-weight";

/// The percentage of the calls that a canary waypoint takes, as an object says it; `None`: the object says nothing; `Err`: what it says is
/// no percentage.
pub(crate) type CanaryWeight = Option<Result<u8, NoPercentage>>;

/// A value that is no percentage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoPercentage;

/// Returns the percentage of a canary waypoint that an object has.
pub(super) fn canary_weight(metadata: &Meta) -> CanaryWeight {
    let text = metadata.annotations.get(CANARY_WEIGHT)?;
    Some(text.parse::<u8>().ok().filter(|weight| *weight <= 100).ok_or(NoPercentage))
}
