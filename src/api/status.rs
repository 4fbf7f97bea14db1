//! The status of the program.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::client::RefusedClients;
use super::listener::Listener;
use super::registry::Registry;
use super::table::{Column, Listed, text};

/// The status of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The current problems.
    pub problems: Vec<Problem>,
    /// The version of the program.
    pub version: String,
    /// The gateway's own workload.
    pub node: Node,
    /// The time since the start, in seconds.
    pub uptime_seconds: u64,
    /// True if the gateway is ready.
    pub ready: bool,
    /// The reasons why the gateway is not ready, one line each.
    pub not_ready: Vec<String>,
    /// True while the gateway drains.
    pub draining: bool,
    /// The upgrade by which the process has begun to serve; `None` if it was started.
    pub taken_over: Option<TakenOver>,
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
    /// The source of the gateway's certificate; `None` if there is no source.
    pub identity: Option<IdentitySource>,
    /// The registries.
    pub registries: Vec<Registry>,
    /// The names whose resources the xDS server does not update yet for reconnected clients. A registry that has not been read
    /// since the start may have more endpoints of these names, so the clients keep the resources that they have.
    pub held_back: HeldBack,
    /// The xDS server.
    pub xds: Xds,
    /// The DNS server; `None` if there is none.
    pub dns: Option<Dns>,
    /// The host names that have no address.
    pub unresolved: Vec<String>,
    /// The conflicts between registries, one line each.
    pub conflicts: Vec<String>,
}

/// A problem of the gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Problem {
    /// The kind of problem: one word of `docs/reasons.md`.
    pub code: String,
    /// The object that has the problem; may be empty.
    pub about: String,
    /// A description of the problem.
    pub text: String,
    /// The command, key or document that an operator checks next.
    pub look_at: String,
}

/// The gateway's own workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The value of `node.name`.
    pub name: String,
    /// The value of `node.cluster`.
    pub cluster: String,
    /// The value of `node.network`.
    pub network: String,
    /// The value of `node.locality`.
    pub locality: String,
}

/// The upgrade by which a process has begun to serve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TakenOver {
    /// The time at which the process began to serve.
    pub since: String,
    /// The id of the earlier process.
    pub process: u32,
    /// The version of the earlier process.
    pub version: String,
    /// The number of live connections that this process goes on with.
    pub moved: u64,
    /// The number of live connections and CONNECT streams that end in the earlier process.
    pub left: u64,
    /// True once the earlier process has ended.
    pub has_ended: bool,
}

/// The state of the config.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The path of the file.
    pub path: String,
    /// The time at which the config in use was applied.
    pub since: String,
    /// The number of the config in use.
    pub generation: u64,
    /// True if the file has the config in use; false if a later version of the file was rejected.
    pub file_is_running: bool,
    /// The mistakes in the rejected file, one line each.
    pub rejected: Vec<String>,
    /// Warnings about the config in use, one line each.
    pub warnings: Vec<String>,
    /// The changed keys that take effect only after a restart.
    pub needs_restart: Vec<String>,
}

/// The limits in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// The limit of file descriptors.
    pub descriptors: usize,
    /// The limit of connections and streams.
    pub connections: usize,
    /// The limit of connections whose ClientHello is incomplete.
    pub pending_hellos: usize,
    /// The limits of each source.
    pub per_source: PerSource,
    /// The limits of each service.
    pub per_service: PerService,
    /// The limits of bandwidth under which connections are open: at most 100, those that moved most bytes first.
    pub bandwidth: Vec<Bandwidth>,
    /// The limit of simultaneous health checks.
    pub health_checks: usize,
    /// The memory budget of the process.
    pub memory: Memory,
}

/// The memory budget of the process and its use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// The budget in bytes.
    pub budget: u64,
    /// The used bytes.
    pub used: u64,
    /// `calm`, `tight` (more than 80 % are used) or `short` (more than 90 %).
    pub level: String,
}

