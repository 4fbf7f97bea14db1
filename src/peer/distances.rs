//! The round-trip times between our networks and those of a peer, as a link carries them: what this replica has measured to the
//! gateways of the peer, and what the peer has measured to ours.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::record::{own_networks, ways};
use isthmus_aggregator::reported::Report;
use isthmus_model::place::Network;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_settings::peer::{Peer, is_network_of};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::inputs::MeasuredBy;

/// The largest number of distances of one message; the receiver ignores further ones.
const DISTANCES_MAX: usize = 64;

/// The time after which the distances are sent again, as a sign that they still hold.
const AGAIN: Duration = Duration::from_secs(60);

/// The distances that the peer has been told, and when.
pub(super) struct ToldDistances(proto::Distances, Instant);

impl ToldDistances {
    pub(super) fn new() -> Self {
        Self(proto::Distances::default(), Instant::now())
    }

    /// Returns what the peer is to be told: the distances if they have changed, and once a minute.
    pub(super) fn next(
        &mut self,
        snapshot: &Snapshot,
        peer: &Peer,
        now: Instant,
    ) -> Option<proto::Distances> {
        let distances = measured(snapshot, peer);
        let is_due = !distances.distances.is_empty() && now.duration_since(self.1) >= AGAIN;
        (distances != self.0 || is_due).then(|| {
            *self = Self(distances.clone(), now);
            distances
        })
    }
}

/// Returns the round-trip times that this replica has measured from its own network to the networks of the peer, the smallest
/// ones if there are too many.
fn measured(snapshot: &Snapshot, peer: &Peer) -> proto::Distances {
    let own = &snapshot.policy.node.network;
    let from = own_networks(snapshot).find(|(network, _)| *network == own);
    let from = from.map(|(network, entry)| ways(network, entry)).unwrap_or_default();
    let prefix = peer.network("").to_string();
    let of_peer = snapshot.networks().iter().filter(|(network, _)| is_network_of(network, &peer.name));
    let mut distances = Vec::new();
    for (network, entry) in of_peer {
        let by_us = entry.round_trips.get(own).filter(|round_trip| round_trip.by == MeasuredBy::Here);
        let (Some(round_trip), Some(to)) = (by_us, network.as_str().strip_prefix(&prefix)) else { continue };
        // A connect on one host may take less than a microsecond, and 0 means that nothing was measured.
        let microseconds = u32::try_from(round_trip.time.as_micros()).unwrap_or(u32::MAX).max(1);
        let distance =
            |from: &String| proto::Distance { from: from.clone(), to: to.to_owned(), microseconds };
        distances.extend(from.iter().map(distance));
    }
    distances.sort_by_key(|distance| distance.microseconds);
    distances.truncate(DISTANCES_MAX);
    proto::Distances { distances }
}

