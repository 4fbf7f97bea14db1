//! Tells the sockets of one listener from those of the others, also while a reload changes names and addresses.

use std::fmt;
use std::sync::Arc;

use isthmus_model::address::Bind;
use isthmus_settings::listener::Listener;

/// The sockets of a listener.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SocketKey {
    /// The sockets that this process has bound to the address.
    Bound(Bind),
    /// The sockets that the service manager has passed for the listener of this name, whatever its `bind` is.
    Passed(Arc<str>),
}

impl SocketKey {
    /// Returns true if the listener uses these sockets.
    pub(crate) fn is_of(&self, listener: &Listener) -> bool {
        match self {
            Self::Bound(bind) => listener.bind == *bind,
            Self::Passed(name) => listener.name == *name,
        }
    }
}

impl fmt::Display for SocketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bound(bind) => bind.fmt(f),
            Self::Passed(name) => write!(f, "the socket {name:?} of the service manager"),
        }
    }
}
