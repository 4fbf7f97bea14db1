//! The zones of the viewer's own network (`docs/steering.md, "Zones"`): the calls that stay on the network are divided among its zones by
//! the rule that divides calls among networks.

use super::{OVERPROVISIONING, PARTS, STEP, in_parts, part};

/// The endpoints of the viewer's own network in one zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zone {
    /// The summed weight of the ready endpoints.
    pub ready: u64,
    /// The summed weight of all endpoints but those that are terminating.
    pub all: u64,
}

/// The part of the own network's share that the viewer's zone has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InZone {
    /// The share of the viewer's calls, in parts of [`PARTS`].
    pub share: u32,
    /// The summed weight of the ready endpoints in the zone.
    pub ready: u64,
    /// The part of the network's demand that is the zone's.
    pub demand: u64,
}

/// Divides the share of the viewer's own network, which has this demand, among its zones; the viewer is in the one at `own`.
///
/// The demand of a zone is its part of the network's endpoints. The viewer's zone keeps what its ready endpoints serve of that. The rest
/// goes to the other zones by the room that they have, or by ready endpoints if they have too little for what leaves all zones.
pub fn divide_zones(share: u32, demand: u64, zones: &[Zone], own: usize) -> (InZone, Vec<u32>) {
    let all: u128 = zones.iter().map(|zone| u128::from(zone.all)).sum();
    let demand_of = |zone: &Zone| part(demand, zone.all.into(), all);
    let serves = |zone: &Zone| u128::from(zone.ready) * OVERPROVISIONING;
    let stays = |zone: &Zone| u128::from(part(demand_of(zone), share.into(), PARTS.into())) * 10;
    let room = |zone: &Zone| serves(zone).saturating_sub(stays(zone));
    let needed: u128 = zones.iter().map(|zone| stays(zone).saturating_sub(serves(zone))).sum();
    let rooms: u128 = zones.iter().map(room).sum();
    let is_room_elsewhere = rooms > room(&zones[own]);
    let meant = u128::from(demand_of(&zones[own])) * 10;
    let keeps = match part(PARTS.into(), serves(&zones[own]).min(meant), meant) {
        // The demand of a small zone may round to nothing.
        _ if zones[own].ready == 0 => 0,
        most if most >= share.into() || meant == 0 => share,
        most => u32::try_from(most - most % u64::from(STEP)).unwrap_or(share),
    };
    let portion = |(at, zone): (usize, &Zone)| match at == own {
        true => 0,
        false if needed <= rooms && (is_room_elsewhere || zones[own].ready > 0) => {
            u64::try_from(room(zone)).unwrap_or(u64::MAX)
        }
        false => zone.ready,
    };
    let portions: Vec<u64> = zones.iter().enumerate().map(portion).collect();
    let turns: Vec<u64> = (0_u64..).take(zones.len()).collect();
    let mut shares = in_parts(&portions, share - keeps, &turns);
    // There may be no ready endpoint in any other zone.
    shares[own] = share - shares.iter().sum::<u32>();
    (InZone { share: shares[own], ready: zones[own].ready, demand: demand_of(&zones[own]) }, shares)
}

#[cfg(test)]
mod tests {
    use super::super::STEPS;
    use super::*;

    /// Returns the shares of zones, in steps; each zone has this number of ready endpoints of all.
    fn steps<const N: usize>(share: u32, zones: [(u64, u64); N], own: usize) -> [u32; N] {
        let zones = zones.map(|(ready, all)| Zone { ready, all });
        let demand = zones.iter().map(|zone| zone.all).sum();
        let (_, shares) = divide_zones(share * STEP, demand, &zones, own);
        assert_eq!(shares.iter().sum::<u32>(), share * STEP);
        std::array::from_fn(|at| shares[at] / STEP)
    }

    #[test]
    fn the_own_zone_comes_first_and_others_take_what_it_cannot_serve() {
        assert_eq!(steps(STEPS, [(15, 15), (15, 15)], 0), [32, 0]);
        assert_eq!(steps(STEPS, [(15, 15), (15, 15)], 1), [0, 32]);
        assert_eq!(steps(STEPS, [(5, 15), (15, 15), (15, 15)], 0), [14, 9, 9], "1.4 × 5/15");
        assert_eq!(steps(STEPS, [(5, 15), (15, 15), (60, 60)], 0), [14, 3, 14], "by room");
        assert_eq!(steps(STEPS, [(5, 15), (15, 15), (60, 60)], 1), [0, 32, 0]);
        assert_eq!(steps(STEPS, [(0, 15), (15, 15)], 0), [0, 32]);
        assert_eq!(steps(STEPS, [(1, 15), (0, 15)], 0), [32, 0], "there is no other");
    }

    #[test]
    fn a_zone_without_ready_endpoints_keeps_nothing() {
        let shares = |share, demand, zones: [(u64, u64); 2]| {
            let zones = zones.map(|(ready, all)| Zone { ready, all });
            divide_zones(share, demand, &zones, 0).1
        };
        assert_eq!(shares(3_000, 30, [(0, 1), (20, 30)]), [0, 3_000], "its demand rounds to nothing");
        assert_eq!(shares(2_300, 11, [(0, 1), (5, 10)]), [0, 2_300], "nobody has room");
    }

    #[test]
    fn what_the_network_keeps_is_divided() {
        // The network keeps half.
        assert_eq!(steps(16, [(15, 15), (0, 30)], 0), [16, 0]);
        assert_eq!(steps(16, [(15, 15), (0, 30)], 1), [16, 0]);
        assert_eq!(steps(14, [(5, 15), (5, 15)], 0), [14, 0]);
        assert_eq!(steps(0, [(0, 15), (0, 15)], 0), [0, 0]);
    }

    /// Calls that leave a zone find room in the others, if there is enough.
    #[test]
    fn no_zone_gets_more_than_its_ready_endpoints_serve() {
        let mut state = 3_u64;
        let mut below = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % end
        };
        for _ in 0..500 {
            let zones: Vec<Zone> = (0..2 + below(4))
                .map(|_| {
                    let all = 1_000 + below(3_000);
                    Zone { ready: all * (40 + below(61)) / 100, all }
                })
                .collect();
            let (all, ready) = zones.iter().fold((0, 0), |sum, zone| (sum.0 + zone.all, sum.1 + zone.ready));
            if ready * 14 < all * 10 {
                continue;
            }
            let mut loads = vec![0; zones.len()];
            for (own, zone) in zones.iter().enumerate() {
                for (load, share) in loads.iter_mut().zip(divide_zones(PARTS, all, &zones, own).1) {
                    *load += zone.all * u64::from(share);
                }
            }
            for (load, zone) in loads.into_iter().zip(&zones) {
                let most = zone.ready * 14 / 10 * u64::from(PARTS);
                assert!(load <= most + all * u64::from(STEP), "{load} of {most}: {zones:?}");
            }
        }
    }
}
