//! One division for all viewers (`docs/steering.md, "How calls are divided"`): the calls that leave the networks fill the rooms of the
//! others, ring by ring and for all networks at once, so that two networks do not count on the same room. As with water that is poured
//! into several vessels from several sides, a full one sends what comes more to the others.

use std::collections::BTreeSet;

/// The turns of pouring in one ring: after each, calls that a full room has refused go to the others of the ring.
const TURNS: u32 = 8;
/// Calls below this part of a viewer's calls are what rounding has left.
const DUST: f64 = 1e-9;

/// The calls of one network's clients that leave it.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    /// The calls that are not given away yet.
    pub(super) left: f64,
    /// The ring of each group for these clients; `None` for that of their own network.
    pub(super) rings: Vec<Option<u32>>,
    /// The calls that drains have refused; they go to groups without a drain.
    refused: f64,
    dust: f64,
}

impl Leaving {
    pub(super) fn new(left: f64, rings: Vec<Option<u32>>) -> Self {
        Self { left, rings, refused: 0.0, dust: left * DUST }
    }
}

/// The room of a group for the calls of other networks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) free: f64,
    /// The part that drains leave of what the group would take: 1 without drains.
    pub(super) kept: f64,
}

/// The room that the calls of one network's clients have found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// The calls that each group takes.
    pub(super) taken: Vec<f64>,
    /// The ring in which all calls had found room, drains aside; `None`: they have not.
    pub(super) last_ring: Option<u32>,
}

/// Pours the calls of all networks into the rooms. Returns what those of the network at `own` in the list have found.
pub(super) fn fill(mut all: Vec<Leaving>, mut rooms: Vec<Room>, own: usize) -> Found {
    let mut found = Found { taken: vec![0.0; rooms.len()], last_ring: None };
    let rings: BTreeSet<u32> = all.iter().flat_map(|one| one.rings.iter().copied().flatten()).collect();
    for ring in &rings {
        pour_all(&mut all, &mut rooms, (own, found.taken.as_mut_slice()), |of, group| {
            of.rings[group] == Some(*ring)
        });
        if all[own].left <= all[own].dust {
            found.last_ring.get_or_insert(*ring);
        }
    }
    // A room that was full for one viewer's turns may be free for another ring's calls.
    pour_all(&mut all, &mut rooms, (own, found.taken.as_mut_slice()), |of, group| of.rings[group].is_some());
    if all.iter().any(|one| one.refused > 0.0) {
        let undrained: Vec<bool> = rooms.iter().map(|room| room.kept >= 1.0).collect();
        all.iter_mut().for_each(|one| one.left += std::mem::take(&mut one.refused));
        for ring in &rings {
            let may = |of: &Leaving, group: usize| undrained[group] && of.rings[group] == Some(*ring);
            pour_all(&mut all, &mut rooms, (own, found.taken.as_mut_slice()), may);
        }
    }
    found
}

