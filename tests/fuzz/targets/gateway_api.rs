//! Objects of the Gateway API, a JSON text in each line; a line that begins with `-` removes the object with its kind and name. The
//! items of the registry do not depend on the order of the objects, nor on whether they are evaluated one by one or at once, and a
//! snapshot can be built of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use isthmus::model::place::{ClusterId, Network};
use isthmus::registry::change::{Change, Dirty, Item};
use isthmus::registry::shard::Shard;
use isthmus::settings::scope::RegistryScope;
use isthmus::snapshot::build;
use isthmus::snapshot::inputs::Inputs;
use isthmus::snapshot::routes::Resolved;
use isthmus_kubernetes::testing::World;

use super::policy;

/// The longest message of a condition that an API server accepts, in bytes.
const MESSAGE_BYTES_MAX: usize = 32_768;

pub(super) fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (mut world, mut items, mut objects) = (World::default(), BTreeMap::new(), BTreeMap::new());
    apply(&mut items, world.renew());
    for line in text.lines() {
        match line.strip_prefix('-') {
            None => objects.extend(world.apply(line).map(|name| (name, line))),
            Some(line) => drop(world.delete(line).and_then(|name| objects.remove(&name))),
        }
        apply(&mut items, world.renew());
    }
    for (reason, message) in world.conditions() {
        assert!(!reason.is_empty() && message.len() <= MESSAGE_BYTES_MAX, "{reason}: {message}");
    }
    let (mut again, mut at_once) = (World::default(), BTreeMap::new());
    let removed = text.lines().filter_map(|line| line.strip_prefix('-'));
    removed.for_each(|line| drop(again.delete(line)));
    for line in objects.values() {
        again.apply(line);
    }
    apply(&mut at_once, again.renew());
    assert_eq!(items.keys().collect::<Vec<_>>(), at_once.keys().collect::<Vec<_>>());
    for (key, item) in &items {
        assert_eq!(format!("{item:?}"), format!("{:?}", at_once[key]));
    }
    build_of(items.into_values());
}

/// Applies the changes to items by their keys.
fn apply(items: &mut BTreeMap<String, Item>, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Put(item) => drop(items.insert(format!("{:?}", item.key()), item)),
            Change::Remove(key) => {
                assert!(items.remove(&format!("{key:?}")).is_some(), "{key:?} was not there");
            }
            other => panic!("{other:?}"),
        }
    }
}

fn build_of(items: impl Iterator<Item = Item>) {
    let scope = RegistryScope { networks: None, ..RegistryScope::default() };
    let mut shard = Shard::new(ClusterId::new("east"), Network::new("east"), &scope);
    let mut dirty = Dirty::default();
    items.for_each(|item| shard.put(item, &mut dirty));
    let (resolved, trust_roots, drains) = (Resolved::default(), Default::default(), Arc::default());
    let inputs = Inputs {
        trust_roots: &trust_roots,
        policy_generation: 1,
        policy: &policy(),
        shards: &[Arc::new(shard)],
        resolved: &resolved,
        virtual_addresses: None,
        probes: None,
        drains: &drains,
        recent: None,
        remembered: None,
    };
    // In a build for tests, the invariants of the snapshot are checked.
    build::all(inputs, 1);
}
