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
        Self::begin_as(0, kind).await
    }

    /// Begins a watch with this number among those of its server.
    async fn begin_as(id: WatchId, kind: Kind) -> Self {
        let scope = Scope::default();
        let (client, requests) = scripted::server(&scope).await;
        let (sender, events) = mpsc::channel(100);
        let way = Arc::new(Way::default());
        let watcher = Watcher::new((client.clone(), way.clone()), id, (kind, None), sender);
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
async fn a_server_that_refuses_is_asked_less_and_less_often_down_to_every_thirty_seconds_but_by_one_watch() {
    let mut watched = Watched::begin_as(1, Kind::Service).await;
    watched.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await;
    for middle in [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000] {
        let waited = watched.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await;
        let expected = ms(middle * 8 / 10)..=ms(middle * 12 / 10 + 1);
        assert!(expected.contains(&waited), "{waited:?}, expected {middle} ms");
    }
    let mut first = Watched::begin(Kind::Service).await;
    first.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await;
    let mut waits = Vec::new();
    for _ in 0..8 {
        waits.push(first.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await);
    }
    assert!(waits.iter().all(|wait| *wait <= ms(2_001)), "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_tries_again_when_another_one_has_listed_but_not_within_half_a_second() {
    let mut watched = Watched::begin_as(1, Kind::Service).await;
    // The next wait is longer than three seconds.
    for _ in 0..4 {
        watched.refuse_next(StatusCode::SERVICE_UNAVAILABLE).await;
    }
    let (sender, _others) = mpsc::channel(100);
    let shared = (watched.client.clone(), watched.way.clone());
    let other = Watcher::new(shared, 0, (Kind::Pod, None), sender);
    let failed = Instant::now();
    watched.scope.spawn(other.run());
    let lines = watched.list().await;
    let asked = watched.requests.next().await;
    assert!(asked.path.contains("services"), "{}", asked.path);
    drop(lines);
    assert_eq!(failed.elapsed(), ms(500));
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

/// The bookmark that ends the list on a watch.
const WHOLE: &str = "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"7\",\"annotations\":{\"k8s.io/initial-events-end\":\"true\"}}}}\n";

/// Watches several kinds of a cluster whose server fails for a time, then serves the first kind alone for two seconds, and then all.
/// Returns the time from its return until all kinds are listed.
async fn listed_after_return(away: Duration, kinds: &[Kind]) -> Duration {
    let scope = Scope::default();
    let (client, mut requests) = scripted::server(&scope).await;
    let (sender, mut events) = mpsc::channel(1_000);
    let way = Arc::new(Way::default());
    for (id, kind) in kinds.iter().enumerate() {
        let watcher = Watcher::new((client.clone(), way.clone()), id, (*kind, None), sender.clone());
        scope.spawn(watcher.run());
    }
    let returns = Instant::now() + away;
    let mut open = Vec::new();
    loop {
        let asked = requests.next().await;
        let is_first = asked.path.contains(&format!("/{}?", kinds[0].plural()));
        let served_from = if is_first { returns } else { returns + seconds(2) };
        if Instant::now() < served_from {
            asked.with(StatusCode::SERVICE_UNAVAILABLE, "{}");
            continue;
        }
        let lines = asked.begin();
        lines.try_send(WHOLE.into()).expect("the client reads");
        open.push(lines);
        if open.len() == kinds.len() {
            break;
        }
    }
    let mut listed = 0;
    while listed < kinds.len() {
        let batch = events.recv().await.expect("the watches go on");
        listed += batch.iter().filter(|event| matches!(event.what, What::Complete)).count();
    }
    returns.elapsed()
}

const SEVERAL: [Kind; 6] =
    [Kind::Namespace, Kind::Service, Kind::Pod, Kind::DestinationRule, Kind::ServiceEntry, Kind::Gateway];

#[tokio::test(start_paused = true)]
async fn all_kinds_are_listed_within_five_seconds_of_the_return_of_a_server() {
    for away in [3, 15, 40, 47, 600] {
        let took = listed_after_return(seconds(away), &SEVERAL).await;
        assert!(took <= seconds(5), "{took:?} after {away} s");
    }
}

#[tokio::test(start_paused = true)]
async fn fifty_clusters_are_listed_within_five_seconds_of_their_return() {
    let begun = Instant::now();
    let all = (0..50).map(|_| listed_after_return(seconds(100), &SEVERAL));
    let took = futures_util::future::join_all(all).await;
    assert!(took.iter().all(|took| *took <= seconds(5)), "{took:?}");
    assert!(begun.elapsed() <= seconds(105), "{:?}", begun.elapsed());
}
