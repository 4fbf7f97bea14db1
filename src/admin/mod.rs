//! The admin API: status, readiness, explain, horizon. It reads the status values of the rest and changes nothing by itself;
//! what changes something is a [`Command`] to whoever composed the program.

pub mod certificates;
pub mod clients;
pub mod endpoints;
pub mod explain;
pub mod horizon;
pub mod networks;
mod probe;
pub mod problems;
pub mod readiness;
pub mod registry_metrics;
pub mod server;
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
use crate::discovery::xds::status::Clients;
use crate::model::place::ClusterId;
use crate::net::own::OwnAddresses;
use crate::telemetry::Telemetry;
use crate::world::Reader;

/// What an operator asks for through the API.
pub enum Command {
    /// Answered with what is wrong, a line each, or with what was done.
    Reload(oneshot::Sender<Result<String, Vec<String>>>),
    Drain,
    /// A level or a filter, as `log.level` or `RUST_LOG` have it; refused where a part of it is neither.
    LogLevel(String, oneshot::Sender<Result<(), String>>),
}

/// The config in use as JSON, made when somebody asks for it: it may be large.
#[derive(Clone)]
pub struct InUse(pub Arc<dyn Fn() -> serde_json::Value + Send + Sync>);

impl fmt::Debug for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InUse")
    }
}

/// How the program itself stands; replaced whole when that changes.
#[derive(Clone, Debug)]
pub struct ProgramStatus {
    pub config: PathBuf,
    pub config_since: SystemTime,
    pub in_use: InUse,
    /// What was wrong with the file when it was last read, a line each; empty: it is what runs.
    pub rejected: Vec<String>,
    pub warnings: Vec<String>,
    /// Keys whose values in the file are not those that the process runs with, as a change of them needs a restart.
    pub restart: Vec<String>,
    /// True once the registries were waited for: listeners are open, and the xDS server serves, as far as they are configured.
    pub serving: bool,
    /// By listener name.
    pub listening: Vec<(Arc<str>, SocketAddr)>,
    pub limits: EffectiveLimits,
    pub workers: usize,
    pub draining: bool,
}

/// Everything the API reads.
#[derive(Clone)]
pub struct Sources {
    pub reader: Reader,
    /// Of the xDS server; nobody, where it is not opened.
    pub clients: Arc<Clients>,
    pub dataplane: Control,
    pub aggregator: watch::Receiver<Arc<AggregatorStatus>>,
    pub telemetry: Telemetry,
    pub identities: Identities,
    pub program: Arc<ArcSwap<ProgramStatus>>,
    pub commands: mpsc::Sender<Command>,
    pub own: Arc<OwnAddresses>,
    pub started: Instant,
    /// The state between two looks at the problems.
    pub memory: Arc<problems::Memory>,
}

impl Sources {
    /// The gates of readiness.
    pub fn gates(&self, own_cluster: &ClusterId) -> Vec<readiness::Gate> {
        readiness::gates(&self.program.load(), &self.aggregator.borrow(), own_cluster, self.identities.gate())
    }
}
