//! The times at which endpoints are checked, and the results of their checks. Pure: time is an argument, in milliseconds.
//!
//! Each endpoint is checked at a fixed offset within its interval; the offset is a hash of its address. So the checks of
//! many endpoints are spread evenly, and two gateways check one endpoint at the same time only if their intervals happen to
//! begin together. While the limit of simultaneous checks is reached, due checks wait, and the longest overdue begins
//! first; the intervals that pass meanwhile are skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::clock::milliseconds;
use crate::upstreams::beliefs::last_failure_of;
use crate::upstreams::{CheckResult, Failure};
use isthmus_model::name::HostName;
use isthmus_model::reason::Reason;
use isthmus_settings::tuning::HealthCheck;
use isthmus_snapshot::candidates::{EndpointKey, service_of};
use isthmus_upgrade::belief::CheckBelief;

/// The time in milliseconds after which a check that waits for capacity is late.
const LATE: u64 = 1_000;

/// A service port or route for which an address is checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct User {
    /// The group of the endpoints: a service port (`hostname:port`) or the key of a route.
    pub(super) group: Arc<str>,
    /// The settings of the check.
    pub(super) check: HealthCheck,
    /// The bytes that the endpoints expect first: a PROXY header, or nothing.
    pub(super) greeting: &'static [u8],
    /// The other addresses of the endpoint; `None` if it has one.
    pub(super) others: Option<Arc<[IpAddr]>>,
}

/// A check that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// The first address of the endpoint.
    pub(super) address: SocketAddr,
    /// The other addresses of the endpoint.
    pub(super) others: Option<Arc<[IpAddr]>>,
    /// The longest time that the check may take.
    pub(super) timeout: Duration,
    /// The bytes to send once the endpoint has accepted the connection.
    pub(super) greeting: &'static [u8],
    /// The server name of the ClientHello to send after the greeting, if one is to be sent.
    pub(super) name: Option<HostName>,
}

/// The result of an endpoint's checks, for one of the services that use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// The key of the endpoint in the group of this service.
    pub(super) key: EndpointKey,
    /// The result of the checks.
    pub(super) result: CheckResult,
}

/// The checks that have waited too long for capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late {
    /// The number of checks that have waited for a second or more.
    pub count: usize,
    /// The longest time that a check has waited for capacity.
    pub longest: Duration,
}

/// The numbers of endpoints of one service or route that are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// The number of checked endpoints.
    pub checked: usize,
    /// The number of checked endpoints that are healthy.
    pub healthy: usize,
}

/// All endpoints that are checked.
#[derive(Default)]
pub(super) struct Schedule {
    endpoints: BTreeMap<SocketAddr, Checked>,
    /// The next check time and the address of each endpoint that is not being checked at the moment.
    turns: BTreeSet<(u64, SocketAddr)>,
}

/// An endpoint that is checked.
#[derive(Default)]
struct Checked {
    /// The services and routes that use the endpoint; at least one.
    users: Vec<User>,
    /// The time of the next check, or of the running check, in milliseconds.
    turn: u64,
    running: bool,
    /// The number of consecutive failed checks.
    failed: u32,
    /// The number of consecutive passed checks while the endpoint is unhealthy.
    passed: u32,
    unhealthy: bool,
}

impl Checked {
    /// Returns the strictest check settings of all users; `None` if there is no user.
    fn check(&self) -> Option<HealthCheck> {
        self.users.iter().map(|user| user.check.clone()).reduce(HealthCheck::strictest)
    }

    fn interval(&self) -> Option<Duration> {
        self.check().map(|check| check.interval)
    }

    /// Records the result of a check. Returns false if the endpoint is healthy and was so before.
    fn record(&mut self, result: &Result<(), Failure>, check: &HealthCheck) -> bool {
        match result {
            Ok(()) if self.failed == 0 && !self.unhealthy => return false,
            Ok(()) => {
                self.failed = 0;
                self.passed += 1;
                self.unhealthy &= self.passed < check.healthy_after;
                self.passed = if self.unhealthy { self.passed } else { 0 };
            }
            Err(_) => {
                self.passed = 0;
                self.failed = self.failed.saturating_add(1);
                self.unhealthy |= self.failed >= check.unhealthy_after;
            }
        }
        true
    }

    /// Returns the result of the checks for a group that uses the endpoint.
    fn finding(&self, group: &Arc<str>, address: SocketAddr, failure: Option<Failure>) -> Finding {
        let key = EndpointKey { group: group.clone(), address };
        Finding { key, result: CheckResult { failed: self.failed, unhealthy: self.unhealthy, failure } }
    }
}

