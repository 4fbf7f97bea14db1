//! The times at which endpoints are checked, and the results of their checks. Pure: time is an argument, in milliseconds.
//!
//! Each endpoint is checked at a fixed offset within its interval; the offset is a hash of its address. So the checks of
//! many endpoints are spread evenly, and two gateways check one endpoint at the same time only if their intervals happen to
//! begin together. While the limit of simultaneous checks is reached, due checks wait, and the longest overdue begins
//! first; the intervals that pass meanwhile are skipped.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;

use crate::clock::milliseconds;
use crate::upstreams::{CheckResult, Upstream};
use isthmus_model::reason::Reason;
use isthmus_snapshot::candidates::{EndpointKey, service_of};
use isthmus_snapshot::policy::HealthCheck;

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
}

/// An endpoint as a member of a group.
#[derive(Debug)]
pub(super) struct Member {
    /// The key of the endpoint in the group.
    pub(super) key: EndpointKey,
    /// The run-time state of the endpoint while its checks fail. It is not searched for at each of thousands of failing checks.
    pub(super) upstream: Option<Arc<Upstream>>,
}

/// A check that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// The address of the endpoint.
    pub(super) address: SocketAddr,
    /// The index of the endpoint in the schedule. It may be another one's by the end of the check.
    pub(super) index: usize,
    /// The longest time that the check may take.
    pub(super) timeout: Duration,
    /// The bytes to send once the endpoint has accepted the connection.
    pub(super) greeting: &'static [u8],
}

/// The result of an endpoint's checks, for one of the services that use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// The key of the endpoint in the group of this service.
    pub(super) key: EndpointKey,
    /// The result of the checks.
    pub(super) result: CheckResult,
}

/// The result of an endpoint's checks, for all services that use it.
#[derive(Debug)]
pub(super) struct Findings<'a> {
    /// The endpoint in the groups of these services.
    pub(super) members: &'a mut [Member],
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
///
/// The endpoints do not fit into the processor's caches together with all else, and each check is about another one. So a check
/// finds its endpoint by index, and needs nothing outside of its [`Checked`] while the endpoint is healthy.
#[derive(Default)]
pub(super) struct Schedule {
    endpoints: Slab<Checked>,
    /// The index of each endpoint in `endpoints`.
    indices: HashMap<SocketAddr, usize>,
    /// The next check time and the index of each endpoint that is not being checked at the moment.
    turns: BTreeSet<(u64, usize)>,
    /// The numbers of endpoints by service and route. An endpoint with several checked ports counts once for each.
    shares: BTreeMap<Arc<str>, Share>,
    /// The number of changes of `shares` so far.
    changes: u64,
}

/// An endpoint that is checked.
struct Checked {
    address: SocketAddr,
    users: Vec<User>,
    /// The endpoint in the groups of its users, each once.
    members: Vec<Member>,
    /// The strictest check settings among the services and routes that use the endpoint.
    check: HealthCheck,
    /// The longest greeting among the services and routes that use the endpoint.
    greeting: &'static [u8],
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
    /// Returns true if any port of the group's service uses the endpoint.
    fn is_used_by(&self, group: &str) -> bool {
        self.users.iter().any(|user| service_of(&user.group) == service_of(group))
    }

    fn result(&self, failure: Option<Reason>) -> CheckResult {
        CheckResult { failed: self.failed, unhealthy: self.unhealthy, failure }
    }
}

impl Schedule {
    /// Adds a user of an address. If the address is unhealthy, returns that verdict for the new user.
    pub(super) fn add(&mut self, address: SocketAddr, user: User, now: u64) -> Option<Finding> {
        let Some((index, known)) = self.known(address) else {
            self.count(&user.group, 1, 1);
            let (check, greeting) = (user.check, user.greeting);
            let turn = now + place(address, check.interval);
            let members = members(address, [&user.group]);
            let index = self.endpoints.insert(Checked {
                address,
                users: vec![user],
                members,
                check,
                greeting,
                turn,
                running: false,
                failed: 0,
                passed: 0,
                unhealthy: false,
            });
            self.indices.insert(address, index);
            self.turns.insert((turn, index));
            return None;
        };
        if known.users.contains(&user) {
            return None;
        }
        let key = EndpointKey { group: user.group.clone(), address };
        let is_new = !known.is_used_by(&user.group);
        let healthy = i64::from(!known.unhealthy);
        known.users.push(user);
        let finding = known.unhealthy.then(|| Finding { key: key.clone(), result: known.result(None) });
        if is_new {
            self.count(&key.group, 1, healthy);
        }
        self.settle(index, now);
        finding
    }

