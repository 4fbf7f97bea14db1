//! Registries: the sources of services, and how they are read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::table::{Column, Listed, list, text};

/// A registry with its state and the numbers of its objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Registry {
    /// The registry's name.
    pub name: String,
    /// The registry's cluster.
    pub cluster: String,
    /// The registry's network.
    pub network: String,
    /// The registry's state: `missing`, `live`, `stale`, `demoted`, `expired` or `held`.
    pub state: String,
    /// The number of changes that were applied.
    pub changes: u64,
    /// The number of objects with mistakes.
    pub flawed: usize,
    /// The problems of the registry, one line each.
    pub problems: Vec<String>,
    /// The number of services.
    pub services: usize,
    /// The number of endpoints.
    pub endpoints: usize,
    /// The number of gateways.
    pub gateways: usize,
    /// The number of export marks.
    pub marks: usize,
    /// The number of services that `allow.services` excludes.
    pub denied_services: usize,
    /// The number of endpoints that `allow.networks` excludes.
    pub denied_endpoints: usize,
    /// The number of endpoints that `allow.addresses` excludes.
    pub denied_addresses: usize,
    /// The time at which the registry entered its state.
    pub since: String,
    /// The time at which the registry read the data in use.
    pub read: Option<String>,
    /// The registry's own report: server, version, counts of objects.
    pub report: Option<Report>,
}

/// The report of a registry about its source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The server, such as `https://10.0.0.1:6443`.
    pub server: String,
    /// The version of the server; empty if it is unknown.
    pub version: String,
    /// Further details of how the registry is read, such as `last relisting`, by name.
    pub facts: BTreeMap<String, String>,
    /// The number of objects by kind.
    pub objects: BTreeMap<String, usize>,
    /// The number of objects that are left out, by cause.
    pub left_out: BTreeMap<String, usize>,
    /// The problems of the registry, one line each.
    pub problems: Vec<String>,
}

impl Listed for Registry {
    const COLUMNS: &'static [Column<Self>] = &[
        ("REGISTRY", |registry| text(&registry.name)),
        ("CLUSTER", |registry| text(&registry.cluster)),
        ("NETWORK", |registry| text(&registry.network)),
        ("STATE", |registry| text(&registry.state)),
        ("SINCE", |registry| text(&registry.since)),
        ("SERVICES", |registry| registry.services.to_string()),
        ("ENDPOINTS", |registry| registry.endpoints.to_string()),
        ("DENIED", |registry| {
            (registry.denied_services + registry.denied_endpoints + registry.denied_addresses).to_string()
        }),
        ("PROBLEMS", |registry| list(&registry.problems)),
    ];
}
