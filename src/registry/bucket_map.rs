//! A map that is copied on write by bucket: changing one entry copies one bucket and the path to it; a clone
//! shares all other buckets.
//!
//! The map is a tree. Each node uses three bits of a key's hash to choose a branch, and the leaves are the buckets. A bucket
//! is divided when it is full, so a map of a few entries is as small as a list of them, and a lookup in a map of a million
//! entries visits about seven nodes. A mesh has several maps per registry, most of them with few entries.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use hashbrown::DefaultHashBuilder;

/// The number of bits of the hash that choose a branch of a node.
const BITS: u32 = 3;
const FAN_OUT: usize = 1 << BITS;
/// The number of entries at which a bucket is divided. A lookup compares the key with each entry of a bucket.
const FULL: usize = 4;
/// The greatest depth of a node: the hash has no bits for a deeper one. Buckets at this depth are not divided.
const MAX_DEPTH: u32 = u64::BITS / BITS;

type Bucket<K, V> = Arc<[(K, V)]>;

#[derive(Clone, Debug)]
enum Node<K, V> {
    Bucket(Bucket<K, V>),
    Branches(Arc<[Self; FAN_OUT]>),
}

/// A map whose clones share the buckets that do not change.
#[derive(Clone, Debug)]
pub struct BucketMap<K, V> {
    hasher: DefaultHashBuilder,
    root: Node<K, V>,
    len: usize,
}

impl<K, V> Default for BucketMap<K, V> {
    fn default() -> Self {
        Self { hasher: DefaultHashBuilder::default(), root: Node::default(), len: 0 }
    }
}

impl<K, V> Default for Node<K, V> {
    fn default() -> Self {
        // An empty list needs no allocation.
        Self::Bucket(Arc::default())
    }
}

/// Returns the index of the branch that a hash chooses at a depth.
fn branch(hash: u64, depth: u32) -> usize {
    // The modulus makes the conversion exact.
    usize::try_from((hash >> (depth * BITS)) % FAN_OUT as u64).unwrap_or(0)
}

impl<K, V> Node<K, V> {
    /// Adds the buckets of this node that `other`, the node at the same place of another map, does not share.
    fn buckets_apart_from<'a>(&'a self, other: &Self, apart: &mut Vec<&'a [(K, V)]>) {
        match (self, other) {
            (Self::Branches(own), Self::Branches(theirs)) => {
                if !Arc::ptr_eq(own, theirs) {
                    let pairs = own.iter().zip(theirs.iter());
                    pairs.for_each(|(own, theirs)| own.buckets_apart_from(theirs, apart));
                }
            }
            (Self::Branches(own), Self::Bucket(_)) => {
                let none = Self::default();
                own.iter().for_each(|own| own.buckets_apart_from(&none, apart));
            }
            (Self::Bucket(own), Self::Bucket(theirs)) if Arc::ptr_eq(own, theirs) => {}
            (Self::Bucket(own), _) => apart.push(own),
        }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> Node<K, V> {
    fn insert(&mut self, (hash, depth): (u64, u32), entry: (K, V), hasher: &DefaultHashBuilder) -> Option<V> {
        let bucket = match self {
            Self::Branches(nodes) => {
                let next = &mut Arc::make_mut(nodes)[branch(hash, depth)];
                return next.insert((hash, depth + 1), entry, hasher);
            }
            Self::Bucket(bucket) => bucket,
        };
        if let Some(at) = bucket.iter().position(|(key, _)| *key == entry.0) {
            return Some(std::mem::replace(&mut Arc::make_mut(bucket)[at].1, entry.1));
        }
        let all = bucket.iter().cloned().chain([entry]);
        if bucket.len() < FULL || depth == MAX_DEPTH {
            *bucket = all.collect();
        } else {
            let mut divided = Self::Branches(Arc::new(std::array::from_fn(|_| Self::default())));
            for entry in all {
                let hash = hasher.hash_one(&entry.0);
                divided.insert((hash, depth), entry, hasher);
            }
            *self = divided;
        }
        None
    }

    fn get_mut<Q: Eq + ?Sized>(&mut self, (hash, depth): (u64, u32), key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        match self {
            Self::Branches(nodes) => {
                Arc::make_mut(nodes)[branch(hash, depth)].get_mut((hash, depth + 1), key)
            }
            Self::Bucket(bucket) => {
                let at = bucket.iter().position(|(known, _)| known.borrow() == key)?;
                Some(&mut Arc::make_mut(bucket)[at].1)
            }
        }
    }

    fn remove<Q: Eq + ?Sized>(&mut self, (hash, depth): (u64, u32), key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        match self {
            Self::Branches(nodes) => {
                let nodes = Arc::make_mut(nodes);
                let old = nodes[branch(hash, depth)].remove((hash, depth + 1), key);
                // Half a bucket, so that a key which comes and goes does not divide and join each time.
                if let Some(joined) = joined(nodes, FULL / 2) {
                    *self = Self::Bucket(joined);
                }
                old
            }
            Self::Bucket(bucket) => {
                let (_, old) = bucket.iter().find(|(known, _)| known.borrow() == key)?.clone();
                *bucket = bucket.iter().filter(|(known, _)| known.borrow() != key).cloned().collect();
                Some(old)
            }
        }
    }
}

/// Returns all entries as one bucket, if the nodes are buckets and have at most `most` entries.
fn joined<'a, K: Clone, V: Clone>(nodes: &'a [Node<K, V>], most: usize) -> Option<Bucket<K, V>> {
    let bucket = |node: &'a Node<K, V>| match node {
        Node::Bucket(bucket) => Some(bucket),
        Node::Branches(_) => None,
    };
    let buckets: Option<Vec<&Bucket<K, V>>> = nodes.iter().map(bucket).collect();
    let buckets =
        buckets.filter(|buckets| buckets.iter().map(|bucket| bucket.len()).sum::<usize>() <= most)?;
    Some(buckets.into_iter().flat_map(|bucket| bucket.iter()).cloned().collect())
}

