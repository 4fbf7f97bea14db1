//! Tests of the division: worked examples, and the properties that hold for all groups.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use isthmus_model::demand::DemandSource;

/// Returns a group of this ring with this number of ready and other endpoints.
fn group(ring: u32, ready: u64, not_ready: u64) -> Group {
    let network = Network::new(&format!("n{ring}"));
    Group { ring, ready, not_ready, ..Group::new(network, None, &Steering::default()) }
}

fn fixed(group: Group, percent: u8) -> Group {
    Group { fixed_percent: Some(percent), ..group }
}

fn viewer() -> Network {
    Network::new("n0")
}

/// Divides the calls of a viewer on this network. What leaves other networks comes last everywhere.
fn divide_at(groups: &mut [Group], network: &Network, max_remote_percent: u8) {
    divide(groups, &Viewpoint { network, max_remote_percent, ring: &|_, _| u32::MAX });
}

/// Returns share, in steps, and priority of each group.
#[track_caller]
fn divided<const N: usize>(mut groups: [Group; N], max_remote_percent: u8) -> [(u32, Option<u32>); N] {
    divide_at(&mut groups, &viewer(), max_remote_percent);
    groups.map(|group| (steps(&group), group.priority))
}

/// Returns the share of a group in whole steps.
#[track_caller]
fn steps(group: &Group) -> u32 {
    assert_eq!(group.share % STEP, 0, "{group:?}");
    group.share / STEP
}

#[test]
fn the_own_network_serves_all_calls_while_most_endpoints_are_ready() {
    let (home, next) = ((STEPS, Some(0)), (0, Some(1)));
    assert_eq!(divided([group(0, 3, 0), group(1, 30, 0)], 100), [home, next]);
    assert_eq!(divided([group(0, 5, 2), group(1, 30, 0)], 100), [home, next], "1.4 × 5/7 is 1");
    assert_eq!(divided([group(0, 1, 1), group(1, 30, 0)], 100), [(22, Some(0)), (10, Some(0))], "0.7");
    assert_eq!(divided([group(0, 0, 9), group(1, 30, 0)], 100), [(0, None), home]);
    assert_eq!(divided([group(0, 1, 200), group(1, 900, 0)], 100), [(0, Some(1)), home], "less than a part");
}

#[test]
fn rings_follow_in_order_and_divide_by_ready_endpoints() {
    let groups = [group(1, 10, 0), group(1, 30, 0), group(3, 5, 0), group(2, 5, 0), group(2, 7, 0)];
    let spare = |priority| (0, Some(priority));
    assert_eq!(divided(groups, 100), [(8, Some(0)), (24, Some(0)), spare(2), spare(1), spare(1)]);
    assert_eq!(divided([group(0, 0, 9), group(1, 0, 1)], 100), [(0, None), (0, None)]);
}

/// Returns share, in steps, and limit of each group.
#[track_caller]
fn taken<const N: usize>(mut groups: [Group; N]) -> [(u32, Takes); N] {
    divide_at(&mut groups, &viewer(), 100);
    groups.map(|group| (steps(&group), group.takes))
}

#[test]
fn another_network_takes_what_its_own_calls_leave_room_for() {
    use Takes::{More, Rest, Room};
    let near = [group(0, 8, 22), group(1, 50, 0), group(2, 30, 0)];
    assert_eq!(taken(near), [(12, Room), (20, Rest), (0, Rest)], "0.37, and room for 0.67");
    let near = [group(0, 15, 15), group(1, 25, 5), group(2, 25, 0), group(2, 50, 0), group(3, 30, 0)];
    assert_eq!(
        taken(near),
        [(22, Room), (5, Room), (2, Rest), (3, Rest), (0, Rest)],
        "0.7, 5/30, the rest 1 : 2"
    );
    let near = [group(0, 0, 30), group(1, 30, 0), group(2, 30, 0)];
    assert_eq!(taken(near), [(0, Room), (16, More), (16, More)], "0.4 each, and half of the rest");
    let near = [group(0, 2, 8), group(1, 5, 5), group(2, 1, 0)];
    assert_eq!(taken(near), [(14, More), (14, More), (4, More)], "0.28, 0, 0.04, and the rest 2 : 5 : 1");
    let only = [group(0, 0, 30), group(3, 4, 0)];
    assert_eq!(taken(only), [(0, Room), (32, More)], "there is no other network");
}