impl Schedule {
    /// Adds a user of an address. `recalled` is the result of the checks of an earlier process. If the address is unhealthy, or its last
    /// check there has failed, returns that verdict for the new user.
    pub(super) fn add(
        &mut self,
        address: SocketAddr,
        user: User,
        recalled: Option<CheckBelief>,
        now: u64,
    ) -> Option<Finding> {
        let known = self.endpoints.entry(address).or_default();
        if known.users.contains(&user) {
            return None;
        }
        let before = known.interval();
        let mut failure = None;
        if let Some(CheckBelief { address: _, checked: _, failed, unhealthy, last_failure }) = recalled {
            (known.failed, known.unhealthy) = (failed, unhealthy);
            failure = last_failure.and_then(last_failure_of);
        }
        let failure = failure.map(|last| Failure { reason: last.reason, detail: last.detail });
        let is_known = known.unhealthy || failure.is_some();
        let finding = is_known.then(|| known.finding(&user.group, address, failure));
        known.users.push(user);
        self.settle(address, before, now);
        finding
    }

    /// Removes a user, which is a service port or a route, from an address. An address without users is not checked. If the
    /// address was failing and no other user of the same group uses it, returns a finding that clears the group's verdict.
    pub(super) fn remove(&mut self, address: SocketAddr, user: &User, now: u64) -> Option<Finding> {
        let known = self.endpoints.get_mut(&address)?;
        let at = known.users.iter().position(|one| one == user)?;
        let before = known.interval();
        known.users.swap_remove(at);
        let is_used = known.users.iter().any(|one| one.group == user.group);
        let was_failing = known.failed > 0 || known.unhealthy;
        self.settle(address, before, now);
        let key = EndpointKey { group: user.group.clone(), address };
        (was_failing && !is_used).then(|| Finding { key, result: CheckResult::default() })
    }

    /// Removes an endpoint without users. If the interval differs from the one before, gives the endpoint a new turn, so that
    /// the changed interval applies at once.
    fn settle(&mut self, address: SocketAddr, before: Option<Duration>, now: u64) {
        let Some(known) = self.endpoints.get_mut(&address) else { return };
        match known.interval() {
            None => {
                self.turns.remove(&(known.turn, address));
                self.endpoints.remove(&address);
            }
            interval if interval == before || known.running => {}
            Some(interval) => {
                self.turns.remove(&(known.turn, address));
                known.turn = now + offset(address, interval);
                self.turns.insert((known.turn, address));
            }
        }
    }

    /// Returns the time of the next check.
    pub(super) fn next(&self) -> Option<u64> {
        self.turns.first().map(|(turn, _)| *turn)
    }

    /// Begins the next check that is due.
    pub(super) fn begin(&mut self, now: u64) -> Option<Due> {
        self.next().filter(|turn| *turn <= now)?;
        let (_, address) = self.turns.pop_first()?;
        let known = self.endpoints.get_mut(&address);
        debug_assert!(
            known.as_ref().is_some_and(|known| !known.running),
            "{address} has a turn and is not free"
        );
        let known = known?;
        let check = known.check()?;
        known.running = true;
        let greeting = known.users.iter().map(|user| user.greeting).max_by_key(|bytes| bytes.len());
        let (timeout, greeting) = (check.timeout.min(check.interval), greeting.unwrap_or_default());
        let others = known.users.iter().find_map(|user| user.others.clone());
        Some(Due { address, others, timeout, greeting, name: check.tls })
    }

    /// Records the result of a check; [`Reason::Internal`] says nothing about the endpoint. Returns findings if they may
    /// differ from those of the last check.
    pub(super) fn end(&mut self, address: SocketAddr, result: Result<(), Failure>, now: u64) -> Vec<Finding> {
        // If the endpoint was removed during the check, and perhaps added again, the result is not for the endpoint that is
        // in the schedule.
        let known = self.endpoints.get_mut(&address).filter(|known| known.running);
        let Some((known, check)) = known.and_then(|known| known.check().map(|check| (known, check))) else {
            return Vec::new();
        };
        known.running = false;
        let interval = milliseconds(check.interval).max(1);
        known.turn += (now.saturating_sub(known.turn) / interval + 1) * interval;
        self.turns.insert((known.turn, address));
        if result == Err(Reason::Internal.into()) || !known.record(&result, &check) {
            return Vec::new();
        }
        let failure = result.err();
        let groups: BTreeSet<&Arc<str>> = known.users.iter().map(|user| &user.group).collect();
        groups.into_iter().map(|group| known.finding(group, address, failure.clone())).collect()
    }

