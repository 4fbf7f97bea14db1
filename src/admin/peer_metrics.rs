//! The metrics of peers (`docs/federation.md, "See the state"`), computed from their state at each scrape, so that a removed peer
//! leaves no metrics.

use super::Sources;
use super::peers::{Linked, PeerState};
use super::scraped::Scraped;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The names and descriptions of the metrics.
const DESCRIPTIONS: [(&str, &str); 3] = [
    ("isthmus_peer_up", "1 if a link with the peer is live, else 0."),
    (
        "isthmus_peer_rtt_seconds",
        "Round-trip time of the last heartbeat on the fastest link with the peer, in seconds; absent without a link.",
    ),
    (
        "isthmus_peer_services",
        "Services exchanged with a peer, by direction: `out` counts services of this mesh that the peer may reach, `in` counts \
         services of the peer.",
    ),
];

/// The links with peers, and the services exchanged with them.
pub(super) const METRICS: Scraped = Scraped { descriptions: &DESCRIPTIONS, expose };

fn expose(sources: &Sources, exposition: &mut Exposition) {
    let snapshot = sources.reader.latest();
    let [up, rtt, services] = DESCRIPTIONS;
    for linked in Linked::all(&snapshot, &sources.links, &sources.aggregator.status.borrow()) {
        let of = ("peer", &*linked.peer.name);
        let mut add = |(name, help), labels: &[(&'static str, &str)], value: f64| {
            exposition.family(name, Kind::Gauge, help).add(labels.iter().copied(), value);
        };
        add(up, &[of], f64::from(u8::from(linked.state == PeerState::Live)));
        if let Some(round_trip) = linked.round_trip() {
            add(rtt, &[of], round_trip.as_secs_f64());
        }
        let out = snapshot.exports_to(&linked.peer.name).len();
        add(services, &[of, ("direction", "out")], out as f64);
        add(services, &[of, ("direction", "in")], linked.services_in() as f64);
    }
}
