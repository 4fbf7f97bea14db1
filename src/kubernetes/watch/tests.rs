//! The times of a watch, on a paused clock and with a server in memory.

use bytes::Bytes;
use isthmus_tasks::scope::Scope;

use super::super::scripted::{self, Requests};
use super::*;

/// A watch of services, its server, and the events.
struct Watched {
    requests: Requests,
    events: mpsc::Receiver<Vec<Event>>,
    client: Arc<Client>,
    way: Arc<Way>,
    scope: Scope,
}

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

impl Watched {
    async fn begin(kind: Kind) -> Self {
        let scope = Scope::default();
        let (client, requests) = scripted::server(&scope).await;
        let (sender, events) = mpsc::channel(100);
        let way = Arc::new(Way::default());
        let watcher = Watcher::new((client.clone(), way.clone()), 0, (kind, None), sender);
        scope.spawn(watcher.run());
        Self { requests, events, client, way, scope }
    }

    /// Sends the list on the watch; returns the sender of its further lines.
    async fn list(&mut self) -> mpsc::Sender<Bytes> {
        let asked = self.requests.next().await;
        assert!(asked.path.contains("sendInitialEvents=true"), "{}", asked.path);
        let lines = asked.begin();
        let end = r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"7","annotations":{"k8s.io/initial-events-end":"true"}}}}"#;
        lines.try_send(format!("{end}\n").into()).expect("the client reads");
        lines
    }

    /// Returns the time until the next request, which is refused with this status.
    async fn refuse_next(&mut self, status: StatusCode) -> Duration {
        let begun = Instant::now();
        self.requests.next().await.with(status, "{}");
        begun.elapsed()
    }

    /// Returns the texts of the failures that were reported.
    fn failures(&mut self) -> Vec<String> {
        let mut failures = Vec::new();
        while let Ok(events) = self.events.try_recv() {
            failures.extend(events.into_iter().filter_map(|event| match event.what {
                What::Failing(text, _) => Some(text.to_string()),
                _ => None,
            }));
        }
        failures
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_silent_for_three_minutes_is_listed_again_without_a_word() {
    let mut watched = Watched::begin(Kind::Service).await;
    let lines = watched.list().await;
    let begun = Instant::now();
    let again = watched.requests.next().await;
    // A watch counts as working after a second.
    assert_eq!(begun.elapsed(), seconds(1 + 180));
    assert!(again.path.contains("sendInitialEvents=true"), "{}", again.path);
    assert_eq!(watched.failures(), [""; 0]);
    drop(lines);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_has_lasted_ten_seconds_may_end_and_a_younger_one_has_failed() {
    let mut watched = Watched::begin(Kind::Service).await;
    let lines = watched.list().await;
    sleep(ms(9_999)).await;
    drop(lines);
    let ended = Instant::now();
    let lines = watched.requests.next().await.begin();
    assert!((ms(400)..=ms(601)).contains(&ended.elapsed()), "{:?}", ended.elapsed());
    assert_eq!(watched.failures().len(), 1);
    sleep(seconds(10)).await;
    drop(lines);
    let ended = Instant::now();
    let resumed = watched.requests.next().await;
    assert_eq!(ended.elapsed(), Duration::ZERO);
    assert!(resumed.path.contains("resourceVersion=7"), "{}", resumed.path);
    assert_eq!(watched.failures(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_is_asked_less_and_less_often_down_to_every_thirty_seconds() {
    let mut watched = Watched::begin(Kind::Service).await;
    watched.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await;
    for middle in [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000] {
        let waited = watched.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await;
        let expected = ms(middle * 8 / 10)..=ms(middle * 12 / 10 + 1);
        assert!(expected.contains(&waited), "{waited:?}, expected {middle} ms");
    }
}

/// Returns the time from a failure of a watch to its next attempt, if another watch of the server works meanwhile: after it has
/// received a line, or in silence.
async fn woken_after(has_line: bool) -> Duration {
    let mut watched = Watched::begin(Kind::Service).await;
    // The next wait is longer than three seconds.
    for _ in 0..4 {
        watched.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await;
    }
    let (sender, _others) = mpsc::channel(100);
    let shared = (watched.client.clone(), watched.way.clone());
    let other = Watcher::new(shared, 1, (Kind::Pod, None), sender);
    let failed = Instant::now();
    watched.scope.spawn(other.run());
    let lines = watched.list().await;
    if has_line {
        sleep(Duration::ZERO).await;
        lines.try_send("\n".into()).expect("the client reads");
    }
    let asked = watched.requests.next().await;
    assert!(asked.path.contains("services"), "{}", asked.path);
    drop(lines);
    failed.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_watch_tries_again_when_another_one_works_but_not_within_half_a_second() {
    assert_eq!(woken_after(true).await, ms(500));
    assert_eq!(woken_after(false).await, seconds(1), "without a fault for a second, a watch works");
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_the_server_does_not_have_is_asked_for_each_minute() {
    let mut watched = Watched::begin(Kind::DestinationRule).await;
    let versions = Kind::DestinationRule.facts().versions.len();
    for round in 0..3 {
        // Each version is asked for, and then the versions of the group that the server has.
        for request in 0..=versions {
            let waited = watched.refuse_next(StatusCode::NOT_FOUND).await;
            let expected = if round > 0 && request == 0 { 60 } else { 0 };
            assert_eq!(waited, seconds(expected), "round {round}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_on_a_watch_has_ten_minutes_and_each_of_its_parts_one() {
    let mut watched = Watched::begin(Kind::Service).await;
    let lines = watched.requests.next().await.begin();
    let begun = Instant::now();
    let trickle = async {
        // Empty lines are no events.
        while lines.send("\n".into()).await.is_ok() {
            sleep(seconds(50)).await;
        }
    };
    let next = tokio::select! {
        asked = watched.requests.next() => asked,
        () = trickle => unreachable!("the connection is open"),
    };
    let took = begun.elapsed();
    assert!((seconds(600)..=seconds(601)).contains(&took), "{took:?}");
    let failures = watched.failures();
    assert!(failures[0].starts_with("there was no answer within 600 s"), "{failures:?}");
    let silent = next.begin();
    let begun = Instant::now();
    let _again = watched.requests.next().await;
    let took = begun.elapsed();
    assert!((seconds(60)..=seconds(62)).contains(&took), "{took:?}");
    drop(silent);
}

#[tokio::test(start_paused = true)]
async fn an_object_with_too_many_values_is_known_by_its_name_until_it_is_repaired_or_deleted() {
    let mut watched = Watched::begin(Kind::Service).await;
    let lines = watched.list().await;
    let many = "7,".repeat(VALUES_MAX);
    let line = |kind: &str, revision: u8, spec: &str| {
        let metadata = format!(r#"{{"name":"a","namespace":"b","resourceVersion":"{revision}"}}"#);
        let object = format!(r#"{{"metadata":{metadata},"spec":{spec}}}"#);
        Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))
    };
    let large = format!(r#"{{"x":[{many}7]}}"#);
    for line in [line("ADDED", 8, &large), line("MODIFIED", 9, "{}"), line("DELETED", 10, &large)] {
        lines.send(line).await.expect("the client reads");
    }
    let mut seen = Vec::new();
    while seen.len() < 3 {
        for event in watched.events.recv().await.expect("the watch goes on") {
            let (what, meta) = match &event.what {
                What::Broken(meta, _) => ("broken", meta),
                What::Put(object) => ("put", object.meta()),
                What::Gone(meta) => ("gone", meta),
                _ => continue,
            };
            seen.push(format!("{what} {}/{}", meta.namespace, meta.name));
        }
    }
    assert_eq!(seen, ["broken b/a", "put b/a", "gone b/a"]);
    assert_eq!(watched.failures(), Vec::<String>::new());
}
