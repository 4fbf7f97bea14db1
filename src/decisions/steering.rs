//! Steering (`docs/steering.md, "How calls are divided"`): how the calls of a viewer are divided among the networks that have a
//! service. The functions here are pure: equal groups give equal shares, whatever the time and the replica. The view collects the
//! groups, and turns shares and priorities into entries.

mod filling;
pub mod zones;

use std::collections::BTreeSet;
use std::hash::Hasher;
use std::time::Duration;

use twox_hash::XxHash3_64;

use isthmus_model::drain;
use isthmus_model::place::{Distance as Level, Network};
use isthmus_settings::steering::{Cost, Steering};
use isthmus_snapshot::demand::Demand;

use self::filling::{Leaving, Room, fill};
use self::zones::InZone;

/// The number of parts into which the calls of a viewer are divided: shares are multiples of 1 / `PARTS`, and so is each percent.
pub const PARTS: u32 = 3_200;
/// The number of steps into which the calls are divided that no fixed share gives away: smaller moves by readiness are no moves.
pub const STEPS: u32 = 32;
/// The parts of a step.
const STEP: u32 = PARTS / STEPS;
/// All calls of a viewer, before they are rounded to parts.
const ALL: u64 = 1 << 32;
/// A ready endpoint serves `OVERPROVISIONING` / 10 of the calls that are meant for an endpoint, as for Envoy.
const OVERPROVISIONING: u128 = 14;
/// The overprovisioning factor that Envoy uses by itself, in percent.
pub const ENVOY_OVERPROVISIONING_PERCENT: u32 = 140;

/// How the distance of a network is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The config file sets the round-trip time.
    Config(Duration),
    /// This replica has measured the round-trip time.
    Measured(Duration),
    /// The peer whose network it is has measured the round-trip time.
    Reported(Duration),
    /// Only the localities are known.
    Locality(Level),
}

impl Source {
    /// Returns the round-trip time; `None` if only the localities are known.
    pub fn time(self) -> Option<Duration> {
        match self {
            Self::Config(time) | Self::Measured(time) | Self::Reported(time) => Some(time),
            Self::Locality(_) => None,
        }
    }
}

/// The distance from a viewer to a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distance {
    /// The round-trip time, or what stands for it.
    pub source: Source,
    /// The cost of traffic from the viewer's network.
    pub cost: Cost,
}

impl Distance {
    /// Returns the number of the ring, from 1. Ring 0 is the viewer's own network, and the ring after the last bound has no end.
    /// A locality stands for the bound of a ring: the first for the same zone, the second for the same region.
    pub fn ring(&self, steering: &Steering) -> u32 {
        let bound =
            |at: usize| steering.rings.get(at).or_else(|| steering.rings.last()).copied().unwrap_or_default();
        let time = match self.source {
            Source::Config(time) | Source::Measured(time) | Source::Reported(time) => time,
            Source::Locality(Level::SameZone) => bound(0),
            Source::Locality(Level::SameRegion) => bound(1),
            Source::Locality(Level::Elsewhere) => Duration::MAX,
        };
        let distance = time.saturating_add(self.cost.as_distance(steering.cost_weight));
        let passed = steering.rings.iter().filter(|bound| **bound < distance).count();
        u32::try_from(passed).unwrap_or(u32::MAX).saturating_add(1)
    }
}

/// The limit of what a group takes of the calls that no fixed share gives away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Takes {
    /// All calls that nearer groups leave.
    #[default]
    Rest,
    /// The share that the group has room for.
    Room,
    /// A share beyond the room of the group, since no group has room.
    More,
}

