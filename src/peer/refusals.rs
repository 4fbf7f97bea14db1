//! The items of one direction of a link that the importer has refused, with the reasons.

use std::collections::BTreeMap;

use super::outline::Outline;
use isthmus_proto::isthmus::peer::v1 as proto;

/// The largest number of refused items that are kept, the first by name; further ones are not counted.
const KEPT_MAX: usize = 10_000;

/// Refused items by name.
#[derive(Clone, Debug, Default)]
pub struct Refusals {
    items: BTreeMap<String, String>,
    /// The number of refused items since the last listing that the importer has not named.
    further: usize,
}

impl Refusals {
    /// Returns the items in order of name, each with the reason.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.items.iter().map(|(item, why)| (&**item, &**why))
    }

    /// Returns the number of refused items since the last listing that the importer has not named.
    pub fn further(&self) -> usize {
        self.further
    }

    /// Counts refused items that the importer has not named.
    pub(super) fn add_further(&mut self, further: u64) {
        self.further = self.further.saturating_add(usize::try_from(further).unwrap_or(usize::MAX));
    }

    pub(super) fn put(&mut self, item: String, why: String) {
        self.items.insert(item, why);
        if self.items.len() > KEPT_MAX {
            self.items.pop_last();
        }
    }

    pub(super) fn remove(&mut self, item: &str) {
        self.items.remove(item);
    }

    /// Removes the refusals of the items that a message sends again.
    pub(super) fn renew(&mut self, delta: &proto::Delta) {
        if delta.begins {
            *self = Self::default();
            return;
        }
        if self.items.is_empty() {
            return;
        }
        let outlines = delta.services.iter().filter_map(|record| Outline::of(record).ok());
        let services = outlines.map(|outline| outline.name);
        let removed = delta.removed_services.iter().chain(&delta.removed_gateways).map(String::as_str);
        let gateways = delta.gateways.iter().map(|one| &*one.key);
        services.chain(removed).chain(gateways).for_each(|item| drop(self.items.remove(item)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_until_their_items_are_sent_again() {
        let mut refusals = Refusals::default();
        for number in 0..250 {
            refusals.put(format!("s{number:03}"), "the limit is reached".to_owned());
        }
        let removed_services = (0..149).map(|number| format!("s{number:03}")).collect();
        refusals.renew(&proto::Delta { removed_services, ..proto::Delta::default() });
        refusals.remove("s200");
        refusals.add_further(7);
        assert_eq!((refusals.iter().count(), refusals.further()), (100, 7));
        for number in 0..2 * KEPT_MAX {
            refusals.put(format!("t{number:05}"), String::new());
        }
        assert_eq!(refusals.iter().count(), KEPT_MAX);
        refusals.renew(&proto::Delta { begins: true, ..proto::Delta::default() });
        assert_eq!((refusals.iter().count(), refusals.further()), (0, 0));
    }
}
