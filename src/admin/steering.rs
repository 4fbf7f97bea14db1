//! Steering, explained: the groups among which a viewer's calls are divided, each with the sentence that says why
//! (`docs/steering.md, "See why"`), and the metric of the shares that clients beside this replica get.

use std::time::Duration;

use super::scraped::Scraped;
use isthmus_aggregator::liveness::Distances;
use isthmus_api as api;
use isthmus_decisions::steering::{Group, PARTS, STEPS, Source, Takes, own_least};
use isthmus_decisions::view::{Viewer, distance, view};
use isthmus_model::place::Network;
use isthmus_settings::peer::peer_of;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::demand::Demand;
use isthmus_snapshot::networks::NetworkEntry;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The metric of the shares of calls.
const SHARE: (&str, &str) = (
    "isthmus_steering_share",
    "Share of calls, from 0 to 1, that Envoys on the gateway's own network send to a network; for services with steering, on their \
     first port. At most 10,000 series.",
);
/// The shares of calls.
pub(super) const METRICS: Scraped = Scraped {
    descriptions: &[SHARE],
    expose: |sources, exposition| expose(&sources.reader.latest(), exposition),
};
/// The largest number of series of the metric.
const SERIES_MAX: usize = 10_000;

/// Returns the groups of the view of a viewer on this network in the form of the API.
pub(super) fn groups(
    snapshot: &Snapshot,
    viewer: &Network,
    groups: &[Group],
    distances: &Distances,
) -> Vec<api::horizon::Group> {
    let max_remote = snapshot.policy.steering.max_remote_percent;
    let age = |group: &Group| {
        let source = group.distance?.source;
        age(snapshot, viewer, &group.network, source, distances)
    };
    groups.iter().map(|group| shown(group, groups, max_remote, age(group))).collect()
}

/// Returns the time since the distance of a network was last measured; `None` if it is not measured.
fn age(
    snapshot: &Snapshot,
    viewer: &Network,
    network: &Network,
    source: Source,
    distances: &Distances,
) -> Option<Duration> {
    match source {
        Source::Config(_) | Source::Locality(_) => None,
        Source::Measured(_) => {
            let is_here = *viewer == snapshot.policy.node.network;
            let other = if is_here { network } else { viewer };
            distances.measured.get(other).map(|measured| measured.age)
        }
        Source::Reported(_) => distances.reported.get(&(network.clone(), viewer.clone())).copied(),
    }
}

fn shown(group: &Group, all: &[Group], max_remote: u8, age: Option<Duration>) -> api::horizon::Group {
    let (source, round_trip) = source(&group.network, group.distance.map(|distance| distance.source));
    let cost = group.distance.map(|distance| distance.cost.to_string()).filter(|cost| cost != "0");
    api::horizon::Group {
        network: group.network.to_string(),
        ring: group.ring,
        round_trip_ms: round_trip,
        source,
        age_seconds: age.map(|age| age.as_secs()),
        cost,
        ready: group.ready,
        not_ready: group.other(),
        share: f64::from(group.share) / f64::from(PARTS),
        priority: group.priority,
        zone_share: group.in_zone.map(|zone| f64::from(zone.share) / f64::from(PARTS)),
        stands_for: group.stands_for.map(|demand| demand.weight),
        why: explained(group, all, max_remote),
    }
}

/// Returns the distance of a network from this replica's own network, in the form of the API.
pub(super) fn distance_here(
    snapshot: &Snapshot,
    network: &Network,
    distances: &Distances,
) -> Option<api::network::Distance> {
    let own = &snapshot.policy.node.network;
    if network == own || network.is_unknown() || own.is_unknown() {
        return None;
    }
    let entry = snapshot.networks().get(network);
    let localities = || entry.map(NetworkEntry::localities).unwrap_or_default();
    let found = distance(snapshot, own, network, localities);
    let (source, round_trip_ms) = source(network, Some(found.source));
    Some(api::network::Distance {
        ring: found.ring(&snapshot.policy.steering),
        round_trip_ms,
        source,
        age_seconds: age(snapshot, own, network, found.source, distances).map(|age| age.as_secs()),
    })
}

