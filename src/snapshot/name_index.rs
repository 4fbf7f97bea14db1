//! Names → values by pattern: exact, longest suffix, any. Look-ups cost a hash per label of the name,
//! however many patterns there are.

use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashMap};

use crate::model::name::{HostName, NamePattern};

/// A map from host names that is copied on write by bucket: changing one name touches one bucket, and a
/// clone shares all the others.
#[derive(Clone, Debug)]
pub struct NameMap<V> {
    hasher: DefaultHashBuilder,
    /// None until something is in it: an empty map costs nothing.
    buckets: Box<[Arc<HashMap<HostName, V>>]>,
    len: usize,
}

const BUCKETS: usize = 1 << 10;

impl<V: Clone> NameMap<V> {
    pub fn new() -> Self {
        Self { hasher: DefaultHashBuilder::default(), buckets: Box::default(), len: 0 }
    }

    fn bucket(&self, name: &str) -> usize {
        // The low bits of the hash; the modulus makes the conversion exact.
        usize::try_from(self.hasher.hash_one(name) % BUCKETS as u64).unwrap_or(0)
    }

    pub fn get(&self, name: &str) -> Option<&V> {
        // A mesh of a few names leaves most buckets empty: those answer without a second hash.
        let bucket = self.buckets.get(self.bucket(name))?;
        if bucket.is_empty() { None } else { bucket.get(name) }
    }

    pub fn insert(&mut self, name: HostName, value: V) -> Option<V> {
        if self.buckets.is_empty() {
            let empty = Arc::new(HashMap::default());
            self.buckets = vec![empty; BUCKETS].into();
        }
        let bucket = self.bucket(name.as_str());
        let old = Arc::make_mut(&mut self.buckets[bucket]).insert(name, value);
        self.len += usize::from(old.is_none());
        old
    }

    pub fn remove(&mut self, name: &str) -> Option<V> {
        let bucket = self.bucket(name);
        if !self.buckets.get(bucket)?.contains_key(name) {
            return None;
        }
        let old = Arc::make_mut(&mut self.buckets[bucket]).remove(name);
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
    pub fn iter(&self) -> impl Iterator<Item = (&HostName, &V)> {
        self.buckets.iter().flat_map(|bucket| bucket.iter())
    }

    /// All entries by name.
    pub fn sorted(&self) -> Vec<(&HostName, &V)> {
        let mut entries: Vec<_> = self.iter().collect();
        entries.sort_unstable_by_key(|(name, _)| *name);
        entries
    }

    /// The names whose values differ between this map and an older one, in order. Buckets that both share are
    /// not looked into.
    pub fn changed_since(&self, older: &Self, same: impl Fn(&V, &V) -> bool) -> Vec<HostName> {
        let shared = |at: usize| matches!((self.buckets.get(at), older.buckets.get(at)), (Some(a), Some(b)) if Arc::ptr_eq(a, b));
        let apart = |map: &'_ Self| {
            let buckets = map.buckets.iter().enumerate().filter(|(at, _)| !shared(*at));
            buckets.map(|(_, bucket)| bucket.clone()).collect::<Vec<_>>()
        };
        let mut changed = Vec::new();
        for bucket in apart(self) {
            let differs = |(name, value): &(&HostName, &V)| {
                !older.get(name.as_str()).is_some_and(|old| same(old, value))
            };
            changed.extend(bucket.iter().filter(differs).map(|(name, _)| name.clone()));
        }
        for bucket in apart(older) {
            changed.extend(bucket.keys().filter(|name| self.get(name.as_str()).is_none()).cloned());
        }
        changed.sort_unstable();
        changed
    }

    /// How many buckets two maps do not share.
    #[cfg(test)]
    fn buckets_apart(&self, other: &Self) -> usize {
        self.buckets.iter().zip(&other.buckets).filter(|(a, b)| !Arc::ptr_eq(a, b)).count()
    }
}

impl<V: Clone> Default for NameMap<V> {
    fn default() -> Self {
        Self::new()
    }
}

/// Values by name pattern.
#[derive(Clone, Debug)]
pub struct PatternMap<V> {
    exact: NameMap<V>,
    suffix: NameMap<V>,
    any: Option<V>,
}

