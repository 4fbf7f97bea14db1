//! Looks names up, and again when their time is over. A look-up that fails keeps the last answer; one that says
//! there is nothing takes it away.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::model::address::canonical_ip;
use crate::model::name::HostName;
use crate::snapshot::name_index::NameMap;

/// After a failure, and where a name stands for nothing.
const RETRY: Duration = Duration::from_secs(2);
/// One look-up, with its retries.
const LOOKUP: Duration = Duration::from_secs(10);
/// Looked up at the same time.
const AT_ONCE: usize = 32;

/// Whom to ask, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Empty: the system's.
    pub servers: Vec<SocketAddr>,
    /// Bounds of an answer's time to live; the first is not above the second.
    pub ttl_min: Duration,
    pub ttl_max: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { servers: Vec::new(), ttl_min: Duration::from_secs(1), ttl_max: Duration::from_secs(3600) }
    }
}

/// What became of a look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Sorted; empty: the name exists no more.
    Addresses(Arc<[IpAddr]>),
    /// Nobody could say.
    Failed(String),
}

/// Keeps the wanted names looked up, until nobody wants any.
pub async fn run(
    options: Options,
    mut wanted: watch::Receiver<NameMap<()>>,
    answers: mpsc::Sender<(HostName, Answer)>,
) {
    let resolver = match resolver(&options.servers) {
        Ok(resolver) => resolver,
        Err(error) => {
            tracing::error!(%error, "cannot read the system's name servers: endpoints given by name have no addresses");
            return;
        }
    };
    let mut due: BTreeMap<HostName, Instant> = BTreeMap::new();
    let mut names = NameMap::default();
    loop {
        let next = wanted.borrow_and_update().clone();
        for name in next.changed_since(&names, |(), ()| true) {
            match next.contains_key(name.as_str()) {
                true => drop(due.insert(name, Instant::now())),
                false => drop(due.remove(&name)),
            }
        }
        names = next;
        let now = Instant::now();
        let ready: Vec<HostName> =
            due.iter().filter(|(_, at)| **at <= now).map(|(name, _)| name.clone()).take(AT_ONCE).collect();
        let lookups = ready.into_iter().map(|name| look_up(&resolver, name));
        for (name, answer, ttl) in join_all(lookups).await {
            let again = ttl.map_or(RETRY, |ttl| ttl.clamp(options.ttl_min, options.ttl_max));
            if let Some(due) = due.get_mut(&name) {
                *due = Instant::now() + again;
            }
            if answers.send((name, answer)).await.is_err() {
                return;
            }
        }
        let next = due.values().min().copied().unwrap_or_else(|| Instant::now() + options.ttl_max);
        // Which comes first does not matter: both lead to a look at the list.
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() {
                return;
            },
            () = tokio::time::sleep_until(next) => {}
        }
    }
}

fn resolver(servers: &[SocketAddr]) -> Result<TokioResolver, NetError> {
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
    // We ask when the time of an answer is over by our bounds; an answer kept from before would be no answer.
    builder.options_mut().cache_size = 0;
    builder.build()
}

/// Runs a bounded number of look-ups side by side.
async fn join_all<F, T>(futures: impl Iterator<Item = F>) -> Vec<T>
where
    F: Future<Output = T>,
{
    let mut running: Vec<_> = futures.map(Box::pin).collect();
    let mut results = Vec::with_capacity(running.len());
    std::future::poll_fn(|context| {
        running.retain_mut(|future| match future.as_mut().poll(context) {
            std::task::Poll::Ready(result) => {
                results.push(result);
                false
            }
            std::task::Poll::Pending => true,
        });
        if running.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    results
}

/// The answer, and how long it holds, if it says so.
async fn look_up(resolver: &TokioResolver, name: HostName) -> (HostName, Answer, Option<Duration>) {
    // A trailing dot keeps the system's search list out: names are whole.
    let lookup = resolver.lookup_ip(format!("{name}."));
    let (answer, ttl) = match tokio::time::timeout(LOOKUP, lookup).await {
        Err(_) => (Answer::Failed("timed out".to_owned()), None),
        Ok(Ok(found)) => {
            let mut addresses: Vec<IpAddr> = found.iter().map(canonical_ip).collect();
            addresses.sort_unstable();
            addresses.dedup();
            let ttl = found.valid_until().saturating_duration_since(std::time::Instant::now());
            (Answer::Addresses(addresses.into()), Some(ttl))
        }
        Ok(Err(error)) if error.is_no_records_found() || error.is_nx_domain() => {
            (Answer::Addresses(Arc::new([])), None)
        }
        Ok(Err(error)) => (Answer::Failed(error.to_string()), None),
    };
    (name, answer, ttl)
}
