//! The keys of a registry that have mistakes: the first ones are reported by name, the others are counted.

use std::collections::{BTreeSet, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use isthmus_registry::change::Change;

/// The largest number of keys that are reported by name.
const NAMED_MAX: usize = 100;
/// The largest number of flawed keys that are counted without their names, at 16 bytes each.
const COUNTED_MAX: usize = 100_000;

/// The keys of a registry that have mistakes.
#[derive(Debug)]
pub(super) struct Flaws {
    /// The name of the object that is reported in place of all keys that are not reported by name.
    rest: Arc<str>,
    named: BTreeSet<Arc<str>>,
    /// Hashes of the flawed keys that are not reported by name.
    counted: HashSet<u64>,
    hasher: RandomState,
    /// The number of keys in `counted` at the last report.
    reported: usize,
    /// Objects reported before the present listing. An object that the listing does not report again is correct, or gone.
    before: BTreeSet<Arc<str>>,
}

impl Flaws {
    /// Starts without flawed keys; all keys begin with `prefix`.
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            rest: format!("{prefix}…").into(),
            named: BTreeSet::new(),
            counted: HashSet::new(),
            hasher: RandomState::new(),
            reported: 0,
            before: BTreeSet::new(),
        }
    }

    /// Begins a listing, which will report every flawed key.
    pub(super) fn begin(&mut self) {
        self.before.append(&mut self.named);
        self.counted.clear();
    }

    /// Completes the listing, and reports as correct each object that had mistakes before the listing and was not reported in
    /// it.
    pub(super) fn complete(&mut self, changes: &mut Vec<Change>) {
        let before = std::mem::take(&mut self.before);
        changes.extend(before.difference(&self.named).map(|object| right(object.clone())));
        self.settle(changes);
    }

    /// Reports that a key has mistakes.
    pub(super) fn flawed(&mut self, object: Arc<str>, problems: Vec<String>, changes: &mut Vec<Change>) {
        if self.named.len() < NAMED_MAX || self.named.contains(&object) {
            self.counted.remove(&self.hasher.hash_one(&object));
            self.named.insert(object.clone());
            changes.push(Change::Flawed { object, problems });
        } else if self.counted.len() < COUNTED_MAX {
            self.counted.insert(self.hasher.hash_one(&object));
        }
    }

    /// Reports that a key has no mistakes, or is gone.
    pub(super) fn right(&mut self, object: &Arc<str>, changes: &mut Vec<Change>) {
        if self.named.remove(object) {
            changes.push(right(object.clone()));
        } else if !self.counted.is_empty() {
            self.counted.remove(&self.hasher.hash_one(object));
        }
    }

    /// Reports the number of flawed keys that are not reported by name, if it has changed. Must be called at the end of a
    /// batch.
    pub(super) fn settle(&mut self, changes: &mut Vec<Change>) {
        let count = self.counted.len();
        if count == self.reported {
            return;
        }
        self.reported = count;
        let least = if count < COUNTED_MAX { "" } else { "at least " };
        let problems = match count {
            0 => Vec::new(),
            count => vec![format!(
                "{}: {least}{count} more keys have mistakes, which are not listed here",
                self.rest
            )],
        };
        changes.push(Change::Flawed { object: self.rest.clone(), problems });
    }

    /// Returns true if no key has mistakes.
    pub(super) fn is_empty(&self) -> bool {
        self.named.is_empty() && self.counted.is_empty()
    }
}

fn right(object: Arc<str>) -> Change {
    Change::Flawed { object, problems: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> Arc<str> {
        format!("/p/{number:06}").into()
    }

    fn objects(changes: &[Change]) -> Vec<(String, usize)> {
        let object = |change: &Change| match change {
            Change::Flawed { object, problems } => (object.to_string(), problems.len()),
            other => panic!("{other:?}"),
        };
        changes.iter().map(object).collect()
    }

    #[test]
    fn keys_beyond_the_bound_are_counted() {
        let (mut flaws, mut changes) = (Flaws::new("/p/"), Vec::new());
        for number in 0..NAMED_MAX + 3 {
            flaws.flawed(key(number), vec!["x".into()], &mut changes);
        }
        flaws.settle(&mut changes);
        assert_eq!(changes.len(), NAMED_MAX + 1);
        assert!(matches!(changes.last(), Some(Change::Flawed { object, problems })
            if &**object == "/p/…" && problems == &["/p/…: 3 more keys have mistakes, which are not listed here"]));
        // One of the counted keys is flawed again, another one is correct, and a third key was never flawed.
        changes.clear();
        flaws.flawed(key(NAMED_MAX), vec!["y".into()], &mut changes);
        flaws.right(&key(NAMED_MAX + 1), &mut changes);
        flaws.right(&key(1_000_000), &mut changes);
        flaws.settle(&mut changes);
        flaws.settle(&mut changes);
        assert_eq!(objects(&changes), [("/p/…".to_owned(), 1)]);
        changes.clear();
        flaws.right(&key(0), &mut changes);
        // A key that was only counted can be reported by name again.
        flaws.flawed(key(NAMED_MAX), vec!["y".into()], &mut changes);
        flaws.right(&key(NAMED_MAX + 2), &mut changes);
        flaws.settle(&mut changes);
        assert_eq!(objects(&changes), [("/p/000000".into(), 0), ("/p/000100".into(), 1), ("/p/…".into(), 0)]);
        (0..NAMED_MAX + 3).for_each(|number| flaws.right(&key(number), &mut changes));
        assert!(flaws.is_empty());
    }

    #[test]
    fn a_listing_reports_what_it_does_not_name_as_right() {
        let (mut flaws, mut changes) = (Flaws::new("/p/"), Vec::new());
        (0..NAMED_MAX + 5).for_each(|number| flaws.flawed(key(number), vec!["x".into()], &mut changes));
        flaws.settle(&mut changes);
        // The first listing is discarded, the second one is complete.
        flaws.begin();
        flaws.flawed(key(7), vec!["x".into()], &mut changes);
        flaws.begin();
        changes.clear();
        flaws.flawed(key(1), vec!["x".into()], &mut changes);
        flaws.complete(&mut changes);
        assert_eq!(changes.len(), 1 + (NAMED_MAX - 1) + 1);
        assert_eq!(objects(&changes)[0], (key(1).to_string(), 1));
        assert_eq!(objects(&changes).last(), Some(&("/p/…".to_owned(), 0)));
        assert!(!objects(&changes)[1..].contains(&(key(1).to_string(), 0)));
    }

    #[test]
    fn the_count_itself_is_bounded() {
        let (mut flaws, mut changes) = (Flaws::new("/p/"), Vec::new());
        (0..NAMED_MAX + COUNTED_MAX + 10).for_each(|number| flaws.flawed(key(number), vec![], &mut changes));
        flaws.settle(&mut changes);
        assert!(matches!(changes.last(), Some(Change::Flawed { problems, .. })
            if problems == &["/p/…: at least 100000 more keys have mistakes, which are not listed here"]));
    }
}
