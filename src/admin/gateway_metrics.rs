//! The metrics of the probes of gateways (`docs/split-horizon.md, "The rules"`), computed at each scrape.

use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::liveness::probed::State;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::networks::GatewayEntry;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The name of the metric.
pub const METRIC: &str = "isthmus_gateway_up";
/// The `# HELP` text of the metric.
pub const METRIC_HELP: &str = "1 for an address of a gateway that answers probes, 0 for one that has ceased to answer; absent if it \
                               has never answered or is not probed.";

/// The name of the metric of round-trip times.
pub const RTT: &str = "isthmus_gateway_rtt_seconds";
/// The `# HELP` text of the metric of round-trip times.
pub const RTT_HELP: &str = "Smallest time in which an address of a gateway accepted a connection in the last minute; absent if none did.";

/// Adds the gateways to the metrics of a scrape.
pub(super) fn expose(snapshot: &Snapshot, liveness: &Liveness, exposition: &mut Exposition) {
    let states = liveness.states();
    let family = exposition.family(METRIC, Kind::Gauge, METRIC_HELP);
    for (network, entry) in snapshot.networks().iter() {
        for address in entry.gateways.iter().flat_map(GatewayEntry::entrances) {
            let up = match states.get(&address) {
                Some(State::Answers { .. } | State::Stopping { .. }) => 1_u8,
                Some(State::Unreachable { .. }) => 0,
                Some(State::NeverAnswered { .. }) | None => continue,
            };
            family.add([("network", network.as_str()), ("gateway", &address.to_string())], up);
        }
    }
    let family = exposition.family(RTT, Kind::Gauge, RTT_HELP);
    let round_trips = liveness.round_trips();
    for (network, entry) in snapshot.networks().iter() {
        for address in entry.gateways.iter().flat_map(GatewayEntry::entrances) {
            let Some(round_trip) = round_trips.get(&address) else { continue };
            let labels = [("network", network.as_str()), ("gateway", &address.to_string())];
            family.add(labels, round_trip.as_secs_f64());
        }
    }
}
