//! The store of all metrics that are counted as they happen; gives out the handles of the crate `metrics`.
//!
//! The cells of metrics are separate for each thread, so that the workers never write to the same cache line: each worker
//! has its own [`Shard`], and all other threads share one. A scrape adds the values of all shards that have the same name
//! and labels. Therefore a gauge must be set in one shard only, or be increased and decreased in many. Histograms have
//! fixed buckets, which need no maintenance between scrapes.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, HistogramFn, Key};
use metrics_util::registry::{Registry, Storage};

use super::exposition::{Exposition, Kind};

/// The upper bounds of buckets in seconds, from typical times on loopback to the default of `hello.timeout`.
const BOUNDS: [f64; 16] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
    10.0,
];

/// The counts of a histogram.
#[derive(Debug, Default)]
pub struct Buckets {
    /// The number of samples in each bucket, by its upper bound; the last bucket counts the samples above all bounds.
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_nanoseconds: AtomicU64,
}

impl HistogramFn for Buckets {
    fn record(&self, seconds: f64) {
        let bucket = BOUNDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_nanos();
        self.sum_nanoseconds.fetch_add(u64::try_from(nanoseconds).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Creates the cells of a shard.
#[derive(Debug, Default)]
pub struct Cells;

impl Storage<Key> for Cells {
    type Counter = Arc<AtomicU64>;
    type Gauge = Arc<AtomicU64>;
    type Histogram = Arc<Buckets>;

    fn counter(&self, _: &Key) -> Self::Counter {
        Arc::default()
    }

    fn gauge(&self, _: &Key) -> Self::Gauge {
        Arc::default()
    }

    fn histogram(&self, _: &Key) -> Self::Histogram {
        Arc::default()
    }
}

/// The cells that one thread writes to.
pub struct Shard(Registry<Key, Cells>);

impl Shard {
    fn new() -> Arc<Self> {
        Arc::new(Self(Registry::new(Cells)))
    }

    /// Returns the handle of a counter with these labels.
    pub fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        self.0.get_or_create_counter(&key(name, labels), |cell| cell.clone().into())
    }

    /// Returns the handle of a gauge with these labels.
    pub fn gauge(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        self.0.get_or_create_gauge(&key(name, labels), |cell| cell.clone().into())
    }

    /// Returns the handle of a histogram of seconds.
    pub fn histogram(&self, name: &'static str) -> Histogram {
        self.0.get_or_create_histogram(&key(name, &[]), |cell| cell.clone().into())
    }
}

/// All metrics of one gateway.
pub struct Recorder {
    /// The shard for all threads that have no shard of their own.
    common: Arc<Shard>,
    /// All shards; `common` is the first.
    shards: Mutex<Vec<Arc<Shard>>>,
    /// The descriptions of metrics, by name.
    help: Mutex<BTreeMap<&'static str, &'static str>>,
}

impl Default for Recorder {
    fn default() -> Self {
        let common = Shard::new();
        Self { shards: Mutex::new(vec![common.clone()]), common, help: Mutex::default() }
    }
}

impl Recorder {
    /// Creates a shard for one thread.
    pub fn shard(&self) -> Arc<Shard> {
        let shard = Shard::new();
        self.shards.lock().unwrap_or_else(PoisonError::into_inner).push(shard.clone());
        shard
    }

    /// Sets the description of a metric.
    pub fn describe(&self, name: &'static str, text: &'static str) {
        self.help.lock().unwrap_or_else(PoisonError::into_inner).insert(name, text);
    }

    /// Returns the handle of a counter with these labels.
    pub fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        self.common.counter(name, labels)
    }

    /// Returns the handle of a gauge with these labels.
    pub fn gauge(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        self.common.gauge(name, labels)
    }

    /// Returns the handle of a histogram of seconds.
    pub fn histogram(&self, name: &'static str) -> Histogram {
        self.common.histogram(name)
    }

    /// Returns the sum of a counter over all its labels; 0 if there is no such counter.
    pub fn counted(&self, name: &str) -> u64 {
        let mut sum = 0;
        self.visit(|shard| {
            shard.0.visit_counters(|key, cell| {
                if key.name() == name {
                    sum += cell.load(Ordering::Relaxed);
                }
            });
        });
        sum
    }

    /// Calls `each` for the cells of all counters in no particular order. A counter with cells in several threads is visited
    /// once for each cell.
    pub fn each_counter(&self, mut each: impl FnMut(&Key, u64)) {
        self.visit(|shard| shard.0.visit_counters(|key, cell| each(key, cell.load(Ordering::Relaxed))));
    }

    /// Returns the increases of all counters and histograms since the last call with the same `known`, or since the start.
    pub fn increases(&self, known: &mut Known) -> Increases {
        let Sums { counters, histograms, .. } = self.sums();
        let mut increases = Increases::default();
        for (key, count) in counters {
            let before = at(&mut known.counters, &key);
            let by = count - std::mem::replace(before, count);
            if by > 0 {
                increases.counters.push((key, by));
            }
        }
        for (key, sums) in histograms {
            let before = at(&mut known.histograms, &key);
            let counts: Vec<u64> =
                sums.counts.iter().zip(&before.counts).map(|(now, before)| now - before).collect();
            let nanoseconds = sums.nanoseconds - before.nanoseconds;
            if counts.iter().any(|count| *count > 0) {
                increases.histograms.push((key.clone(), counts, nanoseconds));
            }
            known.histograms.insert(key, sums);
        }
        increases
    }

    /// Adds the increase of a counter of another process. A metric that this program does not have is left out.
    pub fn add(&self, name: &str, labels: &[(String, String)], by: u64) {
        if let Some(key) = self.known_key(name, labels) {
            self.common.0.get_or_create_counter(&key, |cell| {
                cell.fetch_add(by, Ordering::Relaxed);
            });
        }
    }

    /// Adds the increase of a histogram of another process. A metric that this program does not have, or that has other buckets, is
    /// left out.
    pub fn add_histogram(&self, name: &str, labels: &[(String, String)], counts: &[u64], nanoseconds: u64) {
        if counts.len() != BOUNDS.len() + 1 {
            return;
        }
        if let Some(key) = self.known_key(name, labels) {
            self.common.0.get_or_create_histogram(&key, |cell| {
                for (cell, by) in cell.counts.iter().zip(counts) {
                    cell.fetch_add(*by, Ordering::Relaxed);
                }
                cell.sum_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
            });
        }
    }

    fn known_key(&self, name: &str, labels: &[(String, String)]) -> Option<Key> {
        let help = self.help.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, _) = help.get_key_value(name)?;
        let labels: Vec<metrics::Label> =
            labels.iter().map(|(name, value)| metrics::Label::new(name.clone(), value.clone())).collect();
        Some(Key::from_parts(*name, labels))
    }

