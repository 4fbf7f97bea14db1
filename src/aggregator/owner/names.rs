//! The host names of routes, gateways and endpoints, with their addresses. Those that an earlier process knew are in use from the
//! start, until the first answer of a name server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use isthmus_model::address::{Host, SrvTarget};
use isthmus_model::name::HostName;
use isthmus_net::lookup::{Cause, Doubt, LookedUp};
use isthmus_registry::name_index::NameMap;
use isthmus_registry::shard::Shard;
use isthmus_settings::policy::Policy;
use isthmus_snapshot::routes::{Resolved, RouteTable};
use isthmus_upgrade::belief::{FORGET_AFTER, NameBelief, Present, TargetBelief};

/// Host names and their addresses. A name that is not used any more is removed.
pub(super) struct Names {
    wanted: watch::Sender<NameMap<()>>,
    /// The names in `wanted` that the config's networks and routes use.
    of_policy: BTreeSet<HostName>,
    /// The addresses or targets of each name that was looked up; empty if it has none.
    resolved: Resolved,
    /// The names whose last look-up does not confirm their addresses.
    doubts: BTreeMap<HostName, Doubt>,
    /// The names in `resolved` whose addresses are those of an earlier process. They may be names that nobody wants, until the
    /// registries are read.
    recalled: BTreeSet<HostName>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            wanted: watch::Sender::new(NameMap::default()),
            of_policy: BTreeSet::new(),
            resolved: Resolved::default(),
            doubts: BTreeMap::new(),
            recalled: BTreeSet::new(),
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
        let recalled = &self.recalled;
        let is_kept = |name: &HostName| wanted.contains_key(name.as_str()) || recalled.contains(name);
        self.resolved.retain(|name, _| is_kept(name));
        self.resolved.targets.retain(|name, _| is_kept(name));
        self.doubts.retain(|name, _| is_kept(name));
        self.wanted.send_replace(wanted);
    }

    /// Takes the addresses that an earlier process knew.
    pub(super) fn recall(&mut self, names: Vec<NameBelief>, present: Present) {
        for NameBelief { name, addresses, targets, used, missing_since } in names {
            let has_any = !addresses.is_empty() || !targets.is_empty();
            let Ok(name) = HostName::parse(&name) else { continue };
            if !has_any || present.age(used) >= FORGET_AFTER {
                continue;
            }
            match name.is_service() {
                true => {
                    let targets: Arc<[SrvTarget]> = targets.into_iter().filter_map(target).collect();
                    self.resolved.targets.insert(name.clone(), targets);
                }
                false => drop(self.resolved.insert(name.clone(), addresses.into())),
            }
            if let Some(since) = missing_since.and_then(|since| present.instant_of(since)) {
                self.doubts.insert(name.clone(), Doubt::missing(since.into_std()));
            }
            self.recalled.insert(name);
        }
    }

    /// Returns what another process of this gateway needs to know.
    pub(super) fn beliefs(&self, present: Present) -> Vec<NameBelief> {
        // Another process knows by itself which names it wants.
        let Self { wanted: _, of_policy: _, resolved, doubts, recalled: _ } = self;
        let missing_since = |name: &HostName| {
            let since = doubts.get(name).and_then(Doubt::missing_since)?;
            Some(present.moment_of(since.into()))
        };
        let belief = |name: &HostName, addresses, targets| NameBelief {
            name: name.to_string(),
            addresses,
            targets,
            used: present.moment,
            missing_since: missing_since(name),
        };
        let hosts = resolved.iter().map(|(name, addresses)| belief(name, addresses.to_vec(), Vec::new()));
        let services = resolved
            .targets
            .iter()
            .map(|(name, targets)| belief(name, Vec::new(), targets.iter().map(target_belief).collect()));
        let has_any = |name: &NameBelief| !name.addresses.is_empty() || !name.targets.is_empty();
        let mut all: Vec<NameBelief> = hosts.chain(services).filter(has_any).collect();
        all.sort_unstable_by(|one, next| one.name.cmp(&next.name));
        all
    }

    /// Forgets the addresses of an earlier process that nobody wants.
    pub(super) fn forget_unwanted(&mut self) {
        let wanted = self.wanted.borrow();
        let gone = self.recalled.iter().filter(|name| !wanted.contains_key(name.as_str()));
        let gone: Vec<HostName> = gone.cloned().collect();
        drop(wanted);
        gone.iter().for_each(|name| self.forget(name));
    }

    /// Returns the number of wanted names whose addresses are those of an earlier process.
    pub(super) fn recalled(&self) -> usize {
        let wanted = self.wanted.borrow();
        self.recalled.iter().filter(|name| wanted.contains_key(name.as_str())).count()
    }

    fn forget(&mut self, name: &HostName) {
        self.resolved.remove(name.as_str());
        self.resolved.targets.remove(name.as_str());
        self.doubts.remove(name);
        self.recalled.remove(name);
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
                self.forget(name);
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
        self.recalled.remove(name);
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

    /// Returns the number of names without any result yet, not even a failure, nor addresses of an earlier process.
    pub(super) fn looking_up(&self) -> usize {
        let known = self.resolved.len() + self.resolved.targets.len();
        let known = known - (self.recalled.len() - self.recalled());
        let wanted = self.wanted.borrow().len();
        debug_assert!(known <= wanted, "only wanted names are answered");
        wanted.saturating_sub(known)
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
        let wanted = self.wanted.borrow();
        let is_wanted = |name: &HostName| wanted.contains_key(name.as_str());
        let doubts = self.doubts.iter().filter(|(name, _)| is_wanted(name) && has(name) == has_addresses);
        doubts.map(|(name, doubt)| (name.clone(), doubt.cause.clone())).collect()
    }
}

