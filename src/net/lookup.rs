//! Looks up the addresses of host names, at given name servers or at those of the system. The results are not cached.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;

use isthmus_model::address::canonical_ip;
use isthmus_model::name::HostName;

/// The deadline of one look-up, with its retries.
const LOOKUP: Duration = Duration::from_secs(10);

/// Looks up host names.
pub struct Lookup(TokioResolver);

/// The result of a look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The addresses, sorted; empty if the name does not exist any more.
    Addresses(Arc<[IpAddr]>),
    /// The look-up failed with this text.
    Failed(String),
}

impl Lookup {
    /// Makes a value that asks these servers, or if there are none, the system's. Fails only if the system's servers cannot be
    /// read.
    pub fn at(servers: &[SocketAddr]) -> Result<Self, NetError> {
        let mut builder = if servers.is_empty() {
            TokioResolver::builder_tokio()?
        } else {
            let servers = servers.iter().map(|server| {
                let mut config = NameServerConfig::udp_and_tcp(server.ip());
                config.connections.iter_mut().for_each(|connection| connection.port = server.port());
                config
            });
            let config = ResolverConfig::from_name_servers(servers.collect());
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        };
        // The resolver's cache is off. The times of look-ups already follow the TTL within bounds of their own, and a cached answer
        // may be older than these bounds allow.
        builder.options_mut().cache_size = 0;
        builder.build().map(Self)
    }

    /// Looks up a name; returns the result, with its TTL if it has one.
    pub async fn addresses(&self, name: &HostName) -> (Resolution, Option<Duration>) {
        // A trailing dot disables the system's search list: names are fully qualified.
        let lookup = self.0.lookup_ip(format!("{name}."));
        match tokio::time::timeout(LOOKUP, lookup).await {
            Err(_) => (Resolution::Failed("the DNS query timed out".to_owned()), None),
            Ok(Ok(found)) => {
                let mut addresses: Vec<IpAddr> = found.iter().map(canonical_ip).collect();
                addresses.sort_unstable();
                addresses.dedup();
                let ttl = found.valid_until().saturating_duration_since(Instant::now());
                (Resolution::Addresses(addresses.into()), Some(ttl))
            }
            Ok(Err(error)) if error.is_no_records_found() || error.is_nx_domain() => {
                (Resolution::Addresses(Arc::new([])), None)
            }
            Ok(Err(error)) => (Resolution::Failed(error.to_string()), None),
        }
    }
}
