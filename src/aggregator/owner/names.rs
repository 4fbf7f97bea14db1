//! The host names of routes, gateways and endpoints, with their addresses.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;

use isthmus_model::address::Host;
use isthmus_model::name::HostName;
use isthmus_net::lookup::Resolution;
use isthmus_snapshot::name_index::NameMap;
use isthmus_snapshot::policy::Policy;
use isthmus_snapshot::routes::{Resolved, RouteTable};
use isthmus_snapshot::shard::Shard;

/// Host names and their addresses. A name that is not used any more is removed.
pub(super) struct Names {
    wanted: watch::Sender<NameMap<()>>,
    /// The names in `wanted` that the config's networks and routes use.
    of_policy: BTreeSet<HostName>,
    resolved: Resolved,
    /// Names whose look-ups have failed, so that no addresses are known.
    unresolved: BTreeSet<HostName>,
    /// Names whose last look-up failed.
    failing: BTreeSet<HostName>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            wanted: watch::Sender::new(NameMap::default()),
            of_policy: BTreeSet::new(),
            resolved: Resolved::default(),
            unresolved: BTreeSet::new(),
            failing: BTreeSet::new(),
        }
    }
}

/// Returns the names that the config uses for gateways and routes.
pub(crate) fn of_policy(policy: &Policy, routes: &RouteTable) -> BTreeSet<HostName> {
    let gateways = policy.networks.iter().flat_map(|network| &network.gateways).map(|gateway| &gateway.host);
    gateways.filter_map(Host::name).chain(routes.host_names()).cloned().collect()
}

impl Names {
    pub(super) fn wanted(&self) -> watch::Receiver<NameMap<()>> {
        self.wanted.subscribe()
    }

    pub(super) fn resolved(&self) -> &Resolved {
        &self.resolved
    }

    /// Replaces the wanted names by those of another config and of all shards.
    pub(super) fn configure(&mut self, policy: &Policy, routes: &RouteTable, shards: &[Arc<Shard>]) {
        self.of_policy = of_policy(policy, routes);
        let all: BTreeSet<&HostName> =
            shards.iter().flat_map(|shard| shard.names()).chain(&self.of_policy).collect();
        let mut wanted = self.wanted.borrow().clone();
        wanted.retain(|name, ()| all.contains(name));
        for name in all {
            if !wanted.contains_key(name.as_str()) {
                wanted.insert(name.clone(), ());
            }
        }
        self.resolved.retain(|name, _| wanted.contains_key(name.as_str()));
        self.unresolved.retain(|name| wanted.contains_key(name.as_str()));
        self.failing.retain(|name| wanted.contains_key(name.as_str()));
        self.wanted.send_replace(wanted);
    }

    /// Updates the names to look up: the names of `touched` that the config or a shard uses are added, and the other names of
    /// `touched` are removed.
    pub(super) fn renew(&mut self, touched: &BTreeSet<HostName>, shards: &[Arc<Shard>]) {
        for name in touched {
            let wants = self.of_policy.contains(name) || shards.iter().any(|shard| shard.uses_name(name));
            let wanted = self.wanted.borrow().contains_key(name.as_str());
            if wants == wanted {
                continue;
            }
            if wants {
                self.wanted.send_modify(|wanted| _ = wanted.insert(name.clone(), ()));
            } else {
                self.wanted.send_modify(|wanted| _ = wanted.remove(name.as_str()));
                self.resolved.remove(name.as_str());
                self.unresolved.remove(name);
                self.failing.remove(name);
            }
        }
    }

    /// Applies the result of a look-up; returns true if the addresses differ from before.
    pub(super) fn apply_resolution(
        &mut self,
        name: &HostName,
        answer: Resolution,
        used_by: impl Fn(&HostName) -> String,
    ) -> bool {
        if !self.wanted.borrow().contains_key(name.as_str()) {
            // The look-up began before the name was removed.
            return false;
        }
        match answer {
            Resolution::Failed(error) => {
                // The name is looked up repeatedly: the log reports it once.
                if self.failing.insert(name.clone()) {
                    let used_by = used_by(name);
                    tracing::warn!(%name, used_by, error, "the DNS lookup fails; the last known addresses stay in \
                                                           use");
                }
                if !self.resolved.contains_key(name.as_str()) {
                    self.unresolved.insert(name.clone());
                }
                false
            }
            Resolution::Addresses(addresses) => {
                self.failing.remove(name);
                self.unresolved.remove(name);
                if self.resolved.get(name.as_str()) == Some(&addresses) {
                    return false;
                }
                match addresses.is_empty() {
                    true => {
                        let used_by = used_by(name);
                        tracing::warn!(%name, used_by, "the name does not resolve, so it has no address");
                    }
                    false => tracing::info!(%name, addresses = ?addresses, "name resolved"),
                }
                self.resolved.insert(name.clone(), addresses);
                true
            }
        }
    }

    /// Returns the number of names without any result yet, not even a failure.
    pub(super) fn looking_up(&self) -> usize {
        let answered = self.resolved.len() + self.unresolved.len();
        let wanted = self.wanted.borrow().len();
        debug_assert!(answered <= wanted, "only wanted names are answered, each in one way");
        wanted.saturating_sub(answered)
    }

    /// Returns the names that have no addresses because their look-ups have failed, in order.
    pub(super) fn unresolved(&self) -> Vec<String> {
        self.unresolved.iter().map(ToString::to_string).collect()
    }
}
