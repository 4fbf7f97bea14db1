//! Tests the lifecycle of a registry step by step, in simulated time.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::*;
use crate::spec::RegistryKind;
use crate::spec::etcd::{EtcdSpec, PREFIX};
use isthmus_document::services::read_registry;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{Service, ServiceKey};
use isthmus_settings::scope::RegistryScope;

/// A registry and a time that the test advances.
struct Scenario {
    registry: Lifecycle,
    now: Instant,
    options: Options,
}

fn spec() -> RegistrySpec {
    RegistrySpec {
        name: "west.yaml".into(),
        cluster: ClusterId::new("west"),
        network: Network::default(),
        scope: RegistryScope::default(),
        kind: RegistryKind::File { path: PathBuf::from("west.yaml") },
    }
}

#[test]
fn a_copy_is_needed_after_a_failure_or_shortly_before_the_start_stops_waiting() {
    let needs = |scenario: &Scenario, seconds: u64| {
        scenario.registry.needs_copy(scenario.now + Duration::from_secs(seconds), &scenario.options)
    };
    let mut scenario = Scenario::new();
    scenario.options.start_timeout = Duration::from_secs(8);
    assert_eq!([0, 4, 5, 7].map(|seconds| needs(&scenario, seconds)), [false, false, true, true]);
    scenario.apply(vec![Change::Begin]);
    assert!(needs(&scenario, 5), "a listing that has begun may never end");
    scenario.bad();
    assert!(needs(&scenario, 0));
    scenario.good(1);
    assert!(!needs(&scenario, 5));
    let later = Lifecycle::new(spec(), Epoch(1));
    assert!(
        !later.needs_copy(scenario.now + Duration::from_secs(60), &scenario.options),
        "no start waits for it"
    );
}

impl Scenario {
    fn new() -> Self {
        let expire_after = Some(Duration::from_secs(600));
        let options = Options { expire_after, ..Options::default() };
        let now = Instant::now();
        Self { registry: Lifecycle::from_start(spec(), Epoch(1), now), now, options }
    }

    fn apply(&mut self, batch: Vec<Change>) -> Effect {
        let effect = self.registry.apply(batch, self.now, &self.options);
        self.registry.shard.check_invariants();
        effect
    }

    /// Lists this many services; returns the number of services that have changed.
    fn good(&mut self, services: usize) -> usize {
        self.apply(listing(services)).dirty.services.len()
    }

    fn bad(&mut self) {
        self.apply(vec![Change::Failed(vec!["gone".to_owned()])]);
    }

    fn bad_with(&mut self, copy: usize) {
        self.bad();
        self.registry.start_from_copy(items(copy), SystemTime::UNIX_EPOCH, self.now, &self.options);
    }

    /// Advances the time; returns the number of services that change as a result.
    fn pass(&mut self, seconds: u64) -> Option<usize> {
        self.now += Duration::from_secs(seconds);
        let effect = self.registry.tick(self.now, &self.options);
        effect.map(|effect| effect.dirty.services.len())
    }

    #[track_caller]
    fn is(&self, state: RegistryState, services: usize) {
        let status = self.registry.status();
        assert_eq!((status.state, status.items.services), (state, services), "{:?}", status.problems);
    }
}

fn service(index: usize) -> Arc<Service> {
    let text = format!(
        "services: [{{hostname: s{index}.mesh, namespace: n, ports: [{{name: a, port: 1}}], endpoints: [{{address: 10.0.0.1}}]}}]"
    );
    let listing = read_registry("x".as_ref(), &text, &ClusterId::new("west"), &Network::default());
    listing.expect("good").services.into_values().next().expect("one")
}

fn items(services: usize) -> Vec<Item> {
    (0..services).map(|index| Item::Service(service(index))).collect()
}

fn puts(services: usize) -> Vec<Change> {
    items(services).into_iter().map(Change::Put).collect()
}

fn listing(services: usize) -> Vec<Change> {
    [vec![Change::Begin], puts(services), vec![Change::Complete]].concat()
}

fn key(index: usize) -> Key {
    let hostname = HostName::parse(&format!("s{index}.mesh")).expect("legal");
    Key::Service(ServiceKey { namespace: "n".into(), hostname })
}

