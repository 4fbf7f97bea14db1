//! Maps name patterns (exact, longest suffix, any) to values. A look-up searches a map once per label of the name, whatever
//! the number of patterns.

use super::bucket_map::BucketMap;
use isthmus_model::name::{HostName, NamePattern};

/// A map keyed by host name.
pub type NameMap<V> = BucketMap<HostName, V>;

/// A map keyed by name pattern.
#[derive(Clone, Debug)]
pub struct PatternMap<V> {
    exact: NameMap<V>,
    suffix: NameMap<V>,
    any: Option<V>,
}

impl<V: Clone> Default for PatternMap<V> {
    fn default() -> Self {
        Self { exact: NameMap::default(), suffix: NameMap::default(), any: None }
    }
}

impl<V: Clone> PatternMap<V> {
    /// Inserts a value; it replaces the value of an equal pattern.
    pub fn insert(&mut self, pattern: NamePattern, value: V) {
        match pattern {
            NamePattern::Exact(name) => drop(self.exact.insert(name, value)),
            NamePattern::Suffix(suffix) => drop(self.suffix.insert(suffix, value)),
            NamePattern::Any => self.any = Some(value),
        }
    }

    /// Removes the pattern that equals this one.
    pub fn remove(&mut self, pattern: &NamePattern) {
        match pattern {
            NamePattern::Exact(name) => drop(self.exact.remove(name.as_str())),
            NamePattern::Suffix(suffix) => drop(self.suffix.remove(suffix.as_str())),
            NamePattern::Any => self.any = None,
        }
    }

    /// Returns true if there are no patterns.
    pub fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.suffix.is_empty() && self.any.is_none()
    }

    /// Returns the value of the pattern that equals this one.
    pub fn get(&self, pattern: &NamePattern) -> Option<&V> {
        match pattern {
            NamePattern::Exact(name) => self.exact.get(name.as_str()),
            NamePattern::Suffix(suffix) => self.suffix.get(suffix.as_str()),
            NamePattern::Any => self.any.as_ref(),
        }
    }

    /// Returns the value of the exact pattern for this name.
    pub fn exact(&self, name: &str) -> Option<&V> {
        self.exact.get(name)
    }

    /// Returns the value of the pattern `*`.
    pub fn any(&self) -> Option<&V> {
        self.any.as_ref()
    }

    /// Returns the values of the suffix patterns that match a name, longest suffix first.
    pub fn suffixes<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a V> {
        let dots = if self.suffix.is_empty() { "" } else { name };
        dots.char_indices()
            .filter(|(at, c)| *c == '.' && *at > 0)
            .filter_map(|(at, _)| self.suffix.get(&name[at + 1..]))
    }

    /// Returns the values of all patterns that match a name, most specific first.
    pub fn matching<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a V> {
        self.exact(name).into_iter().chain(self.suffixes(name)).chain(self.any())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
