//! The weights of an assignment for clients that have one weight per workload, and not one per workload and service: ztunnels.
//! A workload that serves two services must have the same weight in both, so that the weights of gateways are fitted to it.

use num_bigint::BigUint;

use super::{Assignment, Entry, EntryKind};
use crate::weights::Share;
use isthmus_model::endpoint::Health;

/// The capacity of an endpoint of weight 1. Gateways often stand for halves, thirds, quarters and fifths.
const UNIT: u32 = 60;
/// The largest capacity. Clients add up the capacities of a service in 32 bits.
const CAPACITY_MAX: u32 = 1 << 20;

/// Returns the capacity of each entry; `None` for a ready entry that gets no calls, because entries of a lower priority number
/// are ready. The calls are divided as the weights of the entries say.
pub fn capacities(assignment: &Assignment) -> Vec<Option<u32>> {
    let entries = &assignment.entries;
    let is_ready = |entry: &Entry| entry.health == Health::Healthy;
    let best = entries.iter().filter(|entry| is_ready(entry)).map(|entry| entry.priority).min();
    let gets_calls = |entry: &Entry| is_ready(entry) && Some(entry.priority) == best;
    let near = entries.iter().filter(|entry| gets_calls(entry) && entry.kind == EntryKind::Endpoint);
    let (mut stands_for, mut weight) = (Share::default(), 0_u64);
    for entry in near {
        stands_for += &entry.stands_for;
        weight += u64::from(entry.weight);
    }
    let capacity = |entry: &Entry| match entry.kind {
        EntryKind::Endpoint => whole(&(&entry.stands_for * BigUint::from(UNIT))),
        EntryKind::Gateway if weight == 0 => entry.weight.min(CAPACITY_MAX),
        EntryKind::Gateway => {
            whole(&(&stands_for * BigUint::from(UNIT) * BigUint::from(entry.weight) / BigUint::from(weight)))
        }
    };
    entries.iter().map(|entry| (gets_calls(entry) || !is_ready(entry)).then(|| capacity(entry))).collect()
}

/// Rounds a share to a whole number from 1 to [`CAPACITY_MAX`].
fn whole(share: &Share) -> u32 {
    let rounded = u32::try_from(share.round().to_integer()).unwrap_or(CAPACITY_MAX);
    rounded.clamp(1, CAPACITY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::endpoint::TlsMode;
    use isthmus_snapshot::candidates::Role;

    fn entry(kind: EntryKind, stands_for: u32, weight: u32, priority: u32) -> Entry {
        Entry {
            address: ([10, 0, 0, 1], 80).into(),
            others: Box::default(),
            kind,
            network: Default::default(),
            cluster: Default::default(),
            locality: Default::default(),
            priority,
            weight,
            stands_for: Share::from_integer(BigUint::from(stands_for)),
            drained: None,
            further: Vec::new(),
            role: Role::Regular,
            health: Health::Healthy,
            tls: TlsMode::Mesh,
        }
    }

    fn of(entries: Vec<Entry>) -> Vec<Option<u32>> {
        capacities(&Assignment { entries, ..Assignment::default() })
    }

    #[test]
    fn an_endpoint_has_the_same_capacity_whatever_the_shares_of_gateways_are() {
        let near = |weight| entry(EntryKind::Endpoint, 1, weight, 0);
        let gateway = |weight| entry(EntryKind::Gateway, 3, weight, 0);
        assert_eq!(of(vec![near(1), near(1)]), [Some(60), Some(60)]);
        // Three quarters of the calls go to two neighbours.
        assert_eq!(of(vec![near(3), near(3), gateway(2)]), [Some(60), Some(60), Some(40)]);
        assert_eq!(of(vec![gateway(9), gateway(1)]), [Some(9), Some(1)]);
    }

    #[test]
    fn ready_entries_behind_others_get_no_calls() {
        let unready = Entry { health: Health::Unhealthy, ..entry(EntryKind::Endpoint, 2, 2, 0) };
        let all = vec![
            unready,
            entry(EntryKind::Gateway, 1, 4, 1),
            entry(EntryKind::Gateway, 1, 4, 2),
            entry(EntryKind::Endpoint, 1, 1, 3),
        ];
        assert_eq!(of(all), [Some(120), Some(4), None, None]);
    }

    #[test]
    fn capacities_are_from_one_to_their_largest() {
        let all = vec![entry(EntryKind::Endpoint, u32::MAX, 1 << 20, 0), entry(EntryKind::Gateway, 1, 1, 0)];
        assert_eq!(of(all)[0], Some(CAPACITY_MAX));
        let drained = Entry { stands_for: Share::default(), ..entry(EntryKind::Endpoint, 0, 1, 0) };
        assert_eq!(of(vec![drained]), [Some(1)]);
    }
}
