//! The Prometheus text format (version 0.0.4). All metrics of the program are written here, whatever their source.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

/// The kind of a family of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number that only increases.
    Counter,
    /// A number that increases and decreases.
    Gauge,
    /// Observations counted by bucket.
    Histogram,
}

impl Kind {
    fn text(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The metrics of one scrape, sorted by name and labels.
#[derive(Debug, Default)]
pub struct Exposition(BTreeMap<String, Family>);

/// The samples of one metric.
#[derive(Debug)]
pub struct Family {
    name: String,
    kind: Kind,
    help: String,
    /// The lines of the samples, by the text of their labels.
    samples: BTreeMap<String, String>,
}

impl Exposition {
    /// Returns the family of this name; creates it if there is none. An empty `help` is left out.
    pub fn family(&mut self, name: &str, kind: Kind, help: &str) -> &mut Family {
        let new = || Family { name: name.to_owned(), kind, help: help.to_owned(), samples: BTreeMap::new() };
        let family = self.0.entry(name.to_owned()).or_insert_with(new);
        debug_assert_eq!(family.kind, kind, "{name} has one kind");
        family
    }

    /// Returns the exposition as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Family { name, kind, help, samples } in self.0.values() {
            // Writing to a string cannot fail.
            if !help.is_empty() {
                let _ = writeln!(text, "# HELP {name} {help}");
            }
            let _ = writeln!(text, "# TYPE {name} {}", kind.text());
            text.extend(samples.values().map(String::as_str));
        }
        text
    }
}

impl Family {
    /// Adds a sample with these labels.
    pub fn add<'l>(&mut self, labels: impl IntoIterator<Item = (&'l str, &'l str)>, value: impl Display) {
        let labels = labels_text(labels);
        let line = format!("{}{labels} {value}\n", self.name);
        self.samples.insert(labels, line);
    }

    /// Adds a histogram: the number of samples up to each upper bound, the last of which is `+Inf`, and the sum of all
    /// samples.
    pub fn add_histogram(&mut self, labels: &[(&str, &str)], counts: &[(String, u64)], sum: f64) {
        debug_assert!(counts.is_sorted_by_key(|(_, count)| *count), "counts of a histogram are cumulative");
        let name = &self.name;
        let mut lines = String::new();
        for (bound, count) in counts {
            let labels = labels_text(labels.iter().copied().chain([("le", bound.as_str())]));
            let _ = writeln!(lines, "{name}_bucket{labels} {count}");
        }
        let count = counts.last().map_or(0, |(_, count)| *count);
        let labels = labels_text(labels.iter().copied());
        let _ = writeln!(lines, "{name}_sum{labels} {sum}\n{name}_count{labels} {count}");
        self.samples.insert(labels, lines);
    }
}

fn labels_text<'l>(labels: impl IntoIterator<Item = (&'l str, &'l str)>) -> String {
    let labels: Vec<String> =
        labels.into_iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) }
}

/// Returns a label value in the form of the text format: with backslash, quote and line feed escaped.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