/// The endpoints of one service port on one network, as a viewer reaches them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The network of the endpoints.
    pub network: Network,
    /// The distance of the network; `None` for the viewer's own network.
    pub distance: Option<Distance>,
    /// The ring: 0 for the viewer's own network, larger ones are farther.
    pub ring: u32,
    /// The summed weight of the ready endpoints that the viewer can reach.
    pub ready: u64,
    /// The part of that weight that planned drains take away, in parts of [`drain::PARTS`].
    pub drained: u64,
    /// The summed weight of the endpoints that are not ready, without those that are terminating.
    pub not_ready: u64,
    /// The demand; `None`: the ready endpoints and those that are not ready.
    pub stands_for: Option<Demand>,
    /// The summed weight of ready endpoints that only the clients of their own network may use: the gateways of the network have ceased to
    /// answer, or `only` does not name it.
    pub at_home: u64,
    /// False if the gateways of the network have ceased to answer. Its endpoints count as not ready, unless there are no others.
    pub answers: bool,
    /// False if the config file does not let calls of other networks go there.
    pub is_allowed: bool,
    /// True if the endpoints are those of a peer that is joined with a service of this mesh. Its clients are not expected in other rooms:
    /// what it says of its demand is not to be believed there.
    pub is_joined: bool,
    /// The part of the ready endpoints, in percent, that calls of other networks may use; `None`: what the network's own calls leave.
    pub visitors_percent: Option<u8>,
    /// The share in percent that the config file sets for the network.
    pub fixed_percent: Option<u8>,
    /// The part of the share that follows from `fixed_percent`, in parts of [`PARTS`]: at most what the ready endpoints serve.
    pub by_hand: u32,
    /// The share of the viewer's calls, in parts of [`PARTS`].
    pub share: u32,
    /// The limit of the share.
    pub takes: Takes,
    /// The part of the share that the viewer's zone has, if this is its own network, with endpoints in several zones.
    pub in_zone: Option<InZone>,
    /// The priority of the group's ready endpoints: 0 for groups with a share; the others follow in the order of rings. `None`
    /// if no endpoint is ready.
    pub priority: Option<u32>,
}

impl Group {
    /// Creates a group without endpoints, not divided yet. `distance` is `None` for the viewer's own network.
    pub fn new(network: Network, distance: Option<Distance>, steering: &Steering) -> Self {
        Self {
            network,
            distance,
            ring: distance.map_or(0, |distance| distance.ring(steering)),
            ready: 0,
            drained: 0,
            not_ready: 0,
            stands_for: None,
            at_home: 0,
            is_joined: false,
            answers: true,
            is_allowed: true,
            visitors_percent: None,
            fixed_percent: None,
            by_hand: 0,
            share: 0,
            takes: Takes::Rest,
            in_zone: None,
            priority: None,
        }
    }

    /// Returns the part of `whole` that drains leave.
    fn less_drains(&self, whole: u64) -> u64 {
        part(whole, self.left(), self.undrained())
    }

    /// Returns the weight of the ready endpoints, in parts of [`drain::PARTS`].
    fn undrained(&self) -> u128 {
        u128::from(self.ready) * u128::from(drain::PARTS)
    }

    /// Returns what drains leave of the weight of the ready endpoints, in parts of [`drain::PARTS`].
    fn left(&self) -> u128 {
        self.undrained().saturating_sub(self.drained.into())
    }

    /// Returns the demand: the weight of the endpoints for which the calls are meant.
    pub fn demand(&self) -> u64 {
        match self.stands_for {
            // A group that shall have no endpoint is served by those that it still has.
            Some(demand) => demand.weight.max(self.ready.min(1)),
            None => self.ready.saturating_add(self.other()),
        }
    }

    /// Returns the weight of the endpoints that serve none of the viewer's calls, without those that are terminating.
    pub fn other(&self) -> u64 {
        self.not_ready.saturating_add(self.at_home)
    }

    /// Returns true if the ready endpoints suffice for all calls that are meant for the group.
    pub fn suffices(&self) -> bool {
        self.serves() >= u128::from(self.demand()) * 10
    }

    /// Returns true if the ready endpoints have room for calls of a viewer on another network.
    pub fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// Returns the number of calls that the ready endpoints serve, where 10 are meant for each endpoint.
    fn serves(&self) -> u128 {
        u128::from(self.ready) * OVERPROVISIONING
    }

