//! The status of the program.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::client::RefusedClients;
use super::listener::Listener;
use super::registry::Registry;

/// The status of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Current problems.
    pub problems: Vec<Problem>,
    /// The version of the program.
    pub version: String,
    /// The gateway's own workload.
    pub node: Node,
    /// Seconds since the start.
    pub uptime_seconds: u64,
    /// True if the gateway is ready.
    pub ready: bool,
    /// Why it is not ready, a line each.
    pub not_ready: Vec<String>,
    /// True while it drains.
    pub draining: bool,
    /// The number of the snapshot in use.
    pub generation: u64,
    /// The config in use.
    pub config: Config,
    /// The listeners.
    pub listeners: Vec<Listener>,
    /// The limits in force.
    pub limits: Limits,
    /// The number of data-plane threads.
    pub workers: usize,
    /// The number of open connections and streams.
    pub connections: usize,
    /// The number of services.
    pub services: usize,
    /// The number of routes.
    pub routes: usize,
    /// The number of peers.
    pub peers: usize,
    /// The source of the gateway's certificate; `None` without one.
    pub identity: Option<IdentitySource>,
    /// The registries.
    pub registries: Vec<Registry>,
    /// Names that reconnected xDS clients keep while registries have not been read.
    pub held_back: HeldBack,
    /// The xDS server.
    pub xds: Xds,
    /// The DNS server; `None` if there is none.
    pub dns: Option<Dns>,
    /// Host names that do not resolve.
    pub unresolved: Vec<String>,
    /// Conflicts between registries, a line each.
    pub conflicts: Vec<String>,
}

/// Something that is wrong with the gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Problem {
    /// The kind: one word of `docs/problems.md`.
    pub code: String,
    /// The subject; may be empty.
    pub about: String,
    /// The problem in words.
    pub text: String,
    /// The command, key or document to look at next.
    pub look_at: String,
}

/// The gateway's own workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// `node.name`.
    pub name: String,
    /// `node.cluster`.
    pub cluster: String,
    /// `node.network`.
    pub network: String,
    /// `node.locality`.
    pub locality: String,
}

/// The state of the config.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The path of the file.
    pub path: String,
    /// When the config in use was applied.
    pub since: String,
    /// The number of the config in use.
    pub generation: u64,
    /// False if the file was read and rejected since.
    pub file_is_running: bool,
    /// The mistakes of the file, a line each.
    pub rejected: Vec<String>,
    /// Warnings about the config in use, a line each.
    pub warnings: Vec<String>,
    /// Keys whose change takes effect after a restart.
    pub needs_restart: Vec<String>,
}

/// The limits in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// File descriptors.
    pub descriptors: usize,
    /// Connections and streams.
    pub connections: usize,
    /// Connections whose hello is not whole.
    pub pending_hellos: usize,
    /// The limits of each source.
    pub per_source: PerSource,
    /// The limits of each service.
    pub per_service: PerService,
    /// Health checks that run at the same time.
    pub health_checks: usize,
}

/// The limits of each source; `None`: no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerSource {
    /// Connections and streams.
    pub connections: Option<usize>,
    /// New connections per second.
    pub new_per_second: Option<u32>,
    /// Connections whose hello is not whole.
    pub pending_hellos: Option<usize>,
}

/// The limits of each service; `None`: no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerService {
    /// Connections and streams.
    pub connections: Option<usize>,
}

/// The source of the gateway's certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct IdentitySource {
    /// Its kind.
    pub source: String,
    /// When the certificate was last renewed.
    pub renewed: Option<String>,
    /// When it will be renewed.
    pub next: Option<String>,
    /// Problems by certificate or trust domain.
    pub problems: BTreeMap<String, String>,
}

/// Names that reconnected xDS clients keep while registries have not been read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HeldBack {
    /// The registries.
    pub registries: Vec<String>,
    /// The number of clients.
    pub clients: usize,
    /// The number of names.
    pub names: usize,
}

/// The DNS server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Its address, for UDP and TCP.
    pub address: String,
    /// Its zones.
    pub zones: Vec<String>,
    /// The number of services that it answers for.
    pub services: usize,
    /// The virtual addresses of imported services.
    pub virtual_addresses: VirtualAddresses,
}

/// The virtual addresses of imported services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VirtualAddresses {
    /// The ranges that they are from.
    pub ranges: Vec<String>,
    /// The number of services that have some.
    pub in_use: usize,
    /// The number of services that are gone and whose addresses are reserved.
    pub reserved: usize,
    /// The number of addresses that services lack, as the ranges are full.
    pub without: usize,
}

/// The xDS server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Xds {
    /// The number of connected clients.
    pub clients: usize,
    /// The clients that were refused.
    pub refused: RefusedClients,
}