fn flaws(scenario: &Scenario) -> Vec<String> {
    scenario.registry.status().flaws.iter().flat_map(|lines| lines.iter()).cloned().collect()
}

fn removals(services: std::ops::Range<usize>) -> Vec<Change> {
    services.map(|index| Change::Remove(key(index))).collect()
}

#[test]
fn it_is_demoted_and_withdrawn_in_time_and_comes_back_at_once() {
    let mut scenario = Scenario::new();
    scenario.is(RegistryState::Missing, 0);
    assert_eq!(scenario.good(3), 3);
    scenario.is(RegistryState::Live, 3);
    scenario.bad();
    scenario.is(RegistryState::Stale, 3);
    assert_eq!(scenario.registry.status().problems, ["gone"]);
    assert_eq!(scenario.pass(119), None);
    // A further failure does not restart the time until the registry is demoted.
    scenario.bad();
    assert_eq!(scenario.pass(1), Some(3));
    scenario.is(RegistryState::Demoted, 3);
    scenario.bad();
    assert_eq!(scenario.pass(1), None);
    assert_eq!(scenario.pass(479), Some(3));
    scenario.is(RegistryState::Expired, 3);
    assert_eq!(scenario.registry.shard.origin.standing, Standing::Expired);
    // When the registry is live again, all of its endpoints count again, so all services change.
    assert_eq!(scenario.good(3), 3);
    scenario.is(RegistryState::Live, 3);
    assert_eq!(scenario.registry.shard.origin.standing, Standing::Live);
    assert_eq!((scenario.pass(10_000), scenario.registry.status().problems), (None, vec![]));
}

#[test]
fn without_a_word_there_is_nothing_to_doubt() {
    let mut scenario = Scenario::new();
    scenario.bad();
    scenario.is(RegistryState::Missing, 0);
    assert_eq!(scenario.registry.status().problems, ["gone"]);
    assert_eq!(scenario.pass(10_000), None);
    scenario.is(RegistryState::Missing, 0);
}

#[test]
fn a_copy_stands_in_for_the_first_word_only() {
    let mut scenario = Scenario::new();
    scenario.bad_with(20);
    scenario.is(RegistryState::Stale, 20);
    assert_eq!(scenario.registry.status().read, Some(SystemTime::UNIX_EPOCH));
    scenario.bad_with(5);
    scenario.is(RegistryState::Stale, 20);
    assert_eq!(scenario.pass(120), Some(20));
    scenario.is(RegistryState::Demoted, 20);
    assert_eq!(scenario.good(19), 20);
    scenario.bad_with(5);
    scenario.is(RegistryState::Stale, 19);
}

#[test]
fn an_item_with_mistakes_that_was_never_good_here_is_that_of_the_copy() {
    let mut scenario = Scenario::new();
    let mut listing = listing(2);
    listing.insert(3, Change::Keep(key(4)));
    listing.insert(3, Change::Keep(key(9)));
    scenario.apply(listing);
    scenario.is(RegistryState::Live, 2);
    assert!(scenario.registry.needs_copy(scenario.now, &scenario.options));
    scenario.registry.start_from_copy(items(6), SystemTime::UNIX_EPOCH, scenario.now, &scenario.options);
    scenario.is(RegistryState::Live, 3);
    assert!(!scenario.registry.needs_copy(scenario.now, &scenario.options), "once");

    // It was corrected, or removed, before the copy was read.
    for change in [Change::Put(Item::Service(service(4))), Change::Remove(key(4))] {
        let mut scenario = Scenario::new();
        scenario.apply(vec![Change::Begin, Change::Keep(key(4)), Change::Complete]);
        scenario.apply(vec![change]);
        assert!(!scenario.registry.needs_copy(scenario.now, &scenario.options));
        let before = scenario.registry.status().items.services;
        scenario.registry.start_from_copy(items(6), SystemTime::UNIX_EPOCH, scenario.now, &scenario.options);
        scenario.is(RegistryState::Live, before);
    }
}

