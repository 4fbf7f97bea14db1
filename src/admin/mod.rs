//! The admin API: status, readiness, explain, horizon. It reads the state of other modules and changes
//! nothing itself; a request for a change is sent as a [`Command`] to `app`.

pub mod certificates;
pub mod check_metrics;
pub mod clients;
pub mod dashboard;
pub mod endpoints;
pub mod enrolment;
pub mod explain;
pub mod horizon;
pub mod limit_metrics;
pub mod limits;
pub mod maintenance;
pub mod networks;
pub mod overview;
pub mod peer_metrics;
pub mod peers;
mod probe;
pub mod problems;
pub mod readiness;
mod recent;
pub mod registry_metrics;
pub mod server;
mod traces;
pub mod views;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use certificates::Identities;
use tokio::sync::{mpsc, oneshot, watch};

use crate::aggregator::status::Status as AggregatorStatus;
use crate::dataplane::handle::{Control, EffectiveLimits};
use crate::discovery::dns::server::Server as DnsServer;
use crate::discovery::peer::enrolment::Enrolment;
use crate::discovery::peer::status::LinkTable;
use crate::discovery::xds::status::Clients;
use crate::model::place::ClusterId;
use crate::net::own::OwnAddresses;
use crate::telemetry::Telemetry;
use crate::world::Reader;

/// A change that an operator requests through the API.
pub enum Command {
    /// Reload the config. The answer is a summary of the changes, or the problems, a line each.
    Reload(oneshot::Sender<Result<String, Vec<String>>>),
    /// Drain and stop.
    Drain,
    /// Set the log level or filter, in the form of `log.level` or `RUST_LOG`; refused if a part of it is
    /// malformed.
    LogLevel(String, oneshot::Sender<Result<(), String>>),
}

/// Makes the config in use as JSON on demand, as it may be large.
#[derive(Clone)]
pub struct InUse(pub Arc<dyn Fn() -> serde_json::Value + Send + Sync>);

impl fmt::Debug for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InUse")
    }
}

/// The state of the program itself; replaced whole when it changes.
#[derive(Clone, Debug)]
pub struct ProgramStatus {
    /// The path of the config file.
    pub config: PathBuf,
    /// When the config in use was applied.
    pub config_since: SystemTime,
    /// The config in use.
    pub in_use: InUse,
    /// The problems of the file at its last read, a line each; empty if that config is in use.
    pub rejected: Vec<String>,
    /// The warnings about the config in use, a line each.
    pub warnings: Vec<String>,
    /// Keys that need a restart because the file has other values than the process was started with.
    pub restart: Vec<String>,
    /// True once the start has waited for the registries: listeners are open, and the xDS server serves, as
    /// far as they are configured.
    pub serving: bool,
    /// The bound address of each listener, by name.
    pub listening: Vec<(Arc<str>, SocketAddr)>,
    /// The limits after those of the process are considered.
    pub limits: EffectiveLimits,
    /// The number of data-plane threads.
    pub workers: usize,
    /// True while the gateway drains.
    pub draining: bool,
}

/// All inputs of the API.
#[derive(Clone)]
pub struct Sources {
    /// Reads the snapshot.
    pub reader: Reader,
    /// The clients of the xDS server; empty if there is no server.
    pub clients: Arc<Clients>,
    /// The DNS server; `None` if there is none.
    pub names: Option<Arc<DnsServer>>,
    /// The enrolments of peers.
    pub enrolment: Enrolment,
    /// The links with peers.
    pub links: Arc<LinkTable>,
    /// Reads the data plane's state.
    pub dataplane: Control,
    /// The status of registries and names.
    pub aggregator: watch::Receiver<Arc<AggregatorStatus>>,
    /// The metrics and the failures list.
    pub telemetry: Telemetry,
    /// The certificate, the roots, and their source.
    pub identities: Identities,
    /// The state of the program.
    pub program: Arc<ArcSwap<ProgramStatus>>,
    /// Sends requests for changes.
    pub commands: mpsc::Sender<Command>,
    /// The addresses of this process.
    pub own: Arc<OwnAddresses>,
    /// The start of the process.
    pub started: Instant,
    /// The state between two evaluations of the problems.
    pub history: Arc<problems::History>,
    /// The list of services for the overview, made at most once a second.
    pub overviews: Arc<overview::Cache>,
}

impl Sources {
    /// Returns the readiness gates.
    pub fn gates(&self, own_cluster: &ClusterId) -> Vec<readiness::Gate> {
        let names = self.names.as_ref().map(|server| server.is_serving());
        let further = readiness::Further { identity: self.identities.gate(), names };
        readiness::gates(&self.program.load(), &self.aggregator.borrow(), own_cluster, further)
    }
}
