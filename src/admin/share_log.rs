//! The shares of steered services, and their log: one line for each service whose shares have changed, with the cause. The shares
//! are those of `isthmus_steering_share`: of Envoys on this replica's network, on the first port.
//!
//! Changes are looked at once a second, so several that come together are one line. A change of one distance may move thousands
//! of services, so the lines are bounded, and further changes are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use isthmus_decisions::steering::{Group, PARTS, Source};
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_snapshot::Snapshot;
use isthmus_tasks::background;
use isthmus_world::{Reader, Since};

use super::steering::{as_percent, groups_here};

/// The time between two looks at what has changed.
const EVERY: Duration = Duration::from_secs(1);
/// The largest number of lines in each [`WINDOW`]; further changes are counted.
const LINES_MAX: usize = 20;
const WINDOW: Duration = Duration::from_secs(10);
/// The largest numbers of networks and causes that a line names.
const NAMED_MAX: usize = 4;

/// The shares that networks have of the calls to steered services. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Shares(Arc<Mutex<Table>>);

/// The shares of each steered service, without those of 0.
type Table = BTreeMap<HostName, Box<[(Network, u32)]>>;

impl Shares {
    /// Returns the mean share of each network, from 0 to 1, without those of 0; `None` if no service is steered.
    pub fn means(&self) -> Option<BTreeMap<Network, f64>> {
        let table = self.table();
        let mut sums: BTreeMap<&Network, u64> = BTreeMap::new();
        for (network, share) in table.values().flatten() {
            *sums.entry(network).or_default() += u64::from(*share);
        }
        let mean = |sum: u64| sum as f64 / f64::from(PARTS) / table.len() as f64;
        let means = sums.into_iter().map(|(network, sum)| (network.clone(), mean(sum)));
        (!table.is_empty()).then(|| means.collect())
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the groups of a service; `None`: it does not exist.
    fn note(&self, service: &HostName, groups: Option<&[Group]>) {
        let with_share = groups.unwrap_or_default().iter().filter(|group| group.share > 0);
        let shares: Box<[_]> = with_share.map(|group| (group.network.clone(), group.share)).collect();
        match shares.is_empty() {
            true => drop(self.table().remove(service)),
            false => drop(self.table().insert(service.clone(), shares)),
        }
    }

    /// Logs the changes of shares until there are no more snapshots.
    pub async fn run(self, mut reader: Reader) {
        let mut held = reader.current().clone();
        let mut window = Window::new(Instant::now());
        let (mut before, mut since) = (held.clone(), Since::Everything);
        loop {
            if before.policy.steers() || held.policy.steers() {
                let (shares, after) = (self.clone(), held.clone());
                let changes = background::run(move || shares.changes(&before, &after, &since)).await;
                for Change { service, shares, cause } in changes.unwrap_or_default() {
                    if window.counts() {
                        tracing::info!(service = %service, %shares, %cause, "the shares of calls have changed");
                    }
                }
            }
            tokio::select! {
                is_there = reader.changed(held.generation) => if !is_there { return },
                () = sleep(WINDOW), if window.hidden > 0 => {}
            }
            sleep(EVERY).await;
            let hidden = window.renew(Instant::now());
            if hidden > 0 {
                tracing::info!(services = hidden, "the shares of calls to further services have changed");
            }
            before = std::mem::replace(&mut held, reader.current().clone());
            since = reader.since(before.generation, held.generation);
        }
    }

    /// Notes the shares of what may have changed from one snapshot to a later one; returns the changes.
    fn changes(&self, before: &Snapshot, after: &Snapshot, since: &Since) -> Vec<Change> {
        let change = |service: HostName| {
            let now = groups_here(after, service.as_str());
            self.note(&service, now.as_deref());
            let (then, now) = (groups_here(before, service.as_str())?, now?);
            let shares = shares(&then, &now)?;
            Some(Change { service, shares, cause: cause(&then, &now) })
        };
        names(before, after, since).into_iter().filter_map(change).collect()
    }
}

/// Returns the services whose shares may differ between two snapshots.
fn names(before: &Snapshot, after: &Snapshot, since: &Since) -> BTreeSet<HostName> {
    match since {
        Since::Everything => {
            let all = before.services().into_iter().chain(after.services());
            all.map(|service| service.key.hostname.clone()).collect()
        }
        Since::Deltas(deltas) => {
            let networks: BTreeSet<&Network> = deltas.iter().flat_map(|delta| &delta.networks).collect();
            let behind = networks.into_iter().flat_map(|network| after.services_behind(network));
            let own = deltas.iter().flat_map(|delta| &delta.services);
            own.chain(behind).cloned().collect()
        }
    }
}

/// A change of the shares of one service.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    service: HostName,
    shares: String,
    cause: String,
}

