//! The metrics of health checks, computed from the state of the checks at each scrape, so that a removed service has no sample.

use isthmus_dataplane::checks::Summary;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The metric for the health of a service's or route's endpoints.
pub const METRIC: &str = "isthmus_endpoint_healthy";
/// The `# HELP` text of the metric.
pub const METRIC_HELP: &str =
    "Fraction, from 0 to 1, of the endpoints with health checks that are healthy, by service or route.";

/// Adds the metrics of health checks to those of a scrape.
pub(super) fn expose(summary: &Summary, exposition: &mut Exposition) {
    for (service, share) in &summary.shares {
        let healthy = share.healthy as f64 / share.checked.max(1) as f64;
        exposition.family(METRIC, Kind::Gauge, METRIC_HELP).add([("service", &**service)], healthy);
    }
}
