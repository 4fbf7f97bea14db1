//! Metrics of the limits in force, so that a dashboard can show the used share of each limit, and of the use of limits of bandwidth
//! and of the memory budget.

use super::scraped::Scraped;
use isthmus_dataplane::handle::EffectiveLimits;
use isthmus_net::admission::bandwidth::Bandwidths;
use isthmus_net::memory::Judgement;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The metrics, each with its `# HELP` text.
const DESCRIPTIONS: [(&str, &str); 4] = [
    (
        "isthmus_limit",
        "Values of the limits in use, by limit: connections, pending_hellos, health_checks, per_source, per_service, \
         per_service_bytes_per_second. A limit that is not set is absent.",
    ),
    (
        "isthmus_bandwidth_used_bytes_per_second",
        "Bytes of the last second under a limit `bytesPerSecond`, by direction and by the service, route or peer that the limit is of: \
         the 100 with the most bytes.",
    ),
    ("isthmus_memory_budget_bytes", "Memory budget of the process (limits.memory), in bytes."),
    (
        "isthmus_memory_used_bytes",
        "Bytes of the memory budget in use: the working set of the cgroup whose limit it is a part of, or the resident memory.",
    ),
];
/// The largest number of limits of bandwidth whose use is shown.
pub(super) const LIMITS_MAX: usize = 100;

/// The limits, the use of limits of bandwidth, and the memory budget.
pub(super) const METRICS: Scraped = Scraped {
    descriptions: &DESCRIPTIONS,
    expose: |sources, exposition| {
        let (limits, dataplane) = (sources.program.load().limits, &sources.dataplane);
        expose(&limits, dataplane.bandwidths(), &dataplane.memory(), exposition);
    },
};

fn expose(
    limits: &EffectiveLimits,
    bandwidths: &Bandwidths,
    memory: &Judgement,
    exposition: &mut Exposition,
) {
    let [limit, bandwidth, budget, used] = DESCRIPTIONS;
    for ((name, help), bytes) in [budget, used].into_iter().zip([memory.budget, memory.used]) {
        exposition.family(name, Kind::Gauge, help).add([], bytes);
    }
    let all = [
        ("connections", Some(limits.connections)),
        ("pending_hellos", Some(limits.pending_hellos)),
        ("health_checks", Some(limits.health_checks).filter(|most| *most > 0)),
        ("per_source", limits.per_source.connections),
        ("per_service", limits.per_service),
        (
            "per_service_bytes_per_second",
            limits.bytes_per_second.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
        ),
    ];
    let family = exposition.family(limit.0, Kind::Gauge, limit.1);
    for (name, most) in all {
        if let Some(most) = most {
            family.add([("limit", name)], most);
        }
    }
    for usage in bandwidths.usage(LIMITS_MAX) {
        let of = usage.owner.to_string();
        let family = exposition.family(bandwidth.0, Kind::Gauge, bandwidth.1);
        for (direction, moved) in ["up", "down"].into_iter().zip(usage.moved) {
            family.add([("of", &*of), ("direction", direction)], moved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::limits::MemoryLimit;
    use isthmus_net::admission::Holder;
    use isthmus_net::admission::bandwidth::Owner;
    use isthmus_net::memory::Measured;

    #[test]
    fn a_limit_that_is_not_set_is_absent() {
        let limits = EffectiveLimits {
            connections: 9,
            pending_hellos: 3,
            per_service: Some(2),
            ..EffectiveLimits::default()
        };
        let mut exposition = Exposition::default();
        let bandwidths = Bandwidths::default();
        let member = bandwidths.join(Owner::Peer("west".into()), 9_000, Holder::Unannounced);
        member.measure(0, 700, false);
        let measured = Measured { available: 9_000, used: 700, left: u64::MAX };
        let memory = Judgement::default().next(MemoryLimit::Bytes(9_000), measured);
        expose(&limits, &bandwidths, &memory, &mut exposition);
        let text = exposition.text();
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let wanted = [
            "isthmus_bandwidth_used_bytes_per_second{of=\"the peer west\",direction=\"down\"} 0",
            "isthmus_bandwidth_used_bytes_per_second{of=\"the peer west\",direction=\"up\"} 700",
            "isthmus_limit{limit=\"connections\"} 9",
            "isthmus_limit{limit=\"pending_hellos\"} 3",
            "isthmus_limit{limit=\"per_service\"} 2",
            "isthmus_memory_budget_bytes 9000",
            "isthmus_memory_used_bytes 700",
        ];
        assert_eq!(samples, wanted);
    }
}
