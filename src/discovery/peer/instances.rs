//! The newest link of each instance of a peer. A process that opens another link has lost its older link, which therefore ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// For each instance, the number of its newest link, and the channel that orders that link to end.
pub(super) type Instances = Arc<Mutex<HashMap<Arc<str>, (u64, watch::Sender<bool>)>>>;

/// The entry of a link in [`Instances`]. Registering it ends the older link of the same instance.
pub(super) struct Newest {
    instances: Instances,
    number: u64,
    replace: watch::Sender<bool>,
}

impl Newest {
    pub(super) fn new(instances: Instances, number: u64, replace: watch::Sender<bool>) -> Self {
        Self { instances, number, replace }
    }

    /// Registers the link for this instance, and ends the instance's older link.
    pub(super) fn is_of(&self, instance: &Arc<str>) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, older)) = instances.insert(instance.clone(), (self.number, self.replace.clone())) {
            older.send_replace(true);
        }
    }
}

impl Drop for Newest {
    fn drop(&mut self) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        instances.retain(|_, (number, _)| *number != self.number);
    }
}