    /// Returns true if the ready endpoints serve less than the share that the config file sets.
    pub fn is_share_bounded(&self) -> bool {
        self.fixed_percent.is_some_and(|percent| self.served_parts() < percent_parts(percent))
    }

    /// Returns the part of the calls that are meant for the group which its ready endpoints serve, in parts of [`PARTS`].
    fn served_parts(&self) -> u32 {
        let meant = u128::from(self.demand()) * 10;
        u32::try_from(part(PARTS.into(), self.serves().min(meant), meant)).unwrap_or(PARTS)
    }

    /// Returns the share that the config file sets, in parts of [`PARTS`]: exact, unless the ready endpoints serve less. That bound moves
    /// with readiness, in steps.
    fn share_by_hand(&self) -> u32 {
        let wanted = self.fixed_percent.filter(|_| self.ready > 0).map_or(0, percent_parts);
        let given = match self.served_parts() {
            most if most >= wanted => wanted,
            most if most < STEP => most,
            most => most - most % STEP,
        };
        u32::try_from(self.less_drains(given.into())).unwrap_or(given)
    }

    /// Returns the number of calls of the viewer that the ready endpoints have room for: on another network they first serve those
    /// that are meant for the group, unless the config file sets a part of them aside.
    fn room(&self) -> u128 {
        match self.visitors_percent {
            _ if self.ring == 0 => self.serves(),
            Some(percent) => u128::from(self.ready) * u128::from(percent) / 10,
            None => self.serves().saturating_sub(u128::from(self.demand()) * 10),
        }
    }

    /// Returns the room for calls of a viewer on another network, in parts of [`PARTS`] of as many calls as `demand` is meant for.
    pub fn room_parts(&self, demand: u64) -> u32 {
        let meant = u128::from(demand) * 10;
        u32::try_from(part(PARTS.into(), self.room().min(meant), meant)).unwrap_or(PARTS)
    }

    /// Returns the part that drains leave of what the group takes, from 0 to 1.
    fn kept(&self) -> f64 {
        match self.undrained() {
            0 => 1.0,
            all => self.left() as f64 / all as f64,
        }
    }
}

/// The viewer whose calls are divided.
pub struct Viewpoint<'a> {
    /// The network of the viewer.
    pub network: &'a Network,
    /// The largest part of its calls, in percent, that leaves the network while that has a ready endpoint.
    pub max_remote_percent: u8,
    /// Returns the ring of a network, the second argument, for viewers on another one, the first.
    pub ring: &'a dyn Fn(&Network, &Network) -> u32,
}

/// Returns a percentage in parts of [`PARTS`].
fn percent_parts(percent: u8) -> u32 {
    PARTS / 100 * u32::from(percent)
}

/// Returns the smallest share, in parts of [`PARTS`], that the viewer's own network has while it has a ready endpoint.
pub fn own_least(max_remote_percent: u8) -> u32 {
    PARTS.saturating_sub(percent_parts(max_remote_percent))
}

/// Divides the calls of a viewer among the groups of a service port: sets the share and the priority of each group. The shares sum to
/// [`PARTS`] if any endpoint is ready, and only groups with ready endpoints have one.
///
/// First, networks with a fixed share get it. The rest goes ring by ring, in [`STEPS`]: a ring takes what its groups have room for, in
/// proportion to their rooms, less what drains take away. The calls that leave other networks at present use the same rooms. Calls that
/// no ring has room for are divided in proportion to ready endpoints.
/// Last, `max_remote_percent` limits the calls that leave the viewer's network.
pub fn divide(groups: &mut [Group], viewpoint: &Viewpoint<'_>) {
    for group in groups.iter_mut() {
        group.by_hand = group.share_by_hand();
    }
    let turns: Vec<u64> = groups.iter().map(|group| turn(viewpoint.network, &group.network)).collect();
    let mut shares = shares(groups, viewpoint, &turns);
    let own = groups.iter().position(|group| group.ring == 0 && group.ready > 0);
    let own_least = own.map_or(0, |own| {
        let least = groups[own].less_drains(own_least(viewpoint.max_remote_percent).into());
        u32::try_from(least).unwrap_or(PARTS)
    });
    if let Some(own) = own.filter(|own| shares[*own] < own_least) {
        shares[own] = 0;
        let remote: Vec<u64> = shares.into_iter().map(u64::from).collect();
        shares = in_parts(&remote, PARTS - own_least, &turns);
        shares[own] = own_least;
    }
    for (group, share) in groups.iter_mut().zip(shares) {
        group.share = share;
    }
    let is_spare = |group: &Group| group.share == 0 && group.ready > 0;
    let rings: BTreeSet<u32> =
        groups.iter().filter(|group| is_spare(group)).map(|group| group.ring).collect();
    for group in groups {
        let nearer = || u32::try_from(rings.range(..group.ring).count()).unwrap_or(u32::MAX - 1);
        group.priority = match group.share {
            0 => (group.ready > 0).then(|| nearer() + 1),
            _ => Some(0),
        };
    }
}

