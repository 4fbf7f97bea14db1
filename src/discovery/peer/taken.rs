//! The items that the other side of a link has given, by their hashes: they are compared with what that side says, and kept within limits.

use std::collections::HashMap;

use prost::Message;

use crate::model::set_hash::{ItemHash, SetHash};
use crate::proto::isthmus::peer::v1 as proto;

/// Gateways that a peer may give.
const GATEWAYS_MAX: usize = 1_024;

/// The items that the other side has given, as far as their hashes tell.
#[derive(Default)]
pub(super) struct Taken {
    services: HashMap<String, ItemHash>,
    gateways: HashMap<String, ItemHash>,
    set: SetHash,
    /// True if items were left out because of a limit, so that the contents cannot be compared.
    is_cut: bool,
    /// True from the first message of a listing to its end.
    pub(super) is_listing: bool,
}

impl Taken {
    /// Returns the number of services.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// Notes the items of a message, and takes out those beyond the limit.
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

    /// Notes the end of a listing; returns true if the contents differ.
    pub(super) fn end(&mut self, contents: Option<&proto::Contents>) -> bool {
        self.is_listing = false;
        contents.is_some_and(|contents| self.differs(contents))
    }

    pub(super) fn differs(&self, contents: &proto::Contents) -> bool {
        !self.is_cut && SetHash::from_parts(contents.count, &contents.hash) != Some(self.set)
    }
}