#[test]
fn a_suspicious_word_waits_and_is_dropped_by_a_better_one() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    assert_eq!(scenario.good(3), 0);
    scenario.is(RegistryState::Held, 20);
    assert!(
        scenario.registry.status().problems[0]
            .contains("it would leave 17 of 20 services without a ready endpoint")
    );
    assert_eq!(scenario.pass(29), None);
    assert_eq!(scenario.good(19), 1);
    scenario.is(RegistryState::Live, 19);
    assert_eq!(scenario.pass(100), None);
    // A newer update during the delay replaces the delayed update, and does not restart the delay.
    scenario.good(3);
    scenario.pass(20);
    scenario.good(2);
    assert_eq!(scenario.pass(10), Some(17));
    scenario.is(RegistryState::Live, 2);
}

#[test]
fn what_is_held_is_forgotten_when_the_registry_cannot_be_read() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    scenario.good(3);
    scenario.bad();
    scenario.is(RegistryState::Stale, 20);
    assert_eq!(scenario.pass(119), None);
    scenario.is(RegistryState::Stale, 20);
    // The registry stays demoted until an update is accepted.
    assert_eq!(scenario.pass(1), Some(20));
    scenario.is(RegistryState::Demoted, 20);
    scenario.good(3);
    scenario.is(RegistryState::Held, 20);
    assert_eq!(scenario.registry.shard.origin.standing, Standing::Demoted);
    scenario.bad();
    scenario.is(RegistryState::Demoted, 20);
    assert_eq!(scenario.pass(0), None);
    scenario.good(3);
    assert_eq!(scenario.pass(30), Some(20));
    scenario.is(RegistryState::Live, 3);
}

/// A registry whose store may be lost and made anew.
fn etcd(services: usize) -> Scenario {
    let mut scenario = Scenario::new();
    let spec = EtcdSpec { endpoints: Vec::new(), prefix: PREFIX.into(), tls: None, login: None };
    scenario.registry.spec.kind = RegistryKind::Etcd(spec);
    scenario.good(services);
    scenario
}

#[test]
fn an_empty_listing_is_held_for_ten_minutes_however_few_services_there_were() {
    let mut scenario = etcd(1);
    assert_eq!(scenario.good(0), 0);
    scenario.is(RegistryState::Held, 1);
    assert_eq!(scenario.pass(599), None);
    assert_eq!(scenario.good(0), 0, "it does not begin anew");
    assert_eq!(scenario.pass(1), Some(1));
    scenario.is(RegistryState::Live, 0);
    // A service that comes back ends it; what is removed one by one was removed on purpose.
    let mut scenario = etcd(2);
    scenario.good(0);
    scenario.good(1);
    scenario.is(RegistryState::Live, 1);
    scenario.apply(removals(0..1));
    scenario.is(RegistryState::Live, 0);
    // A mass withdrawal that becomes an empty listing is held for as long.
    let mut scenario = etcd(20);
    scenario.good(3);
    scenario.pass(20);
    scenario.good(0);
    assert_eq!(scenario.pass(580), None);
    assert_eq!(scenario.pass(20), Some(20));
    // A file says what its author wants.
    let mut scenario = Scenario::new();
    scenario.good(1);
    scenario.good(0);
    scenario.is(RegistryState::Live, 0);
}

#[test]
fn what_is_held_is_applied_by_an_order() {
    let mut scenario = etcd(2);
    assert!(scenario.registry.accept_held().is_none());
    scenario.good(0);
    assert!(scenario.registry.status().problems[0].contains("isthmus registry accept west.yaml"));
    let effect = scenario.registry.accept_held().expect("it was held");
    assert!(effect.accepted && effect.dirty.services.len() == 2);
    scenario.is(RegistryState::Live, 0);
    assert_eq!(scenario.pass(600), None);
}

#[test]
fn nothing_is_held_of_a_registry_that_counts_for_nothing_or_without_a_hold() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    scenario.bad();
    scenario.pass(600);
    scenario.is(RegistryState::Expired, 20);
    scenario.good(1);
    scenario.is(RegistryState::Live, 1);
    scenario.options.withdrawal_hold = Duration::ZERO;
    scenario.good(20);
    scenario.good(0);
    scenario.is(RegistryState::Live, 0);
}

#[test]
fn only_what_is_taken_in_is_kept_as_a_copy() {
    let mut scenario = Scenario::new();
    assert!(scenario.apply(listing(20)).accepted);
    assert!(!scenario.apply(listing(2)).accepted);
    assert!(scenario.apply(listing(20)).accepted);
}