/// The entries of nodes, and of the nodes below them.
struct Entries<'a, K, V> {
    /// The nodes to visit at each depth.
    nodes: Vec<std::slice::Iter<'a, Node<K, V>>>,
    bucket: std::slice::Iter<'a, (K, V)>,
}

impl<'a, K, V> Iterator for Entries<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((key, value)) = self.bucket.next() {
                return Some((key, value));
            }
            match self.nodes.last_mut()?.next() {
                Some(Node::Bucket(bucket)) => self.bucket = bucket.iter(),
                Some(Node::Branches(nodes)) => self.nodes.push(nodes.iter()),
                None => drop(self.nodes.pop()),
            }
        }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> BucketMap<K, V> {
    /// Returns the value of a key.
    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        if self.is_empty() {
            return None;
        }
        let hash = self.hasher.hash_one(key);
        let (mut node, mut depth) = (&self.root, 0);
        loop {
            match node {
                Node::Branches(nodes) => (node, depth) = (&nodes[branch(hash, depth)], depth + 1),
                Node::Bucket(bucket) => {
                    let entry = bucket.iter().find(|(known, _)| known.borrow() == key);
                    return entry.map(|(_, value)| value);
                }
            }
        }
    }

    /// Returns the value of a key for a change; copies the bucket if the key exists and other maps share the
    /// bucket.
    pub fn get_mut<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.get(key)?;
        self.root.get_mut((self.hasher.hash_one(key), 0), key)
    }

    /// Inserts a value and returns the value that it replaces.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let hash = self.hasher.hash_one(&key);
        let old = self.root.insert((hash, 0), (key, value), &self.hasher);
        self.len += usize::from(old.is_none());
        old
    }

    /// Removes a key and returns its value; copies nothing if the key does not exist.
    pub fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.get(key)?;
        let old = self.root.remove((self.hasher.hash_one(key), 0), key);
        debug_assert!(old.is_some(), "the key was there");
        self.len -= usize::from(old.is_some());
        old
    }

    /// Keeps the entries for which `keep` returns true. Visits all entries.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        let gone: Vec<K> =
            self.iter().filter(|(key, value)| !keep(key, value)).map(|(key, _)| key.clone()).collect();
        gone.iter().for_each(|key| drop(self.remove(key)));
    }

    /// Returns true if the map has the key.
    pub fn contains_key<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the map has no entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns all entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        Entries { nodes: vec![std::slice::from_ref(&self.root).iter()], bucket: [].iter() }
    }

    /// Returns the buckets that another map does not share.
    fn buckets_apart_from(&self, other: &Self) -> Vec<&[(K, V)]> {
        let mut apart = Vec::new();
        self.root.buckets_apart_from(&other.root, &mut apart);
        apart
    }
}

impl<K: Clone + Eq + Hash, V: Clone> FromIterator<(K, V)> for BucketMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        entries.into_iter().for_each(|(key, value)| drop(map.insert(key, value)));
        map
    }
}

impl<K: Clone + Eq + Hash + Ord, V: Clone> BucketMap<K, V> {
    /// Returns all entries in order of key.
    pub fn sorted(&self) -> Vec<(&K, &V)> {
        let mut entries: Vec<_> = self.iter().collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        entries
    }

