//! A registry's life, told step by step in a time of our own.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::*;
use crate::aggregator::spec::RegistryKind;
use crate::document::services::read_registry;
use crate::model::name::HostName;
use crate::model::place::{ClusterId, Network};
use crate::model::service::{Service, ServiceKey};
use crate::snapshot::policy::RegistryScope;

/// A registry at a moment that the test moves on.
struct Story {
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

impl Story {
    fn new() -> Self {
        let expire_after = Some(Duration::from_secs(600));
        let options = Options { expire_after, ..Options::default() };
        let now = Instant::now();
        Self { registry: Lifecycle::from_start(spec(), Epoch(1), now), now, options }
    }

    fn hear(&mut self, batch: Vec<Change>) -> Effect {
        let effect = self.registry.hear(batch, self.now, &self.options);
        self.registry.shard.check_invariants();
        effect
    }

    /// The registry lists so many services; how many of them have changed.
    fn good(&mut self, services: usize) -> usize {
        self.hear(listing(services)).dirty.services.len()
    }

    fn bad(&mut self) {
        self.hear(vec![Change::Failed(vec!["gone".to_owned()])]);
    }

    fn bad_with(&mut self, copy: usize) {
        self.bad();
        self.registry.start_from_copy(items(copy), SystemTime::UNIX_EPOCH, self.now);
    }