/// The endpoints of the viewer's network say how many calls there are. Without one, the nearest ring is taken to have room.
#[test]
fn a_viewer_without_endpoints_on_its_network_uses_the_nearest_ring() {
    use Takes::{More, Rest, Room};
    assert_eq!(taken([group(1, 3, 0), group(2, 30, 0)]), [(32, Rest), (0, Rest)]);
    assert_eq!(taken([group(1, 1, 1), group(2, 30, 0)]), [(22, Room), (10, Rest)], "0.7");
    assert_eq!(taken([group(1, 1, 3), group(2, 1, 3)]), [(16, More), (16, More)], "0.35 each");
}

#[test]
fn the_overprovisioning_factor_counts_once() {
    let left = |mut groups: Vec<Group>| {
        divide_at(&mut groups, &viewer(), 100);
        overprovisioning_percent(&groups)
    };
    assert_eq!(left(Vec::new()), 140);
    assert_eq!(left(vec![group(0, 30, 0), group(1, 30, 0)]), 140);
    assert_eq!(left(vec![group(0, 30, 0), group(1, 1, 29)]), 140, "the other has no share");
    assert_eq!(left(vec![group(0, 28, 2), group(1, 30, 0)]), 130);
    assert_eq!(left(vec![group(0, 22, 8), group(1, 30, 0)]), 102, "the own group keeps all");
    assert_eq!(left(vec![group(0, 21, 9), group(1, 30, 0)]), 100);
    assert_eq!(left(vec![group(0, 8, 22), group(1, 90, 0)]), 100);
    assert_eq!(left(vec![group(0, 30, 0), fixed(group(1, 30, 0), 50)]), 140);
    let drained = Group { drained: 1_600 * 30, ..group(0, 30, 0) };
    assert_eq!(left(vec![drained, group(1, 30, 0), group(2, 30, 0)]), 100, "ring 1 is full");
}

#[test]
fn a_drain_leaves_calls_to_networks_with_room() {
    let drained = |left: u64| {
        let own = Group { drained: (32 - left) * 100 * 30, ..group(0, 30, 0) };
        taken([own, group(1, 30, 0), group(2, 30, 0)]).map(|(share, _)| share)
    };
    assert_eq!(drained(32), [32, 0, 0]);
    assert_eq!(drained(24), [24, 8, 0]);
    assert_eq!(drained(16), [16, 13, 3], "0.5, 0.4, 0.1");
    assert_eq!(drained(1), [1, 16, 15]);
}

#[test]
fn fixed_shares_hold_while_their_networks_have_ready_endpoints() {
    let shares = |mut groups: [Group; 3], max| {
        divide_at(&mut groups, &viewer(), max);
        groups.map(|group| group.share * 100 / PARTS)
    };
    let all = |ready| [group(0, ready, 0), fixed(group(1, ready, 0), 25), fixed(group(2, 9, 0), 50)];
    assert_eq!(shares(all(4), 100), [25, 25, 50]);
    assert_eq!(shares(all(0), 100), [0, 0, 100]);
    assert_eq!(
        shares([group(0, 0, 9), fixed(group(1, 50, 0), 25), group(2, 9, 0)], 100),
        [0, 100, 0],
        "at least its share"
    );
    // 250 of the 350 calls that ring 1 serves are its own, and a quarter of the 180 others goes there by hand. 55 are left.
    assert_eq!(
        shares([group(0, 0, 9), fixed(group(1, 25, 0), 25), group(2, 9, 0)], 100),
        [0, 87, 12],
        "no more than there is room for"
    );
    // The own endpoints serve 70 % of the calls, 50 % by hand and 20 % of the others.
    assert_eq!(shares([fixed(group(0, 15, 15), 50), group(1, 50, 0), group(2, 9, 0)], 100), [68, 31, 0]);
    assert_eq!(
        shares([fixed(group(0, 4, 0), 10), fixed(group(1, 4, 0), 90), group(2, 9, 0)], 100),
        [10, 90, 0]
    );
    for percent in [1, 2, 3, 19, 99] {
        let canary = [group(0, 30, 0), fixed(group(1, 30, 0), percent), group(2, 9, 0)];
        assert_eq!(shares(canary.clone(), 100), [100 - u32::from(percent), percent.into(), 0]);
        let most = [fixed(group(0, 30, 0), 0), fixed(group(1, 30, 0), 100), group(2, 9, 0)];
        assert_eq!(shares(most, percent), [100 - u32::from(percent), percent.into(), 0], "maxRemote");
    }
}

