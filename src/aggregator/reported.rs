//! The round-trip times that peers report between their own networks and ours. A gateway of ours measures from its own network
//! alone; what a peer has measured holds for viewers on our other networks, since a round trip is the same from both ends.
//!
//! A peer may change what it says at any time: for each pair of networks the smallest report of a minute counts, and steering uses
//! it only as slowly as what this replica measures itself. Time is an argument, and never that of the peer's clock.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::round_trip::{Rings, Settled, WINDOW};
use isthmus_model::place::Network;
use isthmus_settings::peer::is_network_of;
use isthmus_upgrade::belief::{DistanceBelief, Present};

/// The largest number of pairs of networks of one peer whose round-trip times are kept; the others count as unknown.
pub const PAIRS_MAX: usize = 256;
/// The largest round-trip time that a peer may report; larger ones are ignored.
pub const ROUND_TRIP_MAX: Duration = Duration::from_secs(10);
/// The age at which a report is forgotten. A peer repeats its reports each minute as long as there is a link.
const EXPIRES: Duration = Duration::from_secs(15 * 60);

/// A round-trip time that a peer reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The network of the peer, by our name for it.
    pub to: Network,
    /// Our network at the other end.
    pub from: Network,
    /// The time.
    pub round_trip: Duration,
}

/// The newest report about a pair of networks.
#[derive(Debug)]
struct Pair {
    /// The smallest report of about a minute, and when it came.
    smallest: Duration,
    at: Instant,
    settled: Settled,
}

/// The reports of all peers.
#[derive(Debug, Default)]
pub(super) struct Reports {
    /// By network of the peer, and then by our network.
    pairs: BTreeMap<(Network, Network), Pair>,
}

impl Reports {
    /// Notes what a peer reports. Ignores what it cannot know or must not say: networks that are not its own, and times that are
    /// zero or too large.
    pub(super) fn note(&mut self, peer: &str, reports: &[Report], now: Instant) {
        for Report { to, from, round_trip } in reports {
            let is_legal = is_network_of(to, peer) && !from.is_unknown() && !round_trip.is_zero();
            if !is_legal || *round_trip > ROUND_TRIP_MAX {
                continue;
            }
            let key = (to.clone(), from.clone());
            if let Some(pair) = self.pairs.get_mut(&key) {
                // A peer has several replicas, of which the nearest one counts.
                if *round_trip <= pair.smallest || now.duration_since(pair.at) >= WINDOW {
                    (pair.smallest, pair.at) = (*round_trip, now);
                }
                continue;
            }
            let of_peer = self.pairs.keys().filter(|(to, _)| is_network_of(to, peer));
            if of_peer.count() < PAIRS_MAX {
                let settled = Settled::default();
                self.pairs.insert(key, Pair { smallest: *round_trip, at: now, settled });
            }
        }
    }

    /// Forgets old reports, and decides which times steering uses.
    pub(super) fn settle(&mut self, rings: &Rings, now: Instant) {
        self.pairs.retain(|_, pair| now.duration_since(pair.at) < EXPIRES);
        for ((to, from), pair) in &mut self.pairs {
            let before = pair.settled.used;
            if pair.settled.note(Some(pair.smallest), (rings, to, from), now) {
                tracing::info!(
                    network = %to,
                    viewers = %from,
                    round_trip = ?pair.smallest,
                    before = ?before,
                    "the distance of a network has changed by what its peer reports"
                );
            }
        }
    }

    /// Returns the times that steering uses: the network of the peer, ours, and the time between them.
    pub(super) fn used(&self) -> impl Iterator<Item = (&Network, &Network, Duration)> {
        self.pairs.iter().filter_map(|((to, from), pair)| Some((to, from, pair.settled.used?)))
    }

    /// Returns what another process of this gateway needs to know.
    pub(super) fn beliefs(&self, present: Present) -> impl Iterator<Item = DistanceBelief> {
        self.pairs.iter().map(move |((to, from), pair)| {
            let Pair { smallest, at, settled: Settled { used, differs_since } } = pair;
            DistanceBelief {
                to: to.to_string(),
                from: from.to_string(),
                reported: Some((present.moment_of(*at), *smallest)),
                used: *used,
                known: present.moment_of(*at),
                differs_since: differs_since.map(|since| present.moment_of(since)),
            }
        })
    }

