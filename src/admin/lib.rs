//! The admin API: status, readiness, explain, horizon. It reads the state of other modules and changes nothing itself; it sends
//! requests for changes to `app` as a [`Command`].
//!
//! A file owns what it shows: its function `answers` adds the requests that it answers, its constant `METRICS` has the metrics that are
//! computed at each scrape.
//!
//! - `server`: the listeners, and the lists of the owners. `routes`, `response`, `scraped`: what these share.
//! - `status`, `listeners`, `services`, `exposed`, `endpoints`, `connections`, `registries`, `networks`, `peers`, `clients`,
//!   `certificates`: the state as values of the API. `limit_metrics`, `peer_metrics`, `time_metrics`: further metrics.
//! - `overview` with `selection`, `dashboard`: the page. `past`: the traffic of the last 15 minutes.
//! - `explain`, with `limits`, `marks`, `recent`, `imported` and `probe`; `horizon`; `traces`: the answers to questions.
//! - `problems`: what is wrong with the gateway; `left_out`: what the scopes of registries leave out. `readiness`: its gates.
//! - `orders`, `maintenance`, `drains`, `enrolment`: requests for changes.
//! - `steering`: why each network gets its share of calls. `share_log`: the log lines about changes of shares.

pub mod certificates;
mod clients;
mod connections;
pub mod dashboard;
mod drains;
mod endpoints;
mod enrolment;
pub mod explain;
mod exposed;
pub mod horizon;
mod imported;
pub mod left_out;
mod limit_metrics;
pub mod limits;
mod listeners;
mod maintenance;
mod marks;
mod networks;
mod orders;
pub mod overview;
pub mod past;
mod peer_metrics;
pub mod peers;
mod probe;
pub mod problems;
pub mod readiness;
mod recent;
mod registries;
mod response;
mod routes;
pub mod scraped;
pub mod selection;
pub mod server;
mod services;
pub mod share_log;
mod status;
mod steering;
mod time_metrics;
mod traces;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use certificates::Identities;
use tokio::sync::{mpsc, oneshot};

use isthmus_ads::status::Clients;
use isthmus_aggregator::drain_orders::DrainOrders;
use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::owner::Handle;
use isthmus_dataplane::handle::{Control, EffectiveLimits};
use isthmus_dns::server::Server as DnsServer;
use isthmus_model::place::ClusterId;
use isthmus_net::own::OwnAddresses;
use isthmus_peer::enrolment::Enrolment;
use isthmus_peer::status::LinkTable;
use isthmus_telemetry::Telemetry;
use isthmus_world::Reader;

/// A change that an operator requests through the API.
pub enum Command {
    /// Reload the config. The answer is a summary of the changes, or the problems, one per line.
    Reload(oneshot::Sender<Result<String, Vec<String>>>),
    /// Drain and stop.
    Drain,
    /// Hand over to a new process. The answer comes once the live connections have moved; an error says why this process goes on.
    Upgrade(oneshot::Sender<Result<Upgraded, String>>, Patience),
    /// Set the log level or filter, in the form of `log.level` or `RUST_LOG`; refused if a part of it is
    /// malformed.
    LogLevel(String, oneshot::Sender<Result<(), String>>),
}

/// Says what an order to upgrade does while no upgrade can begin, but one can later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// The order is refused.
    Now,
    /// The order waits.
    Wait,
}

/// The result of an upgrade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upgraded {
    /// The id of the new process.
    pub process: u32,
    /// The version of the new process.
    pub version: String,
    /// The number of live connections that go on in the new process.
    pub moved: u64,
    /// The number of live connections and CONNECT streams that end in the old process.
    pub left: u64,
    /// The time from the order to the end of the moves.
    pub took: Duration,
    /// The time that the connections in the old process have to end.
    pub within: Duration,
}

/// The upgrade by which a process has begun to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenOver {
    /// The time at which the process began to serve.
    pub since: SystemTime,
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

/// A function that returns the config in use as JSON, on demand because it may be large.
#[derive(Clone)]
pub struct InUse(pub Arc<dyn Fn() -> serde_json::Value + Send + Sync>);

impl Default for InUse {
    fn default() -> Self {
        Self(Arc::new(|| serde_json::Value::Null))
    }
}

