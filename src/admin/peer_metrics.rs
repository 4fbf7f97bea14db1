//! The metrics of peers (`docs/federation.md, "See the state"`), computed from their state at each scrape, so that a removed peer
//! leaves no metrics.

use super::Sources;
use super::peers::{Linked, PeerState};
use super::scraped::Scraped;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The names and descriptions of the metrics.
const DESCRIPTIONS: [(&str, &str); 6] = [
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
    (
        "isthmus_peer_carriers",
        "Open carriers with a peer, by direction: on `toPeer` callers of this mesh call the peer's services, on `fromPeer` callers of \
         the peer those of this mesh.",
    ),
    ("isthmus_peer_carrier_streams", "Calls that cross at present on carriers with a peer, by direction."),
    ("isthmus_peer_carrier_calls_total", "Calls that have crossed on carriers with a peer, by direction."),
];

/// The links with peers, and the services exchanged with them.
pub(super) const METRICS: Scraped = Scraped { descriptions: &DESCRIPTIONS, expose };

fn expose(sources: &Sources, exposition: &mut Exposition) {
    let snapshot = sources.reader.latest();
    let [up, rtt, services, carriers, streams, calls] = DESCRIPTIONS;
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
        let on_carriers = linked.peer.carry.iter().map(|direction| {
            let all = sources.dataplane.carriers().of_peer(&linked.peer.name, *direction);
            ([of, ("direction", direction.text())], all)
        });
        let on_carriers: Vec<_> = on_carriers.collect();
        for (labels, all) in &on_carriers {
            add(carriers, labels, all.carriers as f64);
            add(streams, labels, all.streams as f64);
        }
        let (name, help) = calls;
        for (labels, all) in on_carriers {
            exposition.family(name, Kind::Counter, help).add(labels, all.calls as f64);
        }
    }
}
