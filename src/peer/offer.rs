//! The services and gateways that this gateway offers to one peer. The peer first gets a full listing, and then the changes. A
//! record of what was sent shows what has changed.
//!
//! While a registry of this mesh was not read since the start, nothing is removed: the peer may have services of the registry
//! from an earlier process (`proto/isthmus/peer/README.md, "Messages"`). A listing that ends meanwhile is partial, and a complete
//! one follows when all registries are read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prost::Message;

use super::export_times::ExportTimes;
use super::outline::ITEMS_MAX;
use super::record;
use isthmus_model::name::{HostName, NamePattern};
use isthmus_model::set_hash::{ItemHash, SetHash};
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_settings::peer::Peer;
use isthmus_snapshot::Snapshot;
use isthmus_world::{Reader, Since};

/// The largest encoded size of the items of one message, in bytes.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// The largest number of items of one message, beside the roots.
const MESSAGE_ITEMS_MAX: usize = ITEMS_MAX - 64;

/// The services, gateways and roots that this gateway offers to one peer over one link.
pub(super) struct Offer {
    peer: Arc<Peer>,
    reader: Reader,
    times: Arc<ExportTimes>,
    /// The patterns of the exported names that the peer subscribed to.
    wanted: Vec<NamePattern>,
    /// The newest snapshot whose changes are in `dirty` or were sent.
    held: Arc<Snapshot>,
    /// Exported names that may have changed since they were sent to the peer.
    dirty: BTreeSet<HostName>,
    are_gateways_dirty: bool,
    are_roots_dirty: bool,
    /// The hashes of the services that were sent to the peer.
    services: BTreeMap<HostName, ItemHash>,
    gateways: BTreeMap<String, ItemHash>,
    given: SetHash,
    /// The full listing that is being sent to the peer; `None` while no full listing is being sent.
    listing: Option<Listing>,
    /// True if the peer must get another listing when all registries are read: the last one was partial, or a removal was not sent.
    is_partial: bool,
}

/// The stage of a full listing: one that sends every exported service again. The listing ends when no name is left in `dirty`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listing {
    Begins,
    GoesOn,
}

/// The next message to the peer.
pub(super) enum Next {
    Delta(proto::Delta),
    End(proto::SnapshotEnd),
}

impl Offer {
    pub(super) fn new(peer: Arc<Peer>, mut reader: Reader, times: Arc<ExportTimes>) -> Self {
        let held = reader.current().clone();
        Self {
            peer,
            reader,
            times,
            wanted: Vec::new(),
            held,
            dirty: BTreeSet::new(),
            are_gateways_dirty: false,
            are_roots_dirty: false,
            services: BTreeMap::new(),
            gateways: BTreeMap::new(),
            given: SetHash::default(),
            listing: None,
            is_partial: false,
        }
    }

    /// Begins a full listing of the names that match `wanted`. A peer that subscribes to no name gets only our roots. The peer
    /// needs them if our workloads call its services, because it verifies our workloads by these roots.
    pub(super) fn subscribe(&mut self, wanted: Vec<NamePattern>) {
        self.wanted = wanted;
        self.are_roots_dirty = true;
        self.services.clear();
        self.gateways.clear();
        self.given = SetHash::default();
        self.held = self.reader.current().clone();
        self.dirty.clear();
        (self.are_gateways_dirty, self.listing, self.is_partial) = (false, None, false);
        if self.is_wanted() {
            self.all_may_differ();
            self.listing = Some(Listing::Begins);
        }
    }

