//! The mesh as one worker sees it: the newest snapshot, and the run-time state of its endpoints.

use std::cell::{Ref, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::balancer::Balancers;
use super::onward::kept::KeptGateways;
use isthmus_snapshot::Snapshot;
use isthmus_world::Reader;

/// The mesh as one worker sees it.
pub(crate) struct MeshView {
    reader: RefCell<Reader>,
    /// The handles to the run-time state of endpoints.
    pub(crate) balancers: Balancers,
    /// The gateways of other networks to which calls were passed on lately.
    pub(crate) far: KeptGateways,
}

impl MeshView {
    /// Creates the view of a worker that has chosen no endpoint yet.
    pub(crate) fn new(reader: Reader) -> Self {
        Self { reader: RefCell::new(reader), balancers: Balancers::default(), far: KeptGateways::default() }
    }

    /// Borrows the newest snapshot. If a caller up the stack already borrows one, returns that one.
    pub(crate) fn snapshot(&self) -> Ref<'_, Snapshot> {
        if let Ok(mut reader) = self.reader.try_borrow_mut() {
            reader.current();
        }
        Ref::map(self.reader.borrow(), |reader| &**reader.held())
    }

    /// Returns the newest snapshot, for tasks that keep it while they wait.
    pub(crate) fn shared_snapshot(&self) -> Arc<Snapshot> {
        drop(self.snapshot());
        self.reader.borrow().held().clone()
    }

    /// Returns true if the address is that of a gateway of this gateway's own network. Such a gateway would pass the
    /// connection on to an endpoint of the same network.
    pub(crate) fn is_own_gateway(&self, address: SocketAddr) -> bool {
        self.snapshot().networks.is_own_gateway(address)
    }

    /// Returns the name of the network that an address belongs to.
    pub(crate) fn network_of(&self, ip: IpAddr) -> Option<Arc<str>> {
        let snapshot = self.snapshot();
        let network = snapshot.networks().network_of_address(ip);
        network.map(|network| network.shared())
    }
}