/// Counts the lines of the current window.
struct Window {
    begun: Instant,
    lines: usize,
    hidden: usize,
}

impl Window {
    fn new(now: Instant) -> Self {
        Self { begun: now, lines: 0, hidden: 0 }
    }

    /// Begins the next window if it is time; returns the number of changes that the last one has not shown.
    fn renew(&mut self, now: Instant) -> usize {
        if now.duration_since(self.begun) < WINDOW {
            return 0;
        }
        std::mem::replace(self, Self::new(now)).hidden
    }

    /// Counts a change; returns true if it may be shown.
    fn counts(&mut self) -> bool {
        let is_shown = self.lines < LINES_MAX;
        *(if is_shown { &mut self.lines } else { &mut self.hidden }) += 1;
        is_shown
    }
}

/// Returns each group before and after, by network.
fn pairs<'a>(
    then: &'a [Group],
    now: &'a [Group],
) -> BTreeMap<&'a Network, (Option<&'a Group>, Option<&'a Group>)> {
    let mut pairs: BTreeMap<_, (Option<&Group>, Option<&Group>)> = BTreeMap::new();
    then.iter().for_each(|group| pairs.entry(&group.network).or_default().0 = Some(group));
    now.iter().for_each(|group| pairs.entry(&group.network).or_default().1 = Some(group));
    pairs
}

/// Returns the shares that have changed, such as `east 100 % → 37.5 %, west 0 % → 62.5 %`; `None` if there is none.
fn shares(then: &[Group], now: &[Group]) -> Option<String> {
    let share = |group: Option<&Group>| group.map_or(0, |group| group.share);
    let pairs = pairs(then, now).into_iter().map(|(network, (then, now))| (network, share(then), share(now)));
    let differ = pairs.filter(|(_, then, now)| then != now);
    let text = |(network, then, now): (&Network, u32, u32)| {
        format!("{network} {} \u{2192} {}", as_percent(then), as_percent(now))
    };
    let all: Vec<String> = differ.map(text).collect();
    (!all.is_empty()).then(|| listed(&all, ", "))
}

/// Returns the first texts of a list, and the number of the others.
fn listed(all: &[String], between: &str) -> String {
    let more = all.len().saturating_sub(NAMED_MAX);
    let shown = all[..all.len() - more].join(between);
    if more == 0 { shown } else { format!("{shown}{between}and {more} more") }
}

/// Returns the reason why shares have changed: what differs between the groups, or that the settings differ.
fn cause(then: &[Group], now: &[Group]) -> String {
    match (then.is_empty(), now.is_empty()) {
        (true, false) => return "steering was turned on".to_owned(),
        (false, true) => return "steering was turned off".to_owned(),
        _ => {}
    }
    let differ = |(network, pair): (&Network, (Option<&Group>, Option<&Group>))| match pair {
        (Some(then), Some(now)) => group_cause(network, then, now),
        (None, Some(now)) => Some(format!("{network} has endpoints, {}", readiness(now))),
        (Some(_), None) => Some(format!("{network} has no endpoints")),
        (None, None) => None,
    };
    let all: Vec<String> = pairs(then, now).into_iter().filter_map(differ).collect();
    match all.is_empty() {
        true => "the settings of steering have changed".to_owned(),
        false => listed(&all, "; "),
    }
}

fn group_cause(network: &Network, then: &Group, now: &Group) -> Option<String> {
    let mut causes = Vec::new();
    match (then.answers, now.answers) {
        (true, false) => causes.push(format!("the gateways of {network} do not answer")),
        (false, true) => causes.push(format!("the gateways of {network} answer again")),
        _ => {}
    }
    if then.ring != now.ring {
        causes.push(format!("{network} is in ring {}, was in {}{}", now.ring, then.ring, distance(now)));
    }
    if causes.is_empty()
        && (then.ready, then.other(), then.demand()) != (now.ready, now.other(), now.demand())
    {
        causes.push(format!("{network} has {}, had {} of {}", readiness(now), then.ready, then.demand()));
    }
    if then.drained != now.drained {
        causes.push(format!("the drains of {network} have changed"));
    }
    if then.fixed_percent != now.fixed_percent {
        causes.push(format!("the share that the policy gives {network} has changed"));
    }
    (!causes.is_empty()).then(|| causes.join(", "))
}