/// Returns what the division has left of the overprovisioning factor, in percent: 140 if it has used nothing, at least 100. A client
/// that sees further endpoints of priority 0 fail may expect this much more of each of the others.
pub fn overprovisioning_percent(groups: &[Group]) -> u32 {
    let left = |group: &Group| {
        let of =
            |ready: u64, demand: u64| u128::from(ready) * OVERPROVISIONING * 10 / u128::from(demand.max(1));
        let serves = match (group.takes, group.in_zone) {
            (Takes::Rest, None) => of(group.ready, group.demand()),
            (Takes::Rest, Some(zone)) if zone.share == group.share => of(zone.ready, zone.demand),
            (Takes::Rest, Some(_)) | (Takes::Room | Takes::More, _) => 0,
        };
        u32::try_from(serves).unwrap_or(u32::MAX).clamp(100, ENVOY_OVERPROVISIONING_PERCENT)
    };
    let with_share = groups.iter().filter(|group| group.share > 0);
    with_share.map(left).min().unwrap_or(ENVOY_OVERPROVISIONING_PERCENT)
}

/// Returns the place of a group among others of the viewer whose portions have equal remainders. It differs by viewer, so that not all
/// viewers prefer the same network.
fn turn(viewer: &Network, network: &Network) -> u64 {
    let mut hasher = XxHash3_64::default();
    hasher.write(viewer.as_str().as_bytes());
    hasher.write(&[0]);
    hasher.write(network.as_str().as_bytes());
    hasher.finish()
}

/// Returns the share of each group, in parts of [`PARTS`], before `max_remote_percent` limits them; all are 0 if no endpoint is ready.
fn shares(groups: &mut [Group], viewpoint: &Viewpoint<'_>, turns: &[u64]) -> Vec<u32> {
    let by_hand: Vec<u64> = groups.iter().map(|group| group.by_hand.into()).collect();
    let left = u64::from(PARTS).saturating_sub(by_hand.iter().sum());
    let left = u32::try_from(left).unwrap_or_default();
    let own = groups.iter().position(|group| group.ring == 0 && group.demand() > 0);
    // The demand of the viewer's own network tells how many calls there are.
    let mut taken = match own {
        Some(own) => of_own(groups, own, viewpoint, left),
        None => of_nearest(groups, left),
    };
    let all_left = ALL * u64::from(left) / u64::from(PARTS);
    let missing = all_left.saturating_sub(taken.iter().sum());
    divide_by_ready(groups, &mut taken, missing);
    if left == 0 || taken.iter().all(|portion| *portion == 0) {
        return in_parts(&by_hand, PARTS, turns);
    }
    let with_rest = |(group, rest): (&Group, u32)| group.by_hand + rest;
    groups.iter().zip(in_steps(&taken, left, turns)).map(with_rest).collect()
}

