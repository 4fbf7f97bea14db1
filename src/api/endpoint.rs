//! Endpoints of services and routes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// An endpoint of a service, or of a route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    /// The key of its route; absent for endpoints of services.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// Its address or host name; with the port, for endpoints of routes.
    pub address: String,
    /// Its own port for each service port; absent for endpoints of routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<BTreeMap<String, u16>>,
    /// The cluster of its registry.
    pub cluster: String,
    /// The standing of its registry; absent for endpoints of routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standing: Option<String>,
    /// Its network.
    pub network: String,
    /// Its locality.
    pub locality: String,
    /// Its weight.
    pub weight: u32,
    /// The health that its registry gives.
    pub health: String,
    /// The kind of TLS that it ends, if its registry says so: `mesh`, `own` or `none`.
    pub tls: Option<String>,
    /// `none` or `hbone`; absent for endpoints of routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tunnel: Option<String>,
    /// Its SPIFFE ID.
    pub identity: Option<String>,
    /// `healthy`, `unhealthy`, `draining`, `disabled`, `ejected` or `unresolved`.
    pub state: String,
    /// Its last failure.
    pub last_failure: Option<LastFailure>,
    /// When it last answered a ClientHello with bytes that are not TLS.
    pub not_tls: Option<String>,
    /// The host name of its service; absent for endpoints of routes, and in the list of one service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
}

/// The last failed attempt to connect to an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastFailure {
    /// The reason.
    pub reason: String,
    /// When it happened.
    pub time: String,
    /// The number of failures in a row; 0 once the endpoint has accepted a connection again.
    pub in_a_row: u32,
    /// `connection` or `check`.
    pub by: String,
}