    /// Removes a user, which is a service port or a route, from an address. An address without users is not checked. If the
    /// address was failing and no other user of the same group uses it, returns a finding that clears the group's verdict.
    pub(super) fn remove(&mut self, address: SocketAddr, user: &User, now: u64) -> Option<Finding> {
        let (index, known) = self.known(address)?;
        let at = known.users.iter().position(|one| one == user)?;
        known.users.swap_remove(at);
        let is_used = known.users.iter().any(|one| one.group == user.group);
        let was_failing = known.failed > 0 || known.unhealthy;
        let (has_left, healthy) = (!known.is_used_by(&user.group), i64::from(!known.unhealthy));
        if known.users.is_empty() {
            let turn = known.turn;
            self.turns.remove(&(turn, index));
            self.indices.remove(&address);
            self.endpoints.remove(index);
        } else {
            self.settle(index, now);
        }
        if has_left {
            self.count(&user.group, -1, -healthy);
        }
        let key = EndpointKey { group: user.group.clone(), address };
        (was_failing && !is_used).then(|| Finding { key, result: CheckResult::default() })
    }

    /// Returns the endpoint at this address, and its index.
    fn known(&mut self, address: SocketAddr) -> Option<(usize, &mut Checked)> {
        let index = *self.indices.get(&address)?;
        Some((index, self.endpoints.get_mut(index)?))
    }

    /// Adds to the numbers of checked and healthy endpoints of the group's service.
    fn count(&mut self, group: &Arc<str>, checked: i64, healthy: i64) {
        self.changes += 1;
        let service = service_of(group);
        if !self.shares.contains_key(service) {
            let name = if service.len() == group.len() { group.clone() } else { service.into() };
            self.shares.insert(name, Share::default());
        }
        let Some(share) = self.shares.get_mut(service) else { return };
        let add =
            |count: usize, more: i64| count.checked_add_signed(isize::try_from(more).unwrap_or_default());
        let (checked, healthy) = (add(share.checked, checked), add(share.healthy, healthy));
        debug_assert!(checked.is_some() && healthy.is_some() && healthy <= checked, "{share:?} of {service}");
        *share = Share { checked: checked.unwrap_or_default(), healthy: healthy.unwrap_or_default() };
        if share.checked == 0 {
            self.shares.remove(service);
        }
    }

    /// Derives from the users of this endpoint their groups and the strictest of their settings. A changed interval applies at once.
    fn settle(&mut self, index: usize, now: u64) {
        let Some(known) = self.endpoints.get_mut(index) else { return };
        known.members = members(known.address, known.users.iter().map(|user| &user.group));
        let greeting = known.users.iter().map(|user| user.greeting).max_by_key(|bytes| bytes.len());
        known.greeting = greeting.unwrap_or_default();
        let Some(check) = known.users.iter().map(|user| user.check).reduce(HealthCheck::strictest) else {
            return;
        };
        let before = std::mem::replace(&mut known.check, check);
        if before.interval != check.interval && !known.running {
            self.turns.remove(&(known.turn, index));
            known.turn = now + place(known.address, check.interval);
            self.turns.insert((known.turn, index));
        }
    }

    /// Returns the time of the next check.
    pub(super) fn next(&self) -> Option<u64> {
        self.turns.first().map(|(turn, _)| *turn)
    }

    /// Begins the next check that is due.
    pub(super) fn begin(&mut self, now: u64) -> Option<Due> {
        if self.next()? > now {
            return None;
        }
        let (_, index) = self.turns.pop_first()?;
        let known = self.endpoints.get_mut(index);
        debug_assert!(
            known.as_ref().is_some_and(|known| !known.running),
            "endpoint {index} has a turn and is not free"
        );
        let known = known?;
        known.running = true;
        let timeout = known.check.timeout.min(known.check.interval);
        Some(Due { address: known.address, index, timeout, greeting: known.greeting })
    }

