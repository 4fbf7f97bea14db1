//! Services.

use serde::{Deserialize, Serialize};

use super::endpoint::Endpoint;

/// A service in the list of services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// Its host name.
    pub hostname: String,
    /// Its namespace.
    pub namespace: String,
    /// Its virtual addresses.
    pub addresses: Vec<String>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// The clusters that have it.
    pub clusters: Vec<String>,
    /// Conflicts between registries, a line each.
    pub conflicts: Vec<String>,
}

/// A port of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Its number.
    pub port: u16,
    /// Its protocol.
    pub protocol: String,
    /// The rules that export it.
    pub exported_by: Vec<String>,
    /// The number of endpoints that this gateway can choose.
    pub endpoints_here: usize,
    /// The endpoints' port, if their registries agree on one; absent in the list of services.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_port: Option<u16>,
}

/// One service with all its endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServiceDetail {
    /// Its host name.
    pub hostname: String,
    /// Its namespace.
    pub namespace: String,
    /// Its virtual addresses.
    pub addresses: Vec<String>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// The names of its subsets.
    pub subsets: Vec<String>,
    /// The clusters that have it.
    pub clusters: Vec<String>,
    /// Conflicts between registries, a line each.
    pub conflicts: Vec<String>,
    /// Its endpoints on every network.
    pub endpoints: Vec<Endpoint>,
}
