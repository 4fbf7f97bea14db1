//! The traffic of the last 15 minutes, in all, of each service and of the clients of each network, for the overview. The counters are
//! read every 15 seconds. What is kept is bounded: the steps of the busiest services and networks, each about 2 KiB.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::sleep;

use isthmus_api::listed as api;
use isthmus_api::network::Calls;
use isthmus_api::overview::Traffic;
use isthmus_dataplane::handle::Control;
use isthmus_snapshot::candidates::service_of;
use isthmus_tasks::background;
use isthmus_telemetry::Telemetry;

use super::overview::{Counts, counts};

/// The time of one step.
pub(super) const STEP: Duration = Duration::from_secs(15);
/// The number of steps that are kept.
pub(super) const STEPS: usize = 60;
/// The largest number of services, and of networks, with steps. If more have traffic, those that had the least in all steps have none.
const NAMES_MAX: usize = 1_000;

/// The traffic of the last steps. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Past(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    all: Steps,
    services: Named,
    networks: Named,
}

/// The steps of those services, or networks, that have any traffic.
#[derive(Debug, Default)]
struct Named {
    /// The counters at the end of the last step.
    before: BTreeMap<String, Traffic>,
    steps: BTreeMap<String, Steps>,
}

/// The steps of one service, the oldest first.
type Steps = VecDeque<Step>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Step {
    opened: u64,
    failed: u64,
    bytes: u64,
    answer: Duration,
}

impl Step {
    fn between(before: &Traffic, now: &Traffic, answer: Duration) -> Self {
        let bytes = |of: &Traffic| of.bytes_up.saturating_add(of.bytes_down);
        Self {
            opened: now.opened.saturating_sub(before.opened),
            failed: now.failed.saturating_sub(before.failed),
            bytes: bytes(now).saturating_sub(bytes(before)),
            answer,
        }
    }

    fn is_idle(&self) -> bool {
        (self.opened, self.failed, self.bytes) == (0, 0, 0)
    }
}

impl Past {
    /// Reads the counters now, and at the end of each step from now on, without end.
    pub async fn run(self, telemetry: Telemetry, dataplane: Control) {
        self.table().begin(counts(&telemetry.recorder));
        loop {
            sleep(STEP).await;
            let (past, telemetry, dataplane) = (self.clone(), telemetry.clone(), dataplane.clone());
            let read = background::run(move || {
                let mut answers: BTreeMap<String, Duration> = BTreeMap::new();
                dataplane.upstreams().visit_answers(|key, p50| {
                    let slowest = answers.entry(service_of(&key.group).to_owned()).or_default();
                    *slowest = p50.max(*slowest);
                });
                past.table().step(counts(&telemetry.recorder), &answers);
            });
            // If the thread panics, this step is missing.
            let _ = read.await;
        }
    }

    /// Returns the steps of all traffic.
    pub(super) fn all(&self) -> api::Past {
        shown(&self.table().all)
    }

    /// Adds the steps of services to their rows.
    pub(super) fn add_to(&self, services: &mut [api::Service]) {
        let table = self.table();
        for service in services {
            if let Some(steps) = table.services.steps.get(&service.name) {
                service.past = shown(steps);
            }
        }
    }