fn target_belief(target: &SrvTarget) -> TargetBelief {
    let SrvTarget { host, port, priority, weight, addresses } = target;
    TargetBelief {
        host: host.to_string(),
        port: *port,
        priority: *priority,
        weight: *weight,
        addresses: addresses.to_vec(),
    }
}

fn target(belief: TargetBelief) -> Option<SrvTarget> {
    let TargetBelief { host, port, priority, weight, addresses } = belief;
    Some(SrvTarget {
        host: HostName::parse(&host).ok()?,
        port,
        priority,
        weight,
        addresses: addresses.into(),
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_net::lookup::{Answer, Resolution};
    use isthmus_snapshot::testing::{gateway, network, policy_of};

    const HOLD: Duration = Duration::from_secs(30);

    fn name(text: &str) -> HostName {
        HostName::parse(text).expect("legal")
    }

    fn known(names: &Names, text: &str) -> Vec<String> {
        let addresses = names.resolved().get(text).cloned().unwrap_or_default();
        addresses.iter().map(ToString::to_string).collect()
    }

    fn answer(names: &mut Names, text: &str, ipv4: Answer, at: Instant) {
        let found = LookedUp::Host(Resolution { ipv4, ipv6: Answer::Addresses(Vec::new()) });
        names.apply_resolution(&name(text), found, (HOLD, at), |_| String::new());
    }

    fn found(ip: [u8; 4]) -> Answer {
        Answer::Addresses(vec![ip.into()])
    }

    /// Returns the names of a process that wants the gateway `gw.test`.
    fn names(recalled: Vec<NameBelief>, present: Present) -> Names {
        let mut names = Names::default();
        names.recall(recalled, present);
        let policy =
            Policy { networks: vec![network("west", vec![gateway("gw.test", 1)])], ..policy_of("c", "east") };
        names.configure(&policy, &RouteTable::default(), &[]);
        names
    }

    #[test]
    fn addresses_of_an_earlier_process_hold_until_a_name_server_answers() {
        let present = Present::now();
        let now = present.instant.into_std();
        let mut first = names(Vec::new(), present);
        assert_eq!((first.looking_up(), first.recalled()), (1, 0));
        answer(&mut first, "gw.test", found([192, 0, 2, 1]), now);
        let beliefs = first.beliefs(present);
        let mut next = names(beliefs.clone(), present);
        assert_eq!(known(&next, "gw.test"), ["192.0.2.1"]);
        assert_eq!((next.looking_up(), next.recalled()), (0, 1));
        answer(&mut next, "gw.test", Answer::Failed("silence".to_owned()), now);
        assert_eq!((known(&next, "gw.test").len(), next.recalled(), next.stale().len()), (1, 0, 1));
        answer(&mut next, "gw.test", found([192, 0, 2, 2]), now);
        assert_eq!((known(&next, "gw.test"), next.stale().len()), (vec!["192.0.2.2".to_owned()], 0));
        let later = Present {
            moment: (std::time::SystemTime::from(present.moment) + FORGET_AFTER).into(),
            ..present
        };
        assert_eq!(known(&names(beliefs, later), "gw.test"), Vec::<String>::new(), "it is too old");
    }

    #[test]
    fn a_name_that_does_not_exist_is_held_no_longer_by_another_process() {
        let present = Present::now();
        let now = present.instant.into_std();
        let mut first = names(Vec::new(), present);
        answer(&mut first, "gw.test", found([192, 0, 2, 1]), now);
        answer(&mut first, "gw.test", Answer::Addresses(Vec::new()), now);
        let later =
            Present { instant: present.instant + HOLD, moment: present.moment_of(present.instant + HOLD) };
        let mut next = names(first.beliefs(present), later);
        assert_eq!(known(&next, "gw.test").len(), 1);
        answer(&mut next, "gw.test", Answer::Addresses(Vec::new()), later.instant.into_std());
        assert_eq!(known(&next, "gw.test").len(), 0);
    }

    #[test]
    fn names_that_nobody_wants_are_kept_until_all_registries_are_read() {
        let present = Present::now();
        let belief = |text: &str| NameBelief {
            name: text.to_owned(),
            addresses: vec![[192, 0, 2, 7].into()],
            targets: Vec::new(),
            used: present.moment,
            missing_since: None,
        };
        let mut names = names(vec![belief("gw.test"), belief("of-a-registry.test")], present);
        assert_eq!(
            (known(&names, "of-a-registry.test").len(), names.looking_up(), names.recalled()),
            (1, 0, 1)
        );
        assert_eq!(names.beliefs(present).len(), 2, "they are handed on");
        names.forget_unwanted();
        assert_eq!(
            (known(&names, "of-a-registry.test").len(), names.looking_up(), names.recalled()),
            (0, 0, 1)
        );
    }
}