    /// Records the result of a check; `None` if the check says nothing about the endpoint. Returns findings if they may differ
    /// from those of the last check.
    pub(super) fn end(
        &mut self,
        due: &Due,
        result: Option<Result<(), Reason>>,
        now: u64,
    ) -> Option<Findings<'_>> {
        // The endpoint was removed, and perhaps added again, during the check: the result is not for the endpoint that is
        // in the schedule.
        let known = self.endpoints.get_mut(due.index);
        let known = known.filter(|known| known.running && known.address == due.address)?;
        known.running = false;
        let interval = milliseconds(known.check.interval).max(1);
        known.turn += (now.saturating_sub(known.turn) / interval + 1) * interval;
        self.turns.insert((known.turn, due.index));
        let was_unhealthy = known.unhealthy;
        let result = result?;
        match result {
            Ok(()) if known.failed == 0 && !known.unhealthy => return None,
            Ok(()) => {
                known.failed = 0;
                known.passed += 1;
                if known.passed >= known.check.healthy_after {
                    known.unhealthy = false;
                }
                known.passed = if known.unhealthy { known.passed } else { 0 };
            }
            Err(_) => {
                known.passed = 0;
                known.failed = known.failed.saturating_add(1);
                known.unhealthy |= known.failed >= known.check.unhealthy_after;
            }
        }
        if known.unhealthy != was_unhealthy {
            let healthy = if was_unhealthy { 1 } else { -1 };
            let mut groups: Vec<Arc<str>> =
                known.members.iter().map(|member| member.key.group.clone()).collect();
            groups.sort_by(|one, other| service_of(one).cmp(service_of(other)));
            groups.dedup_by(|one, other| service_of(one) == service_of(other));
            groups.iter().for_each(|group| self.count(group, 0, healthy));
        }
        let known = self.endpoints.get_mut(due.index)?;
        let result = known.result(result.err());
        Some(Findings { members: &mut known.members, result })
    }

    /// Returns the checks that have waited too long for capacity; `None` if there are none.
    pub(super) fn late(&self, now: u64) -> Option<Late> {
        let (first, _) = self.turns.first()?;
        let waited = now.saturating_sub(*first);
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

    /// Returns the numbers of checked and healthy endpoints, by service and route.
    pub(super) fn shares(&self) -> &BTreeMap<Arc<str>, Share> {
        &self.shares
    }

    /// Returns a count that increases with each change of [`Self::shares`].
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }
}

/// Returns the endpoint as a member of these groups, of each once.
fn members<'a>(address: SocketAddr, groups: impl IntoIterator<Item = &'a Arc<str>>) -> Vec<Member> {
    let groups: BTreeSet<&Arc<str>> = groups.into_iter().collect();
    let key = |group: &Arc<str>| EndpointKey { group: group.clone(), address };
    groups.into_iter().map(|group| Member { key: key(group), upstream: None }).collect()
}