    /// So much time passes; how many services that changes.
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

fn flaws(story: &Story) -> Vec<String> {
    story.registry.status().flaws.iter().flat_map(|lines| lines.iter()).cloned().collect()
}

fn removals(services: std::ops::Range<usize>) -> Vec<Change> {
    services.map(|index| Change::Remove(key(index))).collect()
}

#[test]
fn it_is_demoted_and_withdrawn_in_time_and_comes_back_at_once() {
    let mut story = Story::new();
    story.is(RegistryState::Missing, 0);
    assert_eq!(story.good(3), 3);
    story.is(RegistryState::Live, 3);
    story.bad();
    story.is(RegistryState::Stale, 3);
    assert_eq!(story.registry.status().problems, ["gone"]);
    assert_eq!(story.pass(119), None);
    // Failing again is no new beginning.
    story.bad();
    assert_eq!(story.pass(1), Some(3));
    story.is(RegistryState::Demoted, 3);
    story.bad();
    assert_eq!(story.pass(1), None);
    assert_eq!(story.pass(479), Some(3));
    story.is(RegistryState::Expired, 3);
    assert_eq!(story.registry.shard.origin.standing, Standing::Expired);
    // All of its services change when it comes back, as all count again.
    assert_eq!(story.good(3), 3);
    story.is(RegistryState::Live, 3);
    assert_eq!(story.registry.shard.origin.standing, Standing::Live);
    assert_eq!((story.pass(10_000), story.registry.status().problems), (None, vec![]));
}

#[test]
fn without_a_word_there_is_nothing_to_doubt() {
    let mut story = Story::new();
    story.bad();
    story.is(RegistryState::Missing, 0);
    assert_eq!(story.registry.status().problems, ["gone"]);
    assert_eq!(story.pass(10_000), None);
    story.is(RegistryState::Missing, 0);
}

#[test]
fn a_copy_stands_in_for_the_first_word_only() {
    let mut story = Story::new();
    story.bad_with(20);
    story.is(RegistryState::Stale, 20);
    assert_eq!(story.registry.status().read, Some(SystemTime::UNIX_EPOCH));
    story.bad_with(5);
    story.is(RegistryState::Stale, 20);
    assert_eq!(story.pass(120), Some(20));
    story.is(RegistryState::Demoted, 20);
    assert_eq!(story.good(19), 20);
    story.bad_with(5);
    story.is(RegistryState::Stale, 19);
}

#[test]
fn a_suspicious_word_waits_and_is_dropped_by_a_better_one() {
    let mut story = Story::new();
    story.good(20);
    assert_eq!(story.good(3), 0);
    story.is(RegistryState::Held, 20);
    assert!(
        story.registry.status().problems[0]
            .contains("it would leave 17 of 20 services without a ready endpoint")
    );
    assert_eq!(story.pass(29), None);
    assert_eq!(story.good(19), 1);
    story.is(RegistryState::Live, 19);
    assert_eq!(story.pass(100), None);
    // One that persists is applied, the newest of its kind, by the time of the first.
    story.good(3);
    story.pass(20);
    story.good(2);
    assert_eq!(story.pass(10), Some(17));
    story.is(RegistryState::Live, 2);
}

#[test]
fn what_is_held_is_forgotten_when_the_registry_cannot_be_read() {
    let mut story = Story::new();
    story.good(20);
    story.good(3);
    story.bad();
    story.is(RegistryState::Stale, 20);
    assert_eq!(story.pass(119), None);
    story.is(RegistryState::Stale, 20);
    // Held again, its standing stays as it is until something is taken in.
    assert_eq!(story.pass(1), Some(20));
    story.is(RegistryState::Demoted, 20);
    story.good(3);
    story.is(RegistryState::Held, 20);
    assert_eq!(story.registry.shard.origin.standing, Standing::Demoted);
    story.bad();
    story.is(RegistryState::Demoted, 20);
    assert_eq!(story.pass(0), None);
    story.good(3);
    assert_eq!(story.pass(30), Some(20));
    story.is(RegistryState::Live, 3);
}

#[test]
fn nothing_is_held_of_a_registry_that_counts_for_nothing_or_without_a_hold() {
    let mut story = Story::new();
    story.good(20);
    story.bad();
    story.pass(600);
    story.is(RegistryState::Expired, 20);
    story.good(1);
    story.is(RegistryState::Live, 1);
    story.options.withdrawal_hold = Duration::ZERO;
    story.good(20);
    story.good(0);
    story.is(RegistryState::Live, 0);
}

#[test]
fn only_what_is_taken_in_is_kept_as_a_copy() {
    let mut story = Story::new();
    assert!(story.hear(listing(20)).taken_in);
    assert!(!story.hear(listing(2)).taken_in);
    assert!(story.hear(listing(20)).taken_in);
}

#[test]
fn a_listing_takes_effect_when_it_is_complete_and_removes_what_it_does_not_name() {
    let mut story = Story::new();
    story.good(3);
    let begun = [vec![Change::Begin], puts(1)].concat();
    assert!(story.hear(begun.clone()).dirty.is_empty());
    story.is(RegistryState::Live, 3);
    // What comes next belongs to the listing.
    assert!(story.hear(vec![Change::Put(Item::Service(service(7)))]).dirty.is_empty());
    story.is(RegistryState::Live, 3);
    // One that the source has and cannot give stays as it is.
    let effect = story.hear(vec![Change::Keep(key(2)), Change::Complete]);
    let names: Vec<String> = effect.dirty.services.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["s1.mesh", "s7.mesh"]);
    story.is(RegistryState::Live, 3);
    // Another beginning, or a failure, discards what was not completed.
    story.hear(begun);
    assert!(story.hear([vec![Change::Begin], puts(8)].concat()).dirty.is_empty());
    story.bad();
    story.is(RegistryState::Stale, 3);
    assert_eq!(story.good(8), 5, "services 1, 3, 4, 5 and 6 are new");
    story.is(RegistryState::Live, 8);
}

#[test]
fn changes_are_applied_batch_by_batch() {
    let mut story = Story::new();
    story.good(20);
    assert_eq!(story.hear(removals(0..2)).dirty.services.len(), 2);
    story.is(RegistryState::Live, 18);
    // What is said again is no change.
    let again = story.hear(vec![Change::Put(Item::Service(service(5))), Change::Remove(key(99))]);
    assert!(again.dirty.is_empty() && again.taken_in);
    // After a failure an empty batch says that the registry can be read again.
    story.bad();
    story.is(RegistryState::Stale, 18);
    assert!(story.hear(Vec::new()).dirty.is_empty());
    story.is(RegistryState::Live, 18);
    assert_eq!(story.registry.status().problems, Vec::<String>::new());
    // Demoted meanwhile, all of its services change.
    story.bad();
    assert_eq!(story.pass(120), Some(18));
    assert_eq!(story.hear(Vec::new()).dirty.services.len(), 18);
    story.is(RegistryState::Live, 18);
}

#[test]
fn changes_out_of_order_are_dropped_and_shown() {
    let mut story = Story::new();
    for batch in [puts(1), removals(0..1), vec![Change::Complete]] {
        assert!(story.hear(batch).dirty.is_empty());
        story.is(RegistryState::Missing, 0);
    }
    let problems = story.registry.status().problems;
    assert!(
        problems.len() == 2 && problems.iter().all(|one| one.contains("before a full listing")),
        "{problems:?}"
    );
    assert_eq!(story.good(2), 2);
    assert!(story.hear(vec![Change::Complete]).dirty.is_empty());
    story.is(RegistryState::Live, 2);
    // A listing that never completes changes nothing, however much it names.
    story.hear(vec![Change::Begin]);
    for _ in 0..10 {
        assert!(story.hear(puts(50)).dirty.is_empty());
    }
    story.is(RegistryState::Live, 2);
}

#[test]
fn withdrawals_one_after_another_count_as_one() {
    let mut story = Story::new();
    story.good(20);
    for index in 0..10 {
        assert_eq!(story.hear(removals(index..index + 1)).dirty.services.len(), 1, "{index}");
    }
    assert!(story.hear(removals(10..11)).dirty.is_empty());
    story.is(RegistryState::Held, 10);
    assert!(story.registry.status().problems[0].contains("it would leave 11 of 20 services"));
    // Ready again, the last ones of the window count less.
    assert_eq!(story.hear(puts(1)).dirty.services.len(), 2);
    story.is(RegistryState::Live, 10);
    // After the window each counts by itself.
    assert_eq!(story.pass(30), None);
    assert_eq!(story.hear(removals(11..18)).dirty.services.len(), 7);
    story.is(RegistryState::Live, 3);
}

#[test]
fn what_is_held_is_changed_further_and_applied_once_it_has_persisted() {
    let mut story = Story::new();
    story.good(20);
    assert!(story.hear(removals(0..15)).dirty.is_empty());
    story.is(RegistryState::Held, 20);
    assert!(story.hear(removals(15..16)).dirty.is_empty());
    assert_eq!(story.pass(29), None);
    assert_eq!(story.pass(1), Some(16));
    story.is(RegistryState::Live, 4);
    // Given back before that, nothing has changed.
    story.good(20);
    story.hear(removals(0..15));
    story.is(RegistryState::Held, 20);
    let back = story.hear(puts(20));
    assert!(back.dirty.is_empty() && back.taken_in);
    story.is(RegistryState::Live, 20);
}

#[test]
fn objects_with_mistakes_are_named_until_they_are_right_and_are_bounded() {
    let mut story = Story::new();
    story.good(2);
    let flawed = |object: &str, problems: &[&str]| Change::Flawed {
        object: object.into(),
        problems: problems.iter().map(|line| (*line).to_owned()).collect(),
    };
    story.hear(vec![flawed("a", &["a:1:2: wrong"])]);
    story.is(RegistryState::Live, 2);
    assert_eq!(flaws(&story), ["a:1:2: wrong"]);
    story.hear(vec![flawed("a", &[])]);
    assert_eq!(flaws(&story), Vec::<String>::new());
    let many = (0..FLAWS_MAX + 10).map(|index| flawed(&index.to_string(), &["x"; 50])).collect();
    story.hear(many);
    let status = story.registry.status();
    assert_eq!((status.flaws.len(), flaws(&story).len()), (FLAWS_MAX, FLAWS_MAX * FLAW_LINES_MAX));
}

#[test]
fn under_another_config_it_keeps_what_the_new_scope_lets_it_say() {
    let mut story = Story::new();
    story.good(4);
    let services = ["s1.mesh", "s2.mesh"].map(crate::snapshot::tests::pattern).to_vec();
    let narrow = RegistrySpec { scope: RegistryScope { services, ..RegistryScope::default() }, ..spec() };
    story.registry = story.registry.succeeded_by(narrow, Epoch(2));
    story.is(RegistryState::Live, 2);
    let names: BTreeSet<String> = story.registry.shard.hostnames().map(ToString::to_string).collect();
    assert_eq!(names, ["s1.mesh".to_owned(), "s2.mesh".to_owned()].into());
    // The new task has to list before it changes anything.
    assert!(story.hear(removals(1..2)).dirty.is_empty());
    assert_eq!(story.good(4), 0);
    assert_eq!(story.registry.status().items.denied_items, 2);
}

#[test]
fn a_fault_of_the_program_leaves_the_last_good_state() {
    let mut story = Story::new();
    story.good(3);
    let before = story.registry.shard.clone();
    story.good(5);
    story.registry.contain((before, true), "index out of bounds", Epoch(2), story.now);
    assert_eq!(story.registry.epoch, Epoch(2));
    story.is(RegistryState::Stale, 3);
    assert_eq!(story.registry.status().problems, ["internal: index out of bounds"]);
    assert_eq!(story.good(3), 0);
    story.is(RegistryState::Live, 3);
    // One that was never read is missing again, so that its copy is wanted.
    let mut story = Story::new();
    let before = story.registry.shard.clone();
    story.good(5);
    story.registry.contain((before, false), "overflow", Epoch(3), story.now);
    story.is(RegistryState::Missing, 0);
    assert!(story.registry.has_failed() && story.registry.is_unread(story.now, &story.options));
}

#[test]
fn a_listing_takes_the_place_of_what_was_withheld() {
    let mut story = Story::new();
    story.good(20);
    story.hear(removals(0..15));
    story.is(RegistryState::Held, 20);
    assert_eq!(story.good(20), 0);
    story.is(RegistryState::Live, 20);
    // The next changes are changes of the listing.
    assert_eq!(story.hear(removals(0..1)).dirty.services.len(), 1);
    story.is(RegistryState::Live, 19);
}

#[test]
fn what_is_withheld_is_what_the_registry_said_last_also_after_a_failure() {
    let mut story = Story::new();
    story.good(20);
    story.hear(removals(0..15));
    story.bad();
    story.is(RegistryState::Stale, 20);
    // Nothing new: the registry still says what was withheld.
    assert!(story.hear(Vec::new()).dirty.is_empty());
    story.is(RegistryState::Held, 20);
    story.bad();
    assert_eq!(story.hear(puts(14)).dirty.services.len(), 1);
    story.is(RegistryState::Live, 19);
}