/// Returns how the distance of a network is known, and the round-trip time in milliseconds.
fn source(network: &Network, source: Option<Source>) -> (String, Option<f64>) {
    let (text, time) = match source {
        None => (String::new(), None),
        Some(Source::Config(time)) => ("by hand".to_owned(), Some(time)),
        Some(Source::Measured(time)) => ("measured here".to_owned(), Some(time)),
        Some(Source::Reported(time)) => {
            (format!("from peer {}", peer_of(network).unwrap_or_default()), Some(time))
        }
        Some(Source::Locality(level)) => (format!("by locality: {}", level.text()), None),
    };
    (text, time.map(|time| (time.as_secs_f64() * 1e6).round() / 1e3))
}

/// Returns what the group stands for, if that is another number than that of its endpoints, and why it has its share.
fn explained(group: &Group, all: &[Group], max_remote: u8) -> String {
    let why = why(group, all, max_remote) + &zone(group);
    match group.stands_for {
        Some(Demand { weight, source }) => format!("stands for {weight} ({}): {why}", source.text()),
        None => why,
    }
}

/// Returns what of the own network's share is in the viewer's zone, if its zones make a difference.
fn zone(group: &Group) -> String {
    match group.in_zone {
        None => String::new(),
        Some(zone) if zone.share == group.share => "; all in the client's zone".to_owned(),
        Some(zone) => format!(
            "; {} in the client's zone, which keeps 1.4 × {}/{}",
            as_percent(zone.share),
            zone.ready,
            zone.demand
        ),
    }
}

/// Returns the sentence that says why the group has its share.
fn why(group: &Group, all: &[Group], max_remote: u8) -> String {
    let count = group.demand();
    let is_other = |other: &&Group| other.network != group.network;
    let others_ready = all.iter().filter(is_other).any(|other| other.ready > 0);
    let is_fixed = |other: &&Group| other.fixed_percent.is_some() && other.share > 0;
    if !group.is_allowed {
        return "the policy's `only` does not name it".to_owned();
    }
    if group.ready == 0 && !group.answers {
        return "its gateways do not answer".to_owned();
    }
    if group.ready == 0 {
        return format!("none of {count} is ready");
    }
    if !others_ready {
        return "no other network has a ready endpoint".to_owned();
    }
    let is_beside = |other: &Group| other.ring == group.ring && other.ready > 0;
    if group.share == 0 {
        let is_ring_used = all.iter().any(|other| is_beside(other) && other.share > 0);
        return match group.ring {
            0 => format!("only {} of {count} are ready: less than 1/{STEPS} of the calls", group.ready),
            _ if is_ring_used || group.takes != Takes::Rest => format!(
                "in reserve, priority {}: {} of {count} are ready, room for less than 1/{STEPS} of the calls",
                group.priority.unwrap_or_default(),
                group.ready
            ),
            _ => format!(
                "in reserve, priority {}: nearer networks suffice",
                group.priority.unwrap_or_default()
            ),
        };
    }
    if let Some(percent) = group.fixed_percent.filter(|_| group.by_hand > 0) {
        return by_hand(group, percent);
    }
    if group.ring > 0 {
        return why_elsewhere(group, all, all.iter().filter(is_other).any(is_beside));
    }
    if all.iter().filter(is_other).any(|other| is_fixed(&other)) {
        return "what the policy's shares leave stays".to_owned();
    }
    match group.suffices() {
        true => "the own network comes first, and its ready endpoints suffice".to_owned(),
        false if max_remote < 100 && group.share == own_least(max_remote) => {
            format!("{} of {count} are ready, but at most {max_remote} % may leave (maxRemote)", group.ready)
        }
        false => {
            let is_more = group.takes == Takes::More;
            let more = if is_more { ", and its part of what no network has room for" } else { "" };
            format!("{} of {count} are ready: keeps 1.4 × {}/{count}{more}", group.ready, group.ready)
        }
    }
}

/// Returns the sentence that says why a group has a share that the config file sets.
fn by_hand(group: &Group, percent: u8) -> String {
    let more =
        if group.share > group.by_hand { ", and it is the nearest with room for the rest" } else { "" };
    match group.is_share_bounded() {
        true => format!(
            "the policy's shares give it {percent} %, but only {} of {} are ready: at most 1.4 × {}/{}{more}",
            group.ready,
            group.demand(),
            group.ready,
            group.demand()
        ),
        false => format!("the policy's shares give it {percent} %{more}"),
    }
}