#[test]
fn a_fixed_share_is_at_most_what_the_ready_endpoints_serve() {
    let share = |ready, not_ready, percent| {
        let mut groups = [group(0, 30, 0), fixed(group(1, ready, not_ready), percent)];
        divide_at(&mut groups, &viewer(), 100);
        assert_eq!(groups[0].share + groups[1].share, PARTS);
        (groups[1].share, groups[1].is_share_bounded())
    };
    assert_eq!(share(1, 29, 50), (STEP, true), "1.4/30 is 4.7 %, one step");
    assert_eq!(share(1, 29, 4), (128, false), "exact, since it is less");
    assert_eq!(share(15, 15, 50), (1_600, false));
    assert_eq!(share(8, 22, 50), (11 * STEP, true), "37.3 %");
    assert_eq!(share(8, 21, 50), (12 * STEP, true), "38.6 %");
    assert_eq!(share(1, 99, 50), (44, true), "1.4 %, less than a step");
    assert_eq!(share(0, 30, 50), (0, true));
    let drained = Group { drained: 1_600 * 30, ..fixed(group(1, 30, 0), 50) };
    let mut groups = [group(0, 30, 0), drained];
    divide_at(&mut groups, &viewer(), 100);
    assert_eq!(groups.map(|group| group.share), [2_400, 800]);
}

/// Forty networks in one ring have 32 steps.
#[test]
fn viewers_do_not_all_leave_out_the_same_networks() {
    let without = |viewer: &str| -> BTreeSet<String> {
        let ring = (0..40).map(|at| Group { network: Network::new(&format!("n{at:02}")), ..group(1, 3, 0) });
        let mut groups: Vec<Group> = ring.collect();
        divide_at(&mut groups, &Network::new(viewer), 100);
        let none = groups.into_iter().filter(|group| group.share == 0);
        none.map(|group| group.network.to_string()).collect()
    };
    let (one, other) = (without("east"), without("west"));
    assert_eq!((one.len(), other.len(), &without("east")), (8, 8, &one));
    assert_ne!(one, other);
}

#[test]
fn what_leaves_the_own_network_is_limited_while_that_has_a_ready_endpoint() {
    let shares = |groups: [Group; 3], max| divided(groups, max).map(|(share, _)| share);
    let half = || [group(0, 1, 3), group(1, 8, 0), group(2, 5, 0)];
    assert_eq!(shares(half(), 100), [11, 21, 0]);
    assert_eq!(shares(half(), 25), [24, 8, 0]);
    assert_eq!(shares(half(), 0), [32, 0, 0]);
    assert_eq!(shares([group(0, 0, 4), group(1, 10, 0), group(2, 5, 0)], 0), [0, 32, 0]);
    assert_eq!(
        shares([group(0, 4, 0), fixed(group(1, 5, 0), 40), fixed(group(2, 5, 0), 40)], 25),
        [24, 4, 4]
    );
}

/// 300 worlds of 3 to 8 networks with 12 to 45 endpoints each, whose calls are half of what these serve. The first network has lost 70 %
/// of its endpoints, and its registry does not list them any more.
#[test]
fn a_network_that_has_lost_most_endpoints_is_overloaded_only_without_its_demand() {
    let mut state = 7_u64;
    let mut below = |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    let mut overloaded = [0, 0];
    for _ in 0..300 {
        let sizes: Vec<u64> = (0..3 + below(6)).map(|_| 12 + below(34)).collect();
        let count = sizes.len();
        let rings: Vec<u32> =
            (0..count * count).map(|_| 1 + u32::try_from(below(4)).expect("small")).collect();
        let ready: Vec<u64> =
            sizes.iter().enumerate().map(|(at, size)| if at == 0 { size * 3 / 10 } else { *size }).collect();
        for (stands_for, overloaded) in [None, Some(sizes[0])].into_iter().zip(&mut overloaded) {
            let mut loads = vec![0; count];
            for (viewer, size) in sizes.iter().enumerate() {
                let of = |at: usize| Group {
                    stands_for: stands_for
                        .filter(|_| at == 0)
                        .map(|weight| Demand { weight, source: DemandSource::Memory }),
                    ..group(if at == viewer { 0 } else { rings[viewer * count + at] }, ready[at], 0)
                };
                let mut groups: Vec<Group> = (0..count).map(of).collect();
                divide_at(&mut groups, &viewer_of(viewer), 100);
                for (load, group) in loads.iter_mut().zip(groups) {
                    *load += size * u64::from(group.share);
                }
            }
            let is_over = |(load, ready): (u64, &u64)| load > 2 * ready * u64::from(PARTS);
            *overloaded += usize::from(loads.into_iter().zip(&ready).any(is_over));
        }
    }
    assert_eq!(overloaded, [300, 0]);
}