/// Reads the round-trip times that the peer has measured to our networks. Those to other networks are left out.
pub(super) fn reported(snapshot: &Snapshot, peer: &Peer, told: &proto::Distances) -> Vec<Report> {
    let of_network = |(network, entry)| ways(network, entry).into_iter().map(move |way| (way, network));
    let ours: BTreeMap<String, &Network> = own_networks(snapshot).flat_map(of_network).collect();
    let report = |distance: &proto::Distance| {
        Some(Report {
            to: peer.network(&distance.from),
            from: (*ours.get(&distance.to)?).clone(),
            round_trip: Duration::from_micros(distance.microseconds.into()),
        })
    };
    told.distances.iter().take(DISTANCES_MAX).filter_map(report).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use isthmus_model::place::ClusterId;
    use isthmus_settings::network::NetworkPolicy;
    use isthmus_settings::peer::PeerLimits;
    use isthmus_snapshot::inputs::{Probes, RoundTrip};
    use isthmus_snapshot::testing::{Mesh, gateway, network};

    fn peer() -> Peer {
        Peer {
            name: "b".into(),
            who: None,
            unused_link: None,
            from: Vec::new(),
            exports: Vec::new(),
            imports: Vec::new(),
            carry: Vec::new(),
            limits: PeerLimits::default(),
        }
    }

    /// Returns a snapshot of the replica on `east`: `south` is ours too, and both have a cluster with gateways of its own.
    fn snapshot_of(round_trips: &[(&str, &str, u64, MeasuredBy)]) -> Snapshot {
        let of_cluster = |name: &str| {
            let mut own = gateway("192.0.2.2", 1);
            own.cluster = ClusterId::new("c");
            network(name, vec![gateway("192.0.2.1", 1), own])
        };
        let peers = ["peer/b/west", "peer/b/north/c", "peer/bc/west"];
        let peers = peers.map(|name| network(name, vec![gateway("192.0.2.9", 1)]));
        let networks: Vec<NetworkPolicy> =
            [of_cluster("east"), of_cluster("south")].into_iter().chain(peers).collect();
        let mut mesh = Mesh::new(networks, Vec::new());
        Arc::make_mut(&mut mesh.policy).node.network = Network::new("east");
        let mut probes = Probes::default();
        for (to, from, ms, by) in round_trips {
            let of_network = probes.round_trips.entry(Network::new(to)).or_default();
            of_network.insert(Network::new(from), RoundTrip { time: Duration::from_millis(*ms), by: *by });
        }
        mesh.probes = probes.into();
        mesh.snapshot()
    }

    fn told(from: &str, to: &str, microseconds: u32) -> proto::Distance {
        proto::Distance { from: from.to_owned(), to: to.to_owned(), microseconds }
    }

    #[test]
    fn a_peer_is_told_what_this_replica_has_measured_to_its_networks() {
        let snapshot = snapshot_of(&[
            ("peer/b/west", "east", 31, MeasuredBy::Here),
            ("peer/b/west", "south", 12, MeasuredBy::Peer),
            ("peer/b/north/c", "east", 5, MeasuredBy::Here),
            ("peer/bc/west", "east", 3, MeasuredBy::Here),
            ("south", "east", 2, MeasuredBy::Here),
        ]);
        let expected = [
            told("east", "north/c", 5_000),
            told("east/c", "north/c", 5_000),
            told("east", "west", 31_000),
            told("east/c", "west", 31_000),
        ];
        assert_eq!(measured(&snapshot, &peer()).distances, expected);
        let (mut before, now) = (ToldDistances::new(), Instant::now());
        let is_told = |before: &mut ToldDistances, snapshot: &Snapshot, seconds: u64| {
            before
                .next(snapshot, &peer(), now + Duration::from_secs(seconds))
                .map(|told| told.distances.len())
        };
        assert_eq!(is_told(&mut before, &snapshot, 0), Some(4));
        assert_eq!(is_told(&mut before, &snapshot, 59), None);
        assert_eq!(is_told(&mut before, &snapshot, 60), Some(4), "a sign that they still hold");
        let nothing = snapshot_of(&[]);
        assert_eq!(is_told(&mut before, &nothing, 61), Some(0));
        assert_eq!(is_told(&mut before, &nothing, 600), None);
    }

    #[test]
    fn distances_to_our_networks_alone_are_read_and_few_of_them() {
        let snapshot = snapshot_of(&[]);
        let said = |distances| reported(&snapshot, &peer(), &proto::Distances { distances });
        let read = said(vec![
            told("west", "south", 12_000),
            told("west", "south/c", 13_000),
            told("west", "nowhere", 1),
            told("west", "peer/bc/west", 1),
            told("../bc/west", "east", 0),
        ]);
        let read: Vec<(&str, &str, u128)> = read
            .iter()
            .map(|report| (report.to.as_str(), report.from.as_str(), report.round_trip.as_micros()))
            .collect();
        let expected = [
            ("peer/b/west", "south", 12_000),
            ("peer/b/west", "south", 13_000),
            ("peer/b/../bc/west", "east", 0),
        ];
        assert_eq!(read, expected, "a zero is refused by the one that keeps reports");
        assert_eq!(said(vec![told("west", "south", 1); 100_000]).len(), DISTANCES_MAX);
    }
}
