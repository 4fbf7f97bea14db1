//! A map that is copied on write by bucket: changing one entry touches one bucket, and a clone shares all the others.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashMap};

const BUCKETS: usize = 1 << 10;

/// A map whose clones share what does not change.
#[derive(Clone, Debug)]
pub struct BucketMap<K, V> {
    hasher: DefaultHashBuilder,
    /// None until something is in it: an empty map costs nothing.
    buckets: Box<[Arc<HashMap<K, V>>]>,
    len: usize,
}

impl<K, V> Default for BucketMap<K, V> {
    fn default() -> Self {
        Self { hasher: DefaultHashBuilder::default(), buckets: Box::default(), len: 0 }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> BucketMap<K, V> {
    fn bucket<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        // The low bits of the hash; the modulus makes the conversion exact.
        usize::try_from(self.hasher.hash_one(key) % BUCKETS as u64).unwrap_or(0)
    }

    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        // A mesh of a few names leaves most buckets empty: those answer without a second hash.
        let bucket = self.buckets.get(self.bucket(key))?;
        if bucket.is_empty() { None } else { bucket.get(key) }
    }

    /// Copies the bucket where others share it, and the key is there.
    pub fn get_mut<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let bucket = self.bucket(key);
        let bucket = self.buckets.get_mut(bucket).filter(|bucket| bucket.contains_key(key))?;
        Arc::make_mut(bucket).get_mut(key)
    }

    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        if self.buckets.is_empty() {
            let empty = Arc::new(HashMap::default());
            self.buckets = vec![empty; BUCKETS].into();
        }
        let bucket = self.bucket(&key);
        let old = Arc::make_mut(&mut self.buckets[bucket]).insert(key, value);
        self.len += usize::from(old.is_none());
        old
    }

    pub fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let bucket = self.bucket(key);
        let bucket = self.buckets.get_mut(bucket).filter(|bucket| bucket.contains_key(key))?;
        let old = Arc::make_mut(bucket).remove(key);
        self.len -= usize::from(old.is_some());
        old
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All entries, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.buckets.iter().flat_map(|bucket| bucket.iter())
    }

    /// The buckets that another map does not share.
    fn buckets_apart_from<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a Arc<HashMap<K, V>>> {
        let shared =
            |at: usize, bucket| other.buckets.get(at).is_some_and(|theirs| Arc::ptr_eq(bucket, theirs));
        let buckets = self.buckets.iter().enumerate();
        buckets.filter(move |(at, bucket)| !shared(*at, bucket)).map(|(_, bucket)| bucket)
    }
}

impl<K: Clone + Eq + Hash + Ord, V: Clone> BucketMap<K, V> {
    /// All entries by key.
    pub fn sorted(&self) -> Vec<(&K, &V)> {
        let mut entries: Vec<_> = self.iter().collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        entries
    }

    /// The keys whose values differ between this map and an older one, in order. Buckets that both share are not looked
    /// into.
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
        // Built apart, no bucket is shared.
        let mut apart = BucketMap::<HostName, i32>::default();
        for (name, value) in map.iter() {
            apart.insert(name.clone(), *value);
        }
        assert!(apart.changed_since(&map, PartialEq::eq).is_empty());
        assert_eq!(apart.changed_since(&before, PartialEq::eq), [host("new.mesh"), host("s7.mesh")]);
    }
}
