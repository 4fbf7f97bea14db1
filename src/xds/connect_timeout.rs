//! The connect timeout of clusters for Envoy. Envoy has one for all endpoints of a cluster, and it covers the TLS handshake. If it
//! is long, calls of a network that is gone wait for it; if it is short, a far gateway never answers in time.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use isthmus_decisions::view::{EntryKind, Viewer, distance, view};
use isthmus_model::place::Network;
use isthmus_settings::limits::Timeouts;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The values for clusters with gateways. They are few, so that a small change of a distance seldom changes clusters.
const VALUES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(3)];
/// The round trips, and the time beside them, that a gateway of priority 0 gets.
const USUAL: (u32, Duration) = (10, Duration::from_millis(750));
/// The same for gateways of other priorities, to which clients go when priority 0 fails: TCP, TLS, and one to spare.
const LEAST: (u32, Duration) = (3, Duration::from_millis(250));
/// The time for which another value must have been wanted without a break before it replaces the one in use.
const HOLD: Duration = Duration::from_secs(600);
/// The time for which a value by distance is not determined again.
const FRESH: Duration = Duration::from_secs(10);
/// The time within which the distance of a gateway that answers is known: it is used 5 s after the first probe, and published with others
/// up to 10 s later.
const KNOWN_WITHIN: Duration = Duration::from_secs(30);

/// A connect timeout, and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timeout {
    /// The operator sets it to another than the default.
    Set(Duration),
    /// It follows from the distances of gateways, or is the default if there are none.
    ByDistance(Duration),
    /// The largest one, because the distance of a gateway is not known yet. A timeout in use is one of these only if no timeout by
    /// distance was in use before.
    Assumed(Duration),
}

/// Returns the connect timeout that suits a service port now: as the operator sets it, or by the round-trip times of the gateways
/// that clients on the replica's own network use.
///
/// Returns `None` if `is_fresh`, unless the operator sets it: the distances make a view of the service, which each endpoint that
/// changes would make once more.
pub(super) fn wanted(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &PortView,
    is_fresh: bool,
) -> Option<Timeout> {
    let configured = snapshot.policy.tuning.of(&service.name).connect_timeout;
    if configured != Timeouts::default().connect {
        return Some(Timeout::Set(configured));
    }
    let by_distance = || by_distance(snapshot, service, port).unwrap_or(Timeout::ByDistance(configured));
    (!is_fresh).then(by_distance)
}

/// Returns the connect timeout by the distances of a service port's gateways; `None` if there are none.
fn by_distance(snapshot: &Snapshot, service: &ServiceView, port: &PortView) -> Option<Timeout> {
    let node = &snapshot.policy.node;
    let viewer = Viewer { network: node.network.clone(), cluster: node.cluster.clone(), ..Viewer::default() };
    let is_far = |network: &&Network| {
        !viewer.is_near(snapshot, network, &node.cluster)
            && snapshot.networks().get(network).is_some_and(|entry| !entry.gateways.is_empty())
    };
    service.networks.iter().find(is_far)?;
    let entries = view(snapshot, service, port, "", &viewer)?.entries;
    let mut networks: BTreeMap<&Network, u32> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.kind == EntryKind::Gateway) {
        let priority = networks.entry(&entry.network).or_insert(entry.priority);
        *priority = entry.priority.min(*priority);
    }
    let needs = |(network, priority): (&Network, u32)| {
        let (count, beside) = if priority == 0 { USUAL } else { LEAST };
        let distance = distance(snapshot, &viewer.network, network, Default::default);
        Some(distance.source.time()?.saturating_mul(count).saturating_add(beside))
    };
    let largest = VALUES[VALUES.len() - 1];
    if networks.is_empty() {
        return None;
    }
    // A gateway at an unknown distance may be far away.
    let Some(needed) = networks.into_iter().map(needs).collect::<Option<Vec<_>>>() else {
        return Some(Timeout::Assumed(largest));
    };
    let needed = needed.into_iter().max()?;
    Some(Timeout::ByDistance(VALUES.into_iter().find(|value| *value >= needed).unwrap_or(largest)))
}

/// The connect timeout in use. By distance, it changes at most once in [`HOLD`]; only one that was assumed at first is replaced as soon as
/// the distance is known. Time is an argument.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    /// The timeout in use; `None` before the first one.
    used: Option<Timeout>,
    /// The time since which it has been in use.
    since: Option<Instant>,
    /// The time since which others have been wanted; `None` while the one in use is.
    differs_since: Option<Instant>,
    /// The time of the last note.
    noted: Option<Instant>,
    /// True if a note was left out since then, because the last one was fresh.
    is_behind: bool,
}

