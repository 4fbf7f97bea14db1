//! Finds the endpoints that answer much later than the others of their service.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hashbrown::HashMap;

use super::{Upstream, Upstreams};

/// An endpoint is slow if the median time of its answers is above this, and above [`SLOWER`] times that of the others.
const SLOW_ABOVE: Duration = Duration::from_secs(1);
const SLOWER: f64 = 5.0;

impl Upstreams {
    /// Marks the endpoints that answer much later than the others of their group.
    pub(super) fn find_slow(&self) {
        let median = |upstream: &Upstream| upstream.answers.quantile(0.5);
        // Few groups have a late endpoint, so the others are not collected.
        let late = self.endpoints.iter().filter(|entry| median(entry) > Some(SLOW_ABOVE));
        let mut groups: HashMap<Arc<str>, Vec<Duration>> =
            late.map(|entry| (entry.key().group.clone(), Vec::new())).collect();
        if !groups.is_empty() {
            for entry in &self.endpoints {
                if let Some(medians) = groups.get_mut(&entry.key().group) {
                    medians.extend(median(&entry));
                }
            }
        }
        let bound = |mut medians: Vec<Duration>| {
            medians.sort_unstable();
            // If the number is even, this takes the faster one of the two in the middle.
            let middle = medians.get((medians.len().max(1) - 1) / 2).copied().unwrap_or_default();
            SLOW_ABOVE.max(middle.mul_f64(SLOWER))
        };
        let bounds: HashMap<Arc<str>, Duration> =
            groups.into_iter().map(|(group, medians)| (group, bound(medians))).collect();
        for entry in &self.endpoints {
            let bound = bounds.get(&entry.key().group);
            let is_slow = bound.is_some_and(|bound| median(&entry) > Some(*bound));
            // All workers read the cache line, so it is written only where something changes.
            if entry.slow.load(Ordering::Relaxed) != is_slow {
                entry.slow.store(is_slow, Ordering::Relaxed);
            }
        }
    }
}
