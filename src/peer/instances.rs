//! The newest link of each instance of a peer. A process that dials again has lost the link that it dialled before, which
//! therefore ends.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use isthmus_model::link::LinkKey;

/// The newest link of each instance in each direction, with the channel that orders the link to end.
pub(super) type Instances = Arc<Mutex<Vec<(LinkKey, watch::Sender<bool>)>>>;

/// The entry of a link in [`Instances`]. Registering it ends the link that it replaces.
pub(super) struct Newest {
    instances: Instances,
    number: u64,
    replace: watch::Sender<bool>,
}

impl Newest {
    pub(super) fn new(instances: Instances, number: u64, replace: watch::Sender<bool>) -> Self {
        Self { instances, number, replace }
    }

    /// Registers the link, and ends the link that it replaces.
    pub(super) fn register(&self, link: &LinkKey) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, older) in instances.extract_if(.., |(known, _)| link.replaces(known)) {
            older.send_replace(true);
        }
        instances.push((link.clone(), self.replace.clone()));
    }
}

impl Drop for Newest {
    fn drop(&mut self) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        instances.retain(|(link, _)| link.number != self.number);
    }
}
