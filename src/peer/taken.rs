//! The items that the peer has sent, as hashes. They are compared with the checksums that the peer sends, and their number is
//! limited.

use std::collections::{HashMap, HashSet};

use prost::Message;

use isthmus_model::set_hash::{ItemHash, SetHash};
use isthmus_proto::isthmus::peer::v1 as proto;

/// The largest number of gateways that a peer may send.
const GATEWAYS_MAX: usize = 1_024;

/// The hashes of the items that the peer has sent.
#[derive(Default)]
pub(super) struct Taken {
    services: HashMap<String, ItemHash>,
    gateways: HashMap<String, ItemHash>,
    set: SetHash,
    /// True if a limit has refused services or gateways, so that the items cannot be compared with the peer's checksum.
    are_cut: Cut,
    /// During a listing, the services from before the listing that it has not named yet. Their places are kept, because a
    /// listing comes in order of name, and new services would otherwise take them.
    expected: HashSet<String>,
    /// True from the first message of a listing to its end.
    pub(super) is_listing: bool,
}

/// The kinds of items of which a limit has refused some.
#[derive(Clone, Copy, Default)]
struct Cut {
    services: bool,
    gateways: bool,
}

impl Taken {
    /// Returns the number of services that the peer has sent.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// Records the items of a message, and removes those beyond a limit from the message.
    pub(super) fn note(
        &mut self,
        delta: &mut proto::Delta,
        services_max: usize,
        refused: &mut Vec<proto::Refusal>,
    ) {
        if delta.begins {
            let mut expected = std::mem::take(&mut self.expected);
            expected.extend(self.services.drain().map(|(name, _)| name));
            *self = Self { is_listing: true, expected, ..Self::default() };
        }
        for name in &delta.removed_services {
            self.expected.remove(name);
            let before = self.services.remove(name);
            self.set.change(before, None);
        }
        for key in &delta.removed_gateways {
            let before = self.gateways.remove(key);
            self.set.change(before, None);
        }
        let Self { services, gateways, set, are_cut, expected, .. } = self;
        let mut take = |known: &mut HashMap<String, ItemHash>, name: &str, bytes: &[u8], has_place: bool| {
            let is_taken = has_place || known.contains_key(name);
            if is_taken {
                let hash = ItemHash::of(bytes);
                set.change(known.insert(name.to_owned(), hash), Some(hash));
            }
            is_taken
        };
        let mut refuse = |item: &str, max: usize, what: &str| {
            refused
                .push(proto::Refusal { item: item.to_owned(), problem: format!("more than {max} {what}") });
        };
        delta.services.retain(|one| {
            expected.remove(&one.name);
            let has_place = services.len() + expected.len() < services_max;
            let is_taken = take(services, &one.name, &one.encode_to_vec(), has_place);
            if !is_taken {
                are_cut.services = true;
                refuse(&one.name, services_max, "services");
            }
            is_taken
        });
        delta.gateways.retain(|one| {
            let is_taken = take(gateways, &one.key, &one.encode_to_vec(), gateways.len() < GATEWAYS_MAX);
            if !is_taken {
                are_cut.gateways = true;
                refuse(&one.key, GATEWAYS_MAX, "gateways");
            }
            is_taken
        });
    }

    /// Records the end of a listing; returns true if the items do not match the checksum that the peer sent.
    pub(super) fn end(&mut self, contents: Option<&proto::Contents>) -> bool {
        self.is_listing = false;
        self.expected = HashSet::new();
        contents.is_some_and(|contents| self.differs(contents))
    }

    /// Returns true if services were refused because of the limit, although there is a place for them now.
    pub(super) fn has_place(&self, services_max: usize) -> bool {
        !self.is_listing && self.are_cut.services && self.services.len() < services_max
    }

    pub(super) fn differs(&self, contents: &proto::Contents) -> bool {
        !(self.are_cut.services || self.are_cut.gateways)
            && SetHash::from_parts(contents.count, &contents.hash) != Some(self.set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes these services, of which at most two have a place; returns the refused ones.
    fn take(taken: &mut Taken, begins: bool, services: &[&str], removed: &[&str]) -> Vec<String> {
        let service = |name: &&str| proto::Service { name: (*name).to_owned(), ..proto::Service::default() };
        let mut delta = proto::Delta {
            begins,
            services: services.iter().map(service).collect(),
            removed_services: removed.iter().map(|name| (*name).to_owned()).collect(),
            ..proto::Delta::default()
        };
        let mut refused = Vec::new();
        taken.note(&mut delta, 2, &mut refused);
        assert_eq!(delta.services.len() + refused.len(), services.len());
        refused.into_iter().map(|one| one.item).collect()
    }

    #[test]
    fn a_place_that_becomes_free_asks_for_a_listing_in_which_the_others_keep_theirs() {
        let mut taken = Taken::default();
        assert_eq!(take(&mut taken, true, &["b", "c", "d"], &[]), ["d"]);
        assert!(!taken.has_place(2), "the listing has not ended");
        taken.end(None);
        assert!(!taken.has_place(2), "it is full");
        take(&mut taken, false, &[], &["b"]);
        assert!(taken.has_place(2));
        // In the next listing, an earlier new name does not take the place of one that is in use.
        assert_eq!(take(&mut taken, true, &["a", "bb", "c", "d"], &[]), ["bb", "d"]);
        taken.end(None);
        assert!(!taken.has_place(2));
        // A place that was kept for a service that is gone is free at the end.
        assert_eq!(take(&mut taken, true, &["b", "c"], &[]), ["b"]);
        taken.end(None);
        assert!(taken.has_place(2));
        assert_eq!(take(&mut taken, true, &["b", "c"], &[]), Vec::<String>::new());
        taken.end(None);
        assert!(!taken.has_place(2));
    }
}