/// Returns the offset within an interval at which an address is checked, in milliseconds. A hash of the address spreads the
/// checks.
pub(super) fn place(address: SocketAddr, interval: Duration) -> u64 {
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    hasher.finish() % milliseconds(interval).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECK: HealthCheck = HealthCheck {
        interval: Duration::from_millis(1_000),
        timeout: Duration::from_millis(300),
        unhealthy_after: 3,
        healthy_after: 2,
    };

    fn user(group: &str) -> User {
        User { group: group.into(), check: CHECK, greeting: &[] }
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
        (at, end(schedule, &due, Some(result), at))
    }

    fn end(schedule: &mut Schedule, due: &Due, result: Option<Result<(), Reason>>, now: u64) -> Vec<Finding> {
        let found = schedule.end(due, result, now);
        let of_each = |found: Findings<'_>| {
            let finding = |member: &Member| Finding { key: member.key.clone(), result: found.result };
            found.members.iter().map(finding).collect()
        };
        found.map(of_each).unwrap_or_default()
    }

    #[test]
    fn verdicts_need_results_in_a_row() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.add(address(1), user("a"), 5_000), None);
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
        schedule.add(address(1), user("a"), 0);
        let (first, _) = check(&mut schedule, Ok(()));
        assert!(first < 1_000);
        let due = schedule.begin(first + 1_000).expect("the next turn");
        assert_eq!(schedule.next(), None, "one check of an endpoint at a time");
        schedule.end(&due, Some(Ok(())), first + 4_500);
        assert_eq!(schedule.next(), Some(first + 5_000));
    }

    #[test]
    fn checks_of_many_endpoints_are_spread_over_the_interval() {
        let mut schedule = Schedule::default();
        for port in 1..=1_000 {
            schedule.add(address(port), user("a"), 0);
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
        schedule.add(address(1), user("a"), 0);
        let strict = HealthCheck { unhealthy_after: 1, healthy_after: 4, ..CHECK };
        schedule.add(address(1), User { check: strict, ..user("b") }, 0);
        let (_, found) = check(&mut schedule, Err(Reason::EndpointTimeout));
        let keys: Vec<&EndpointKey> = found.iter().map(|one| &one.key).collect();
        assert_eq!(keys, [&key("a", 1), &key("b", 1)]);
        assert!(found.iter().all(|one| one.result.unhealthy), "the strictest settings apply");
        // A service that joins receives the known verdict; for a service that leaves, the verdict is cleared.
        let joined = schedule.add(address(1), user("c"), 0).expect("a finding");
        assert!(joined.key == key("c", 1) && joined.result.unhealthy);
        let left = schedule.remove(address(1), &user("c"), 0).expect("a finding");
        assert!(left.key == key("c", 1) && left.result == CheckResult::default());
        assert_eq!(schedule.shares()["a"], Share { checked: 1, healthy: 0 });
        // If a service changes its settings, the known verdict stays in force.
        let other = User { check: HealthCheck { healthy_after: 1, ..strict }, ..user("b") };
        schedule.add(address(1), other.clone(), 0);
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
        schedule.add(address(1), user("a"), 0);
        let due = schedule.begin(1_000).expect("due");
        assert_eq!(schedule.remove(address(1), &user("a"), 1_000), None);
        schedule.add(address(1), user("a"), 1_000);
        assert_eq!(end(&mut schedule, &due, Some(Err(Reason::EndpointTimeout)), 1_300), []);
        assert_eq!(schedule.turns.len(), 1);
        // Nor about an endpoint that has taken its index.
        let due = schedule.begin(3_000).expect("due");
        schedule.remove(address(1), &user("a"), 3_000);
        schedule.add(address(2), user("a"), 3_000);
        let other = schedule.begin(5_000).expect("due");
        assert_eq!((other.index, other.address), (due.index, address(2)));
        assert_eq!(end(&mut schedule, &due, Some(Err(Reason::EndpointTimeout)), 5_000), []);
        assert_eq!(end(&mut schedule, &other, Some(Err(Reason::EndpointTimeout)), 5_000).len(), 1);
    }

    #[test]
    fn a_fault_of_this_process_is_no_verdict_and_waiting_checks_are_counted() {
        let mut schedule = Schedule::default();
        for port in 1..=3 {
            schedule.add(address(port), user("a"), 0);
        }
        let due = schedule.begin(1_000).expect("due");
        assert_eq!(end(&mut schedule, &due, None, 1_000), []);
        assert_eq!(schedule.late(1_000), None);
        let late = schedule.late(3_000).expect("late");
        assert!(late.count >= 2 && late.longest >= Duration::from_secs(2), "{late:?}");
    }

    #[test]
    fn a_shorter_interval_holds_at_once() {
        let mut schedule = Schedule::default();
        let slow = User { check: HealthCheck { interval: Duration::from_secs(3600), ..CHECK }, ..user("a") };
        schedule.add(address(1), slow, 0);
        schedule.add(address(1), user("b"), 0);
        assert!(schedule.next().is_some_and(|turn| turn < 1_000));
    }
}