impl Held {
    /// Notes the timeout that is wanted; `None` if the last note is fresh.
    pub(super) fn note(&mut self, wanted: Option<Timeout>, now: Instant) {
        let Some(wanted) = wanted else {
            self.is_behind = true;
            return;
        };
        (self.noted, self.is_behind) = (Some(now), false);
        let wanted = match (self.used, wanted) {
            (Some(Timeout::ByDistance(_)), Timeout::Assumed(time)) => Timeout::ByDistance(time),
            (_, wanted) => wanted,
        };
        if let (Some(Timeout::ByDistance(used)), Timeout::ByDistance(time)) = (self.used, wanted)
            && used != time
            && now.duration_since(*self.differs_since.get_or_insert(now)) < HOLD
        {
            return;
        }
        if self.used != Some(wanted) {
            (self.used, self.since) = (Some(wanted), Some(now));
        }
        self.differs_since = None;
    }

    /// Returns the timeout in use.
    pub(super) fn value(&self) -> Duration {
        match self.used {
            None => Duration::default(),
            Some(Timeout::Set(time) | Timeout::ByDistance(time) | Timeout::Assumed(time)) => time,
        }
    }

    /// Returns true if a value by distance, noted before, need not be determined again.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        let by_distance = matches!(self.used, Some(Timeout::ByDistance(_) | Timeout::Assumed(_)));
        by_distance && self.noted.is_some_and(|noted| now.duration_since(noted) < FRESH)
    }

    /// Returns true if a note was left out, or if the next note changes the timeout, unless it wants the one in use. A timeout that was
    /// assumed is noted again until the distance should be known.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_held = |since: Instant| now.duration_since(since) >= HOLD;
        let may_be_known = |since: Instant| now.duration_since(since) <= KNOWN_WITHIN;
        let is_assumed = matches!(self.used, Some(Timeout::Assumed(_)));
        let is_due = self.is_behind
            || self.differs_since.is_some_and(is_held)
            || is_assumed && self.since.is_some_and(may_be_known);
        !self.is_fresh(now) && is_due
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use isthmus_model::endpoint::Health;
    use isthmus_model::service::PortProtocol;
    use isthmus_settings::network::NetworkPolicy;
    use isthmus_settings::policy::Policy;
    use isthmus_settings::steering::{ServiceSteering, SteeringMode};
    use isthmus_settings::tuning::Tuning;
    use isthmus_snapshot::testing::{Mesh, endpoint, gateway, network, port, service, shard, tuning};

    const S: Duration = Duration::from_secs(1);
    const MINUTE: Duration = Duration::from_secs(60);

    /// Returns the timeout for a service with endpoints on these networks; `ready` of 10 are ready on n1, the replica's own. The
    /// others have gateways at these distances, in milliseconds.
    fn timeout(ready: usize, mode: SteeringMode, far: &[(&str, Option<u64>)]) -> Duration {
        let of = |host: usize| {
            let health = if host < ready { Health::Healthy } else { Health::Unhealthy };
            isthmus_model::endpoint::Endpoint { health, ..endpoint(&format!("10.1.0.{host}"), 1) }
        };
        let web = |endpoints| service("web.mesh", vec![port(443, PortProtocol::Tcp)], endpoints);
        let mut shards = vec![shard("a", "n1", vec![web((0..10).map(of).collect())])];
        let mut networks = Vec::new();
        for (at, (name, distance)) in far.iter().enumerate() {
            let there = (0..10).map(|host| endpoint(&format!("10.2.{at}.{host}"), 1)).collect();
            shards.push(shard(&format!("c{at}"), name, vec![web(there)]));
            let distance = distance.iter().map(|ms| (Network::new("n1"), Duration::from_millis(*ms)));
            networks.push(NetworkPolicy {
                distance: distance.collect(),
                ..network(name, vec![gateway(&format!("192.0.2.{at}"), 1)])
            });
        }
        let mut mesh = Mesh::new(networks, shards);
        let policy: &mut Policy = Arc::make_mut(&mut mesh.policy);
        let steering = ServiceSteering { mode, ..ServiceSteering::default() };
        policy.tuning.default = Tuning { steering, ..tuning() }.into();
        let snapshot = mesh.snapshot();
        let service = snapshot.service("web.mesh").expect("there");
        assert_eq!(wanted(&snapshot, service, &service.ports[0], true), None);
        match wanted(&snapshot, service, &service.ports[0], false) {
            Some(Timeout::ByDistance(time)) => time,
            Some(Timeout::Assumed(time)) if far.iter().any(|(_, distance)| distance.is_none()) => time,
            other => panic!("it is not by distance: {other:?}"),
        }
    }

    #[test]
    fn the_timeout_follows_the_farthest_gateway_that_clients_use_first() {
        use SteeringMode::{Nearest, Off};
        for (ready, mode, far, expected) in [
            (10, Off, &[][..], 3),
            (10, Off, &[("n2", Some(25))], 1),
            (10, Off, &[("n2", Some(26))], 2),
            (10, Off, &[("n2", Some(125))], 2),
            (10, Off, &[("n2", Some(126))], 3),
            (10, Off, &[("n2", Some(5_000))], 3),
            (10, Off, &[("n2", Some(5)), ("n3", Some(100))], 2),
            (10, Off, &[("n2", Some(5)), ("n3", None)], 3),
            // All calls stay near, so that only the handshake with the others has to be possible.
            (10, Nearest, &[("n2", Some(200))], 1),
            (10, Nearest, &[("n2", Some(300))], 2),
            (10, Nearest, &[("n2", None)], 3),
            (5, Nearest, &[("n2", Some(30))], 2),
            (0, Nearest, &[("n2", Some(30)), ("n3", Some(200))], 3),
        ] {
            assert_eq!(timeout(ready, mode, far), expected * S, "{ready} {mode:?} {far:?}");
        }
    }

    #[test]
    fn a_timeout_changes_after_ten_minutes_without_a_break_or_if_the_operator_sets_it() {
        let (start, mut held) = (Instant::now(), Held::default());
        let mut note = |minute: u32, wanted| {
            held.note(Some(wanted), start + minute * MINUTE);
            (held.value().as_secs(), held.is_due(start + (minute + 5) * MINUTE))
        };
        let by_distance = |seconds: u32| Timeout::ByDistance(seconds * S);
        assert_eq!(note(0, by_distance(3)), (3, false), "the first one holds at once");
        assert_eq!(note(5, by_distance(1)), (3, false));
        assert_eq!(note(14, by_distance(1)), (3, true));
        assert_eq!(note(14, by_distance(3)), (3, false));
        assert_eq!(note(15, by_distance(1)), (3, false), "it counts anew");
        assert_eq!(note(24, by_distance(2)), (3, true));
        assert_eq!(note(25, by_distance(1)), (1, false));
        assert_eq!(note(26, by_distance(2)), (1, false));
        assert_eq!(note(27, Timeout::Set(7 * S)), (7, false));
        assert_eq!(note(28, Timeout::Set(2 * S)), (2, false));
        assert_eq!(note(29, by_distance(1)), (1, false), "the operator has removed the key");
    }

    #[test]
    fn a_timeout_that_was_assumed_is_replaced_as_soon_as_the_distance_is_known() {
        let (start, mut held) = (Instant::now(), Held::default());
        let at = |seconds: u32| start + seconds * S;
        held.note(Some(Timeout::Assumed(3 * S)), at(0));
        assert_eq!((held.value(), held.is_due(at(9)), held.is_due(at(10))), (3 * S, false, true));
        held.note(Some(Timeout::Assumed(3 * S)), at(10));
        assert!(held.is_due(at(20)) && held.is_due(at(30)));
        assert!(!held.is_due(at(31)), "a gateway that never answers costs nothing for ever");
        held.note(Some(Timeout::ByDistance(S)), at(40));
        assert_eq!((held.value(), held.is_due(at(50))), (S, false));
        // A network that is new changes the cluster like another distance: later.
        held.note(Some(Timeout::Assumed(3 * S)), at(60));
        assert_eq!(held.value(), S);
        held.note(Some(Timeout::Assumed(3 * S)), at(660));
        assert_eq!(held.value(), 3 * S);
        for (wanted, second) in [(1, 670), (3, 680), (1, 690)] {
            held.note(Some(Timeout::ByDistance(wanted * S)), at(second));
            assert_eq!(held.value(), 3 * S, "its own hold has begun");
        }
        let mut held = Held::default();
        for (wanted, second) in
            [(Timeout::ByDistance(3 * S), 0), (Timeout::Assumed(3 * S), 10), (Timeout::ByDistance(S), 20)]
        {
            held.note(Some(wanted), at(second));
            assert_eq!(held.value(), 3 * S, "{wanted:?}");
        }
    }

    #[test]
    fn a_value_by_distance_is_determined_at_most_once_in_ten_seconds_and_then_made_up_for() {
        let (start, mut held) = (Instant::now(), Held::default());
        let at = |seconds: u32| start + seconds * S;
        assert!(!held.is_fresh(start));
        held.note(Some(Timeout::ByDistance(S)), start);
        assert!(held.is_fresh(at(9)) && !held.is_fresh(at(10)));
        assert!(!held.is_due(at(60)), "nothing was left out");
        held.note(None, at(9));
        assert!(!held.is_due(at(9)) && held.is_due(at(10)));
        held.note(Some(Timeout::ByDistance(S)), at(60));
        assert!(!held.is_due(at(120)));
        // The operator removes the key.
        held.note(Some(Timeout::Set(7 * S)), at(61));
        assert!(!held.is_fresh(at(61)));
    }
}