    /// Returns the connections from a network; `None` if there were none.
    pub(super) fn calls_from(&self, network: &str) -> Option<Calls> {
        let table = self.table();
        let steps = table.networks.steps.get(network)?;
        let rate = |step: &Step| step.opened as f64 / STEP.as_secs_f64();
        let (ended, failed) = shown(steps).sums();
        Some(Calls {
            per_second: steps.back().map_or(0.0, rate),
            per_second_max: steps.iter().map(rate).fold(0.0, f64::max),
            ended,
            failed,
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Sets the counters from which the first step begins.
    fn begin(&mut self, now: Counts) {
        self.services.before = now.services.into_iter().collect();
        self.networks.before = now.networks.into_iter().collect();
    }

    /// Ends a step with these counters and these times until an answer, by service.
    fn step(&mut self, now: Counts, answers: &BTreeMap<String, Duration>) {
        let earlier = self.all.len();
        let sum = self.services.step(now.services.into_iter().collect(), answers, earlier);
        self.networks.step(now.networks.into_iter().collect(), &BTreeMap::new(), earlier);
        push(&mut self.all, sum);
    }
}

impl Named {
    /// Ends a step; returns the sum of all names. `earlier` is the number of the steps before.
    fn step(
        &mut self,
        now: BTreeMap<String, Traffic>,
        answers: &BTreeMap<String, Duration>,
        earlier: usize,
    ) -> Step {
        let mut sum = Step::default();
        let mut ended: BTreeMap<&str, Step> = BTreeMap::new();
        for (name, counters) in &now {
            let answer = answers.get(name).copied().unwrap_or_default();
            let step = Step::between(&self.before.get(name).copied().unwrap_or_default(), counters, answer);
            sum.opened += step.opened;
            sum.failed += step.failed;
            sum.bytes += step.bytes;
            sum.answer = sum.answer.max(answer);
            if !step.is_idle() && !self.steps.contains_key(name) {
                // A name that begins to have traffic had none in the steps before.
                let idle = std::iter::repeat_n(Step::default(), earlier);
                self.steps.insert(name.clone(), idle.collect());
            }
            ended.insert(name, step);
        }
        for (name, of) in &mut self.steps {
            // A name whose counters are gone has no traffic.
            push(of, ended.get(name.as_str()).copied().unwrap_or_default());
        }
        self.steps.retain(|_, steps| !steps.iter().all(Step::is_idle));
        self.leave_out_the_least();
        self.before = now;
        sum
    }

    fn leave_out_the_least(&mut self) {
        let further = self.steps.len().saturating_sub(NAMES_MAX);
        if further == 0 {
            return;
        }
        let weight = |steps: &Steps| steps.iter().map(|step| step.opened + step.failed).sum::<u64>();
        let mut by_weight: Vec<(u64, String)> =
            self.steps.iter().map(|(name, steps)| (weight(steps), name.clone())).collect();
        by_weight.sort_unstable();
        for (_, name) in by_weight.drain(..further) {
            self.steps.remove(&name);
        }
    }
}

fn push(steps: &mut Steps, step: Step) {
    if steps.len() == STEPS {
        steps.pop_front();
    }
    steps.push_back(step);
}

fn shown(steps: &Steps) -> api::Past {
    let of = |value: fn(&Step) -> u64| -> Vec<u64> { steps.iter().map(value).collect() };
    api::Past {
        opened: of(|step| step.opened),
        failed: of(|step| step.failed),
        bytes: of(|step| step.bytes),
        answer_us: of(|step| u64::try_from(step.answer.as_micros()).unwrap_or(u64::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(count: u64) -> Traffic {
        Traffic { opened: count, ..Traffic::default() }
    }

    fn ended(table: &mut Table, counters: &[(&str, u64)]) {
        let now = counters.iter().map(|(name, count)| ((*name).to_owned(), opened(*count)));
        table.step(Counts { services: now.collect(), ..Counts::default() }, &BTreeMap::new());
    }

    #[test]
    fn steps_are_what_the_counters_have_grown_by_and_the_oldest_is_dropped() {
        let mut table = Table::default();
        ended(&mut table, &[("a", 5)]);
        ended(&mut table, &[("a", 7), ("b", 1)]);
        ended(&mut table, &[("a", 7), ("b", 4)]);
        assert_eq!(shown(&table.all).opened, [5, 3, 3]);
        assert_eq!(shown(&table.services.steps["a"]).opened, [5, 2, 0]);
        assert_eq!(shown(&table.services.steps["b"]).opened, [0, 1, 3]);
        // The counters of a service may go with its routes.
        ended(&mut table, &[("a", 8)]);
        assert_eq!(shown(&table.services.steps["b"]).opened, [0, 1, 3, 0]);
        for _ in 0..STEPS {
            ended(&mut table, &[("a", 8)]);
        }
        assert!(table.services.steps.is_empty(), "both were idle in all steps");
        assert_eq!(shown(&table.all).opened, vec![0; STEPS]);
    }

    #[test]
    fn the_services_with_the_least_traffic_are_left_out() {
        let mut table = Table::default();
        let names: Vec<String> = (0..NAMES_MAX + 10).map(|index| format!("s{index:05}")).collect();
        let counters: Vec<(&str, u64)> = names.iter().map(String::as_str).zip(1..).collect();
        ended(&mut table, &counters);
        assert_eq!(table.services.steps.len(), NAMES_MAX);
        assert!(!table.services.steps.contains_key("s00009") && table.services.steps.contains_key("s00010"));
    }
    #[test]
    fn the_connections_of_a_network_have_a_rate_and_failures() {
        let past = Past::default();
        let ended = |opened: u64, failed: u64| {
            let traffic = Traffic { opened, failed, ..Traffic::default() };
            let networks = [("net-west".to_owned(), traffic)].into_iter().collect();
            past.table().step(Counts { networks, ..Counts::default() }, &BTreeMap::new());
        };
        ended(30, 1);
        ended(45, 3);
        let calls = Calls { per_second: 1.0, per_second_max: 2.0, ended: 45, failed: 3 };
        assert_eq!(past.calls_from("net-west"), Some(calls));
        assert_eq!(past.calls_from("net-east"), None);
        assert_eq!(past.all().opened, [0, 0], "the services are counted, not the networks");
    }
}