    /// Returns the checks that have waited too long for capacity; `None` if there are none.
    pub(super) fn late(&self, now: u64) -> Option<Late> {
        let waited = now.saturating_sub(self.next()?);
        if waited < LATE {
            return None;
        }
        let count = self.turns.iter().take_while(|(turn, _)| turn + LATE <= now).count();
        Some(Late { count, longest: Duration::from_millis(waited) })
    }

    /// Returns true if no endpoint is checked.
    pub(super) fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// Counts the checked and healthy endpoints, by service and route. An address counts once for all ports of a service.
    pub(super) fn shares(&self) -> BTreeMap<Arc<str>, Share> {
        let mut shares = BTreeMap::<&str, Share>::new();
        for known in self.endpoints.values() {
            let services: BTreeSet<&str> = known.users.iter().map(|user| service_of(&user.group)).collect();
            for service in services {
                let share = shares.entry(service).or_default();
                share.checked += 1;
                share.healthy += usize::from(!known.unhealthy);
            }
        }
        shares.into_iter().map(|(service, share)| (service.into(), share)).collect()
    }
}

/// Returns the offset within an interval at which an address is checked, in milliseconds. A hash of the address spreads the
/// checks.
fn offset(address: SocketAddr, interval: Duration) -> u64 {
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    hasher.finish() % milliseconds(interval).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_upgrade::belief::Present;

    const CHECK: HealthCheck = HealthCheck {
        interval: Duration::from_millis(1_000),
        timeout: Duration::from_millis(300),
        unhealthy_after: 3,
        healthy_after: 2,
        tls: None,
    };

    fn user(group: &str) -> User {
        User { group: group.into(), check: CHECK, greeting: &[], others: None }
    }

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port))
    }

    fn key(group: &str, port: u16) -> EndpointKey {
        EndpointKey { group: group.into(), address: address(port) }
    }

    /// Begins the next check at the time it is due, and ends it at once; returns that time and the findings.
    fn check(schedule: &mut Schedule, result: Result<(), Reason>) -> (u64, Vec<Finding>) {
        let at = schedule.next().expect("a turn");
        assert_eq!(
            at.checked_sub(1).and_then(|before| schedule.begin(before)),
            None,
            "its turn has not come"
        );
        let due = schedule.begin(at).expect("due");
        (at, schedule.end(due.address, result.map_err(Failure::from), at))
    }

    #[test]
    fn verdicts_need_results_in_a_row() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.add(address(1), user("a"), None, 5_000), None);
        let refused = Err(Reason::EndpointRefused);
        let results = [
            (Ok(()), None),
            (refused, Some((1, false))),
            (refused, Some((2, false))),
            (Ok(()), Some((0, false))),
            (refused, Some((1, false))),
            (refused, Some((2, false))),
            (refused, Some((3, true))),
            (refused, Some((4, true))),
            (Ok(()), Some((0, true))),
            (refused, Some((1, true))),
            (Ok(()), Some((0, true))),
            (Ok(()), Some((0, false))),
            (Ok(()), None),
        ];
        for (step, (result, expected)) in results.into_iter().enumerate() {
            let (_, found) = check(&mut schedule, result);
            let found = found.first().map(|one| (one.result.failed, one.result.unhealthy));
            assert_eq!(found, expected, "step {step}");
        }
    }

    #[test]
    fn an_endpoint_keeps_its_place_in_the_interval_and_leaves_out_turns_that_passed() {
        let mut schedule = Schedule::default();
        schedule.add(address(1), user("a"), None, 0);
        let (first, _) = check(&mut schedule, Ok(()));
        assert!(first < 1_000);
        let due = schedule.begin(first + 1_000).expect("the next turn");
        assert_eq!(schedule.next(), None, "one check of an endpoint at a time");
        schedule.end(due.address, Ok(()), first + 4_500);
        assert_eq!(schedule.next(), Some(first + 5_000));
    }

    #[test]
    fn checks_of_many_endpoints_are_spread_over_the_interval() {
        let mut schedule = Schedule::default();
        for port in 1..=1_000 {
            schedule.add(address(port), user("a"), None, 0);
        }
        let mut tenths = [0; 10];
        for _ in 0..1_000 {
            let (at, _) = check(&mut schedule, Ok(()));
            tenths[usize::try_from(at / 100).expect("within the interval")] += 1;
        }
        assert!(tenths.iter().all(|count| (60..=140).contains(count)), "{tenths:?}");
    }

    #[test]
    fn services_that_share_an_address_share_its_check_and_its_verdict() {
        let mut schedule = Schedule::default();
        schedule.add(address(1), user("a"), None, 0);
        let strict = HealthCheck { unhealthy_after: 1, healthy_after: 4, ..CHECK };
        schedule.add(address(1), User { check: strict.clone(), ..user("b") }, None, 0);
        let (_, found) = check(&mut schedule, Err(Reason::EndpointTimeout));
        let keys: Vec<&EndpointKey> = found.iter().map(|one| &one.key).collect();
        assert_eq!(keys, [&key("a", 1), &key("b", 1)]);
        assert!(found.iter().all(|one| one.result.unhealthy), "the strictest settings apply");
        // A service that joins receives the known verdict; for a service that leaves, the verdict is cleared.
        let joined = schedule.add(address(1), user("c"), None, 0).expect("a finding");
        assert!(joined.key == key("c", 1) && joined.result.unhealthy);
        let left = schedule.remove(address(1), &user("c"), 0).expect("a finding");
        assert!(left.key == key("c", 1) && left.result == CheckResult::default());
        assert_eq!(schedule.shares()["a"], Share { checked: 1, healthy: 0 });
        // If a service changes its settings, the known verdict stays in force.
        let other = User { check: HealthCheck { healthy_after: 1, ..strict.clone() }, ..user("b") };
        schedule.add(address(1), other.clone(), None, 0);
        assert_eq!(schedule.remove(address(1), &User { check: strict, ..user("b") }, 0), None);
        assert_eq!(schedule.shares()["b"], Share { checked: 1, healthy: 0 });
        schedule.remove(address(1), &user("a"), 0);
        let (_, found) = check(&mut schedule, Ok(()));
        assert!(!found[0].result.unhealthy, "one passed check is enough for the service that is left");
        schedule.remove(address(1), &other, 0);
        assert!(schedule.is_empty() && schedule.next().is_none() && schedule.shares().is_empty());
    }

    #[test]
    fn a_check_that_outlives_its_endpoint_says_nothing() {
        let mut schedule = Schedule::default();
        schedule.add(address(1), user("a"), None, 0);
        let due = schedule.begin(1_000).expect("due");
        assert_eq!(schedule.remove(address(1), &user("a"), 1_000), None);
        schedule.add(address(1), user("a"), None, 1_000);
        assert_eq!(schedule.end(due.address, Err(Reason::EndpointTimeout.into()), 1_300), []);
        assert_eq!(schedule.turns.len(), 1);
        schedule.remove(address(1), &user("a"), 3_000);
        assert_eq!(schedule.end(due.address, Err(Reason::EndpointTimeout.into()), 3_300), []);
        assert!(schedule.is_empty() && schedule.next().is_none());
    }

    #[test]
    fn a_fault_of_this_process_is_no_verdict_and_waiting_checks_are_counted() {
        let mut schedule = Schedule::default();
        for port in 1..=3 {
            schedule.add(address(port), user("a"), None, 0);
        }
        let due = schedule.begin(1_000).expect("due");
        assert_eq!(schedule.end(due.address, Err(Reason::Internal.into()), 1_000), []);
        assert_eq!(schedule.late(1_000), None);
        let late = schedule.late(3_000).expect("late");
        assert!(late.count >= 2 && late.longest >= Duration::from_secs(2), "{late:?}");
    }

    #[test]
    fn an_endpoint_that_was_unhealthy_in_an_earlier_process_is_so_until_its_checks_pass() {
        let present = Present::now();
        let belief = |port, checked| CheckBelief {
            address: address(port),
            checked,
            failed: 3,
            unhealthy: true,
            last_failure: None,
        };
        let mut schedule = Schedule::default();
        let found = [(1, "a"), (1, "b"), (2, "a")].map(|(port, group)| {
            let recalled = (port == 1 && group == "a").then(|| belief(port, present.moment));
            let found = schedule.add(address(port), user(group), recalled, 0);
            found.map(|found| (found.key, found.result.unhealthy))
        });
        assert_eq!(found, [Some((key("a", 1), true)), Some((key("b", 1), true)), None]);
        schedule.remove(address(2), &user("a"), 0);
        let (_, found) = check_twice(&mut schedule);
        assert!(found.iter().all(|found| !found.result.unhealthy), "two passed checks");
    }

    /// Passes two checks; returns the time and the findings of the second one.
    fn check_twice(schedule: &mut Schedule) -> (u64, Vec<Finding>) {
        check(schedule, Ok(()));
        check(schedule, Ok(()))
    }

    #[test]
    fn a_shorter_interval_holds_at_once() {
        let mut schedule = Schedule::default();
        let slow = User { check: HealthCheck { interval: Duration::from_secs(3600), ..CHECK }, ..user("a") };
        schedule.add(address(1), slow, None, 0);
        schedule.add(address(1), user("b"), None, 0);
        assert!(schedule.next().is_some_and(|turn| turn < 1_000));
    }
}
