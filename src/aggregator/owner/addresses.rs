//! The virtual addresses of imported services, which the owner assigns and frees before each build.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::copies::CopyStore;
use crate::leases;
use crate::options::Options;
use crate::status::VirtualAddressStatus;
use isthmus_model::name::HostName;
use isthmus_registry::change::Dirty;
use isthmus_registry::shard::Shard;
use isthmus_snapshot::virtual_addresses::{VirtualAddresses, import_of};
use isthmus_telemetry::clock::steady_seconds;

/// The largest number of services without an address that the status names; further ones are counted.
const LISTED_MAX: usize = 5;

/// The virtual addresses, and the services whose addresses are not in a snapshot yet.
pub(super) struct Addresses {
    all: VirtualAddresses,
    /// Services whose addresses may differ from those in the snapshot, because the last build failed.
    unbuilt: BTreeSet<HostName>,
    problem: Option<String>,
}

impl Addresses {
    /// Starts from the leases on disk, if the config gives ranges. Blocks.
    pub(super) fn start(options: &Options) -> Option<Self> {
        let ranges = options.virtual_addresses?;
        let read = options.state.as_deref().map(leases::load).transpose();
        let problem = read.as_ref().err().map(|error| {
            format!("cannot read the virtual addresses of the last run, so some may change: {error}")
        });
        if let Some(problem) = &problem {
            tracing::error!("{problem}");
        }
        let leases = read.ok().flatten().unwrap_or_default();
        let all = VirtualAddresses::with_leases(ranges, leases, steady_seconds());
        Some(Self { all, unbuilt: BTreeSet::new(), problem })
    }

    /// Assigns and frees the addresses of changed services. Returns `dirty` together with the services whose addresses change.
    /// The next build has to merge all of these services.
    pub(super) fn renew<'d>(
        &mut self,
        dirty: &'d Dirty,
        shards: &[Arc<Shard>],
        copies: &CopyStore,
    ) -> Cow<'d, Dirty> {
        let now = steady_seconds();
        let names: BTreeSet<&HostName> = dirty.services.iter().chain(&self.unbuilt).collect();
        let mut moved = BTreeSet::new();
        for name in names {
            let import = import_of(name.as_str(), shards);
            moved.extend(self.all.renew(name, import.map(|import| &**import), now));
        }
        if !moved.is_empty() {
            copies.store_leases(self.all.leases());
        }
        moved.extend(self.unbuilt.iter().cloned());
        if moved.is_subset(&dirty.services) {
            return Cow::Borrowed(dirty);
        }
        let mut dirty = dirty.clone();
        dirty.services.extend(moved);
        Cow::Owned(dirty)
    }

    /// Records whether a snapshot with these changes was built.
    pub(super) fn built(&mut self, result: Result<(), ()>, dirty: &Dirty) {
        match result {
            Ok(()) => self.unbuilt.clear(),
            Err(()) => self.unbuilt.extend(dirty.services.iter().cloned()),
        }
    }

    /// Releases the addresses of services that have been gone for long enough. Returns the services whose addresses change.
    pub(super) fn expire(&mut self, copies: &CopyStore) -> BTreeSet<HostName> {
        let before = self.all.counts();
        let changed = self.all.expire(steady_seconds());
        if self.all.counts() != before {
            copies.store_leases(self.all.leases());
        }
        changed
    }

    /// Requests that all leases be written.
    pub(super) fn store(&self, copies: &CopyStore) {
        copies.store_leases(self.all.leases());
    }

    /// Records the result of writing the leases.
    pub(super) fn written(&mut self, result: std::io::Result<()>) {
        self.problem = result.err().map(|error| {
            format!("cannot write the virtual addresses in use, so a restart may change some: {error}")
        });
        if let Some(problem) = &self.problem {
            tracing::error!("{problem}");
        }
    }

    pub(super) fn all(&self) -> &VirtualAddresses {
        &self.all
    }

    pub(super) fn status(&self) -> VirtualAddressStatus {
        VirtualAddressStatus {
            ranges: self.all.ranges(),
            counts: self.all.counts(),
            without: self.all.without().take(LISTED_MAX).cloned().collect(),
            problem: self.problem.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
