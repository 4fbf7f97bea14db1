//! The seam between registries and the world: a registry is one task that sends batches of changes.

use std::pin::Pin;

use tokio::sync::mpsc;

use super::spec::RegistrySpec;
use crate::snapshot::change::Change;

/// A source of services, gateways and marks.
///
/// The task lists everything once (`Begin`, the items, `Complete`), and then sends what changes. A batch is applied as one;
/// a listing may span several batches. After `Failed`, the next batch, which may be empty, says that the registry can be
/// read again.
pub trait Registry: Send {
    fn spec(&self) -> &RegistrySpec;

    /// Sends changes until nobody takes them any more.
    fn run(self: Box<Self>, changes: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Makes the task of a registry.
pub type Factory = dyn Fn(&RegistrySpec) -> Box<dyn Registry> + Send + Sync;

/// Which start of a registry's task a change comes from: changes of a task that was replaced are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub(super) u64);

/// Nobody takes changes of this registry any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the registry was replaced, or the program ends")]
pub struct Closed;

/// Where a registry sends its changes. Sending waits while the aggregator is behind.
#[derive(Clone, Debug)]
pub struct Changes {
    epoch: Epoch,
    sender: mpsc::Sender<(Epoch, Vec<Change>)>,
}

impl Changes {
    pub(super) fn new(epoch: Epoch, sender: mpsc::Sender<(Epoch, Vec<Change>)>) -> Self {
        Self { epoch, sender }
    }

    pub async fn send(&self, batch: Vec<Change>) -> Result<(), Closed> {
        self.sender.send((self.epoch, batch)).await.map_err(|_| Closed)
    }
}