/// Returns the sentence that says why a group on another network than the viewer's has a share. `has_beside` is true if there is
/// another group in its ring.
fn why_elsewhere(group: &Group, all: &[Group], has_beside: bool) -> String {
    let own: u64 = all.iter().filter(|other| other.ring == 0).map(Group::demand).sum();
    // Calls that leave other networks use the same room.
    let is_shared = || group.takes == Takes::Room && group.share + PARTS / STEPS <= group.room_parts(own);
    let shared = if is_shared() { ", which other networks' calls use too" } else { "" };
    let room = match (own, group.has_room(), group.visitors_percent) {
        (1.., true, None) => {
            format!("has room for (1.4 × {} − {})/{own} of the calls{shared}", group.ready, group.demand())
        }
        (1.., true, Some(percent)) => {
            format!("has room for {percent} % × {}/{own} of the calls (room){shared}", group.ready)
        }
        _ => String::new(),
    };
    match group.takes {
        Takes::More if room.is_empty() => {
            "takes its part, by ready endpoints, of what no network has room for".to_owned()
        }
        Takes::More => format!("{room}, and takes its part of what no network has room for"),
        Takes::Room if !room.is_empty() => room,
        Takes::Room | Takes::Rest => {
            let nearest = all.iter().filter(|other| other.ready > 0).all(|other| other.ring >= group.ring);
            let part = if has_beside { ", in proportion to the room in its ring" } else { "" };
            match nearest {
                true => format!("the nearest ring with a ready endpoint{part}"),
                false => format!("takes what nearer networks leave{part}"),
            }
        }
    }
}

/// Returns the groups of a service as Envoys on this replica's network have them, on the first port; none if the service is not
/// steered, and `None` if it does not exist.
pub(super) fn groups_here(snapshot: &Snapshot, hostname: &str) -> Option<Vec<Group>> {
    let service = snapshot.service(hostname)?;
    if !snapshot.policy.tuning.of(&service.name).steering.is_on() {
        return Some(Vec::new());
    }
    let node = &snapshot.policy.node;
    let viewer = Viewer { network: node.network.clone(), cluster: node.cluster.clone(), ..Viewer::default() };
    Some(view(snapshot, service, service.ports.first()?, "", &viewer)?.groups)
}

/// Returns a share in percent.
pub(super) fn as_percent(share: u32) -> String {
    format!("{:.1} %", f64::from(share) / f64::from(PARTS) * 100.0)
}