#[test]
fn what_a_joined_peer_says_of_its_demand_takes_no_room_of_own_networks() {
    // Half of the own endpoints are gone, another own network has room, and a peer says that nearly all of its own are missing.
    let share_of_own = |peers_demand: u64| {
        let (own, near) = (group(0, 15, 15), Group { network: viewer_of(1), ..group(1, 60, 0) });
        let peer = Group { network: viewer_of(2), is_joined: true, ..group(2, 1, peers_demand) };
        let mut groups = vec![own, near, peer];
        divide_at(&mut groups, &viewer_of(0), 100);
        groups.into_iter().map(|group| group.share).collect::<Vec<_>>()
    };
    assert_eq!(share_of_own(u64::from(u32::MAX)), share_of_own(0));
    assert_eq!(share_of_own(0)[2], 0, "the own networks suffice");
}

/// A world in which some networks have lost 70 % of their endpoints: the numbers of endpoints, those that are ready, and the rings.
struct World {
    sizes: Vec<u64>,
    ready: Vec<u64>,
    rings: Vec<Vec<u32>>,
}

impl World {
    fn groups(&self, viewer: usize) -> Vec<Group> {
        let of = |at: usize| {
            let (size, ready) = (self.sizes[at], self.ready[at]);
            let ring = if at == viewer { 0 } else { self.rings[viewer][at] };
            Group { network: viewer_of(at), ..group(ring, ready, size - ready) }
        };
        (0..self.sizes.len()).map(of).collect()
    }

    /// Returns the calls that each network gets, in parts of an endpoint's. `is_joint` is false if each viewer divides as if it was alone.
    fn loads(&self, is_joint: bool) -> Vec<f64> {
        let number = |network: &Network| network.as_str()[1..].parse::<usize>().expect("a number");
        let ring = |from: &Network, to: &Network| self.rings[number(from)][number(to)];
        let mut loads = vec![0.0; self.sizes.len()];
        for (viewer, size) in self.sizes.iter().enumerate() {
            let mut groups = self.groups(viewer);
            let network = &viewer_of(viewer);
            if !is_joint {
                // Others that have lost endpoints have no room, and no calls.
                for group in groups.iter_mut().filter(|group| group.ring > 0 && group.not_ready > 0) {
                    (group.ready, group.not_ready) = (0, 0);
                }
            }
            divide(&mut groups, &Viewpoint { network, max_remote_percent: 100, ring: &ring });
            for (load, group) in loads.iter_mut().zip(groups) {
                *load += *size as f64 * f64::from(group.share) / f64::from(PARTS);
            }
        }
        loads
    }

    /// Returns true if a network gets more calls than its ready endpoints serve, by more than what rounding moves.
    fn is_over(&self, is_joint: bool) -> bool {
        let of_lost = self.sizes.iter().zip(&self.ready).filter(|(size, ready)| ready < size);
        let rounding: f64 = of_lost.map(|(size, _)| *size as f64 / f64::from(STEPS)).sum();
        let mut all = self.loads(is_joint).into_iter().zip(&self.ready);
        all.any(|(load, ready)| load > 1.4 * *ready as f64 + rounding)
    }
}