#[test]
fn a_listing_takes_effect_when_it_is_complete_and_removes_what_it_does_not_name() {
    let mut scenario = Scenario::new();
    scenario.good(3);
    let begun = [vec![Change::Begin], puts(1)].concat();
    assert!(scenario.apply(begun.clone()).dirty.is_empty());
    scenario.is(RegistryState::Live, 3);
    // Changes after `Begin` belong to the listing.
    assert!(scenario.apply(vec![Change::Put(Item::Service(service(7)))]).dirty.is_empty());
    scenario.is(RegistryState::Live, 3);
    // `Keep` leaves an item of the listing as it is.
    let effect = scenario.apply(vec![Change::Keep(key(2)), Change::Complete]);
    let names: Vec<String> = effect.dirty.services.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["s1.mesh", "s7.mesh"]);
    scenario.is(RegistryState::Live, 3);
    // A new `Begin`, or a failure, discards the listing in progress.
    scenario.apply(begun);
    assert!(scenario.apply([vec![Change::Begin], puts(8)].concat()).dirty.is_empty());
    scenario.bad();
    scenario.is(RegistryState::Stale, 3);
    // A listing that only begins, and never ends, does not end the failure: the registry is demoted in time.
    for _ in 0..3 {
        scenario.apply(vec![Change::Begin]);
        assert!(scenario.apply(puts(2)).dirty.is_empty());
        scenario.is(RegistryState::Stale, 3);
    }
    assert_eq!(scenario.pass(120), Some(3));
    scenario.is(RegistryState::Demoted, 3);
    scenario.good(3);
    scenario.bad();
    assert_eq!(scenario.good(8), 5, "services 1, 3, 4, 5 and 6 are new");
    scenario.is(RegistryState::Live, 8);
}

#[test]
fn changes_are_applied_batch_by_batch() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    assert_eq!(scenario.apply(removals(0..2)).dirty.services.len(), 2);
    scenario.is(RegistryState::Live, 18);
    // An equal item is not a change.
    let again = scenario.apply(vec![Change::Put(Item::Service(service(5))), Change::Remove(key(99))]);
    assert!(again.dirty.is_empty() && again.accepted);
    // After a failure a batch without changes of items says nothing about the registry, unless it has `Readable`.
    scenario.bad();
    scenario.apply(vec![Change::Flawed { object: "x".into(), problems: Vec::new() }]);
    scenario.is(RegistryState::Stale, 18);
    assert!(scenario.apply(vec![Change::Readable]).dirty.is_empty());
    scenario.is(RegistryState::Live, 18);
    assert_eq!(scenario.registry.status().problems, Vec::<String>::new());
    // The registry was demoted meanwhile, so all of its services change.
    scenario.bad();
    assert_eq!(scenario.pass(120), Some(18));
    assert_eq!(scenario.apply(vec![Change::Readable]).dirty.services.len(), 18);
    scenario.is(RegistryState::Live, 18);
}

#[test]
fn changes_out_of_order_are_dropped_and_shown() {
    let mut scenario = Scenario::new();
    for batch in [puts(1), removals(0..1), vec![Change::Complete]] {
        assert!(scenario.apply(batch).dirty.is_empty());
        scenario.is(RegistryState::Missing, 0);
    }
    let problems = scenario.registry.status().problems;
    assert!(
        problems.len() == 2 && problems.iter().all(|one| one.contains("before a full listing")),
        "{problems:?}"
    );
    assert_eq!(scenario.good(2), 2);
    assert!(scenario.apply(vec![Change::Complete]).dirty.is_empty());
    scenario.is(RegistryState::Live, 2);
    // A listing that never completes changes nothing, however many items it names.
    scenario.apply(vec![Change::Begin]);
    for _ in 0..10 {
        assert!(scenario.apply(puts(50)).dirty.is_empty());
    }
    scenario.is(RegistryState::Live, 2);
}

#[test]
fn withdrawals_one_after_another_count_as_one() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    for index in 0..10 {
        assert_eq!(scenario.apply(removals(index..index + 1)).dirty.services.len(), 1, "{index}");
    }
    assert!(scenario.apply(removals(10..11)).dirty.is_empty());
    scenario.is(RegistryState::Held, 10);
    assert!(scenario.registry.status().problems[0].contains("it would leave 11 of 20 services"));
    // Services that are ready again do not count as lost.
    assert_eq!(scenario.apply(puts(1)).dirty.services.len(), 2);
    scenario.is(RegistryState::Live, 10);
    // After the window each loss counts by itself.
    assert_eq!(scenario.pass(30), None);
    assert_eq!(scenario.apply(removals(11..18)).dirty.services.len(), 7);
    scenario.is(RegistryState::Live, 3);
}