/// Adds the shares of steered services to the metrics of a scrape, as Envoys on this replica's network have them.
fn expose(snapshot: &Snapshot, exposition: &mut Exposition) {
    if !snapshot.policy.steers() {
        return;
    }
    let family = exposition.family(SHARE.0, Kind::Gauge, SHARE.1);
    let mut series = 0;
    for service in snapshot.services() {
        let groups = groups_here(snapshot, &service.name).unwrap_or_default();
        series += groups.len();
        if series > SERIES_MAX {
            return;
        }
        for group in &groups {
            let labels = [("service", &*service.name), ("network", group.network.as_str())];
            family.add(labels, f64::from(group.share) / f64::from(PARTS));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_decisions::steering::zones::InZone;
    use isthmus_decisions::steering::{Distance, Viewpoint, divide};
    use isthmus_model::demand::DemandSource;
    use isthmus_model::place::Distance as Level;
    use isthmus_settings::steering::{Cost, Steering};

    fn group(network: &str, source: Option<Source>, ready: u64, not_ready: u64) -> Group {
        let distance = source.map(|source| Distance { source, cost: Cost::default() });
        Group { ready, not_ready, ..Group::new(Network::new(network), distance, &Steering::default()) }
    }

    /// Divides the calls of a viewer on `east`; all networks are near each other.
    fn divide_at_east(groups: &mut [Group], max_remote_percent: u8) {
        let network = &Network::new("east");
        divide(groups, &Viewpoint { network, max_remote_percent, ring: &|_, _| 1 });
    }

    /// Returns share, in steps, and sentence of each group.
    fn told(mut groups: Vec<Group>, max_remote: u8) -> Vec<(u32, String)> {
        divide_at_east(&mut groups, max_remote);
        groups.iter().map(|group| (group.share / (PARTS / STEPS), why(group, &groups, max_remote))).collect()
    }

    #[test]
    fn each_share_has_a_sentence() {
        let ms = |time| Some(Source::Measured(Duration::from_millis(time)));
        let elsewhere = Some(Source::Locality(Level::Elsewhere));
        let of = |ready, not_ready| {
            vec![
                group("east", None, ready, not_ready),
                group("west", ms(15), 9, 0),
                group("asia", elsewhere, 9, 0),
            ]
        };
        let texts = |groups, max| -> Vec<String> {
            told(groups, max).into_iter().map(|(share, why)| format!("{share}: {why}")).collect()
        };
        let reserve = "0: in reserve, priority 1: nearer networks suffice";
        assert_eq!(
            texts(of(3, 1), 100),
            [
                "32: the own network comes first, and its ready endpoints suffice",
                reserve,
                "0: in reserve, priority 2: nearer networks suffice"
            ]
        );
        assert_eq!(
            texts(of(8, 22), 100),
            [
                "16: 8 of 30 are ready: keeps 1.4 × 8/30, and its part of what no network has room for",
                "8: has room for (1.4 × 9 − 9)/30 of the calls, and takes its part of what no network has room for",
                "8: has room for (1.4 × 9 − 9)/30 of the calls, and takes its part of what no network has room for",
            ]
        );
        assert_eq!(
            texts(of(8, 4), 100),
            ["30: 8 of 12 are ready: keeps 1.4 × 8/12", "2: takes what nearer networks leave", reserve]
        );
        assert_eq!(
            texts(of(3, 6), 100),
            [
                "15: 3 of 9 are ready: keeps 1.4 × 3/9",
                "13: has room for (1.4 × 9 − 9)/9 of the calls",
                "4: takes what nearer networks leave"
            ]
        );
        assert_eq!(texts(of(8, 22), 50)[0], "16: 8 of 30 are ready, but at most 50 % may leave (maxRemote)");
        assert_eq!(
            texts(of(0, 3), 100),
            ["0: none of 3 is ready", "32: the nearest ring with a ready endpoint", reserve]
        );
        let mut few = of(0, 3);
        few[1].not_ready = 6;
        assert_eq!(
            texts(few, 100)[1..],
            [
                "10: takes its part, by ready endpoints, of what no network has room for",
                "22: has room for (1.4 × 9 − 9)/3 of the calls, and takes its part of what no network has room for"
            ]
        );
        let mut full = of(0, 9);
        full[1].not_ready = 6;
        assert_eq!(
            texts(full, 100)[1],
            "14: takes its part, by ready endpoints, of what no network has room for"
        );
        let mut fixed = of(3, 0);
        fixed[2].fixed_percent = Some(25);
        assert_eq!(
            texts(fixed, 100),
            ["24: what the policy's shares leave stays", reserve, "8: the policy's shares give it 25 %"]
        );
        let mut lost = of(10, 0);
        lost[0].stands_for = Some(Demand { weight: 30, source: DemandSource::Replicas });
        divide_at_east(&mut lost, 100);
        assert_eq!(
            explained(&lost[0], &lost, 100),
            "stands for 30 (replicas): 10 of 30 are ready: keeps 1.4 × 10/30, and its part of what no network has room for"
        );
        lost[0].in_zone = Some(InZone { share: 4 * PARTS / STEPS, ready: 1, demand: 20 });
        assert!(
            explained(&lost[0], &lost, 100)
                .ends_with("has room for; 12.5 % in the client's zone, which keeps 1.4 × 1/20")
        );
        lost[0].in_zone = None;
        lost[0].ready = 0;
        divide_at_east(&mut lost, 100);
        assert_eq!(explained(&lost[0], &lost, 100), "stands for 30 (replicas): none of 30 is ready");
        let mut bounded = of(3, 0);
        (bounded[2].fixed_percent, bounded[2].not_ready) = (Some(50), 27);
        assert_eq!(
            texts(bounded, 100)[2],
            "11: the policy's shares give it 50 %, but only 9 of 36 are ready: at most 1.4 × 9/36"
        );
        let mut others = of(1, 9);
        (others[1].ready, others[1].not_ready, others[2].ready) = (25, 0, 50);
        others.push(Group { ready: 1, not_ready: 9, ..group("south", ms(1), 0, 0) });
        assert_eq!(
            texts(others.clone(), 100)[1..],
            [
                "23: has room for (1.4 × 25 − 25)/10 of the calls, which other networks' calls use too",
                "5: takes what nearer networks leave",
                "0: in reserve, priority 1: 1 of 10 are ready, room for less than 1/32 of the calls"
            ]
        );
        others[2].visitors_percent = Some(10);
        others[3].is_allowed = false;
        assert_eq!(texts(others.clone(), 100)[3], "0: the policy's `only` does not name it");
        assert_eq!(
            texts(vec![group("west", ms(9), 1, 5)], 100),
            ["32: no other network has a ready endpoint"]
        );
    }
}
