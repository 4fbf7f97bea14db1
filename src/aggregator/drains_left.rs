//! The shares that planned drains have left of their targets, as beliefs of a later process: a document that was amended in the config, in
//! a registry or in an annotation must not raise a share there either.

use isthmus_model::drain::PARTS;
use isthmus_snapshot::drains::{DrainSource, Left};
use isthmus_upgrade::belief::{DrainBelief, FORGET_AFTER, Present};

/// Returns the shares as beliefs.
pub(super) fn beliefs(left: &Left, present: Present) -> Vec<DrainBelief> {
    let belief = |((source, target), left): (&(DrainSource, _), &u16)| {
        let registry = match source {
            DrainSource::Config => None,
            DrainSource::Registry(name) => Some(name.to_string()),
            DrainSource::Operator => return None,
        };
        Some(DrainBelief { registry, target: Clone::clone(target), left: *left, known: present.moment })
    };
    left.0.iter().filter_map(belief).collect()
}

/// Returns the shares that an earlier process has known, unless that is long ago: a document of today is not one that amends a drain of
/// last month.
pub(super) fn recalled(beliefs: Vec<DrainBelief>, present: Present) -> Left {
    let mut all = Left::default();
    for DrainBelief { registry, target, left, known } in beliefs {
        if left > PARTS || present.age(known) >= FORGET_AFTER {
            continue;
        }
        let source = registry.map_or(DrainSource::Config, |name| DrainSource::Registry(name.into()));
        all.lower(Left([((source, target), left)].into_iter().collect()));
    }
    all
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use isthmus_model::drain::DrainTarget;

    #[test]
    fn what_is_handed_over_is_recalled_and_what_is_damaged_is_nothing() {
        let of = |kind, name| DrainTarget::parse(kind, name).expect("a target");
        let left = [
            ((DrainSource::Config, of("network", "west")), 1_600),
            ((DrainSource::Registry("etcd é".into()), of("endpoint", "[fd00::1]:8443")), 0),
            ((DrainSource::Registry("k".into()), of("gateway", "gw.example")), 3_168),
        ];
        let left = Left(left.into_iter().collect());
        let present = Present::now();
        assert_eq!(recalled(beliefs(&left, present), present), left);
        let lines =
            beliefs(&left, present).into_iter().map(|belief| serde_json::to_string(&belief).expect("JSON"));
        let read = lines.map(|line| serde_json::from_str(&line).expect("a belief"));
        assert_eq!(recalled(read.collect(), present), left);
        let known = present.moment;
        let damaged = DrainBelief { registry: None, target: of("network", "west"), left: PARTS + 1, known };
        assert_eq!(recalled(vec![damaged], present), Left::default());
        let later = |after: Duration| Present { moment: (SystemTime::from(known) + after).into(), ..present };
        assert_eq!(recalled(beliefs(&left, present), later(FORGET_AFTER / 2)), left);
        assert_eq!(recalled(beliefs(&left, present), later(FORGET_AFTER)), Left::default(), "too old");
        let orders = Left([((DrainSource::Operator, of("network", "west")), 0)].into_iter().collect());
        assert_eq!(
            beliefs(&orders, present),
            [],
            "an order of an operator begins from what it was given with"
        );
    }
}
