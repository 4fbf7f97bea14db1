//! The newest link of each instance of a peer. A process of the peer that dials again has lost the link that it dialled before,
//! which therefore ends. A link that this gateway has dialled is not replaced: two addresses may lead to one process.

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

    /// Registers the link, and ends the link that it replaces. Returns false if this gateway has dialled the process before and
    /// that link is still open.
    pub(super) fn register(&self, link: &LinkKey) -> bool {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        if link.is_dialled && instances.iter().any(|(known, _)| link.replaces(known)) {
            return false;
        }
        for (_, older) in instances.extract_if(.., |(known, _)| link.replaces(known)) {
            older.send_replace(true);
        }
        instances.push((link.clone(), self.replace.clone()));
        true
    }
}

impl Drop for Newest {
    fn drop(&mut self) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        instances.retain(|(link, _)| link.number != self.number);
    }
}