#[test]
fn what_is_held_is_changed_further_and_applied_once_it_has_persisted() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    assert!(scenario.apply(removals(0..15)).dirty.is_empty());
    scenario.is(RegistryState::Held, 20);
    assert!(scenario.apply(removals(15..16)).dirty.is_empty());
    assert_eq!(scenario.pass(29), None);
    assert_eq!(scenario.pass(1), Some(16));
    scenario.is(RegistryState::Live, 4);
    // Endpoints that come back while the mass withdrawal is held back change nothing.
    scenario.good(20);
    scenario.apply(removals(0..15));
    scenario.is(RegistryState::Held, 20);
    let back = scenario.apply(puts(20));
    assert!(back.dirty.is_empty() && back.accepted);
    scenario.is(RegistryState::Live, 20);
}

#[test]
fn a_listing_in_progress_knows_of_an_update_that_is_applied_meanwhile() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    scenario.apply(removals(0..15));
    scenario.apply(vec![Change::Begin]);
    assert_eq!(scenario.pass(30), Some(15), "the update that was held back");
    scenario.apply(puts(20));
    assert_eq!(scenario.apply(vec![Change::Complete]).dirty.services.len(), 15, "they are back");
    scenario.is(RegistryState::Live, 20);
    // A copy on disk that is read late has services that the registry does not list.
    let mut scenario = Scenario::new();
    scenario.apply(vec![Change::Begin]);
    scenario.registry.start_from_copy(items(5), SystemTime::UNIX_EPOCH, scenario.now, &scenario.options);
    scenario.apply(puts(3));
    assert_eq!(scenario.apply(vec![Change::Complete]).dirty.services.len(), 2, "they are gone");
    scenario.is(RegistryState::Live, 3);
}

#[test]
fn objects_with_mistakes_are_named_until_they_are_right_and_are_bounded() {
    let mut scenario = Scenario::new();
    scenario.good(2);
    let flawed = |object: &str, problems: &[&str]| Change::Flawed {
        object: object.into(),
        problems: problems.iter().map(|line| (*line).to_owned()).collect(),
    };
    scenario.apply(vec![flawed("a", &["a:1:2: wrong"])]);
    scenario.is(RegistryState::Live, 2);
    assert_eq!(flaws(&scenario), ["a:1:2: wrong"]);
    scenario.apply(vec![flawed("a", &[])]);
    assert_eq!(flaws(&scenario), Vec::<String>::new());
    let many = (0..FLAWS_MAX + 10).map(|index| flawed(&index.to_string(), &["x"; 50])).collect();
    scenario.apply(many);
    let status = scenario.registry.status();
    assert_eq!((status.flaws.len(), flaws(&scenario).len()), (FLAWS_MAX, FLAWS_MAX * FLAW_LINES_MAX));
}

#[test]
fn under_another_config_it_keeps_what_the_new_scope_lets_it_say() {
    let mut scenario = Scenario::new();
    scenario.good(4);
    let services = ["s1.mesh", "s2.mesh"].map(isthmus_snapshot::testing::pattern).to_vec();
    let narrow = RegistrySpec { scope: RegistryScope { services, ..RegistryScope::default() }, ..spec() };
    scenario.registry = scenario.registry.succeeded_by(narrow, Epoch(2));
    scenario.is(RegistryState::Live, 2);
    let names: BTreeSet<String> = scenario.registry.shard.hostnames().map(ToString::to_string).collect();
    assert_eq!(names, ["s1.mesh".to_owned(), "s2.mesh".to_owned()].into());
    // The new task must list before its changes are accepted.
    assert!(scenario.apply(removals(1..2)).dirty.is_empty());
    assert_eq!(scenario.good(4), 0);
    assert_eq!(scenario.registry.status().items.denied_items, 2);
}