impl fmt::Debug for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InUse")
    }
}

/// The state of the process: its config, listeners and limits. It is replaced as a whole when a part changes.
#[derive(Clone, Debug)]
pub struct ProgramStatus {
    /// The path of the config file.
    pub config: PathBuf,
    /// The time at which the config in use was applied.
    pub config_since: SystemTime,
    /// The config in use.
    pub in_use: InUse,
    /// The problems of the config file when it was last read, one per line; empty if the file is in use.
    pub rejected: Vec<String>,
    /// The warnings about the config in use, one per line.
    pub warnings: Vec<String>,
    /// Kubeconfigs that are left out because an earlier one has the same cluster, one per line.
    pub claimed_twice: Vec<String>,
    /// Keys whose values in the file differ from those at the start of the process, and take effect only after a restart.
    pub restart: Vec<String>,
    /// True as soon as the wait for registries at the start is over. From then on the configured listeners are open, and the
    /// xDS server, if there is one, serves clients.
    pub serving: bool,
    /// The bound address of each listener, by name.
    pub listening: Vec<(Arc<str>, SocketAddr)>,
    /// The effective limits, which the limits of the process may reduce.
    pub limits: EffectiveLimits,
    /// The number of data-plane threads.
    pub workers: usize,
    /// True while the gateway drains.
    pub draining: bool,
    /// The upgrade by which the process has begun to serve; `None` if it was started.
    pub taken_over: Option<TakenOver>,
}

impl ProgramStatus {
    /// Returns the status of a process that has read its first config and has not applied it.
    pub fn new(config: &Path, workers: usize) -> Self {
        Self {
            config: std::path::absolute(config).unwrap_or_else(|_| config.to_owned()),
            config_since: SystemTime::now(),
            in_use: InUse::default(),
            rejected: Vec::new(),
            warnings: Vec::new(),
            claimed_twice: Vec::new(),
            restart: Vec::new(),
            serving: false,
            listening: Vec::new(),
            limits: EffectiveLimits::default(),
            workers,
            draining: false,
            taken_over: None,
        }
    }
}

/// All inputs of the API.
#[derive(Clone)]
pub struct Sources {
    /// The reader of the snapshots.
    pub reader: Reader,
    /// The clients of the xDS server; empty if there is no server.
    pub clients: Arc<Clients>,
    /// The DNS server; `None` if none is configured.
    pub names: Option<Arc<DnsServer>>,
    /// The enrolments of peers.
    pub enrolment: Enrolment,
    /// The links with peers.
    pub links: Arc<LinkTable>,
    /// The handle to the data plane's state.
    pub dataplane: Control,
    /// The operators' orders to drain.
    pub drain_orders: DrainOrders,
    /// The handle to the registries, with their status and that of resolved host names.
    pub aggregator: Handle,
    /// The results of the probes of gateways.
    pub liveness: Liveness,
    /// The metrics and the failures list.
    pub telemetry: Telemetry,
    /// The gateway's certificate, the trusted roots, and their source.
    pub identities: Identities,
    /// The state of the process: its config, listeners and limits, and whether it drains.
    pub program: Arc<ArcSwap<ProgramStatus>>,
    /// The channel for requests to change something.
    pub commands: mpsc::Sender<Command>,
    /// The addresses on which this process listens.
    pub own: Arc<OwnAddresses>,
    /// The time at which the process started.
    pub started: Instant,
    /// The data that is kept between two evaluations of the problems.
    pub history: Arc<problems::history::History>,
    /// The list of services for the overview, made at most once a second.
    pub overviews: Arc<overview::Cache>,
    /// The shares of calls that networks have.
    pub shares: share_log::Shares,
    /// The traffic of the last 15 minutes.
    pub past: past::Past,
}

impl Sources {
    /// Returns the readiness gates.
    pub fn gates(&self, own_cluster: &ClusterId) -> Vec<readiness::Gate> {
        let names = self.names.as_ref().map(|server| server.is_serving());
        let trust = self.identities.trust_gate(self.reader.latest().policy.takes_hbone(), SystemTime::now());
        let further = readiness::Further { identity: self.identities.gate(), trust, names };
        readiness::gates(&self.program.load(), &self.aggregator.status.borrow(), own_cluster, further)
    }
}
