//! Registries.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A registry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Registry {
    /// Its name.
    pub name: String,
    /// Its cluster.
    pub cluster: String,
    /// Its network.
    pub network: String,
    /// `missing`, `live`, `stale`, `demoted`, `expired` or `held`.
    pub state: String,
    /// The number of changes that were applied.
    pub changes: u64,
    /// The number of objects that have mistakes.
    pub flawed: usize,
    /// Problems of the registry, a line each.
    pub problems: Vec<String>,
    /// The number of services.
    pub services: usize,
    /// The number of endpoints.
    pub endpoints: usize,
    /// The number of gateways.
    pub gateways: usize,
    /// The number of export marks.
    pub marks: usize,
    /// The number of services that `allow.services` leaves out.
    pub denied_services: usize,
    /// The number of endpoints that `allow.networks` leaves out.
    pub denied_endpoints: usize,
    /// The number of endpoints that `allow.addresses` leaves out.
    pub denied_addresses: usize,
    /// When it came into this state.
    pub since: String,
    /// When the data in use was read.
    pub read: Option<String>,
    /// Its own report: server, version, counts of objects.
    pub report: Option<Report>,
}

/// How a registry is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The server.
    pub server: String,
    /// The version of the server.
    pub version: String,
    /// Facts by name.
    pub facts: BTreeMap<String, String>,
    /// The number of objects by kind.
    pub objects: BTreeMap<String, usize>,
    /// The number of objects that are left out, by why.
    pub left_out: BTreeMap<String, usize>,
    /// Problems of the registry, a line each.
    pub problems: Vec<String>,
}