    /// Returns the number of series.
    pub fn series(&self) -> usize {
        let sums = self.sums();
        sums.counters.len() + sums.gauges.len() + sums.histograms.len()
    }

    /// Adds all metrics to an exposition.
    pub fn expose(&self, exposition: &mut Exposition) {
        let sums = self.sums();
        let help = self.help.lock().unwrap_or_else(PoisonError::into_inner);
        let help = |key: &Key| help.get(key.name()).copied().unwrap_or_default();
        for (key, count) in &sums.counters {
            exposition.family(key.name(), Kind::Counter, help(key)).add(labels(key), count);
        }
        for (key, value) in &sums.gauges {
            exposition.family(key.name(), Kind::Gauge, help(key)).add(labels(key), value);
        }
        for (key, histogram) in &sums.histograms {
            let labels: Vec<(&str, &str)> = labels(key).collect();
            let family = exposition.family(key.name(), Kind::Histogram, help(key));
            family.add_histogram(&labels, &histogram.cumulative(), histogram.seconds());
        }
    }

    /// Returns the metrics of this recorder only, in the text format.
    pub fn render(&self) -> String {
        let mut exposition = Exposition::default();
        self.expose(&mut exposition);
        exposition.text()
    }

    fn visit(&self, each: impl FnMut(&Arc<Shard>)) {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(each);
    }

    fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        self.visit(|shard| {
            let registry = &shard.0;
            registry.visit_counters(|key, cell| *at(&mut sums.counters, key) += cell.load(Ordering::Relaxed));
            registry.visit_gauges(|key, cell| {
                *at(&mut sums.gauges, key) += f64::from_bits(cell.load(Ordering::Relaxed));
            });
            registry.visit_histograms(|key, cell| at(&mut sums.histograms, key).add(cell));
        });
        sums
    }
}

/// The values that [`Recorder::increases`] has returned last.
#[derive(Default)]
pub struct Known {
    counters: HashMap<Key, u64>,
    histograms: HashMap<Key, BucketSums>,
}

/// The increases of metrics.
#[derive(Debug, Default)]
pub struct Increases {
    /// The increase of each counter.
    pub counters: Vec<(Key, u64)>,
    /// The increase of each bucket of a histogram, and of its sum in nanoseconds.
    pub histograms: Vec<(Key, Vec<u64>, u64)>,
}

/// Returns the labels of a metric.
pub fn labels_of(key: &Key) -> Vec<(String, String)> {
    labels(key).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Returns the value of a label; empty if the metric does not have it.
pub fn label<'k>(key: &'k Key, name: &str) -> &'k str {
    key.labels().find(|label| label.key() == name).map_or("", |label| label.value())
}

/// The sums over all shards.
#[derive(Default)]
struct Sums {
    counters: HashMap<Key, u64>,
    gauges: HashMap<Key, f64>,
    histograms: HashMap<Key, BucketSums>,
}

#[derive(Default)]
struct BucketSums {
    counts: [u64; BOUNDS.len() + 1],
    nanoseconds: u64,
}

