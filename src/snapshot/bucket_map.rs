//! A map that is copied on write by bucket: changing one entry copies one bucket and the path to it; a clone
//! shares all other buckets.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashMap};

/// The number of buckets per group, and of groups per map. A change copies this many pointers twice, whatever
/// the size of the map.
const FAN_OUT: usize = 1 << 6;

type Bucket<K, V> = Arc<HashMap<K, V>>;
type Group<K, V> = Arc<[Bucket<K, V>]>;

/// A map whose clones share the buckets that do not change.
#[derive(Clone, Debug)]
pub struct BucketMap<K, V> {
    hasher: DefaultHashBuilder,
    /// Empty until the first insertion, so that an empty map costs nothing.
    groups: Arc<[Group<K, V>]>,
    len: usize,
}

impl<K, V> Default for BucketMap<K, V> {
    fn default() -> Self {
        Self { hasher: DefaultHashBuilder::default(), groups: Arc::default(), len: 0 }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> BucketMap<K, V> {
    /// Returns the index of a key's group, and of its bucket in the group.
    fn place<Q: Hash + ?Sized>(&self, key: &Q) -> (usize, usize) {
        let hash = self.hasher.hash_one(key);
        // Takes the low bits of the hash; the modulus makes the conversions exact.
        let part = |bits: u64| usize::try_from(bits % FAN_OUT as u64).unwrap_or(0);
        (part(hash), part(hash / FAN_OUT as u64))
    }

    fn bucket<Q: Hash + ?Sized>(&self, key: &Q) -> Option<&Bucket<K, V>> {
        let (group, bucket) = self.place(key);
        self.groups.get(group).map(|group| &group[bucket])
    }

    /// Returns the bucket for a change, copying it if other maps share it.
    fn bucket_mut(&mut self, (group, bucket): (usize, usize)) -> &mut HashMap<K, V> {
        if self.groups.is_empty() {
            let empty: Group<K, V> = (0..FAN_OUT).map(|_| Bucket::default()).collect();
            self.groups = (0..FAN_OUT).map(|_| empty.clone()).collect();
        }
        let group = &mut Arc::make_mut(&mut self.groups)[group];
        Arc::make_mut(&mut Arc::make_mut(group)[bucket])
    }

    /// Returns the value of a key.
    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        // A map of a few names has mostly empty buckets, where this check saves the second hash.
        let bucket = self.bucket(key)?;
        if bucket.is_empty() { None } else { bucket.get(key) }
    }

    /// Returns the value of a key for a change; copies the bucket if the key exists and other maps share the
    /// bucket.
    pub fn get_mut<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.get(key)?;
        self.bucket_mut(self.place(key)).get_mut(key)
    }

    /// Inserts a value and returns the value that it replaces.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let old = self.bucket_mut(self.place(&key)).insert(key, value);
        self.len += usize::from(old.is_none());
        old
    }

    /// Removes a key and returns its value; copies nothing if the key does not exist.
    pub fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.get(key)?;
        let old = self.bucket_mut(self.place(key)).remove(key);
        debug_assert!(old.is_some(), "the key was there");
        self.len -= usize::from(old.is_some());
        old
    }

    /// Keeps the entries for which `keep` returns true. Visits all entries.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        let gone: Vec<K> =
            self.iter().filter(|(key, value)| !keep(key, value)).map(|(key, _)| key.clone()).collect();
        for key in gone {
            let place = self.place(&key);
            self.bucket_mut(place).remove(&key);
            self.len -= 1;
        }
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
        self.groups.iter().flat_map(|group| group.iter()).flat_map(|bucket| bucket.iter())
    }

    /// Returns the buckets that another map does not share.
    fn buckets_apart_from<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a Bucket<K, V>> {
        let theirs = |at: usize| other.groups.get(at);
        let apart = move |(at, group): (usize, &'a Group<K, V>)| {
            let theirs = theirs(at).filter(|theirs| !Arc::ptr_eq(theirs, group));
            let shared = theirs.is_none() && other.groups.get(at).is_some();
            let buckets = group.iter().enumerate().filter(move |_| !shared);
            buckets
                .filter(move |(at, bucket)| !theirs.is_some_and(|theirs| Arc::ptr_eq(bucket, &theirs[*at])))
        };
        self.groups.iter().enumerate().flat_map(apart).map(|(_, bucket)| bucket)
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
        let mut changed = Vec::new();
        for bucket in self.buckets_apart_from(older) {
            let differs = |(key, value): &(&K, &V)| !older.get(*key).is_some_and(|old| same(old, value));
            changed.extend(bucket.iter().filter(differs).map(|(key, _)| key.clone()));
        }
        for bucket in older.buckets_apart_from(self) {
            changed.extend(bucket.keys().filter(|key| self.get(*key).is_none()).cloned());
        }
        changed.sort_unstable();
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::name::HostName;

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
        assert_eq!(map.buckets_apart_from(&before).count(), 1);
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
}
