//! A response while it is being made.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::discovery::xds::resource::Resource;

/// The size in bytes at which a partial response is closed: clients refuse messages of more than 4 MiB.
const RESPONSE_BYTES: usize = 1 << 20;
/// Names that are checked for one partial response.
pub(super) const RESPONSE_NAMES: usize = 10_000;

/// The contents of a response.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) resources: Vec<Arc<Resource>>,
    /// Names of the resources that the client does not have in this version.
    pub(super) new: Vec<Arc<str>>,
    names: BTreeSet<Arc<str>>,
    pub(super) removed: BTreeSet<Arc<str>>,
    pub(super) missing: BTreeSet<Arc<str>>,
    bytes: usize,
    /// Names that were checked for the response, with or without a result.
    pub(super) looked_at: usize,
}

impl Draft {
    /// Returns true if a partial response may grow; a complete one grows beyond.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < RESPONSE_BYTES && self.looked_at < RESPONSE_NAMES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.resources.is_empty() && self.removed.is_empty() && self.missing.is_empty()
    }

    /// Adds a resource that the client does not have.
    pub(super) fn add(&mut self, resource: Arc<Resource>) {
        let name = resource.name.clone();
        if self.put(resource) {
            self.new.push(name);
        }
    }

    /// Adds a resource that the client has in this version.
    pub(super) fn add_known(&mut self, resource: Arc<Resource>) {
        self.put(resource);
    }

    /// Adds a resource, unless the draft has its name; the name is then not removed. Returns true if it was added.
    fn put(&mut self, resource: Arc<Resource>) -> bool {
        if !self.names.insert(resource.name.clone()) {
            return false;
        }
        self.removed.remove(&resource.name);
        self.bytes += resource.message().len();
        self.resources.push(resource);
        true
    }
}
