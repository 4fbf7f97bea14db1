//! A response under construction.

use std::collections::BTreeSet;
use std::sync::Arc;

use isthmus_ads::resource::Resource;

/// The size in bytes at which a partial response is closed. Clients refuse messages of more than 4 MiB.
const RESPONSE_BYTES: usize = 1 << 20;
/// The largest number of names that are checked for one partial response.
pub(super) const RESPONSE_NAMES: usize = 10_000;

/// The size in bytes at which the part of a wide change in a response is closed. Such a response fits into the window that
/// HTTP/2 clients open by default (65,535 bytes) if its last resource is not large.
pub(super) const WIDE_BYTES: usize = 48 << 10;

/// The contents of a response.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) resources: Vec<Arc<Resource>>,
    /// Names of the added resources that the client does not have in this version.
    pub(super) new: Vec<Arc<str>>,
    names: BTreeSet<Arc<str>>,
    pub(super) removed: BTreeSet<Arc<str>>,
    pub(super) missing: BTreeSet<Arc<str>>,
    bytes: usize,
    /// The number of names that were checked for the response, with or without a result.
    pub(super) looked_at: usize,
    /// The size in bytes, and the number of checked names, before the first name of a wide change.
    before_wide: Option<(usize, usize)>,
}

impl Draft {
    /// Returns true if a partial response may grow. A complete response has no limit.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < RESPONSE_BYTES && self.looked_at < RESPONSE_NAMES
    }

    /// Returns true if the part of a wide change may grow.
    pub(super) fn has_wide_room(&self) -> bool {
        self.before_wide.is_none_or(|(bytes, looked_at)| {
            self.bytes - bytes < WIDE_BYTES && self.looked_at - looked_at < RESPONSE_NAMES
        })
    }

    /// Notes that all further names are of a wide change.
    pub(super) fn begin_wide(&mut self) {
        self.before_wide.get_or_insert((self.bytes, self.looked_at));
    }

    /// Returns true if the draft has resources of a wide change.
    pub(super) fn has_wide(&self) -> bool {
        self.before_wide.is_some_and(|(bytes, _)| self.bytes > bytes)
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

    /// Adds a resource unless the draft has one of this name, and takes the name out of `removed`. Returns true if the resource
    /// was added.
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