#[test]
fn a_fault_of_the_program_leaves_the_last_good_state() {
    let mut scenario = Scenario::new();
    scenario.good(3);
    let before = scenario.registry.shard.clone();
    scenario.good(5);
    scenario.registry.contain((before, true), "index out of bounds", Epoch(2), scenario.now);
    assert_eq!(scenario.registry.epoch, Epoch(2));
    scenario.is(RegistryState::Stale, 3);
    assert_eq!(scenario.registry.status().problems, ["internal: index out of bounds"]);
    assert_eq!(scenario.good(3), 0);
    scenario.is(RegistryState::Live, 3);
    // A registry that was never read is missing again, so its copy is requested.
    let mut scenario = Scenario::new();
    let before = scenario.registry.shard.clone();
    scenario.good(5);
    scenario.registry.contain((before, false), "overflow", Epoch(3), scenario.now);
    scenario.is(RegistryState::Missing, 0);
    assert!(
        scenario.registry.needs_copy(scenario.now, &scenario.options)
            && scenario.registry.is_unread(scenario.now, &scenario.options)
    );
}

#[test]
fn a_listing_takes_the_place_of_what_was_withheld() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    scenario.apply(removals(0..15));
    scenario.is(RegistryState::Held, 20);
    assert_eq!(scenario.good(20), 0);
    scenario.is(RegistryState::Live, 20);
    // The next changes build on the listing.
    assert_eq!(scenario.apply(removals(0..1)).dirty.services.len(), 1);
    scenario.is(RegistryState::Live, 19);
}

#[test]
fn what_is_withheld_is_what_the_registry_said_last_also_after_a_failure() {
    let mut scenario = Scenario::new();
    scenario.good(20);
    scenario.apply(removals(0..15));
    scenario.bad();
    scenario.is(RegistryState::Stale, 20);
    // That the registry can be read again changes no item: the update stays held back.
    assert!(scenario.apply(vec![Change::Readable]).dirty.is_empty());
    scenario.is(RegistryState::Held, 20);
    scenario.bad();
    assert_eq!(scenario.apply(puts(14)).dirty.services.len(), 1);
    scenario.is(RegistryState::Live, 19);
}

/// Returns the registry of a peer that is demoted after 30 s without a link, and expires after 15 minutes.
fn of_a_peer() -> Scenario {
    use crate::spec::peer::PeerSpec;
    use isthmus_settings::peer::{Peer, PeerLimits};
    let (from, exports, imports) = (Vec::new(), Vec::new(), Vec::new());
    let peer = Peer {
        name: "west".into(),
        who: None,
        unused_link: None,
        from,
        exports,
        imports,
        limits: PeerLimits::default(),
        carry: Vec::new(),
    };
    let (stale_after, expire_after) = (Duration::from_secs(30), Duration::from_secs(900));
    let kind = RegistryKind::Peer(PeerSpec { peer: peer.into(), stale_after, expire_after });
    let (now, options) = (Instant::now(), Options::default());
    Scenario { registry: Lifecycle::from_start(RegistrySpec { kind, ..spec() }, Epoch(1), now), now, options }
}

#[test]
fn f_5_a_lost_peer_passes_through_its_stages_at_its_own_times() {
    let mut peer = of_a_peer();
    peer.good(3);
    peer.bad();
    peer.is(RegistryState::Stale, 3);
    assert_eq!((peer.pass(29), peer.pass(1)), (None, Some(3)));
    peer.is(RegistryState::Demoted, 3);
    // While the peer's gateways answer, its registry does not expire.
    for _ in 0..20 {
        assert_eq!(peer.pass(60), None);
        peer.apply(vec![Change::StillWorks]);
    }
    peer.is(RegistryState::Demoted, 3);
    assert_eq!((peer.pass(899), peer.pass(1)), (None, Some(3)));
    peer.is(RegistryState::Expired, 3);
    // The gateways answer again, so the expired registry becomes demoted.
    peer.apply(vec![Change::StillWorks]);
    assert_eq!(peer.pass(1), Some(3));
    peer.is(RegistryState::Demoted, 3);
    peer.good(3);
    peer.is(RegistryState::Live, 3);
}