/// 300 worlds in which two or three networks have lost endpoints, and which have enough of them in sum.
#[test]
fn networks_that_lose_endpoints_together_overload_no_other() {
    let mut state = 11_u64;
    let mut below = |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    let (mut worlds, mut over) = (0, [0, 0]);
    while worlds < 300 {
        let sizes: Vec<u64> = (0..4 + below(5)).map(|_| 120 + below(340)).collect();
        let hit = 2 + below(2);
        let left = |(at, size): (u64, &u64)| if at < hit { size * 3 / 10 } else { *size };
        let ready: Vec<u64> = (0..).zip(&sizes).map(left).collect();
        let (all, needed): (u64, u64) = (ready.iter().sum(), sizes.iter().sum());
        let count = sizes.len();
        let ring = |below: &mut dyn FnMut(u64) -> u64| 1 + u32::try_from(below(4)).expect("small");
        let rings = (0..count).map(|_| (0..count).map(|_| ring(&mut below)).collect()).collect();
        if 14 * all < 10 * needed {
            continue;
        }
        worlds += 1;
        let world = World { sizes, ready, rings };
        for (is_joint, over) in [false, true].into_iter().zip(&mut over) {
            *over += usize::from(world.is_over(is_joint));
        }
    }
    assert!(over[0] > 30, "each alone: {over:?}");
    assert_eq!(over[1], 0);
}

/// Two networks lose all endpoints. One of them is nearer to a third network than the other.
#[test]
fn the_rooms_of_others_are_shared_by_all_that_need_them() {
    let rings = vec![vec![0, 1, 1, 2], vec![1, 0, 1, 2], vec![1, 1, 0, 2], vec![2, 2, 2, 0]];
    let world = World { sizes: vec![30, 10, 100, 100], ready: vec![0, 0, 100, 100], rings };
    let shares = |viewer| {
        let mut groups = world.groups(viewer);
        let ring = |from: &Network, to: &Network| {
            world.rings[usize::from(from.as_str() == "n1")]
                [to.as_str()[1..].parse::<usize>().expect("a number")]
        };
        let network = &viewer_of(viewer);
        divide(&mut groups, &Viewpoint { network, max_remote_percent: 100, ring: &ring });
        groups.iter().map(steps).collect::<Vec<_>>()
    };
    // The 40 calls fill the nearer room, in proportion.
    assert_eq!((shares(0), shares(1)), (vec![0, 0, 32, 0], vec![0, 0, 32, 0]));
    assert_eq!(shares(2), [0, 0, 32, 0]);
    let world = World { sizes: vec![60, 20, 100, 100], ..world };
    let both = [0, 1].map(|viewer| {
        let mut groups = world.groups(viewer);
        let ring = |_: &Network, to: &Network| if to.as_str() == "n3" { 2 } else { 1 };
        let network = &viewer_of(viewer);
        divide(&mut groups, &Viewpoint { network, max_remote_percent: 100, ring: &ring });
        groups.iter().map(|group| (steps(group), group.takes)).collect::<Vec<_>>()
    });
    let half = [(0, Takes::Room), (0, Takes::Room), (16, Takes::Room), (16, Takes::Rest)];
    assert_eq!(both, [half, half]);
}

#[test]
fn the_room_for_visitors_can_be_set() {
    let with = |room: u8, group: Group| Group { visitors_percent: Some(room), ..group };
    let shares = |groups: [Group; 3]| divided(groups, 100).map(|(share, _)| share);
    let lost = || group(0, 0, 30);
    assert_eq!(shares([lost(), with(100, group(1, 30, 0)), group(2, 30, 0)]), [0, 32, 0], "a standby");
    assert_eq!(shares([lost(), with(25, group(1, 30, 0)), group(2, 300, 0)]), [0, 8, 24]);
    assert_eq!(
        shares([lost(), with(0, group(1, 30, 0)), group(2, 3, 0)]),
        [0, 0, 32],
        "not even of what is left"
    );
    assert_eq!(
        shares([lost(), with(0, group(1, 30, 0)), group(2, 0, 3)]),
        [0, 32, 0],
        "there is nothing else"
    );
    assert_eq!(shares([group(0, 30, 0), with(100, group(1, 30, 0)), group(2, 3, 0)]), [32, 0, 0]);
    // Without calls of its own, the nearest ring takes what the room allows.
    assert_eq!(shares([group(1, 0, 0), with(50, group(1, 30, 0)), group(2, 30, 0)]), [0, 16, 16]);
}

fn viewer_of(number: usize) -> Network {
    Network::new(&format!("n{number}"))
}