/// Returns what each group has room for of the viewer's calls, of which there are [`ALL`], less its share by hand: `left` parts of them
/// have no such share. The viewer's own network, at `own`, comes first, and what leaves it finds room beside what leaves the others.
fn of_own(groups: &mut [Group], own: usize, viewpoint: &Viewpoint<'_>, left: u32) -> Vec<u64> {
    let share = |parts: u32| f64::from(parts) / f64::from(PARTS);
    let (without_hand, calls_of) = (share(left), |group: &Group| group.demand() as f64 * 10.0);
    let all_calls: f64 = groups.iter().filter(|group| !group.is_joined).map(calls_of).sum();
    // The calls of the clients of a group's network: those that have no share by hand, and of these, those that stay there.
    let home = |group: &Group| {
        let calls = calls_of(group);
        let serves = group.ready.saturating_add(group.at_home) as f64 * OVERPROVISIONING as f64;
        let free = (serves - calls * share(group.by_hand)).max(0.0);
        (calls * without_hand, free.min(calls * without_hand))
    };
    let room = |group: &Group| {
        let of_others = if group.is_joined { all_calls } else { all_calls - calls_of(group) };
        let by_hand = of_others * share(group.by_hand);
        let free = if group.ring == 0 { 0.0 } else { group.room() as f64 - by_hand };
        Room { free: free.max(0.0), kept: group.kept() }
    };
    let rooms: Vec<Room> = groups.iter().map(room).collect();
    let (calls, stay) = home(&groups[own]);
    let keeps = stay * groups[own].kept();
    groups[own].takes = if stay < calls { Takes::Room } else { Takes::Rest };
    let mut taken = vec![0.0; groups.len()];
    let mut last_ring = Some(0);
    if keeps < calls {
        let rings = groups.iter().map(|group| (group.ring > 0).then_some(group.ring)).collect();
        let mut all = vec![Leaving::new(calls - keeps, rings)];
        // A network all of whose endpoints are for visitors has no clients of its own.
        let has_clients = |group: &&Group| !group.is_joined && group.visitors_percent != Some(100);
        let others = groups.iter().filter(|group| group.ring > 0).filter(has_clients);
        all.extend(others.filter_map(|group| leaving(group, home(group), &rooms, groups, viewpoint)));
        let found = fill(all, rooms, 0);
        (taken, last_ring) = (found.taken, found.last_ring);
    }
    taken[own] = keeps;
    for group in groups.iter_mut().filter(|group| group.ring > 0) {
        let is_full = last_ring.is_none_or(|last| group.ring < last);
        group.takes = if is_full { Takes::Room } else { Takes::Rest };
    }
    let whole = calls_of(&groups[own]);
    taken.into_iter().map(|taken| portion(taken, whole)).collect()
}

/// Returns the calls that leave another network than the viewer's, if there are any. `home` has the calls of its clients without a share by
/// hand, and those that its endpoints serve.
fn leaving(
    group: &Group,
    (calls, stay): (f64, f64),
    rooms: &[Room],
    groups: &[Group],
    viewpoint: &Viewpoint<'_>,
) -> Option<Leaving> {
    let kept = if group.at_home > 0 { 1.0 } else { group.kept() };
    let mut leaves = calls - stay * kept;
    if group.ready > 0 {
        let most = f64::from(viewpoint.max_remote_percent) / 100.0;
        leaves = leaves.min(calls * (1.0 - kept * (1.0 - most)));
    }
    let ring = |(to, room): (&Group, &Room)| match to.network == group.network {
        true => None,
        // Rings of full groups do not matter.
        false if room.free <= 0.0 => Some(u32::MAX),
        false => Some((viewpoint.ring)(&group.network, &to.network)),
    };
    (leaves > 0.0).then(|| Leaving::new(leaves, groups.iter().zip(rooms).map(ring).collect()))
}

/// Returns a number of calls as a part of [`ALL`].
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is from 0 to `ALL`")]
fn portion(calls: f64, whole: f64) -> u64 {
    ((calls / whole).clamp(0.0, 1.0) * ALL as f64) as u64
}

