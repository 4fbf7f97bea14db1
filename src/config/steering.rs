//! `steering`, and the same key of a policy: how the calls of xDS clients are divided among networks.

use std::collections::BTreeSet;
use std::time::Duration;

use isthmus_aggregator::spec::RegistrySpec;
use isthmus_document::nearest::nearest;
use isthmus_document::problem::{InvalidValue, Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::tree;
use isthmus_model::place::Network;
use isthmus_settings::policy::Policy;
use isthmus_settings::steering::{ServiceSteering, Steering, SteeringMode};

use super::table::Root;
use super::table::mesh::Network as NetworkKeys;
use super::table::routes::Policy as PolicyKeys;
use super::table::steering as keys;

/// Reads the settings for all services.
pub(super) fn read(root: &Fields<'_>, problems: &mut Problems) -> Steering {
    let fields = root.map(&Root::STEERING);
    let path = Path::Root.key(Root::STEERING.name());
    let path = path.key(keys::Steering::RINGS.name());
    let mut rings: Vec<Duration> = Vec::new();
    for (at, ring, node) in fields.values(&keys::Steering::RINGS) {
        if rings.last().is_some_and(|last| *last >= ring) {
            let fault = format!(
                "{node} is not larger than the ring before it; rings are upper bounds, nearest first"
            );
            problems.error(node.position, &path.index(at), fault);
        }
        rings.push(ring);
    }
    Steering {
        rings: if rings.is_empty() { Steering::default().rings } else { rings.into() },
        max_remote_percent: fields.get(&keys::Steering::MAX_REMOTE),
        cost_weight: fields.get(&keys::Steering::COST_WEIGHT),
    }
}

/// Reads the settings for services that no policy matches.
pub(super) fn default(root: &Fields<'_>) -> ServiceSteering {
    let mode = root.map(&Root::STEERING).get(&keys::Steering::MODE);
    ServiceSteering { mode, ..ServiceSteering::default() }
}

/// Reads the settings of one policy; `base` are those for services that no policy matches.
pub(super) fn of_policy(
    policy: &Fields<'_>,
    base: &ServiceSteering,
    path: &Path<'_>,
    problems: &mut Problems,
) -> ServiceSteering {
    let fields = policy.map(&PolicyKeys::STEERING);
    let mode = fields.get(&keys::PolicySteering::MODE).unwrap_or(base.mode);
    let shares = fields.get(&keys::PolicySteering::SHARES).unwrap_or_default();
    if let Some(node) = fields.at(&keys::PolicySteering::SHARES) {
        let path = path.key(PolicyKeys::STEERING.name());
        let path = path.key(keys::PolicySteering::SHARES.name());
        let sum: u32 = shares.values().map(|percent| u32::from(*percent)).sum();
        if sum > 100 {
            problems.error(
                node.position,
                &path,
                format!("the shares are {sum}% together, expected at most 100%"),
            );
        }
        if mode == SteeringMode::Off && !shares.is_empty() {
            let fault = "shares need a mode that divides the rest; write `mode: nearest` beside them";
            problems.error(node.position, &path, fault);
        }
    }
    let failover = fields.get(&keys::PolicySteering::FAILOVER).unwrap_or_default();
    let only: BTreeSet<Network> =
        fields.get(&keys::PolicySteering::ONLY).unwrap_or_default().into_iter().collect();
    let path = path.key(PolicyKeys::STEERING.name());
    for key in [&keys::PolicySteering::FAILOVER, &keys::PolicySteering::ONLY] {
        if let Some(node) = fields.at(key).filter(|_| mode == SteeringMode::Off) {
            let fault = "it holds for steered services alone; write `mode: nearest` beside it";
            problems.error(node.position, &path.key(key.name()), fault);
        }
    }
    let is_out = |network: &Network| !only.is_empty() && !only.contains(network);
    for (at, network, node) in fields.values(&keys::PolicySteering::FAILOVER) {
        if is_out(&network) {
            let fault = format!("{node} is not in `only`, so that no call goes there");
            problems.error(node.position, &path.key(keys::PolicySteering::FAILOVER.name()).index(at), fault);
        }
    }
    ServiceSteering { mode, shares, failover: failover.into(), only }
}

/// Reports networks of `distance`, `cost`, `shares`, `failover` and `only` that nothing else in the config names: a misspelled name would have no
/// effect.
pub(super) fn check_networks(
    root: &Fields<'_>,
    policy: &Policy,
    registries: &[RegistrySpec],
    problems: &mut Problems,
) {
    let named = policy.networks.iter().map(|network| &network.name).chain([&policy.node.network]);
    let of_registries = registries.iter().map(|registry| &registry.network);
    let known: BTreeSet<&Network> = named.chain(of_registries).filter(|name| !name.is_unknown()).collect();
    let mut check_one = |network: &Network, position: Position, path: &Path<'_>| {
        if !known.contains(network) {
            let name = network.as_str();
            let fault = InvalidValue::new(format!(
                "no network {name:?} is known; add it to `networks` if only a registry names it"
            ));
            let near = nearest(name, known.iter().map(|name| name.as_str()));
            problems.error(position, path, fault.hint(near));
        }
    };
    let check = |entries: &[(tree::Key, tree::Node)],
                 path: &Path<'_>,
                 check_one: &mut dyn FnMut(&Network, Position, &Path<'_>)| {
        for (key, _) in entries {
            check_one(&Network::new(&key.text), key.position, &path.key(&key.text));
        }
    };
    let list = Path::Root.key(Root::NETWORKS.name());
    for (name, node) in root.entries(&Root::NETWORKS) {
        let (fields, path) = (Fields::of::<NetworkKeys>(Some(node)), list.key(&name.text));
        check(
            fields.entries(&NetworkKeys::DISTANCE),
            &path.key(NetworkKeys::DISTANCE.name()),
            &mut check_one,
        );
        check(fields.entries(&NetworkKeys::COST), &path.key(NetworkKeys::COST.name()), &mut check_one);
    }
    let list = Path::Root.key(Root::POLICIES.name());
    for (at, fields, _) in root.maps(&Root::POLICIES) {
        let (fields, path) = (fields.map(&PolicyKeys::STEERING), list.index(at));
        let path = path.key(PolicyKeys::STEERING.name());
        let shares = path.key(keys::PolicySteering::SHARES.name());
        check(fields.entries(&keys::PolicySteering::SHARES), &shares, &mut check_one);
        for key in [&keys::PolicySteering::FAILOVER, &keys::PolicySteering::ONLY] {
            for (at, network, node) in fields.values(key) {
                check_one(&network, node.position, &path.key(key.name()).index(at));
            }
        }
    }
}
