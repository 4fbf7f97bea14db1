//! The interface of registries: a registry is one task that sends batches of changes.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::spec::RegistrySpec;
use isthmus_registry::change::Change;
use isthmus_registry::shard::Shard;

/// A source of services, gateways and marks.
///
/// The task lists everything once (`Begin`, the items, `Complete`), and then sends changes. A batch is
/// applied in one step; a listing may span several batches. After `Failed`, a change of an item, the end of a listing or
/// `Readable` means that the registry can be read again.
pub trait Registry: Send {
    /// Returns the spec of the registry.
    fn spec(&self) -> &RegistrySpec;

    /// Sends changes until the receiver is gone.
    fn run(self: Box<Self>, changes: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Makes the task of a registry.
pub type Factory = dyn Fn(&RegistrySpec) -> Box<dyn Registry> + Send + Sync;

/// Identifies one start of a registry's task, so that the changes of a replaced task can be dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub(super) u64);

/// The receiver of the registry's changes is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the registry was replaced, or the gateway stops")]
pub struct Closed;

/// Sends a registry's changes. Sending waits while the aggregator is behind.
#[derive(Clone, Debug)]
pub struct Changes {
    epoch: Epoch,
    sender: mpsc::Sender<(Epoch, Vec<Change>)>,
    in_use: watch::Receiver<Arc<Shard>>,
}

impl Changes {
    pub(super) fn new(
        epoch: Epoch,
        sender: mpsc::Sender<(Epoch, Vec<Change>)>,
        in_use: watch::Receiver<Arc<Shard>>,
    ) -> Self {
        Self { epoch, sender, in_use }
    }

    /// Returns changes without an aggregator, and the receiver of their batches.
    #[cfg(any(test, feature = "testing"))]
    pub fn for_tests() -> (Self, mpsc::Receiver<(Epoch, Vec<Change>)>) {
        let ((sender, sent), (_, in_use)) = (mpsc::channel(64), watch::channel(Arc::default()));
        (Self::new(Epoch(0), sender, in_use), sent)
    }

    /// Sends a batch of changes to the aggregator.
    pub async fn send(&self, batch: Vec<Change>) -> Result<(), Closed> {
        self.sender.send((self.epoch, batch)).await.map_err(|_| Closed)
    }

    /// Returns the items of the registry that are in use. Until this task has completed a listing, these are the items from the
    /// previous task or from the copy on disk.
    pub fn in_use(&self) -> Arc<Shard> {
        self.in_use.borrow().clone()
    }
}
