//! Looks up host names, and repeats each look-up when its TTL has passed. `owner::names` applies the results.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use isthmus_model::name::HostName;
use isthmus_net::lookup::{LookedUp, Lookup};
use isthmus_registry::name_index::NameMap;

/// The time until a name is looked up again after a look-up that failed or found no addresses.
const RETRY: Duration = Duration::from_secs(2);
/// The largest number of concurrent look-ups.
const AT_ONCE: usize = 32;

/// The name servers, and the bounds of the TTL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name servers; empty: those of the system.
    pub servers: Vec<SocketAddr>,
    /// The lower bound for the TTL of an answer, at most `ttl_max`.
    pub ttl_min: Duration,
    /// The upper bound for the TTL of an answer.
    pub ttl_max: Duration,
    /// How long a name keeps its last addresses when it does not exist any more, or has no address.
    pub hold_missing: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            servers: Vec::new(),
            ttl_min: Duration::from_secs(1),
            ttl_max: Duration::from_secs(3600),
            hold_missing: Duration::from_secs(30),
        }
    }
}

/// Looks up the wanted names until the sender of `wanted` is gone.
pub async fn run(
    options: Options,
    wanted: watch::Receiver<NameMap<()>>,
    answers: mpsc::Sender<(HostName, LookedUp)>,
) {
    let lookup = match Lookup::at(&options.servers) {
        Ok(lookup) => lookup,
        Err(error) => {
            tracing::error!(%error, "cannot read the system's name servers, so host names of endpoints cannot be \
                                     resolved");
            return;
        }
    };
    follow(&options, wanted, answers, |name| look_up(&lookup, name)).await;
}

/// Looks up the wanted names by `look_up`, which returns the result with its TTL if it has one.
async fn follow<F>(
    options: &Options,
    mut wanted: watch::Receiver<NameMap<()>>,
    answers: mpsc::Sender<(HostName, LookedUp)>,
    look_up: impl Fn(HostName) -> F,
) where
    F: Future<Output = (HostName, LookedUp, Option<Duration>)>,
{
    let mut schedule = Schedule::default();
    let mut names = NameMap::default();
    let mut running = FuturesUnordered::new();
    loop {
        let next = wanted.borrow_and_update().clone();
        for name in next.changed_since(&names, |(), ()| true) {
            match next.contains_key(name.as_str()) {
                true => schedule.put(name, Instant::now()),
                false => schedule.remove(&name),
            }
        }
        names = next;
        while running.len() < AT_ONCE
            && let Some(name) = schedule.pop_due(Instant::now())
        {
            running.push(look_up(name));
        }
        let has_room = running.len() < AT_ONCE;
        let due = schedule.next_due().unwrap_or_else(|| Instant::now() + options.ttl_max);
        // The order does not matter: all arms lead to another check of the schedule.
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() {
                return;
            },
            Some((name, answer, ttl)) = running.next() => {
                let again = ttl.map_or(RETRY, |ttl| ttl.clamp(options.ttl_min, options.ttl_max));
                if names.contains_key(name.as_str()) {
                    schedule.put(name.clone(), Instant::now() + again);
                }
                if answers.send((name, answer)).await.is_err() {
                    return;
                }
            }
            () = tokio::time::sleep_until(due), if has_room => {}
        }
    }
}

/// The times of the next look-ups.
#[derive(Debug, Default)]
struct Schedule {
    times: BTreeMap<HostName, Instant>,
    queue: BTreeSet<(Instant, HostName)>,
}

impl Schedule {
    fn put(&mut self, name: HostName, at: Instant) {
        self.remove(&name);
        self.times.insert(name.clone(), at);
        self.queue.insert((at, name));
    }

    fn remove(&mut self, name: &HostName) {
        if let Some((name, at)) = self.times.remove_entry(name) {
            let queued = self.queue.remove(&(at, name));
            debug_assert!(queued, "each time is in the queue");
        }
    }

    /// Removes and returns the first name whose look-up is due.
    fn pop_due(&mut self, now: Instant) -> Option<HostName> {
        let (at, name) = self.queue.first().filter(|(at, _)| *at <= now).cloned()?;
        self.queue.remove(&(at, name.clone()));
        self.times.remove(&name);
        Some(name)
    }

    fn next_due(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }
}

/// Looks up a name; returns the result, with its TTL if it has one.
async fn look_up(lookup: &Lookup, name: HostName) -> (HostName, LookedUp, Option<Duration>) {
    let (answer, ttl) = lookup.name(&name).await;
    (name, answer, ttl)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_net::lookup::{Answer, Resolution};

    /// Returns the time from the first look-up of a name, whose answer has this TTL, to the second one.
    async fn looked_up_again(ttl: Option<Duration>) -> Duration {
        let names = [(HostName::parse("a.test").expect("legal"), ())];
        let (_sender, wanted) = watch::channel(names.into_iter().collect());
        let (answers, mut arriving) = mpsc::channel(1);
        let answer = |name| {
            let none = Answer::Addresses(Vec::new());
            let found = LookedUp::Host(Resolution { ipv4: none.clone(), ipv6: none });
            std::future::ready((name, found, ttl))
        };
        let times = async {
            arriving.recv().await.expect("an answer");
            let first = Instant::now();
            arriving.recv().await.expect("an answer");
            first.elapsed()
        };
        let options = Options::default();
        tokio::select! {
            () = follow(&options, wanted, answers, answer) => panic!("it ended"),
            time = times => time,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_is_looked_up_again_after_its_ttl_and_after_two_seconds_without_one() {
        for (ttl, again) in [(Some(0), 1), (Some(7), 7), (Some(86_400), 3_600), (None, 2)] {
            let time = looked_up_again(ttl.map(Duration::from_secs)).await;
            assert_eq!(time, Duration::from_secs(again), "{ttl:?}");
        }
    }

    #[test]
    fn names_come_in_the_order_of_their_times_each_once() {
        let name = |text: &str| HostName::parse(text).expect("legal");
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let mut schedule = Schedule::default();
        schedule.put(name("late.test"), now + second);
        schedule.put(name("first.test"), now);
        schedule.put(name("gone.test"), now);
        schedule.put(name("late.test"), now + 2 * second);
        schedule.remove(&name("gone.test"));
        schedule.remove(&name("unknown.test"));
        assert_eq!(schedule.pop_due(now), Some(name("first.test")));
        assert_eq!((schedule.pop_due(now + second), schedule.next_due()), (None, Some(now + 2 * second)));
        assert_eq!(schedule.pop_due(now + 2 * second), Some(name("late.test")));
        assert_eq!((schedule.next_due(), schedule.times.len()), (None, 0));
    }
}