/// The limits of each source. `None`: there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerSource {
    /// The limit of connections and streams of a source.
    pub connections: Option<usize>,
    /// The limit of new connections of a source per second.
    pub new_per_second: Option<u32>,
    /// The limit of connections of a source whose ClientHello is incomplete.
    pub pending_hellos: Option<usize>,
}

/// The limits of each service. `None`: there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PerService {
    /// The limit of connections and streams to a service.
    pub connections: Option<usize>,
    /// The limit of the bandwidth of a service in each direction, in bytes per second.
    pub bytes_per_second: Option<u64>,
}

/// A limit of bandwidth and its use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bandwidth {
    /// The service, route or peer that the limit is of.
    pub of: String,
    /// The limit of each direction, in bytes per second.
    pub limit: u64,
    /// The bytes of the last second from clients to endpoints.
    pub bytes_up: u64,
    /// The bytes of the last second from endpoints to clients.
    pub bytes_down: u64,
    /// The number of sources and identities that share the limit of bytes from clients.
    pub sources_up: u64,
    /// The number of sources and identities that share the limit of bytes from endpoints.
    pub sources_down: u64,
    /// The number of connections and streams that share the limit of bytes from clients.
    pub busy_up: u64,
    /// The number of connections and streams that share the limit of bytes from endpoints.
    pub busy_down: u64,
}

/// The source of the gateway's certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct IdentitySource {
    /// The kind of source.
    pub source: String,
    /// The time at which the certificate was last renewed.
    pub renewed: Option<String>,
    /// The time at which the certificate will be renewed.
    pub next: Option<String>,
    /// The causes of the last failures, by certificate or trust domain.
    pub problems: BTreeMap<String, String>,
}

/// The names whose resources the xDS server does not update yet for reconnected clients. A registry that has not been read
/// since the start may have more endpoints of these names, so the clients keep the resources that they have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HeldBack {
    /// The registries that have not been read.
    pub registries: Vec<String>,
    /// The number of clients that keep resources because of these registries.
    pub clients: usize,
    /// The number of names whose resources are kept, over all clients.
    pub names: usize,
}

/// The DNS server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// The address of the server, for UDP and TCP.
    pub address: String,
    /// The zones of the server.
    pub zones: Vec<String>,
    /// The number of services that the server answers for.
    pub services: usize,
    /// The virtual addresses of imported services.
    pub virtual_addresses: VirtualAddresses,
}

/// The virtual addresses of imported services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VirtualAddresses {
    /// The ranges that the addresses come from.
    pub ranges: Vec<String>,
    /// The number of services that have virtual addresses.
    pub in_use: usize,
    /// The number of removed services whose addresses are still reserved.
    pub reserved: usize,
    /// The number of addresses that services lack because the ranges are full.
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

impl Listed for Problem {
    const COLUMNS: &'static [Column<Self>] = &[
        ("PROBLEM", |problem| text(&problem.code)),
        ("TEXT", |problem| text(&problem.text)),
        ("SEE", |problem| text(&problem.look_at)),
    ];
}

impl Listed for Bandwidth {
    const COLUMNS: &'static [Column<Self>] = &[
        ("BANDWIDTH OF", |bandwidth| text(&bandwidth.of)),
        ("LIMIT", |bandwidth| per_second(bandwidth.limit)),
        ("UP", |bandwidth| per_second(bandwidth.bytes_up)),
        ("DOWN", |bandwidth| per_second(bandwidth.bytes_down)),
        ("SOURCES UP", |bandwidth| bandwidth.sources_up.to_string()),
        ("SOURCES DOWN", |bandwidth| bandwidth.sources_down.to_string()),
        ("BUSY UP", |bandwidth| bandwidth.busy_up.to_string()),
        ("BUSY DOWN", |bandwidth| bandwidth.busy_down.to_string()),
    ];
}

fn per_second(bytes: u64) -> String {
    format!("{}/s", super::text::bytes(bytes as f64))
}
