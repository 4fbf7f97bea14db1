//! The items of one direction of a link that the importer has refused, with the reasons.

use std::collections::BTreeMap;

use isthmus_proto::isthmus::peer::v1 as proto;

/// The largest number of refused items that are kept, the first by name; further ones are not counted.
const KEPT_MAX: usize = 10_000;

/// Refused items by name.
#[derive(Clone, Debug, Default)]
pub struct Refusals(BTreeMap<String, String>);

impl Refusals {
    /// Returns the items in order of name, each with the reason.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(item, why)| (&**item, &**why))
    }

    pub(super) fn put(&mut self, item: String, why: String) {
        self.0.insert(item, why);
        if self.0.len() > KEPT_MAX {
            self.0.pop_last();
        }
    }

    pub(super) fn remove(&mut self, item: &str) {
        self.0.remove(item);
    }

    /// Removes the refusals of the items that a message sends again.
    pub(super) fn renew(&mut self, delta: &proto::Delta) {
        if delta.begins {
            return self.0.clear();
        }
        let services = delta.services.iter().map(|one| &one.name).chain(&delta.removed_services);
        let gateways = delta.gateways.iter().map(|one| &one.key).chain(&delta.removed_gateways);
        if !self.0.is_empty() {
            services.chain(gateways).for_each(|item| drop(self.0.remove(item)));
        }
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
        assert_eq!(refusals.iter().count(), 100);
        for number in 0..2 * KEPT_MAX {
            refusals.put(format!("t{number:05}"), String::new());
        }
        assert_eq!(refusals.iter().count(), KEPT_MAX);
        refusals.renew(&proto::Delta { begins: true, ..proto::Delta::default() });
        assert_eq!(refusals.iter().count(), 0);
    }
}