/// Returns what each group has room for of the calls of a viewer whose own network has no demand: the nearest ring is taken to have room.
fn of_nearest(groups: &mut [Group], left: u32) -> Vec<u64> {
    let mut taken = vec![0; groups.len()];
    let rings: BTreeSet<u32> = groups.iter().map(|group| group.ring).collect();
    let mut left = ALL * u64::from(left) / u64::from(PARTS);
    for ring in rings {
        let of_ring = groups.iter().filter(|group| group.ring == ring);
        let calls = of_ring.clone().map(|group| u128::from(group.demand())).sum::<u128>() * 10;
        let room = |group: &Group| {
            let all = if group.visitors_percent.is_some() { group.room() } else { group.serves() };
            all.saturating_sub(calls * u128::from(group.by_hand) / u128::from(PARTS))
        };
        let rooms: u128 = of_ring.map(room).sum();
        let takes = part(ALL, rooms.min(calls), calls).min(left);
        let is_full = takes < left;
        for (group, taken) in groups.iter_mut().zip(&mut taken).filter(|(group, _)| group.ring == ring) {
            *taken = group.less_drains(part(takes, room(group), rooms));
            left -= *taken;
            group.takes = if is_full { Takes::Room } else { Takes::Rest };
        }
    }
    taken
}

/// Divides the calls for which no ring has room in proportion to the ready endpoints, less drains. A network that shall serve no calls of
/// others gets them if there is nothing else.
fn divide_by_ready(groups: &mut [Group], taken: &mut [u64], missing: u64) {
    let is_open = |group: &Group| group.ring == 0 || group.visitors_percent != Some(0);
    let is_any_open = groups.iter().any(|group| is_open(group) && group.left() > 0);
    let left = |group: &Group| if is_any_open && !is_open(group) { 0 } else { group.left() };
    let kept: u128 = groups.iter().map(left).sum();
    for (group, taken) in groups.iter_mut().zip(taken) {
        let more = part(missing, left(group), kept);
        *taken += more;
        if more >= ALL / u64::from(STEPS) / 2 {
            group.takes = Takes::More;
        }
    }
}

/// Returns `whole` × `part` ÷ `of`, rounded down; 0 if `of` is 0. `part` is at most `of`.
fn part(whole: u64, part: u128, of: u128) -> u64 {
    let portion = (u128::from(whole) * part).checked_div(of).unwrap_or_default();
    u64::try_from(portion).unwrap_or(whole)
}

/// Rounds portions to whole steps whose sum is `whole`; what is less than a step goes to the largest portion.
fn in_steps(portions: &[u64], whole: u32, turns: &[u64]) -> Vec<u32> {
    let mut parts = in_parts(portions, whole / STEP, turns);
    parts.iter_mut().for_each(|part| *part *= STEP);
    let largest = (0..portions.len()).max_by_key(|at| (portions[*at], std::cmp::Reverse(turns[*at])));
    if let Some(largest) = largest {
        parts[largest] += whole % STEP;
    }
    parts
}

/// Rounds portions to whole parts whose sum is `whole`: each gets its portion rounded down, and those with the largest
/// remainders get one more, in order of `turns` among equal ones. A portion of 0 gets 0; if all are 0, so are the parts.
fn in_parts(portions: &[u64], whole: u32, turns: &[u64]) -> Vec<u32> {
    let total: u128 = portions.iter().map(|portion| u128::from(*portion)).sum();
    if total == 0 {
        return vec![0; portions.len()];
    }
    let exact = |portion: &u64| u128::from(*portion) * u128::from(whole);
    // Each part is at most `whole`.
    let mut parts: Vec<u32> =
        portions.iter().map(|portion| u32::try_from(exact(portion) / total).unwrap_or(whole)).collect();
    let mut by_remainder: Vec<usize> = (0..portions.len()).collect();
    by_remainder.sort_by_key(|at| (std::cmp::Reverse(exact(&portions[*at]) % total), turns[*at]));
    let missing = whole - parts.iter().sum::<u32>();
    by_remainder.into_iter().take(missing as usize).for_each(|at| parts[at] += 1);
    debug_assert_eq!(parts.iter().sum::<u32>(), whole, "{portions:?}");
    parts
}

#[cfg(test)]
mod tests;
