//! The store behind the `metrics` facade: counters, gauges, and histograms with fixed buckets, rendered in the
//! Prometheus text format (version 0.0.4).
//!
//! Fixed buckets need no upkeep between scrapes, unlike sample-keeping histograms.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder as Facade, SharedString, Unit,
};
use metrics_util::registry::{Registry, Storage};

/// Upper bounds in seconds, from what loopback needs to what `hello.timeout` allows.
const BOUNDS: [f64; 16] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
    10.0,
];

/// A histogram's counts.
#[derive(Debug, Default)]
pub struct Buckets {
    /// Samples up to each bound; the last takes the rest.
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_nanoseconds: AtomicU64,
}

impl HistogramFn for Buckets {
    fn record(&self, seconds: f64) {
        let bucket = BOUNDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default().as_nanos();
        self.sum_nanoseconds.fetch_add(u64::try_from(nanoseconds).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Makes the cells.
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

/// All metrics of one gateway.
pub struct Recorder {
    registry: Registry<Key, Cells>,
    help: Mutex<BTreeMap<String, String>>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self { registry: Registry::new(Cells), help: Mutex::default() }
    }
}

impl Recorder {
    fn describe(&self, name: &KeyName, text: &SharedString) {
        let mut help = self.help.lock().unwrap_or_else(PoisonError::into_inner);
        help.insert(name.as_str().to_owned(), text.to_string());
    }

    /// A counter with these labels.
    pub fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        self.registry.get_or_create_counter(&key(name, labels), |cell| cell.clone().into())
    }

    /// A gauge with these labels.
    pub fn gauge(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        self.registry.get_or_create_gauge(&key(name, labels), |cell| cell.clone().into())
    }

    /// A histogram of seconds.
    pub fn histogram(&self, name: &'static str) -> Histogram {
        self.registry.get_or_create_histogram(&key(name, &[]), |cell| cell.clone().into())
    }

    /// The sum of a counter over all its labels; 0 where there is none.
    pub fn counted(&self, name: &str) -> u64 {
        let mut sum = 0;
        self.registry.visit_counters(|key, cell| {
            if key.name() == name {
                sum += cell.load(Ordering::Relaxed);
            }
        });
        sum
    }

    /// How many series there are.
    pub fn series(&self) -> usize {
        let mut series = 0;
        self.registry.visit_counters(|_, _| series += 1);
        self.registry.visit_gauges(|_, _| series += 1);
        self.registry.visit_histograms(|_, _| series += 1);
        series
    }

    /// The Prometheus text format, sorted by name and labels.
    pub fn render(&self) -> String {
        let mut families: BTreeMap<String, (&'static str, BTreeMap<String, String>)> = BTreeMap::new();
        let mut add = |key: &Key, kind: &'static str, text: String| {
            let family = families.entry(key.name().to_owned()).or_insert_with(|| (kind, BTreeMap::new()));
            family.1.insert(labels_text(key, None), text);
        };
        self.registry.visit_counters(|key, cell| {
            add(key, "counter", sample(key, "", None, cell.load(Ordering::Relaxed)));
        });
        self.registry.visit_gauges(|key, cell| {
            add(key, "gauge", sample(key, "", None, f64::from_bits(cell.load(Ordering::Relaxed))));
        });
        self.registry.visit_histograms(|key, cell| add(key, "histogram", histogram_text(key, cell)));
        let help = self.help.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = String::new();
        for (name, (kind, samples)) in families {
            if let Some(help) = help.get(&name) {
                let _ = writeln!(out, "# HELP {name} {help}");
            }
            let _ = writeln!(out, "# TYPE {name} {kind}");
            out.extend(samples.into_values());
        }
        out
    }
}

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels = labels
        .iter()
        .map(|(name, value)| metrics::Label::new(*name, (*value).to_owned()))
        .collect::<Vec<_>>();
    Key::from_parts(name, labels)
}

fn histogram_text(key: &Key, cell: &Buckets) -> String {
    let mut text = String::new();
    let mut count = 0;
    for (index, cell) in cell.counts.iter().enumerate() {
        count += cell.load(Ordering::Relaxed);
        let bound = BOUNDS.get(index).map_or_else(|| "+Inf".to_owned(), ToString::to_string);
        text.push_str(&sample(key, "_bucket", Some(&bound), count));
    }
    let sum = std::time::Duration::from_nanos(cell.sum_nanoseconds.load(Ordering::Relaxed)).as_secs_f64();
    text.push_str(&sample(key, "_sum", None, sum));
    text.push_str(&sample(key, "_count", None, count));
    text
}

fn sample(key: &Key, suffix: &str, bound: Option<&str>, value: impl std::fmt::Display) -> String {
    format!("{}{suffix}{} {value}\n", key.name(), labels_text(key, bound))
}

fn labels_text(key: &Key, bound: Option<&str>) -> String {
    let mut labels: Vec<String> =
        key.labels().map(|label| format!("{}=\"{}\"", label.key(), escaped(label.value()))).collect();
    labels.extend(bound.map(|bound| format!("le=\"{bound}\"")));
    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) }
}

/// A label value as the text format wants it: backslash, quote and line feed escaped.
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Facade for Recorder {
    fn describe_counter(&self, key: KeyName, _: Option<Unit>, description: SharedString) {
        self.describe(&key, &description);
    }

    fn describe_gauge(&self, key: KeyName, _: Option<Unit>, description: SharedString) {
        self.describe(&key, &description);
    }

    fn describe_histogram(&self, key: KeyName, _: Option<Unit>, description: SharedString) {
        self.describe(&key, &description);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.registry.get_or_create_counter(key, |cell| cell.clone().into())
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        self.registry.get_or_create_gauge(key, |cell| cell.clone().into())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.registry.get_or_create_histogram(key, |cell| cell.clone().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format_is_sorted_and_escaped() {
        let recorder = Recorder::default();
        recorder.describe_counter("c_total".into(), None, "Counts.".into());
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
}