    /// Takes a report that an earlier process of this gateway had.
    pub(super) fn recall(&mut self, belief: DistanceBelief, present: Present) {
        let DistanceBelief { to, from, reported, used, known: _, differs_since } = belief;
        let Some((at, smallest)) = reported.filter(|(at, _)| present.age(*at) < EXPIRES) else { return };
        let Some(at) = present.instant_of(at) else { return };
        let differs_since = differs_since.and_then(|since| present.instant_of(since));
        let pair = Pair { smallest, at, settled: Settled { used, differs_since } };
        self.pairs.insert((Network::new(&to), Network::new(&from)), pair);
    }

    /// Returns the age of the report about each pair: the network of the peer, and ours.
    pub(super) fn ages(&self, now: Instant) -> BTreeMap<(Network, Network), Duration> {
        self.pairs.iter().map(|(key, pair)| (key.clone(), now.duration_since(pair.at))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(to: &str, from: &str, round_trip: Duration) -> Report {
        Report { to: Network::new(to), from: Network::new(from), round_trip }
    }

    const fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    fn used(reports: &Reports) -> Vec<(String, String, u128)> {
        let text = |(to, from, time): (&Network, &Network, Duration)| {
            (to.to_string(), from.to_string(), time.as_millis())
        };
        reports.used().map(text).collect()
    }

    fn one(to: &str, from: &str, time: u128) -> Vec<(String, String, u128)> {
        vec![(to.to_owned(), from.to_owned(), time)]
    }

    #[test]
    fn a_peer_speaks_about_its_own_networks_within_bounds() {
        let (mut reports, start) = (Reports::default(), Instant::now());
        let said = [
            report("peer/b/west", "east", ms(30)),
            report("peer/bc/west", "east", ms(1)),
            report("south", "east", ms(1)),
            report("peer/b/south", "", ms(1)),
            report("peer/b/zero", "east", Duration::ZERO),
            report("peer/b/large", "east", ROUND_TRIP_MAX + ms(1)),
            report("peer/b/largest", "east", Duration::MAX),
        ];
        reports.note("b", &said, start);
        reports.settle(&Rings::default(), start);
        assert_eq!(used(&reports), [], "not before five seconds");
        reports.settle(&Rings::default(), start + ms(5_000));
        assert_eq!(used(&reports), one("peer/b/west", "east", 30));
    }

    #[test]
    fn a_peer_with_many_networks_takes_no_place_of_another() {
        let (mut reports, start) = (Reports::default(), Instant::now());
        for number in 0..10_000 {
            reports.note("b", &[report(&format!("peer/b/{number}"), "east", ms(3))], start);
        }
        reports.note("c", &[report("peer/c/west", "east", ms(3))], start);
        reports.settle(&Rings::default(), start);
        reports.settle(&Rings::default(), start + ms(5_000));
        assert_eq!(reports.used().count(), PAIRS_MAX + 1);
        assert!(reports.used().any(|(to, ..)| to.as_str() == "peer/c/west"));
    }

    #[test]
    fn a_peer_that_changes_its_report_each_second_changes_nothing() {
        let (mut reports, start) = (Reports::default(), Instant::now());
        let mut seen = Vec::new();
        for second in 0..3_600_u64 {
            let now = start + ms(second * 1_000);
            let time = [31, 900, 30, 5_000, 60][usize::try_from(second % 5).expect("small")];
            reports.note("b", &[report("peer/b/west", "east", ms(time))], now);
            reports.settle(&Rings::default(), now);
            seen.extend(used(&reports).into_iter().map(|(.., time)| time));
        }
        seen.dedup();
        assert_eq!(seen, [30], "the smallest of each minute");
    }

    #[test]
    fn a_change_that_lasts_is_used_after_five_minutes_and_an_old_report_is_forgotten() {
        let (mut reports, start) = (Reports::default(), Instant::now());
        let mut at = |second: u64, said: Option<u64>| {
            let now = start + ms(second * 1_000);
            let said = said.map(|time| report("peer/b/west", "east", ms(time)));
            reports.note("b", said.as_slice(), now);
            reports.settle(&Rings::default(), now);
            used(&reports).first().map(|(.., time)| *time)
        };
        for second in 0..100 {
            assert_eq!(at(second, Some(30)), (second >= 5).then_some(30));
        }
        // The smallest report of a minute counts, so a larger one counts a minute later.
        let changed = (100..600).find(|second| at(*second, Some(80)) == Some(80));
        assert_eq!(changed, Some(99 + 60 + 300));
        // The last report came when the change was seen.
        let forgotten = (600..3_000).find(|second| at(*second, None).is_none());
        assert_eq!(forgotten, Some(99 + 60 + 300 + 900));
    }
}