impl BucketSums {
    fn add(&mut self, buckets: &Buckets) {
        for (sum, cell) in self.counts.iter_mut().zip(&buckets.counts) {
            *sum += cell.load(Ordering::Relaxed);
        }
        self.nanoseconds += buckets.sum_nanoseconds.load(Ordering::Relaxed);
    }

    /// Returns the cumulative number of samples up to each bound, the last of which is `+Inf`.
    fn cumulative(&self) -> Vec<(String, u64)> {
        let bounds = BOUNDS.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
        let counts = self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        bounds.zip(counts).collect()
    }

    fn seconds(&self) -> f64 {
        Duration::from_nanos(self.nanoseconds).as_secs_f64()
    }
}

/// Returns the sum of a key; a new sum is 0.
fn at<'s, K: Clone + Eq + Hash, V: Default>(sums: &'s mut HashMap<K, V>, key: &K) -> &'s mut V {
    sums.entry(key.clone()).or_default()
}

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels = labels
        .iter()
        .map(|(name, value)| metrics::Label::new(*name, (*value).to_owned()))
        .collect::<Vec<_>>();
    Key::from_parts(name, labels)
}

fn labels(key: &Key) -> impl Iterator<Item = (&str, &str)> {
    key.labels().map(|label| (label.key(), label.value()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format_is_sorted_and_escaped() {
        let recorder = Recorder::default();
        recorder.describe("c_total", "Counts.");
        recorder.counter("c_total", &[("name", "b")]).increment(2);
        recorder.counter("c_total", &[("name", "a\"\n\\")]).increment(1);
        recorder.gauge("g", &[]).set(1.5);
        let histogram = recorder.histogram("h_seconds");
        histogram.record(0.0002);
        histogram.record(60.0);
        let text = recorder.render();
        assert!(text.starts_with("# HELP c_total Counts.\n# TYPE c_total counter\nc_total{name=\"a\\\"\\n\\\\\"} 1\nc_total{name=\"b\"} 2\n# TYPE g gauge\ng 1.5\n"), "{text}");
        assert!(
            text.contains("h_seconds_bucket{le=\"0.0001\"} 0\nh_seconds_bucket{le=\"0.00025\"} 1\n"),
            "{text}"
        );
        assert!(
            text.ends_with("h_seconds_bucket{le=\"+Inf\"} 2\nh_seconds_sum 60.0002\nh_seconds_count 2\n"),
            "{text}"
        );
        assert_eq!(recorder.series(), 4);
    }

    #[test]
    fn the_metrics_of_a_process_go_on_in_another() {
        let (old, new) = (Recorder::default(), Recorder::default());
        for recorder in [&old, &new] {
            recorder.describe("c_total", "Counts.");
            recorder.describe("h_seconds", "Times.");
        }
        let mut known = Known::default();
        let mut pass_on = |old: &Recorder| {
            let increases = old.increases(&mut known);
            for (key, by) in increases.counters {
                new.add(key.name(), &labels_of(&key), by);
            }
            for (key, counts, nanoseconds) in increases.histograms {
                new.add_histogram(key.name(), &labels_of(&key), &counts, nanoseconds);
            }
            new.render()
        };
        old.counter("c_total", &[("name", "a")]).increment(2);
        old.counter("unknown_total", &[]).increment(2);
        old.histogram("h_seconds").record(0.5);
        new.shard().counter("c_total", &[("name", "a")]).increment(1);
        let text = pass_on(&old);
        assert!(text.contains("c_total{name=\"a\"} 3\n") && text.contains("h_seconds_sum 0.5\n"), "{text}");
        assert!(!text.contains("unknown_total"), "{text}");
        old.counter("c_total", &[("name", "a")]).increment(1);
        let text = pass_on(&old);
        assert!(text.contains("c_total{name=\"a\"} 4\n") && text.contains("h_seconds_count 1\n"), "{text}");
        new.add_histogram("h_seconds", &[], &[1, 2], 3);
        assert_eq!(new.render(), text, "other buckets are left out");
    }

    #[test]
    fn a_scrape_sums_up_the_shards_of_all_threads() {
        let recorder = Recorder::default();
        let shards = [recorder.shard(), recorder.shard()];
        for shard in &shards {
            shard.counter("c_total", &[("name", "a")]).increment(2);
            shard.gauge("g", &[]).increment(1.5);
            shard.histogram("h_seconds").record(0.5);
        }
        recorder.counter("c_total", &[("name", "a")]).increment(1);
        shards[0].counter("c_total", &[("name", "b")]).increment(1);
        let text = recorder.render();
        for line in ["c_total{name=\"a\"} 5\n", "c_total{name=\"b\"} 1\n", "g 3\n", "h_seconds_count 2\n"] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert_eq!((recorder.counted("c_total"), recorder.series()), (6, 4));
    }
}