/// Pours calls into the rooms that `may` allows, until nothing moves.
fn pour_all(
    all: &mut [Leaving],
    rooms: &mut [Room],
    (own, taken): (usize, &mut [f64]),
    may: impl Fn(&Leaving, usize) -> bool,
) {
    for _ in 0..TURNS {
        let mut offered = vec![0.0; rooms.len()];
        let mut offers: Vec<(usize, usize, f64)> = Vec::new();
        for (from, one) in all.iter().enumerate().filter(|(_, one)| one.left > one.dust) {
            let free = |group: &usize| rooms[*group].free > 0.0 && may(one, *group);
            let groups: Vec<usize> = (0..rooms.len()).filter(free).collect();
            let sum: f64 = groups.iter().map(|group| rooms[*group].free).sum();
            for group in groups {
                let offer = one.left * rooms[group].free / sum;
                offered[group] += offer;
                offers.push((from, group, offer));
            }
        }
        if offers.is_empty() {
            return;
        }
        let full: Vec<f64> = rooms.iter().map(|room| room.free).collect();
        for (from, group, offer) in offers {
            let takes =
                if offered[group] > full[group] { offer * full[group] / offered[group] } else { offer };
            let (one, room) = (&mut all[from], &mut rooms[group]);
            one.left -= takes;
            one.refused += takes - takes * room.kept;
            room.free = (room.free - takes).max(0.0);
            if from == own {
                taken[group] += takes * room.kept;
            }
        }
        // A rest of a room that is due to rounding is no room.
        rooms
            .iter_mut()
            .zip(&full)
            .filter(|(room, full)| room.free < **full * DUST)
            .for_each(|(room, _)| room.free = 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooms<const N: usize>(free: [f64; N]) -> Vec<Room> {
        free.map(|free| Room { free, kept: 1.0 }).to_vec()
    }

    fn leaving<const N: usize>(all: [(f64, &[u32]); N]) -> Vec<Leaving> {
        all.map(|(left, rings)| Leaving::new(left, rings.iter().copied().map(Some).collect())).to_vec()
    }

    /// Returns what each network's calls take of each room, rounded.
    fn filled(all: &[Leaving], rooms: &[Room]) -> Vec<Vec<f64>> {
        let of = |own| fill(all.to_vec(), rooms.to_vec(), own).taken;
        (0..all.len())
            .map(|own| of(own).into_iter().map(|calls| (calls * 1e6).round() / 1e6).collect())
            .collect()
    }

    #[test]
    fn one_viewer_fills_ring_after_ring_in_proportion_to_room() {
        let all = leaving([(10.0, &[1, 1, 2, 3])]);
        assert_eq!(filled(&all, &rooms([2.0, 4.0, 8.0, 8.0])), [[2.0, 4.0, 4.0, 0.0]]);
        let found = fill(all, rooms([2.0, 4.0, 1.0, 1.0]), 0);
        assert_eq!((found.taken.iter().sum::<f64>(), found.last_ring), (8.0, None));
    }

    #[test]
    fn viewers_share_a_room_in_proportion_to_their_calls() {
        let all = leaving([(3.0, &[1, 2]), (6.0, &[1, 2])]);
        assert_eq!(filled(&all, &rooms([6.0, 9.0])), [[2.0, 1.0], [4.0, 2.0]]);
        // A group in the third ring for one viewer may be in the first for another.
        let all = leaving([(4.0, &[3, 1]), (4.0, &[1, 3])]);
        assert_eq!(filled(&all, &rooms([4.0, 4.0])), [[0.0, 4.0], [4.0, 0.0]]);
    }

    #[test]
    fn what_a_drain_refuses_goes_to_groups_without_one() {
        let all = leaving([(8.0, &[1, 1, 2])]);
        let mut some = rooms([8.0, 8.0, 8.0]);
        some[0].kept = 0.25;
        assert_eq!(filled(&all, &some), [[1.0, 7.0, 0.0]]);
    }

    #[test]
    fn while_the_sum_suffices_all_calls_find_room_and_no_room_is_exceeded() {
        let mut state = 5_u64;
        let mut below = |end: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u32::try_from(state >> 33).expect("31 bits") % end
        };
        for _ in 0..500 {
            let count = 2 + below(8);
            let free: Vec<f64> = (0..count).map(|_| f64::from(below(50))).collect();
            let mut left: f64 = free.iter().sum();
            let mut all = Vec::new();
            for _ in 0..1 + below(6) {
                let calls = (left * f64::from(below(100)) / 100.0).floor();
                left -= calls;
                all.push(Leaving::new(calls, (0..count).map(|_| Some(1 + below(4))).collect()));
            }
            let rooms: Vec<Room> = free.iter().map(|free| Room { free: *free, kept: 1.0 }).collect();
            let found: Vec<Found> = (0..all.len()).map(|own| fill(all.clone(), rooms.clone(), own)).collect();
            for (one, found) in all.iter().zip(&found) {
                assert!((found.taken.iter().sum::<f64>() - one.left).abs() < 1e-3, "{all:?} {rooms:?}");
            }
            for (group, free) in free.iter().enumerate() {
                assert!(found.iter().map(|found| found.taken[group]).sum::<f64>() < free + 1e-3);
            }
        }
    }
}
