//! The items that the peer has sent, as hashes. They are compared with the checksums that the peer sends, and their number and
//! memory are limited.

use std::collections::HashMap;
use std::sync::Arc;

use prost::Message;

use super::budget::{Budget, Held};
use super::outline::Outline;
use isthmus_model::set_hash::{ItemHash, SetHash};
use isthmus_proto::isthmus::peer::v1 as proto;

/// The largest number of gateways that a peer may send.
const GATEWAYS_MAX: usize = 1_024;
/// The bytes that a gateway takes in memory, beside those of its texts.
const GATEWAY_BYTES: usize = 512;

/// The hashes of the items that the peer has sent.
pub(super) struct Taken {
    services: HashMap<String, Item>,
    gateways: HashMap<String, Item>,
    set: SetHash,
    /// The items that a limit has refused. If there are any, the others cannot be compared with the peer's checksum.
    are_cut: Cut,
    /// During a listing, the services from before the listing that it has not named yet, each with the bytes that it takes.
    /// Their places are kept, because a listing comes in order of name, and new services would otherwise take them.
    expected: HashMap<String, usize>,
    held: Held,
    /// True from the first message of a listing to its end.
    pub(super) is_listing: bool,
}

/// One service or gateway.
#[derive(Clone, Copy)]
struct Item {
    hash: ItemHash,
    /// The bytes that it takes in memory.
    bytes: usize,
}

/// The items that a limit has refused.
#[derive(Clone, Copy, Default)]
struct Cut {
    services: bool,
    gateways: bool,
    /// The bytes of the smallest service for which there was no memory.
    memory: Option<usize>,
}

