//! The metrics of health checks, made from their state at each scrape, so that a removed service leaves none.

use crate::dataplane::checks::Summary;
use crate::telemetry::exposition::{Exposition, Kind};

/// The name of the metric.
pub const METRIC: &str = "isthmus_endpoint_healthy";
/// The description of the metric.
pub const METRIC_HELP: &str =
    "Share of the endpoints with health checks that are healthy, 0 to 1, by service or route.";

/// Adds the metrics of health checks to those of a scrape.
pub(super) fn expose(summary: &Summary, exposition: &mut Exposition) {
    for (service, share) in &summary.shares {
        let healthy = share.healthy as f64 / share.checked.max(1) as f64;
        exposition.family(METRIC, Kind::Gauge, METRIC_HELP).add([("service", &**service)], healthy);
    }
}
