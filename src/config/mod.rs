//! The config file: one YAML file (or a directory of them, or one that includes others) becomes a
//! checked [`Config`], or the list of all that is wrong with it. Nothing here opens a socket or keeps
//! state; a reload is another [`load`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::aggregator::options::Options as AggregatorOptions;
use crate::aggregator::spec::RegistrySpec;
use crate::discovery::Options as DiscoveryOptions;
use crate::document::environment::Environment;
use crate::document::problem::Problem;
use crate::model::address::Bind;
use crate::model::identity::TrustDomain;
use crate::snapshot::listing::Listing;
use crate::snapshot::policy::Policy;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::spans::TracingOptions;
use crate::tls::source::Options as IdentityOptions;

mod addresses;
mod aggregation;
mod assembly;
mod effective;
mod exports;
mod file;
mod identity;
mod listeners;
mod networks;
mod reference;
mod registries;
mod routes;
mod schema;
mod table;
mod telemetry;
mod tuning;

pub use effective::effective;
use file::What;
pub use reference::reference;
pub use schema::schema;

/// Everything a config file says, checked.
#[derive(Clone, Debug)]
pub struct Config {
    pub policy: Arc<Policy>,
    /// The file's own `services`; cluster and network are the node's.
    pub services: Listing,
    /// In the order of the file.
    pub registries: Vec<RegistrySpec>,
    pub aggregator: AggregatorOptions,
    /// Who we are, and whom we trust.
    pub identity: IdentityOptions,
    /// `None`: not opened.
    pub xds: Option<DiscoveryOptions>,
    /// `None`: `off`.
    pub admin: Option<SocketAddr>,
    /// `None`: not opened.
    pub metrics: Option<Bind>,
    /// `None`: not opened.
    pub health: Option<Bind>,
    pub access_log: AccessLog,
    pub log: Log,
    /// `None`: off.
    pub tracing: Option<TracingOptions>,
    pub drain: Drain,
    pub workers: Workers,
    pub identity_places: IdentityPlaces,
    /// What is doubtful but does not fail the config.
    pub warnings: Vec<Problem>,
}

/// Where the file names certificates and roots.
#[derive(Clone, Debug, Default)]
pub struct IdentityPlaces {
    pub certificate: Option<String>,
    pub trust: BTreeMap<TrustDomain, String>,
}

impl Config {
    /// A copy without the file's own services, which may be many.
    pub fn without_services(&self) -> Self {
        Self {
            policy: self.policy.clone(),
            services: Listing::default(),
            registries: self.registries.clone(),
            aggregator: self.aggregator.clone(),
            identity: self.identity.clone(),
            xds: self.xds.clone(),
            admin: self.admin,
            metrics: self.metrics,
            health: self.health,
            access_log: self.access_log.clone(),
            log: self.log,
            tracing: self.tracing.clone(),
            drain: self.drain,
            workers: self.workers,
            identity_places: self.identity_places.clone(),
            warnings: self.warnings.clone(),
        }
    }
}

/// The program's own log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    pub level: LogLevel,
    pub format: LogFormat,
}

/// The least grave lines that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    pub const ALL: [Self; 5] = [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace];

    pub fn text(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// How the program's own log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// How the gateway stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Accepting goes on for this long after readiness is off.
    pub delay: Duration,
    /// Connections may finish within this; what is left is reset.
    pub timeout: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Self { delay: Duration::ZERO, timeout: Duration::from_secs(30) }
    }
}

/// Data-plane threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workers {
    /// As many as the CPU quota allows.
    Auto,
    /// From 1 to 1024.
    Count(NonZeroUsize),
}

/// Reads and checks a config file, or a directory of them (all its `*.yaml` in the order of their
/// names). `before` is told of each file and directory before it is read, for a watcher. On failure: all that is wrong, in
/// the order of the files.
pub fn load(
    path: &Path,
    environment: Environment<'_>,
    before: &mut dyn FnMut(&Path),
) -> Result<Config, Vec<Problem>> {
    assembly::assemble(file::read(path, What::Regular, environment, before))
}

/// Does the same with what a person has named on the command line, which may be a pipe or a terminal.
pub fn load_named(path: &Path, environment: Environment<'_>) -> Result<Config, Vec<Problem>> {
    assembly::assemble(file::read(path, What::Anything, environment, &mut |_| {}))
}

#[cfg(test)]
mod tests;