    /// Returns true if the peer has subscribed to any name.
    pub(super) fn is_wanted(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Returns the number of services that were sent to the peer.
    pub(super) fn services_given(&self) -> usize {
        self.services.len()
    }

    /// Marks the roots as changed, so that the next message carries them.
    pub(super) fn roots_changed(&mut self) {
        self.are_roots_dirty = true;
    }

    /// Waits for a snapshot that is newer than `held`; returns false if no more snapshots will follow.
    pub(super) async fn changed(&self) -> bool {
        self.reader.changed(self.held.generation).await
    }

    /// Reads the newest snapshot, and marks everything that differs from the snapshot read before as dirty.
    pub(super) fn follow(&mut self) {
        let next = self.reader.current().clone();
        let held = std::mem::replace(&mut self.held, next);
        if !self.is_wanted() {
            return;
        }
        if self.is_partial && !self.held.unread.has_own() {
            let wanted = std::mem::take(&mut self.wanted);
            return self.subscribe(wanted);
        }
        let names = match self.reader.since(held.generation, self.held.generation) {
            Since::Everything => None,
            Since::Deltas(deltas) => {
                // If a network has changed, every service is checked, because every service may depend on the gateways of that
                // network.
                let networks = deltas.iter().any(|delta| !delta.networks.is_empty());
                let names = self.held.exported_names_changed(&held, &deltas, &self.peer.name);
                names.filter(|_| !networks)
            }
        };
        match names {
            None => self.all_may_differ(),
            Some(names) => self.dirty.extend(names.into_iter().filter(|name| is_wanted(&self.wanted, name))),
        }
    }

    /// Marks the gateways, and every service that was or may be sent to the peer, as possibly changed.
    fn all_may_differ(&mut self) {
        let all = self.held.exports_to(&self.peer.name).into_iter().map(|exported| exported.name);
        self.dirty.extend(all.filter(|name| is_wanted(&self.wanted, name)).cloned());
        self.dirty.extend(self.services.keys().cloned());
        self.are_gateways_dirty = true;
    }

    /// Returns true if there may be something to send.
    pub(super) fn has_more(&self) -> bool {
        let is_dirty = !self.dirty.is_empty() || self.are_gateways_dirty;
        self.are_roots_dirty || self.is_wanted() && (self.listing.is_some() || is_dirty)
    }

    /// Returns the next message to the peer; `None` if the peer has everything. `now` is in seconds since 1970.
    pub(super) fn next(
        &mut self,
        sequence: u64,
        now: u64,
        roots: impl FnOnce() -> Option<proto::Roots>,
    ) -> Option<Next> {
        if self.listing == Some(Listing::GoesOn) && self.dirty.is_empty() {
            self.listing = None;
            self.is_partial |= self.held.unread.has_own();
            let (contents, partial) = (Some(contents(self.given)), self.is_partial);
            return Some(Next::End(proto::SnapshotEnd { sequence, contents, partial }));
        }
        let snapshot = self.held.clone();
        let begins = self.listing == Some(Listing::Begins);
        let mut delta = proto::Delta { sequence, begins, ..proto::Delta::default() };
        if std::mem::take(&mut self.are_roots_dirty) || begins {
            delta.roots = roots();
        }
        let mut bytes = 0;
        if std::mem::take(&mut self.are_gateways_dirty) {
            bytes += self.give_gateways(&snapshot, &mut delta);
        }
        while bytes < MESSAGE_BYTES_MAX
            && items(&delta) < MESSAGE_ITEMS_MAX
            && let Some(name) = self.dirty.pop_first()
        {
            bytes += self.give(&snapshot, &name, now, &mut delta);
        }
        match &mut self.listing {
            Some(listing) => *listing = Listing::GoesOn,
            None => delta.after = Some(contents(self.given)),
        }
        let is_empty = delta.services.is_empty()
            && delta.removed_services.is_empty()
            && delta.gateways.is_empty()
            && delta.removed_gateways.is_empty()
            && delta.roots.is_none();
        (!is_empty || self.listing.is_some()).then_some(Next::Delta(delta))
    }

    /// Adds a service to a message, unless the peer has the service with the same content, or an unread registry may have (more
    /// of) it. Returns the number of bytes added.
    fn give(&mut self, snapshot: &Snapshot, name: &HostName, now: u64, delta: &mut proto::Delta) -> usize {
        let Some(exported) = snapshot.export_to(&self.peer.name, name) else {
            if snapshot.unread.has_own() {
                self.is_partial = true;
                return 0;
            }
            self.times.forget(&self.peer.name, name);
            if let Some(before) = self.services.remove(name) {
                self.given.change(Some(before), None);
                delta.removed_services.push(name.to_string());
            }
            return name.as_str().len();
        };
        let exported_at = self.times.of(&self.peer.name, name, now);
        let service = record::service(snapshot, &exported, exported_at);
        if service.groups.is_empty() && snapshot.unread.may_have_own(exported.service.key.hostname.as_str()) {
            self.is_partial = true;
            return 0;
        }
        let encoded = service.encode_to_vec();
        let hash = ItemHash::of(&encoded);
        let before = self.services.insert(name.clone(), hash);
        if before == Some(hash) {
            return 0;
        }
        self.given.change(before, Some(hash));
        let bytes = encoded.len();
        delta.services.push(encoded);
        bytes
    }

    fn give_gateways(&mut self, snapshot: &Snapshot, delta: &mut proto::Delta) -> usize {
        let (all, mut bytes) = (record::gateways(snapshot, &self.peer), 0);
        let mut gone: Vec<String> =
            self.gateways.keys().filter(|key| !all.contains_key(*key)).cloned().collect();
        if snapshot.unread.has_own() && !gone.is_empty() {
            self.is_partial = true;
            gone.clear();
        }
        for key in gone {
            self.given.change(self.gateways.remove(&key), None);
            bytes += key.len();
            delta.removed_gateways.push(key);
        }
        // A receiver refuses all but 1,024.
        for (key, gateway) in all.into_iter().take(MESSAGE_ITEMS_MAX / 2) {
            let encoded = gateway.encode_to_vec();
            let hash = ItemHash::of(&encoded);
            let before = self.gateways.insert(key, hash);
            if before != Some(hash) {
                self.given.change(before, Some(hash));
                bytes += encoded.len();
                delta.gateways.push(gateway);
            }
        }
        bytes
    }
}

fn items(delta: &proto::Delta) -> usize {
    delta.services.len() + delta.removed_services.len() + delta.gateways.len() + delta.removed_gateways.len()
}

fn is_wanted(wanted: &[NamePattern], name: &HostName) -> bool {
    wanted.iter().any(|pattern| pattern.matches(name.as_str()))
}

fn contents(set: SetHash) -> proto::Contents {
    proto::Contents { count: set.count(), hash: set.sum().to_vec() }
}

#[cfg(test)]
mod tests;