#[test]
fn the_ring_follows_from_round_trip_time_and_cost_or_locality() {
    let ms = Duration::from_millis;
    let ring = |source, cost: &str| {
        Distance { source, cost: Cost::parse(cost).expect("legal") }.ring(&Steering::default())
    };
    assert_eq!(
        [1, 2, 3, 20, 21, 80, 81].map(|time| ring(Source::Measured(ms(time)), "0")),
        [1, 1, 2, 2, 3, 3, 4]
    );
    assert_eq!(["0.005", "0.01", "0.019", "1"].map(|cost| ring(Source::Config(ms(1)), cost)), [2, 2, 2, 4]);
    assert_eq!(Level::ALL.map(|level| ring(Source::Locality(level), "0")), [1, 2, 4]);
    assert_eq!(ring(Source::Locality(Level::SameZone), "0.01"), 2);
    let one = Steering { rings: [ms(5)].into(), ..Steering::default() };
    let of = |level| Distance { source: Source::Locality(level), cost: Cost::default() }.ring(&one);
    assert_eq!(Level::ALL.map(of), [1, 1, 2]);
}

#[test]
fn costs_are_read_and_written_exactly() {
    for text in ["0", "0.02", "1", "12.345678", "4294"] {
        assert_eq!(Cost::parse(text).map(|cost| cost.to_string()).as_deref(), Some(text));
    }
    for wrong in ["", ".", "-1", "1.", ".5", "1e3", "0.1234567", "5000", "+1", "NaN"] {
        assert_eq!(Cost::parse(wrong), None, "{wrong}");
    }
}

/// Returns groups of a viewer: perhaps one on its own network, and others in rings.
fn groups() -> impl Strategy<Value = Vec<Group>> {
    let endpoints = || prop_oneof![2 => Just(0), 6 => 1..40_u64, 1 => 1..5_000_000_000_u64];
    let of = |ring| (ring, endpoints(), endpoints()).prop_map(|(ring, ready, not)| group(ring, ready, not));
    let own = proptest::option::of(of(0..1_u32));
    (own, vec(of(1..4_u32), 0..8)).prop_map(|(own, remote)| own.into_iter().chain(remote).collect())
}

/// Returns groups of which some have fixed shares.
fn groups_with_shares() -> impl Strategy<Value = Vec<Group>> {
    (groups(), vec(prop_oneof![4 => Just(None), 1 => (0..=12_u8).prop_map(Some)], 9)).prop_map(
        |(groups, fixed)| {
            let with = |(group, fixed_percent)| Group { fixed_percent, ..group };
            groups.into_iter().zip(fixed).map(with).collect()
        },
    )
}

