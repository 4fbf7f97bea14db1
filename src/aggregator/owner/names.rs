//! The host names that routes, gateways and endpoints are given by, and what they stand for.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;

use crate::aggregator::resolver::Answer;
use crate::model::address::Host;
use crate::model::name::HostName;
use crate::snapshot::name_index::NameMap;
use crate::snapshot::policy::Policy;
use crate::snapshot::routes::{Resolved, RouteTable};
use crate::snapshot::shard::Shard;

/// Names and their addresses. A name that nothing is given by any more is forgotten.
pub(super) struct Names {
    wanted: watch::Sender<NameMap<()>>,
    /// Of these, the ones that the config's networks and routes are given by.
    of_policy: BTreeSet<HostName>,
    resolved: Resolved,
    /// Names without an answer that says which addresses they have.
    unresolved: BTreeSet<HostName>,
    /// Names of which the last look-up has failed.
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

/// The names that the config gives gateways and routes by.
pub(in crate::aggregator) fn of_policy(policy: &Policy, routes: &RouteTable) -> BTreeSet<HostName> {
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

    /// Wants the names of another config and of all shards, and no others.
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

    /// Looks again whether these names are wanted.
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

    /// Takes in an answer; returns true if the name stands for other addresses than before.
    pub(super) fn answered(
        &mut self,
        name: &HostName,
        answer: Answer,
        used_by: impl Fn(&HostName) -> String,
    ) -> bool {
        if !self.wanted.borrow().contains_key(name.as_str()) {
            // It was asked for before the name was forgotten.
            return false;
        }
        match answer {
            Answer::Failed(error) => {
                // It is looked up again and again: the log tells of it once.
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
            Answer::Addresses(addresses) => {
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

    /// Names that no answer has come for yet, not even that they cannot be looked up.
    pub(super) fn looking_up(&self) -> usize {
        let answered = self.resolved.len() + self.unresolved.len();
        let wanted = self.wanted.borrow().len();
        debug_assert!(answered <= wanted, "only wanted names are answered, each in one way");
        wanted.saturating_sub(answered)
    }

    /// Names that could not be looked up yet, in order.
    pub(super) fn unresolved(&self) -> Vec<String> {
        self.unresolved.iter().map(ToString::to_string).collect()
    }
}
