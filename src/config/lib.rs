//! The config file: one YAML file (or a directory of them, or one that includes others) becomes a checked
//! [`Config`], or the list of all its problems. No function opens a socket or keeps state; a reload is
//! another [`load`].
//!
//! - `table`: every key, with its default and its description. A default `X::default()` is in the `impl Default` of `X`, mostly in
//!   [`isthmus_settings`].
//! - `file`: the files and their merged tree. `assembly`: the tree becomes a [`Config`], with the checks that need several values.
//! - `listeners`, `routes`, `tuning`, `steering`, `exports`, `networks`, `peers`, `registries`, `aggregation`, `dns`, `drains`, `identity`, `telemetry`: the
//!   readers of the sections. `addresses`: which addresses may not collide.
//! - `effective`, `schema`, `reference`: what is generated from the table.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use isthmus_aggregator::options::Options as AggregatorOptions;
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_dns::Options as DnsOptions;
use isthmus_document::environment::Environment;
use isthmus_document::problem::Problem;
use isthmus_model::address::{AdminBind, Bind};
use isthmus_model::identity::TrustDomain;
use isthmus_peer::options::LinkOptions;
use isthmus_registry::listing::Listing;
use isthmus_settings::policy::Policy;
use isthmus_telemetry::access_log::AccessLog;
use isthmus_telemetry::spans::TracingOptions;
use isthmus_tls::source::Options as IdentityOptions;
use isthmus_wds::options::Options as WdsOptions;
use isthmus_xds::options::Options as DiscoveryOptions;

mod addresses;
mod aggregation;
mod assembly;
mod dns;
mod drains;
mod effective;
mod exports;
mod file;
mod identity;
mod listeners;
mod networks;
mod peers;
mod reference;
mod registries;
mod routes;
mod schema;
mod steering;
mod table;
mod telemetry;
mod tuning;

pub use effective::effective;
use file::What;
pub use reference::reference;
pub use schema::schema;

/// The checked contents of a config file.
#[derive(Clone, Debug)]
pub struct Config {
    /// The part of the config that the data path and the aggregator act on.
    pub policy: Arc<Policy>,
    /// The services of the file itself; cluster and network are those of the node.
    pub services: Listing,
    /// The registries, in the order of the file.
    pub registries: Vec<RegistrySpec>,
    /// The links with peers, in the order of the file.
    pub links: Vec<LinkOptions>,
    /// The settings of the aggregator.
    pub aggregator: AggregatorOptions,
    /// The sources of the certificate and the roots.
    pub identity: IdentityOptions,
    /// The settings of the xDS server; `None`: there is none.
    pub xds: Option<DiscoveryOptions>,
    /// The WDS server; `None`: off.
    pub wds: Option<Arc<WdsOptions>>,
    /// The settings of the DNS server; `None`: there is none.
    pub dns_server: Option<DnsOptions>,
    /// The address of the admin API; `None`: there is none.
    pub admin: Option<AdminBind>,
    /// The address of the metrics listener; `None`: there is none.
    pub metrics: Option<Bind>,
    /// The address of the health listener; `None`: there is none.
    pub health: Option<Bind>,
    /// Where the access log is written, and its format.
    pub access_log: AccessLog,
    /// The settings of the program log.
    pub log: Log,
    /// The settings of tracing; `None`: off.
    pub tracing: Option<TracingOptions>,
    /// The timing of a graceful stop.
    pub drain: Drain,
    /// The number of data-plane threads.
    pub workers: Workers,
    /// The positions of `registries` in the file, by the registry's name, for messages.
    pub registry_places: BTreeMap<Arc<str>, String>,
    /// The positions of certificates and roots in the file, for messages.
    pub identity_places: IdentityPlaces,
    /// The merged files as JSON, without the services, for [`effective()`].
    pub document: Arc<str>,
    /// Problems that do not prevent the use of the config.
    pub warnings: Vec<Problem>,
}

/// The positions of certificates and roots in the file.
#[derive(Clone, Debug, Default)]
pub struct IdentityPlaces {
    /// The position of the certificate's source.
    pub certificate: Option<String>,
    /// The position of the roots of each trust domain.
    pub trust: BTreeMap<TrustDomain, String>,
    /// The position of the revocation lists of each trust domain.
    pub crl: BTreeMap<TrustDomain, String>,
}

impl Config {
    /// Returns the name of a registry for a message, with its position if it is in the config.
    pub fn placed_name(&self, registry: &RegistrySpec) -> String {
        let place = self.registry_places.get(&registry.name).map(|place| format!("{place}: "));
        format!("{}registry {}", place.unwrap_or_default(), registry.name)
    }

    /// Returns a copy without the file's own services, which may be many.
    pub fn without_services(&self) -> Self {
        Self {
            policy: self.policy.clone(),
            services: Listing::default(),
            registries: self.registries.clone(),
            links: self.links.clone(),
            aggregator: self.aggregator.clone(),
            identity: self.identity.clone(),
            xds: self.xds.clone(),
            wds: self.wds.clone(),
            dns_server: self.dns_server.clone(),
            admin: self.admin.clone(),
            metrics: self.metrics,
            health: self.health,
            access_log: self.access_log.clone(),
            log: self.log,
            tracing: self.tracing.clone(),
            drain: self.drain,
            workers: self.workers,
            registry_places: self.registry_places.clone(),
            identity_places: self.identity_places.clone(),
            document: self.document.clone(),
            warnings: self.warnings.clone(),
        }
    }
}

/// The settings of the program log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    /// The least severe level that is written.
    pub level: LogLevel,
    /// The format of a line.
    pub format: LogFormat,
}

/// A level of the program log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Faults that end a part of the service.
    Error,
    /// Conditions that an operator should check.
    Warn,
    /// Changes of state.
    Info,
    /// Single decisions.
    Debug,
    /// Single packets and polls.
    Trace,
}

impl LogLevel {
    /// All levels, most severe first.
    pub const ALL: [Self; 5] = [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace];

    /// Returns the level as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// The format of the program log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// A line of text.
    Text,
    /// A JSON object per line.
    Json,
}

impl LogFormat {
    /// All formats, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Text, Self::Json];

    /// Returns the format as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// The timing of a graceful stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// The time between failing `/readyz` and closing the listeners.
    pub delay: Duration,
    /// How long connections may take to end before they are reset.
    pub timeout: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Self { delay: Duration::ZERO, timeout: Duration::from_secs(30) }
    }
}

/// The number of data-plane threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workers {
    /// As many threads as the CPU quota allows.
    Auto,
    /// This number of threads, from 1 to 1024.
    Count(NonZeroUsize),
}

/// Reads and checks a config file, or a directory of them (all its `*.yaml` in order of name). `before` is called with the path
/// of each file and directory before it is read, so that the caller can watch the path for later changes. The error has all
/// problems, in the order of the files.
pub fn load(
    path: &Path,
    environment: Environment<'_>,
    before: &mut dyn FnMut(&Path),
) -> Result<Config, Vec<Problem>> {
    assembly::assemble(file::read(path, What::Regular, environment, before))
}

/// Reads and checks a config that the command line names, which may be a pipe or a terminal.
pub fn load_named(path: &Path, environment: Environment<'_>) -> Result<Config, Vec<Problem>> {
    assembly::assemble(file::read(path, What::Anything, environment, &mut |_| {}))
}

#[cfg(test)]
mod tests;
