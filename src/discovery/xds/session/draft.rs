//! A response while it is put together.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::discovery::xds::resource::Resource;

/// Bytes of resources after which a response is closed that need not hold all: clients refuse messages of over 4 MiB.
const RESPONSE_BYTES: usize = 1 << 20;
/// Names looked at for one such response.
pub(super) const RESPONSE_NAMES: usize = 10_000;

/// What a response will hold.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) resources: Vec<Arc<Resource>>,
    /// Names of those that the client does not have in this version.
    pub(super) new: Vec<Arc<str>>,
    names: BTreeSet<Arc<str>>,
    pub(super) removed: BTreeSet<Arc<str>>,
    pub(super) missing: BTreeSet<Arc<str>>,
    bytes: usize,
    /// Names looked at for it, whatever came of that.
    pub(super) looked_at: usize,
}

impl Draft {
    /// Whether it may grow. Some responses have to hold all and grow beyond.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < RESPONSE_BYTES && self.looked_at < RESPONSE_NAMES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.resources.is_empty() && self.removed.is_empty() && self.missing.is_empty()
    }

    /// Tells of a resource that the client does not have.
    pub(super) fn tell(&mut self, resource: Arc<Resource>) {
        self.tell_as(resource, true);
    }

    /// A name is told of once, and not as removed too.
    pub(super) fn tell_as(&mut self, resource: Arc<Resource>, new: bool) {
        if !self.names.insert(resource.name.clone()) {
            return;
        }
        self.removed.remove(&resource.name);
        self.bytes += resource.message().len();
        if new {
            self.new.push(resource.name.clone());
        }
        self.resources.push(resource);
    }
}