impl<V: Clone> Default for PatternMap<V> {
    fn default() -> Self {
        Self { exact: NameMap::new(), suffix: NameMap::new(), any: None }
    }
}

impl<V: Clone> PatternMap<V> {
    pub fn insert(&mut self, pattern: NamePattern, value: V) {
        match pattern {
            NamePattern::Exact(name) => drop(self.exact.insert(name, value)),
            NamePattern::Suffix(suffix) => drop(self.suffix.insert(suffix, value)),
            NamePattern::Any => self.any = Some(value),
        }
    }

    pub fn remove(&mut self, pattern: &NamePattern) {
        match pattern {
            NamePattern::Exact(name) => drop(self.exact.remove(name.as_str())),
            NamePattern::Suffix(suffix) => drop(self.suffix.remove(suffix.as_str())),
            NamePattern::Any => self.any = None,
        }
    }

    /// The value of exactly this pattern, for building up.
    pub fn get(&self, pattern: &NamePattern) -> Option<&V> {
        match pattern {
            NamePattern::Exact(name) => self.exact.get(name.as_str()),
            NamePattern::Suffix(suffix) => self.suffix.get(suffix.as_str()),
            NamePattern::Any => self.any.as_ref(),
        }
    }

    pub fn exact(&self, name: &str) -> Option<&V> {
        self.exact.get(name)
    }

    pub fn any(&self) -> Option<&V> {
        self.any.as_ref()
    }

    /// The values of the suffixes that a name lies below, longest first.
    pub fn suffixes<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a V> {
        let dots = if self.suffix.is_empty() { "" } else { name };
        dots.char_indices()
            .filter(|(at, c)| *c == '.' && *at > 0)
            .filter_map(|(at, _)| self.suffix.get(&name[at + 1..]))
    }

    /// All values whose pattern takes a name, most specific first.
    pub fn matching<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a V> {
        self.exact(name).into_iter().chain(self.suffixes(name)).chain(self.any())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> HostName {
        HostName::parse(text).expect("legal")
    }

    #[test]
    fn the_most_specific_pattern_comes_first() {
        let mut map = PatternMap::default();
        for pattern in ["a.b.c", "*.b.c", "*.c", "*", "*.d"] {
            map.insert(NamePattern::parse(pattern).expect("legal"), pattern);
        }
        let matching = |name| map.matching(name).copied().collect::<Vec<_>>();
        assert_eq!(matching("a.b.c"), ["a.b.c", "*.b.c", "*.c", "*"]);
        assert_eq!(matching("x.y.c"), ["*.c", "*"]);
        assert_eq!(matching("c"), ["*"]);
        assert_eq!(matching("b.c"), ["*.c", "*"]);
    }

    #[test]
    fn a_change_touches_one_bucket() {
        let mut map = NameMap::new();
        for index in 0..5_000 {
            map.insert(host(&format!("s{index}.mesh")), index);
        }
        let before = map.clone();
        map.insert(host("s7.mesh"), 8);
        map.remove("absent.mesh");
        assert_eq!(map.buckets_apart(&before), 1);
        assert_eq!((before.get("s7.mesh"), map.get("s7.mesh"), map.len()), (Some(&7), Some(&8), 5_000));
        assert_eq!(map.changed_since(&before, PartialEq::eq), [host("s7.mesh")]);
        assert_eq!(map.remove("s7.mesh"), Some(8));
        assert_eq!(map.len(), 4_999);
        map.insert(host("new.mesh"), 1);
        assert_eq!(map.changed_since(&before, PartialEq::eq), [host("new.mesh"), host("s7.mesh")]);
        let empty = NameMap::new();
        assert_eq!(
            (empty.changed_since(&map, PartialEq::eq).len(), map.changed_since(&empty, PartialEq::eq).len()),
            (5_000, 5_000)
        );
        assert_eq!((empty.get("s7.mesh"), empty.clone().remove("s7.mesh"), empty.len()), (None, None, 0));
        // Built apart, no bucket is shared.
        let mut apart = NameMap::new();
        for (name, value) in map.iter() {
            apart.insert(name.clone(), *value);
        }
        assert!(apart.changed_since(&map, PartialEq::eq).is_empty());
        assert_eq!(apart.changed_since(&before, PartialEq::eq), [host("new.mesh"), host("s7.mesh")]);
    }
}
