//! A registry's life, told step by step in a time of our own.

use std::path::PathBuf;
use std::time::Duration;

use super::*;
use crate::document::services::read_registry;
use crate::model::place::{ClusterId, Network};
use crate::snapshot::policy::RegistryScope;

/// A registry at a moment that the test moves on.
struct Story {
    registry: Registry,
    now: Instant,
    options: Options,
}

impl Story {
    fn new() -> Self {
        let source = FileRegistry {
            name: "west.yaml".into(),
            path: PathBuf::from("west.yaml"),
            cluster: ClusterId::new("west"),
            network: Network::default(),
            scope: RegistryScope::default(),
        };
        let expire_after = Some(Duration::from_secs(600));
        let options = Options { expire_after, ..Options::default() };
        let now = Instant::now();
        Self { registry: Registry::from_start(source, now), now, options }
    }

    /// The registry is read, with so many services; how many of them have changed.
    fn good(&mut self, services: usize) -> usize {
        let texts = vec![Text { path: "west.yaml".into(), text: services.to_string() }];
        let word = Word::Good(Reading { shard: shard(services), texts });
        self.registry.hear(word, self.now, &self.options).services.len()
    }

    fn bad(&mut self) {
        self.bad_with(None);
    }

    fn bad_with(&mut self, copy: Option<ScopedShard>) {
        let copy = copy.map(|shard| (shard, SystemTime::UNIX_EPOCH));
        let word = Word::Bad { problems: vec!["gone".to_owned()], copy };
        self.registry.hear(word, self.now, &self.options);
    }

    /// So much time passes; how many services that changes.
    fn pass(&mut self, seconds: u64) -> Option<usize> {
        self.now += Duration::from_secs(seconds);
        self.registry.tick(self.now, &self.options).map(|change| change.services.len())
    }

    #[track_caller]
    fn is(&self, state: RegistryState, services: usize) {
        let status = self.registry.status();
        assert_eq!((status.state, status.services), (state, services), "{:?}", status.problems);
    }
}

fn shard(services: usize) -> ScopedShard {
    let mut text = "services:".to_owned();
    for index in 0..services {
        text.push_str(&format!(
            "\n- {{hostname: s{index}.mesh, namespace: n, ports: [{{name: a, port: 1}}], endpoints: [{{address: 10.0.0.1}}]}}"
        ));
    }
    let text = if services == 0 { "services: []" } else { &text };
    let shard = read_registry("x".as_ref(), text, &ClusterId::new("west"), &Network::default());
    ScopedShard::new(shard.expect("good"), &RegistryScope::default())
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
    story.bad_with(Some(shard(20)));
    story.is(RegistryState::Stale, 20);
    assert_eq!(story.registry.status().read, Some(SystemTime::UNIX_EPOCH));
    story.bad_with(Some(shard(5)));
    story.is(RegistryState::Stale, 20);
    assert_eq!(story.pass(120), Some(20));
    story.is(RegistryState::Demoted, 20);
    assert_eq!(story.good(19), 20);
    story.bad_with(Some(shard(5)));
    story.is(RegistryState::Stale, 19);
}

#[test]
fn a_suspicious_word_waits_and_is_dropped_by_a_better_one() {
    let mut story = Story::new();
    story.good(20);
    assert_eq!(story.good(3), 0);
    story.is(RegistryState::Held, 20);
    assert!(story.registry.status().problems[0].contains("from 17 of 20 services: held for 30s"));
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
    let mut hear = |services: usize| {
        let texts = vec![Text { path: "west.yaml".into(), text: services.to_string() }];
        let word = Word::Good(Reading { shard: shard(services), texts });
        let change = story.registry.hear(word, story.now, &story.options);
        change.taken_in.map(|texts| texts[0].text.clone())
    };
    assert_eq!(hear(20).as_deref(), Some("20"));
    assert_eq!(hear(2), None);
    assert_eq!(hear(20).as_deref(), Some("20"));
}