#[test]
fn a_lost_peer_whose_config_changes_does_not_expire_while_its_gateways_answer() {
    let mut peer = of_a_peer();
    peer.good(3);
    peer.bad();
    assert_eq!(peer.pass(1_000 - 1), Some(3));
    peer.is(RegistryState::Expired, 3);
    peer.apply(vec![Change::StillWorks]);
    assert_eq!(peer.pass(1), Some(3));
    peer.is(RegistryState::Demoted, 3);
    // The task of the next config has not probed the gateways yet.
    peer.registry = peer.registry.succeeded_by(peer.registry.spec.clone(), Epoch(2));
    assert_eq!(peer.pass(1), None);
    peer.is(RegistryState::Demoted, 3);
}

#[test]
fn f_3_a_peer_that_restarts_empty_withdraws_nothing_within_the_guard() {
    let mut peer = of_a_peer();
    peer.good(20);
    assert!(peer.apply(removals(0..20)).dirty.services.is_empty());
    peer.is(RegistryState::Held, 20);
    assert_eq!(peer.pass(29), None);
    // The peer sends its services again before the end of the hold.
    peer.apply(puts(20));
    peer.is(RegistryState::Live, 20);
    peer.apply(removals(0..20));
    assert_eq!(peer.pass(30), Some(20));
    peer.is(RegistryState::Live, 0);
}

#[test]
fn what_a_peer_orders_to_forget_is_not_held_back_and_is_not_copied() {
    let order = || vec![Change::Forget, Change::Failed(vec!["the peer has ended the link".to_owned()])];
    let mut peer = of_a_peer();
    peer.good(20);
    let effect = peer.apply(order());
    assert_eq!((effect.dirty.services.len(), effect.accepted), (20, true));
    peer.is(RegistryState::Stale, 0);
    assert_eq!(peer.good(20), 20);
    peer.is(RegistryState::Live, 20);
    // `Change::Forget` also removes the items while an update is held back, and items that come from a copy.
    peer.apply(removals(0..20));
    peer.is(RegistryState::Held, 20);
    assert_eq!(peer.apply(order()).dirty.services.len(), 20);
    peer.is(RegistryState::Stale, 0);
    let mut restarted = of_a_peer();
    restarted.bad_with(20);
    restarted.is(RegistryState::Stale, 20);
    assert!(restarted.apply(order()).accepted);
    restarted.is(RegistryState::Stale, 0);
}

impl Scenario {
    /// Returns a registry at the start of a process with a state folder, which an earlier process has used.
    fn restarted(kind: RegistryKind) -> Self {
        let mut scenario = Self::new();
        scenario.options.state = Some(PathBuf::from("state"));
        scenario.registry.spec.kind = kind;
        scenario
    }

    /// Reads the copy on disk, which has this many services; `None`: there is none.
    fn copy(&mut self, services: Option<usize>) -> Effect {
        assert!(self.registry.needs_copy(self.now, &self.options), "a listing waits for it");
        match services {
            None => self.registry.start_without_copy(self.now, &self.options),
            Some(services) => {
                let written = SystemTime::UNIX_EPOCH;
                self.registry.start_from_copy(items(services), written, self.now, &self.options)
            }
        }
    }
}

fn file() -> RegistryKind {
    RegistryKind::File { path: PathBuf::from("west.yaml") }
}

fn store() -> RegistryKind {
    RegistryKind::Etcd(EtcdSpec { endpoints: Vec::new(), prefix: PREFIX.into(), tls: None, login: None })
}

#[test]
fn the_first_listing_after_a_start_is_judged_against_the_copy() {
    let mut first = Scenario::restarted(file());
    assert_eq!(first.good(0), 0);
    first.is(RegistryState::Missing, 0);
    let effect = first.copy(Some(30));
    assert_eq!((effect.dirty.services.len(), effect.accepted), (30, false));
    first.is(RegistryState::Held, 30);
    // A change that restores the services ends the hold; one that does not goes on with it.
    first.apply(puts(3));
    first.is(RegistryState::Held, 30);
    assert_eq!(first.pass(29), None);
    assert_eq!(first.pass(1), Some(27));
    first.is(RegistryState::Live, 3);
    for (listed, copy) in
        [(21, Some(30)), (30, Some(30)), (40, Some(30)), (5, None), (5, Some(0)), (0, Some(10))]
    {
        let mut like = Scenario::restarted(file());
        like.good(listed);
        assert!(like.copy(copy).accepted, "{listed}, {copy:?}");
        like.is(RegistryState::Live, listed);
    }
    let mut emptied = Scenario::restarted(store());
    emptied.good(0);
    emptied.copy(Some(1));
    emptied.is(RegistryState::Held, 1);
    assert_eq!((emptied.pass(599), emptied.pass(1)), (None, Some(1)), "a lost store is held for ten minutes");
}

