//! The newest link of each instance of a peer: a process that opens another link has lost the one before.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

/// The newest link of each instance, by its number, with the order that ends it.
pub(super) type Instances = Arc<Mutex<HashMap<Arc<str>, (u64, watch::Sender<bool>)>>>;

/// Ends the older link of the same instance.
pub(super) struct Newest {
    instances: Instances,
    number: u64,
    replace: watch::Sender<bool>,
}

impl Newest {
    pub(super) fn new(instances: Instances, number: u64, replace: watch::Sender<bool>) -> Self {
        Self { instances, number, replace }
    }

    /// Notes that the link is one of this instance; an older one ends.
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
