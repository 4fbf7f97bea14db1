//! The host names of routes, gateways and endpoints, with their addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use isthmus_model::address::Host;
use isthmus_model::name::HostName;
use isthmus_net::lookup::{Cause, Doubt, LookedUp};
use isthmus_snapshot::name_index::NameMap;
use isthmus_snapshot::policy::Policy;
use isthmus_snapshot::routes::{Resolved, RouteTable};
use isthmus_snapshot::shard::Shard;

/// Host names and their addresses. A name that is not used any more is removed.
pub(super) struct Names {
    wanted: watch::Sender<NameMap<()>>,
    /// The names in `wanted` that the config's networks and routes use.
    of_policy: BTreeSet<HostName>,
    /// The addresses or targets of each name that was looked up; empty if it has none.
    resolved: Resolved,
    /// The names whose last look-up does not confirm their addresses.
    doubts: BTreeMap<HostName, Doubt>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            wanted: watch::Sender::new(NameMap::default()),
            of_policy: BTreeSet::new(),
            resolved: Resolved::default(),
            doubts: BTreeMap::new(),
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
        self.resolved.targets.retain(|name, _| wanted.contains_key(name.as_str()));
        self.doubts.retain(|name, _| wanted.contains_key(name.as_str()));
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
                self.resolved.targets.remove(name.as_str());
                self.doubts.remove(name);
            }
        }
    }

    /// Applies the result of a look-up; returns true if the addresses differ from before. `hold` is how long a name without an
    /// address keeps its last ones.
    pub(super) fn apply_resolution(
        &mut self,
        name: &HostName,
        answer: LookedUp,
        (hold, now): (Duration, Instant),
        used_by: impl Fn(&HostName) -> String,
    ) -> bool {
        if !self.wanted.borrow().contains_key(name.as_str()) {
            // The look-up began before the name was removed.
            return false;
        }
        let doubted = self.doubts.remove(name);
        let (differs, has_any, doubt) = match answer {
            LookedUp::Host(resolution) => {
                let known = self.resolved.get(name.as_str());
                let last = known.cloned().unwrap_or_default();
                let (addresses, doubt) = resolution.settle(&last, doubted.as_ref(), hold, now);
                let differs = addresses != last;
                if differs && !addresses.is_empty() {
                    tracing::info!(%name, addresses = ?addresses, "name resolved");
                }
                if known.is_none() || differs {
                    self.resolved.insert(name.clone(), addresses.clone());
                }
                (differs, !addresses.is_empty(), doubt)
            }
            LookedUp::Service(records) => {
                let known = self.resolved.targets.get(name.as_str());
                let last = known.cloned().unwrap_or_default();
                let (targets, doubt) = records.settle(&last, doubted.as_ref(), hold, now);
                let differs = targets != last;
                if differs && !targets.is_empty() {
                    tracing::info!(%name, targets = targets.len(), "SRV records resolved");
                }
                if known.is_none() || differs {
                    self.resolved.targets.insert(name.clone(), targets.clone());
                }
                (differs, !targets.is_empty(), doubt)
            }
        };
        if let Some(doubt) = doubt {
            let is_alike = |before: Doubt| kind(&before.cause) == kind(&doubt.cause);
            // The name is looked up repeatedly: the log reports a change once.
            if differs || !doubted.is_some_and(is_alike) {
                report(name, &doubt.cause, has_any, &used_by(name));
            }
            self.doubts.insert(name.clone(), doubt);
        }
        differs
    }

    /// Returns the number of names without any result yet, not even a failure.
    pub(super) fn looking_up(&self) -> usize {
        let answered = self.resolved.len() + self.resolved.targets.len();
        let wanted = self.wanted.borrow().len();
        debug_assert!(answered <= wanted, "only wanted names are answered");
        wanted.saturating_sub(answered)
    }

    /// Returns the names that have no addresses, in order, each with the reason.
    pub(super) fn unresolved(&self) -> Vec<(HostName, Cause)> {
        self.doubted(false)
    }

    /// Returns the names whose addresses in use are not confirmed by the last look-up, in order, each with the reason.
    pub(super) fn stale(&self) -> Vec<(HostName, Cause)> {
        self.doubted(true)
    }

    fn doubted(&self, has_addresses: bool) -> Vec<(HostName, Cause)> {
        let has = |name: &HostName| {
            let has_targets = self.resolved.targets.get(name.as_str()).is_some_and(|found| !found.is_empty());
            has_targets || self.resolved.get(name.as_str()).is_some_and(|found| !found.is_empty())
        };
        let doubts = self.doubts.iter().filter(|(name, _)| has(name) == has_addresses);
        doubts.map(|(name, doubt)| (name.clone(), doubt.cause.clone())).collect()
    }
}

/// Returns the same value for causes of which the log needs only one.
fn kind(cause: &Cause) -> std::mem::Discriminant<Cause> {
    std::mem::discriminant(cause)
}

/// Logs that a look-up does not confirm the addresses of a name.
fn report(name: &HostName, cause: &Cause, has_addresses: bool, used_by: &str) {
    match (cause, has_addresses) {
        (Cause::Failed(error), true) => {
            tracing::warn!(%name, used_by, error, "the DNS lookup fails; the last known addresses stay in use");
        }
        (Cause::Failed(error), false) => {
            tracing::warn!(%name, used_by, error, "the DNS lookup fails, so the name has no address");
        }
        (Cause::Missing, true) => {
            tracing::warn!(%name, used_by, "the name does not exist any more, or has no address; its last addresses stay \
                                            in use for `dns.holdMissing`");
        }
        (Cause::Missing, false) => {
            tracing::warn!(%name, used_by, "the name does not resolve, so it has no address");
        }
    }
}