#[test]
fn the_first_listing_waits_for_a_copy_that_is_not_read_no_longer_than_the_start_waits() {
    let mut scenario = Scenario::restarted(file());
    scenario.options.start_timeout = Duration::from_secs(20);
    // The wait begins with the process, and not with the listing.
    assert_eq!((scenario.pass(5), scenario.good(3), scenario.pass(5)), (None, 0, None));
    // A change after the listing does not begin the wait anew.
    scenario.apply(puts(4));
    assert_eq!(scenario.pass(9), None);
    scenario.is(RegistryState::Missing, 0);
    assert_eq!(scenario.pass(1), Some(4));
    scenario.is(RegistryState::Live, 4);
    let problem = scenario.registry.status().copy_problem.expect("a problem");
    assert!(problem.contains("was not read in time"), "{problem}");
    // A copy that comes later withdraws and adds nothing.
    scenario.registry.start_from_copy(items(30), SystemTime::UNIX_EPOCH, scenario.now, &scenario.options);
    scenario.is(RegistryState::Live, 4);
}

#[test]
fn changes_after_the_first_listing_wait_for_the_copy_with_it() {
    let mut scenario = Scenario::restarted(file());
    scenario.good(1);
    scenario.apply(puts(29));
    scenario.is(RegistryState::Missing, 0);
    scenario.copy(Some(30));
    scenario.is(RegistryState::Live, 29);
    assert_eq!(scenario.good(2), 0, "later listings wait for nothing");
    scenario.is(RegistryState::Held, 29);
    let mut later = Scenario { registry: Lifecycle::new(spec(), Epoch(1)), ..Scenario::restarted(file()) };
    later.good(2);
    later.is(RegistryState::Live, 2);
    let mut unheld = Scenario::restarted(file());
    unheld.options.withdrawal_hold = Duration::ZERO;
    unheld.good(2);
    unheld.is(RegistryState::Live, 2);
}

#[test]
fn a_hold_ends_in_a_later_process_when_it_would_have_ended_in_the_earlier_one() {
    let mut earlier = Scenario::new();
    earlier.registry.spec.kind = store();
    earlier.good(30);
    assert_eq!(earlier.registry.hold(Present::now()), None);
    earlier.good(0);
    earlier.pass(400);
    let present = Present { instant: earlier.now, ..Present::now() };
    let hold = earlier.registry.hold(present).expect("held");
    assert_eq!(
        (&*hold.registry, hold.is_emptied, present.until(hold.until)),
        ("west.yaml", true, Duration::from_secs(200))
    );
    let later = |listed: usize| {
        let mut later = Scenario::restarted(store());
        later.registry.recall(&hold, Present { instant: later.now, ..present });
        later.good(listed);
        later.copy(Some(30));
        later
    };
    let mut emptied = later(0);
    emptied.is(RegistryState::Held, 30);
    assert!(emptied.registry.hold(present).is_some(), "it may be handed over again");
    assert_eq!((emptied.pass(199), emptied.pass(1)), (None, Some(30)));
    let restored = later(30);
    restored.is(RegistryState::Live, 30);
    assert_eq!(restored.registry.hold(present), None);
    // A disk that hangs does not end the hold: the listing goes on waiting for the copy.
    let waiting = || {
        let mut waiting = Scenario::restarted(store());
        waiting.options.start_timeout = Duration::from_secs(20);
        waiting.registry.recall(&hold, Present { instant: waiting.now, ..present });
        waiting.good(0);
        assert_eq!(waiting.pass(199), None);
        waiting.is(RegistryState::Missing, 0);
        waiting
    };
    let mut read = waiting();
    read.copy(Some(30));
    read.is(RegistryState::Held, 30);
    assert_eq!(read.pass(1), Some(30));
    let mut hangs = waiting();
    assert!(hangs.pass(1).is_some());
    hangs.is(RegistryState::Live, 0);
}
