//! A config file with its registries, read without a gateway.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::config_file;
use isthmus_admin::certificates::file_problems;
use isthmus_admin::left_out;
use isthmus_aggregator::offline::{self as registry, OfflineError, names_in};
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_config::Config;
use isthmus_model::address::{AdminBind, Host, canonical_ip};
use isthmus_model::name::HostName;
use isthmus_model::place::ClusterId;
use isthmus_net::dial;
use isthmus_net::lookup::{Cause, Lookup};
use isthmus_net::unix::UnixSocket;
use isthmus_settings::export_tls::TlsSource;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::port_endpoint::network_of;
use isthmus_snapshot::routes::Resolved;

/// The time for all look-ups of names together.
const LOOK_UPS_WITHIN: Duration = Duration::from_secs(2);
/// The largest number of names in one message.
const NAMED_MAX: usize = 5;

/// How the host names of a config are resolved.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// They are looked up, for at most [`LOOK_UPS_WITHIN`] together.
    LookUp,
    /// They are not looked up, and have no addresses.
    Leave,
}

/// A config file and its registries.
pub(super) struct Offline {
    pub(super) snapshot: Snapshot,
    /// The address of the admin API; `None`: there is none.
    pub(super) admin: Option<AdminBind>,
    /// The registries that are left out because only a running gateway reads them, one line for each kind. They are no errors of
    /// the config.
    pub(super) notes: Vec<String>,
    pub(super) warnings: Vec<String>,
    /// Files that the config names and that are missing, expired or unusable, although `run` starts without them.
    pub(super) faults: Vec<String>,
}

