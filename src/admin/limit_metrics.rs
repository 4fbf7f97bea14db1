//! Metrics of the limits in force, so that a dashboard can show the used share of each limit.

use isthmus_dataplane::handle::EffectiveLimits;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The metric with the limits in force.
pub const METRIC: &str = "isthmus_limit";
/// The `# HELP` text of the metric.
pub const METRIC_HELP: &str = "Values of the limits in use, by limit: connections, pending_hellos, health_checks, per_source, \
                               per_service. A limit that is not set is absent.";

/// Adds the limits to the metrics of a scrape.
pub(super) fn expose(limits: &EffectiveLimits, exposition: &mut Exposition) {
    let all = [
        ("connections", Some(limits.connections)),
        ("pending_hellos", Some(limits.pending_hellos)),
        ("health_checks", Some(limits.health_checks).filter(|most| *most > 0)),
        ("per_source", limits.per_source.connections),
        ("per_service", limits.per_service),
    ];
    let family = exposition.family(METRIC, Kind::Gauge, METRIC_HELP);
    for (limit, most) in all {
        if let Some(most) = most {
            family.add([("limit", limit)], most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_not_set_is_absent() {
        let limits = EffectiveLimits {
            connections: 9,
            pending_hellos: 3,
            per_service: Some(2),
            ..EffectiveLimits::default()
        };
        let mut exposition = Exposition::default();
        expose(&limits, &mut exposition);
        let text = exposition.text();
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let wanted = [
            "isthmus_limit{limit=\"connections\"} 9",
            "isthmus_limit{limit=\"pending_hellos\"} 3",
            "isthmus_limit{limit=\"per_service\"} 2",
        ];
        assert_eq!(samples, wanted);
    }
}