    /// Returns the keys whose values differ between this map and an older one, in order. Buckets that both
    /// share are skipped.
    pub fn changed_since(&self, older: &Self, same: impl Fn(&V, &V) -> bool) -> Vec<K> {
        let own = self.buckets_apart_from(older).into_iter().flatten();
        let differs = |(key, value): &&(K, V)| !older.get(key).is_some_and(|old| same(old, value));
        let theirs = older.buckets_apart_from(self).into_iter().flatten();
        let removed = theirs.filter(|(key, _)| !self.contains_key(key));
        let changed = own.filter(differs).chain(removed);
        let mut changed: Vec<K> = changed.map(|(key, _)| key.clone()).collect();
        changed.sort_unstable();
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::collection::vec;
    use proptest::{option, prop_assert_eq, proptest};

    use super::*;
    use isthmus_model::name::HostName;

    fn host(text: &str) -> HostName {
        HostName::parse(text).expect("legal")
    }

    #[test]
    fn a_change_touches_one_bucket() {
        let mut map = BucketMap::<HostName, i32>::default();
        for index in 0..5_000 {
            map.insert(host(&format!("s{index}.mesh")), index);
        }
        let before = map.clone();
        map.insert(host("s7.mesh"), 8);
        map.remove("absent.mesh");
        assert_eq!(map.buckets_apart_from(&before).len(), 1);
        assert_eq!((before.get("s7.mesh"), map.get("s7.mesh"), map.len()), (Some(&7), Some(&8), 5_000));
        assert_eq!(map.changed_since(&before, PartialEq::eq), [host("s7.mesh")]);
        assert_eq!(map.remove("s7.mesh"), Some(8));
        assert_eq!(map.len(), 4_999);
        map.insert(host("new.mesh"), 1);
        assert_eq!(map.changed_since(&before, PartialEq::eq), [host("new.mesh"), host("s7.mesh")]);
        let empty = BucketMap::<HostName, i32>::default();
        assert_eq!(
            (empty.changed_since(&map, PartialEq::eq).len(), map.changed_since(&empty, PartialEq::eq).len()),
            (5_000, 5_000)
        );
        assert_eq!((empty.get("s7.mesh"), empty.clone().remove("s7.mesh"), empty.len()), (None, None, 0));
        // The two maps are built separately, so no bucket is shared.
        let mut apart = BucketMap::<HostName, i32>::default();
        for (name, value) in map.iter() {
            apart.insert(name.clone(), *value);
        }
        assert!(apart.changed_since(&map, PartialEq::eq).is_empty());
        assert_eq!(apart.changed_since(&before, PartialEq::eq), [host("new.mesh"), host("s7.mesh")]);
    }

    /// Returns the number of entries in each bucket.
    fn loads<K, V>(node: &Node<K, V>) -> Vec<usize> {
        match node {
            Node::Bucket(bucket) => vec![bucket.len()],
            Node::Branches(nodes) => nodes.iter().flat_map(loads).collect(),
        }
    }

    #[test]
    fn buckets_are_divided_and_joined_as_entries_come_and_go() {
        assert_eq!(size_of::<Node<HostName, i32>>(), 16);
        let mut map = BucketMap::<HostName, i32>::default();
        let names: Vec<HostName> = (0..3_000).map(|index| host(&format!("s{index}.mesh"))).collect();
        for (at, name) in names.iter().enumerate() {
            map.insert(name.clone(), 0);
            assert!(at >= FULL || matches!(map.root, Node::Bucket(_)));
        }
        let all = loads(&map.root);
        assert_eq!((all.iter().sum::<usize>(), map.iter().count()), (3_000, 3_000));
        assert!(all.iter().all(|load| *load <= FULL) && all.len() < 3_000 * 3, "{} buckets", all.len());
        for name in &names[1..] {
            *map.get_mut(name).expect("it is there") += 1;
            assert_eq!(map.remove(name), Some(1));
        }
        assert_eq!((loads(&map.root), map.len(), map.get(&names[0])), (vec![1], 1, Some(&0)));
    }

    /// A key whose hash is that of all other keys.
    #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
    struct Alike(u32);

    impl Hash for Alike {
        fn hash<H: std::hash::Hasher>(&self, _: &mut H) {}
    }

    #[test]
    fn keys_of_one_hash_share_a_bucket() {
        let mut map: BucketMap<Alike, u32> = (0..100).map(|number| (Alike(number), number)).collect();
        assert!((0..100).all(|number| map.get(&Alike(number)) == Some(&number)));
        map.retain(|_, value| *value >= 97);
        assert_eq!(map.sorted(), [(&Alike(97), &97), (&Alike(98), &98), (&Alike(99), &99)]);
        assert_eq!(map.len(), 3);
        assert_eq!(map.remove(&Alike(97)), Some(97));
        assert!(matches!(map.root, Node::Bucket(_)), "the last two entries are one bucket");
    }

    proptest! {
        #[test]
        fn any_run_of_changes_gives_what_a_simple_map_gives(
            runs in vec(vec((0_u32..40, option::of(0_u32..3)), 0..60), 1..6),
        ) {
            let (mut map, mut model) = (BucketMap::default(), BTreeMap::new());
            for run in runs {
                let (before, model_before) = (map.clone(), model.clone());
                for (key, value) in run {
                    let (old, model_old) = match value {
                        Some(value) => (map.insert(key, value), model.insert(key, value)),
                        None => (map.remove(&key), model.remove(&key)),
                    };
                    prop_assert_eq!((old, map.len(), map.get(&key)), (model_old, model.len(), model.get(&key)));
                }
                prop_assert_eq!(map.sorted(), model.iter().collect::<Vec<_>>());
                prop_assert_eq!(before.sorted(), model_before.iter().collect::<Vec<_>>());
                let keys: BTreeSet<&u32> = model.keys().chain(model_before.keys()).collect();
                let changed: Vec<u32> =
                    keys.into_iter().filter(|key| model.get(key) != model_before.get(key)).copied().collect();
                prop_assert_eq!(map.changed_since(&before, PartialEq::eq), changed);
            }
        }
    }
}