/// Returns the shares in parts.
fn shares(groups: &[Group], max_remote_percent: u8) -> Vec<u32> {
    let mut groups = groups.to_vec();
    divide_at(&mut groups, &viewer(), max_remote_percent);
    groups.into_iter().map(|group| group.share).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_calls_are_given_and_only_to_ready_endpoints(groups in groups_with_shares(), max in 0..=100_u8) {
        let mut divided = groups;
        divide_at(&mut divided, &viewer(), max);
        let any = divided.iter().any(|group| group.ready > 0);
        prop_assert_eq!(divided.iter().map(|group| group.share).sum::<u32>(), if any { PARTS } else { 0 });
        for group in &divided {
            prop_assert!(group.ready > 0 || group.share == 0 && group.priority.is_none(), "{group:?}");
            prop_assert_eq!(group.priority == Some(0), group.share > 0);
            prop_assert!(group.ready == 0 || group.priority.is_some());
        }
        // The priorities have no gap, and a nearer ring comes first.
        let used: BTreeSet<u32> = divided.iter().filter_map(|group| group.priority).collect();
        prop_assert!(used.iter().copied().eq(0..u32::try_from(used.len()).expect("few")));
        for (one, other) in divided.iter().flat_map(|one| divided.iter().map(move |other| (one, other))) {
            if let (Some(first @ 1..), Some(second @ 1..)) = (one.priority, other.priority) {
                prop_assert_eq!(first.cmp(&second), one.ring.cmp(&other.ring));
            }
        }
    }

    #[test]
    fn no_more_leaves_the_own_network_than_allowed(groups in groups_with_shares(), max in 0..=100_u8) {
        let shares = shares(&groups, max);
        let Some(own) = groups.iter().position(|group| group.ring == 0 && group.ready > 0) else { return Ok(()) };
        prop_assert!((PARTS - shares[own]) * 100 <= PARTS * u32::from(max), "{shares:?}");
    }

    /// Rounding may move one step to another group.
    #[test]
    fn more_ready_endpoints_never_lower_a_share(groups in groups(), at in 0..9_usize, more in 1..50_u64) {
        prop_assume!(at < groups.len());
        let mut better = groups.clone();
        better[at].ready += more;
        prop_assert!(shares(&better, 100)[at] + STEP >= shares(&groups, 100)[at]);
    }

    /// If all endpoints are ready: a group with few ready endpoints gains by healthy company in its ring.
    #[test]
    fn a_nearer_ring_never_lowers_a_share(mut groups in groups(), at in 0..9_usize) {
        prop_assume!(at < groups.len() && groups[at].ring > 1);
        groups.iter_mut().for_each(|group| group.not_ready = 0);
        let mut nearer = groups.clone();
        nearer[at].ring -= 1;
        prop_assert!(shares(&nearer, 100)[at] + STEP >= shares(&groups, 100)[at]);
    }

    /// While some ring has room for all calls, nothing that happens elsewhere changes what the own network keeps.
    #[test]
    fn others_do_not_change_what_the_own_network_keeps(groups in groups(), at in 0..9_usize, ready in 0..50_u64) {
        prop_assume!(groups.len() > 1 && groups[0].ring == 0);
        let at = 1 + at % (groups.len() - 1);
        let roomy = || group(9, u64::from(u32::MAX) * 64, 0);
        let with_roomy = |mut groups: Vec<Group>| { groups.push(roomy()); groups };
        let mut other = groups.clone();
        other[at].ready = ready;
        let (before, after) = (shares(&with_roomy(groups), 100)[0], shares(&with_roomy(other), 100)[0]);
        prop_assert!(before.abs_diff(after) <= STEP);
    }

    #[test]
    fn shares_that_no_hand_sets_are_whole_steps(groups in groups()) {
        prop_assert!(shares(&groups, 100).iter().all(|share| share % STEP == 0));
    }

    /// While the ready endpoints of the own network suffice, a fixed share is exact, whatever else there is.
    #[test]
    fn fixed_shares_of_ready_networks_are_exact(groups in groups(), percent in 0..=100_u8) {
        let mut groups: Vec<Group> = groups.into_iter().filter(|group| group.ring > 0).collect();
        groups.extend([group(0, 5, 0), fixed(group(9, 7, 0), percent)]);
        prop_assert_eq!(shares(&groups, 100).last().copied(), Some(percent_parts(percent)));
    }

    /// Fewer calls than the nearest ring has room for all go there.
    #[test]
    fn a_next_ring_with_room_serves_all_that_the_own_network_leaves(groups in groups(), not_ready in 1..50_u64) {
        let mut groups: Vec<Group> = groups.into_iter().filter(|group| group.ring > 1).collect();
        groups.extend([group(0, 0, not_ready), group(1, 2 * not_ready, 0), group(1, not_ready, 0)]);
        let near: u32 = shares(&groups, 100).iter().rev().take(2).sum();
        prop_assert_eq!(near, PARTS);
    }

    /// The endpoints of another network serve that network's calls first: beyond its part by ready endpoints, it takes no more than it
    /// has room for.
    #[test]
    fn no_other_network_takes_more_than_its_room_and_its_part(groups in groups(), own in 1..50_u64) {
        let mut groups: Vec<Group> = groups.into_iter().filter(|group| group.ring > 0).collect();
        groups.push(group(0, own / 2, own - own / 2));
        let ready: u128 = groups.iter().map(|group| u128::from(group.ready)).sum();
        for (group, share) in groups.iter().zip(shares(&groups, 100)).filter(|(group, _)| group.ring > 0) {
            let all = u128::from(PARTS);
            let room = all * group.room() / u128::from(10 * own);
            let part = (all * u128::from(group.ready)).checked_div(ready).unwrap_or_default();
            prop_assert!(u128::from(share) <= room + part + 2 * u128::from(STEP), "{group:?}");
        }
    }

    #[test]
    fn rounded_parts_are_less_than_one_part_away(portions in vec(prop_oneof![Just(0), 0..ALL], 1..40)) {
        let total: u128 = portions.iter().map(|portion| u128::from(*portion)).sum();
        prop_assume!(total > 0);
        let turns = vec![0; portions.len()];
        for (part, portion) in in_parts(&portions, PARTS, &turns).into_iter().zip(&portions) {
            let exact = u128::from(*portion) * u128::from(PARTS);
            prop_assert!((u128::from(part) * total).abs_diff(exact) < total);
        }
    }
}