/// Reads a config and its registries. Returns all errors, one per line.
pub(super) fn offline(path: &Path, names: Names) -> Result<Offline, Vec<String>> {
    let config = config_file::load(path)
        .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    let mut warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    let mut faults = file_problems(&config);
    // `run` does not start without its access log.
    let mut problems: Vec<String> = config.access_log.problem().into_iter().collect();
    // A folder that is missing may be made by the service manager before it starts `run`.
    if let Some(AdminBind::Unix(path)) = &config.admin
        && let Some(error) = UnixSocket::problem(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        problems.push(format!("cannot open the admin listener on unix:{}: {error}", path.display()));
    }
    let mut live_only = BTreeMap::<&'static str, Vec<&str>>::new();
    let mut shards = vec![Arc::new(registry::own(config.services.clone()))];
    for spec in &config.registries {
        match registry::read(spec) {
            Ok(shard) => {
                let (name, counts) = (config.placed_name(spec), shard.counts());
                let left_out = [left_out::by_name_or_network(&counts), left_out::by_address(&counts)];
                warnings.extend(left_out.into_iter().flatten().map(|text| format!("{name}: {text}")));
                shards.push(Arc::new(shard));
            }
            // `run` starts without the file, and reads it once it exists.
            Err(OfflineError::Absent(found)) => faults.extend(found),
            Err(OfflineError::LiveOnly(source)) => live_only.entry(source).or_default().push(&spec.name),
            Err(OfflineError::Wrong(found)) => problems.extend(found),
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let known = names_in(&config.policy, shards.iter().map(|shard| &**shard));
    let resolved = match names {
        Names::LookUp => {
            let (resolved, failed) = resolve(&known, &config.aggregator.dns.servers);
            warnings.extend(failed);
            resolved
        }
        Names::Leave => Resolved::default(),
    };
    let snapshot = registry::snapshot(&config.policy, &shards, &resolved);
    let conflicts = snapshot.services().into_iter().flat_map(|service| &service.conflicts);
    warnings.extend(conflicts.map(ToString::to_string));
    warnings.extend(off_network(&snapshot, &config));
    let unread = live_only.into_iter().map(|(source, registries)| {
        format!(
            "only `isthmus run` reads {source}, so the services of {} are missing here",
            listed("registry", "registries", &registries)
        )
    });
    let notes = unread.chain(default_tls(&config)).collect();
    Ok(Offline { snapshot, admin: config.admin, notes, warnings, faults })
}

/// Returns a note that names the rules without `tls`, if a registry infers TLS modes.
fn default_tls(config: &Config) -> Option<String> {
    let infers = |spec: &RegistrySpec| spec.scope.tls != TlsSource::Written;
    let exports = config.policy.exports.iter().filter(|rule| rule.tls.is_none()).map(|rule| &*rule.name);
    let peers = config.policy.peers.iter().flat_map(|peer| &peer.exports);
    let peers = peers.filter(|rule| rule.tls.is_none()).map(|rule| &*rule.rule);
    let rules: Vec<&str> = exports.chain(peers).collect();
    (!rules.is_empty() && config.registries.iter().any(infers)).then(|| {
        let shown = rules[..rules.len().min(NAMED_MAX)].join(", ");
        let more = if rules.len() > NAMED_MAX { ", …" } else { "" };
        format!(
            "{shown}{more}: without `tls`, a rule leads to services of Kubernetes and istiod only as far as their endpoints have mTLS \
             of the mesh, and not by plain host name; write `tls: own` to reach the others too, or `tls: mesh` to keep them shut"
        )
    })
}

/// Returns names for a message, at most [`NAMED_MAX`] of them: `registry a`, or `2 registries: a, b`.
fn listed(one: &str, several: &str, names: &[&str]) -> String {
    match names {
        [name] => format!("{one} {name}"),
        names => {
            let more = if names.len() > NAMED_MAX { ", …" } else { "" };
            format!("{} {several}: {}{more}", names.len(), names[..names.len().min(NAMED_MAX)].join(", "))
        }
    }
}

/// Returns a warning for each registry whose endpoints this gateway can never choose because the registry's network, or the
/// gateway's own, is not set. This is the most likely mistake in a first config with several networks.
fn off_network(snapshot: &Snapshot, config: &Config) -> Vec<String> {
    let node = &snapshot.policy.node;
    let is_gateway = !snapshot.policy.listeners.is_empty() && !snapshot.policy.exports.is_empty();
    if !is_gateway {
        return Vec::new();
    }
    // For each cluster, the numbers of endpoints without a network, of endpoints with a network, and of all endpoints.
    let mut counts: BTreeMap<&ClusterId, (usize, usize, usize)> = BTreeMap::new();
    for part in snapshot.services().into_iter().flat_map(|service| &service.parts) {
        let (none, some, all) = counts.entry(&part.origin.cluster).or_default();
        for endpoint in part.service.endpoints.iter() {
            let unknown = network_of(endpoint, &part.origin, snapshot.networks()).is_unknown();
            *none += usize::from(unknown && part.origin.cluster != node.cluster);
            *some += usize::from(!unknown);
            *all += 1;
        }
    }
    let called = |cluster: &ClusterId| {
        let registry = config.registries.iter().find(|registry| registry.cluster == *cluster);
        registry.map_or_else(|| "services".to_owned(), |registry| config.placed_name(registry))
    };
    let warning = |(cluster, (none, some, all)): (&ClusterId, (usize, usize, usize))| {
        let called = called(cluster);
        match (node.network.is_unknown(), none, some) {
            (false, 1.., _) => Some(format!(
                "{called}: {none} of {all} endpoints have no network, but node.network is {}, so none of these \
                 endpoints can be used; set `network`, or `networks.<name>.cidrs`",
                node.network
            )),
            (true, _, 1..) => Some(format!(
                "{called}: {some} of {all} endpoints have a network, but node.network is not set, so none of \
                 these endpoints can be used; set `node.network`"
            )),
            _ => None,
        }
    };
    counts.into_iter().filter_map(warning).collect()
}

/// Looks up names at these name servers, or if there are none, as the system's files say. Returns the addresses, and warnings for names
/// without any. A name that cannot be resolved has no addresses, as on the data path.
fn resolve(names: &BTreeSet<HostName>, name_servers: &[SocketAddr]) -> (Resolved, Vec<String>) {
    if names.is_empty() {
        return Default::default();
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return (Resolved::default(), vec![format!("names cannot be looked up: {error}")]),
    };
    let (services, hosts): (Vec<&HostName>, Vec<&HostName>) =
        names.iter().partition(|name| name.is_service());
    let records = runtime.block_on(async {
        let Ok(lookup) = Lookup::at(name_servers) else { return Vec::new() };
        let answer = async |name| (name, timeout(LOOK_UPS_WITHIN, lookup.records(name)).await);
        join_all(services.into_iter().map(answer)).await
    });
    let answers = runtime.block_on(async {
        let look_up = async |name: &HostName| dial::addresses(&Host::Name(name.clone()), name_servers).await;
        let answer = async |name| (name, timeout(LOOK_UPS_WITHIN, look_up(name)).await);
        join_all(hosts.into_iter().map(answer)).await
    });
    let (mut resolved, mut warnings, mut late) = (Resolved::default(), Vec::new(), Vec::new());
    for (name, answer) in records {
        let Ok((found, _)) = answer else {
            late.push(name.as_str());
            continue;
        };
        let (targets, doubt) = found.settle(&Arc::default(), None, Duration::ZERO, Instant::now());
        if targets.is_empty() {
            let why = match doubt.map(|doubt| doubt.cause) {
                Some(Cause::Failed(error)) => error,
                Some(Cause::Missing) | None => "it has no SRV record whose target has an address".to_owned(),
            };
            warnings.push(format!(
                "{name} does not resolve, so the endpoints with this name have no address: {why}"
            ));
        }
        resolved.targets.insert(name.clone(), targets);
    }
    for (name, answer) in answers {
        match answer {
            Ok(Ok(found)) => {
                let addresses: BTreeSet<IpAddr> = found.iter().copied().map(canonical_ip).collect();
                resolved.insert(name.clone(), addresses.into_iter().collect());
            }
            Ok(Err(error)) => warnings.push(format!(
                "{name} does not resolve, so the endpoints and gateways with this name have no address: {error}"
            )),
            Err(_) => late.push(name.as_str()),
        }
    }
    if !late.is_empty() {
        let names = listed("the name", "names", &late);
        warnings
            .push(format!("no answer within {LOOK_UPS_WITHIN:?} for {names}; --offline makes no look-ups"));
    }
    (resolved, warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_a_registry_have_its_position() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("isthmus.yaml");
        let west = "services:\n- {hostname: a.mesh, namespace: n, ports: [{name: p, port: 1}], endpoints: [{address: 169.254.0.1}, {address: 10.0.0.1}]}\n\
                    - {hostname: b.test, namespace: n, ports: [{name: p, port: 1}]}\n";
        std::fs::write(folder.path().join("west.yaml"), west).expect("written");
        let config = "listen: ':1'\nnode: {network: east}\nexports: [{services: ['*']}]\nregistries:\n\
                      - file: {path: west.yaml, cluster: west}\n  allow: {services: ['*.mesh']}\n";
        std::fs::write(&path, config).expect("written");
        let world = offline(&path, Names::LookUp).unwrap_or_else(|problems| panic!("{problems:?}"));
        let place = format!("{}:5:3: registries[0]: registry west.yaml: ", path.display());
        let texts = ["1 service is left out", "1 endpoint is left out", "1 of 1 endpoints have no network"];
        for text in texts {
            let wanted = format!("{place}{text}");
            assert!(
                world.warnings.iter().any(|warning| warning.starts_with(&wanted)),
                "{wanted}: {:#?}",
                world.warnings
            );
        }
    }
}
