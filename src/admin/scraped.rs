//! Metrics that are computed at each scrape, so that what is gone has no series.

use super::Sources;
use isthmus_telemetry::exposition::Exposition;

/// The metrics of one file.
pub struct Scraped {
    /// The names and the `# HELP` texts.
    pub descriptions: &'static [(&'static str, &'static str)],
    /// Adds the metrics to those of a scrape.
    pub(crate) expose: fn(&Sources, &mut Exposition),
}
