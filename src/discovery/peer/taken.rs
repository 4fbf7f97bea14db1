//! The items that the peer has sent, as hashes. They are compared with the checksums that the peer sends, and their number is
//! limited.

use std::collections::HashMap;

use prost::Message;

use crate::model::set_hash::{ItemHash, SetHash};
use crate::proto::isthmus::peer::v1 as proto;

/// The largest number of gateways that a peer may send.
const GATEWAYS_MAX: usize = 1_024;

/// The hashes of the items that the peer has sent.
#[derive(Default)]
pub(super) struct Taken {
    services: HashMap<String, ItemHash>,
    gateways: HashMap<String, ItemHash>,
    set: SetHash,
    /// True if a limit refused items, so that the items cannot be compared with the peer's checksum.
    is_cut: bool,
    /// True from the first message of a listing to its end.
    pub(super) is_listing: bool,
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
            *self = Self { is_listing: true, ..Self::default() };
        }
        for name in &delta.removed_services {
            let before = self.services.remove(name);
            self.set.change(before, None);
        }
        for key in &delta.removed_gateways {
            let before = self.gateways.remove(key);
            self.set.change(before, None);
        }
        let Self { services, gateways, set, is_cut, .. } = self;
        let mut take =
            |known: &mut HashMap<String, ItemHash>, name: &str, bytes: &[u8], max: usize, what: &str| {
                let hash = ItemHash::of(bytes);
                if known.len() >= max && !known.contains_key(name) {
                    *is_cut = true;
                    let problem = format!("more than {max} {what}");
                    refused.push(proto::Refusal { item: name.to_owned(), problem });
                    return false;
                }
                set.change(known.insert(name.to_owned(), hash), Some(hash));
                true
            };
        delta
            .services
            .retain(|one| take(services, &one.name, &one.encode_to_vec(), services_max, "services"));
        delta.gateways.retain(|one| take(gateways, &one.key, &one.encode_to_vec(), GATEWAYS_MAX, "gateways"));
    }

    /// Records the end of a listing; returns true if the items do not match the checksum that the peer sent.
    pub(super) fn end(&mut self, contents: Option<&proto::Contents>) -> bool {
        self.is_listing = false;
        contents.is_some_and(|contents| self.differs(contents))
    }

    pub(super) fn differs(&self, contents: &proto::Contents) -> bool {
        !self.is_cut && SetHash::from_parts(contents.count, &contents.hash) != Some(self.set)
    }
}