fn readiness(group: &Group) -> String {
    format!("{} of {} ready", group.ready, group.demand())
}

fn distance(group: &Group) -> String {
    match group.distance.map(|distance| distance.source) {
        Some(Source::Config(time) | Source::Measured(time) | Source::Reported(time)) => {
            format!(" ({time:.1?})")
        }
        Some(Source::Locality(level)) => format!(" ({})", level.text()),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_decisions::steering::{Distance, Viewpoint, divide};
    use isthmus_settings::steering::{Cost, Steering};

    /// Returns divided groups: network, round-trip time in milliseconds (0: the own network), ready and not ready endpoints.
    fn groups(all: &[(&str, u64, u64, u64)]) -> Vec<Group> {
        let group = |(network, ms, ready, not_ready): &(&str, u64, u64, u64)| {
            let source = Source::Measured(Duration::from_millis(*ms));
            let distance = (*ms > 0).then(|| Distance { source, cost: Cost::default() });
            let group = Group::new(Network::new(network), distance, &Steering::default());
            Group { ready: *ready, not_ready: *not_ready, ..group }
        };
        let mut groups: Vec<Group> = all.iter().map(group).collect();
        let network = &Network::new("east");
        divide(&mut groups, &Viewpoint { network, max_remote_percent: 100, ring: &|_, _| 1 });
        groups
    }

    #[test]
    fn a_change_is_told_with_its_cause() {
        let well = groups(&[("east", 0, 30, 0), ("west", 31, 30, 0), ("asia", 90, 30, 0)]);
        assert_eq!(shares(&well, &well), None);
        let few = groups(&[("east", 0, 8, 22), ("west", 31, 30, 0), ("asia", 90, 30, 0)]);
        assert_eq!(
            shares(&well, &few).as_deref(),
            Some("asia 0.0 % \u{2192} 21.9 %, east 100.0 % \u{2192} 37.5 %, west 0.0 % \u{2192} 40.6 %")
        );
        assert_eq!(cause(&well, &few), "east has 8 of 30 ready, had 30 of 30");
        let near = groups(&[("east", 0, 8, 22), ("west", 31, 30, 0), ("asia", 15, 30, 0)]);
        assert_eq!(cause(&few, &near), "asia is in ring 2, was in 4 (15.0ms)");
        let mut silent = groups(&[("east", 0, 8, 22), ("west", 31, 0, 30), ("asia", 90, 30, 0)]);
        silent[1].answers = false;
        assert_eq!(cause(&few, &silent), "the gateways of west do not answer");
        assert_eq!(cause(&silent, &few), "the gateways of west answer again");
        assert_eq!(cause(&few, &few[..2]), "asia has no endpoints");
        assert_eq!(cause(&few[..2], &few), "asia has endpoints, 30 of 30 ready");
        assert_eq!(cause(&few, &[]), "steering was turned off");
        assert_eq!(cause(&[], &few), "steering was turned on");
        assert_eq!(cause(&few, &few), "the settings of steering have changed");
        let many: Vec<String> = (0..200).map(|number| format!("n{number}")).collect();
        let many: Vec<_> = many.iter().map(|name| (name.as_str(), 31, 1, 0)).collect();
        let told = cause(&well, &groups(&many));
        assert!(told.ends_with("and 199 more") && told.len() < 300, "{told}");
    }

    #[test]
    fn a_flood_of_changes_writes_few_lines_and_counts_the_rest() {
        let start = Instant::now();
        let mut window = Window::new(start);
        let shown = (0..2_000).filter(|_| window.counts()).count();
        assert_eq!((shown, window.renew(start + WINDOW - EVERY)), (LINES_MAX, 0));
        assert_eq!(window.renew(start + WINDOW), 2_000 - LINES_MAX);
        assert!(window.counts());
        assert_eq!(window.renew(start + 2 * WINDOW), 0);
    }
}