impl Taken {
    /// Starts without items. `budget` is the memory of all links with the peer.
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self {
            services: HashMap::new(),
            gateways: HashMap::new(),
            set: SetHash::default(),
            are_cut: Cut::default(),
            expected: HashMap::new(),
            held: Held::of(budget),
            is_listing: false,
        }
    }

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
            self.begin_listing();
        }
        for name in &delta.removed_services {
            self.remove_service(name);
        }
        for key in &delta.removed_gateways {
            self.remove_gateway(key);
        }
        let removed = &mut delta.removed_services;
        delta.services.retain(|record| match self.take_service(record, services_max) {
            Ok(()) => true,
            Err(refusal) => {
                // The peer has replaced the former record of the service.
                removed.push(refusal.item.clone());
                refused.push(refusal);
                false
            }
        });
        let removed = &mut delta.removed_gateways;
        delta.gateways.retain(|gateway| match self.take_gateway(gateway) {
            Ok(()) => true,
            Err(problem) => {
                self.remove_gateway(&gateway.key);
                removed.push(gateway.key.clone());
                refused.push(proto::Refusal { item: gateway.key.clone(), problem });
                false
            }
        });
    }

    fn begin_listing(&mut self) {
        self.expected.extend(self.services.drain().map(|(name, item)| (name, item.bytes)));
        let bytes: usize = self.gateways.drain().map(|(_, item)| item.bytes).sum();
        self.held.free(bytes);
        (self.set, self.are_cut, self.is_listing) = (SetHash::default(), Cut::default(), true);
    }

    fn remove_service(&mut self, name: &str) {
        let before = self.services.remove(name);
        self.set.change(before.map(|item| item.hash), None);
        let expected = self.expected.remove(name);
        self.held.free(before.map_or(0, |item| item.bytes) + expected.unwrap_or(0));
    }

    fn remove_gateway(&mut self, key: &str) {
        let before = self.gateways.remove(key);
        self.set.change(before.map(|item| item.hash), None);
        self.held.free(before.map_or(0, |item| item.bytes));
    }

    fn take_service(&mut self, record: &[u8], services_max: usize) -> Result<(), proto::Refusal> {
        let refusal = |item: &str, problem: String| proto::Refusal { item: item.to_owned(), problem };
        let Outline { name, bytes_held, .. } =
            Outline::of(record).map_err(|malformed| refusal("a service", malformed.to_string()))?;
        let expected = self.expected.remove(name);
        let before = self.services.get(name).copied();
        // A service has one of the two: a listing begins with no services.
        let bytes_before = before.map(|item| item.bytes).or(expected).unwrap_or(0);
        if before.is_none() && self.services.len() + self.expected.len() >= services_max {
            self.held.free(bytes_before);
            self.are_cut.services = true;
            return Err(refusal(name, format!("more than {services_max} services")));
        }
        if !self.held.replace(bytes_before, bytes_held) {
            let why = self.held.budget().refusal(bytes_held - bytes_before);
            self.held.free(bytes_before);
            self.set.change(self.services.remove(name).map(|item| item.hash), None);
            let smallest = self.are_cut.memory.map_or(bytes_held, |other| other.min(bytes_held));
            self.are_cut.memory = Some(smallest);
            return Err(refusal(name, why));
        }
        let item = Item { hash: ItemHash::of(record), bytes: bytes_held };
        self.set.change(before.map(|item| item.hash), Some(item.hash));
        self.services.insert(name.to_owned(), item);
        Ok(())
    }

    fn take_gateway(&mut self, gateway: &proto::Gateway) -> Result<(), String> {
        let before = self.gateways.get(&gateway.key).copied();
        let encoded = gateway.encode_to_vec();
        let item = Item { hash: ItemHash::of(&encoded), bytes: GATEWAY_BYTES + encoded.len() };
        let has_place = before.is_some() || self.gateways.len() < GATEWAYS_MAX;
        let bytes_before = before.map_or(0, |item| item.bytes);
        if !has_place || !self.held.replace(bytes_before, item.bytes) {
            self.are_cut.gateways = true;
            return Err(match has_place {
                false => format!("more than {GATEWAYS_MAX} gateways"),
                true => self.held.budget().refusal(item.bytes - bytes_before),
            });
        }
        self.set.change(before.map(|item| item.hash), Some(item.hash));
        self.gateways.insert(gateway.key.clone(), item);
        Ok(())
    }

    /// Records the end of a listing; returns true if the items do not match the checksum that the peer sent.
    pub(super) fn end(&mut self, contents: Option<&proto::Contents>) -> bool {
        self.is_listing = false;
        let bytes: usize = self.expected.drain().map(|(_, bytes)| bytes).sum();
        self.held.free(bytes);
        contents.is_some_and(|contents| self.differs(contents))
    }

    /// Returns true if services were refused because of a limit, although there is a place for one of them now.
    pub(super) fn has_place(&self, services_max: usize) -> bool {
        let Cut { services, memory, .. } = self.are_cut;
        let has_memory = memory.is_some_and(|bytes| self.held.budget().has(bytes));
        !self.is_listing && self.services.len() < services_max && (services || has_memory)
    }

    pub(super) fn differs(&self, contents: &proto::Contents) -> bool {
        let Cut { services, gateways, memory } = self.are_cut;
        !(services || gateways || memory.is_some())
            && SetHash::from_parts(contents.count, &contents.hash) != Some(self.set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes these services, of which at most two have a place; returns the refused ones.
    fn take(taken: &mut Taken, begins: bool, services: &[&str], removed: &[&str]) -> Vec<String> {
        let service = |name: &&str| {
            proto::Service { name: (*name).to_owned(), ..proto::Service::default() }.encode_to_vec()
        };
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
        let mut taken = Taken::new(Budget::new(usize::MAX, &Arc::default()));
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

    #[test]
    fn what_exceeds_the_memory_is_named_and_asked_for_when_there_is_room() {
        let budget = Budget::new(2_200, &Arc::default());
        let mut taken = Taken::new(budget.clone());
        assert_eq!(take(&mut taken, true, &["a", "b"], &[]), Vec::<String>::new());
        let mut delta = proto::Delta {
            services: vec![
                proto::Service { name: "c".to_owned(), ..proto::Service::default() }.encode_to_vec(),
            ],
            ..proto::Delta::default()
        };
        let mut refused = Vec::new();
        taken.note(&mut delta, 10, &mut refused);
        assert_eq!((delta.services.len(), &*refused[0].item), (0, "c"));
        assert!(refused[0].problem.contains("limits.memory, 2200 bytes"), "{}", refused[0].problem);
        taken.end(None);
        assert!(!taken.has_place(10));
        // A record that grows beyond the memory loses what it had, and leaves its place to another.
        let port = proto::Port { name: "p".repeat(253), number: 1, protocol: "TCP".to_owned() };
        let grown =
            proto::Service { name: "a".to_owned(), ports: vec![port; 4], ..proto::Service::default() };
        let mut delta = proto::Delta { services: vec![grown.encode_to_vec()], ..proto::Delta::default() };
        taken.note(&mut delta, 10, &mut refused);
        assert_eq!((delta.removed_services, taken.services()), (vec!["a".to_owned()], 1));
        assert!(taken.has_place(10));
        // In a listing, what is in use keeps its memory.
        assert_eq!(take(&mut taken, true, &["a", "aa"], &[]), ["aa"]);
        drop(taken);
        assert!(budget.has(2_200), "a link that ends frees its memory");
    }
}
