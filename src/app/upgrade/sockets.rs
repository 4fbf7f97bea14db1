//! The listening sockets of this process, which it can pass on, and those that an earlier process has passed to it. Each has a name:
//! the part that listens, and its address in the config.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use isthmus_dataplane::socket_key::SocketKey;
use isthmus_upgrade::message::SocketName;

/// The kind of the sockets of a data-plane listener that this process has bound.
pub(crate) const LISTENER: &str = "listener";
/// The kind of the sockets that the service manager has passed.
pub(crate) const PASSED: &str = "passed";
/// The kind of the upgrade socket.
pub(crate) const UPGRADE: &str = "upgrade";

/// The sockets of the control plane, and those of an earlier process; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Sockets(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    /// Descriptors of the open sockets of the control plane.
    open: Vec<(SocketName, OwnedFd)>,
    /// The sockets of an earlier process that are not used yet.
    offered: BTreeMap<SocketName, Vec<OwnedFd>>,
    /// The names of the sockets of an earlier process that are used.
    taken: BTreeSet<SocketName>,
    /// True if this process takes over from an earlier one.
    takes_over: bool,
}

impl Sockets {
    fn all(&self) -> MutexGuard<'_, All> {
        // A poisoned lock is usable: each change is a single step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a socket of an earlier process.
    pub(super) fn offer(&self, name: SocketName, socket: OwnedFd) {
        let mut all = self.all();
        all.takes_over = true;
        all.offered.entry(name).or_default().push(socket);
    }

    /// Removes and returns the sockets of the earlier process of this kind.
    pub(super) fn take_all(&self, kind: &str) -> Vec<(SocketName, Vec<OwnedFd>)> {
        let mut all = self.all();
        let names: Vec<SocketName> = all.offered.keys().filter(|name| name.kind == kind).cloned().collect();
        names.into_iter().filter_map(|name| Some((name.clone(), take(&mut all, name)?))).collect()
    }

    /// Returns the sockets of the earlier process with this name; none if it has none.
    pub(crate) fn take(&self, kind: &str, key: &str) -> Option<Vec<OwnedFd>> {
        take(&mut self.all(), name(kind, key))
    }

    /// Returns true if this process takes over from an earlier one, and still has sockets that it does not use.
    pub(crate) fn has_more(&self) -> bool {
        !self.all().offered.is_empty()
    }

    /// Returns the names of the used sockets of the earlier process.
    pub(super) fn taken(&self) -> Vec<SocketName> {
        self.all().taken.iter().cloned().collect()
    }

    /// Closes the sockets of the earlier process that this one does not use.
    pub(super) fn close_others(&self) {
        self.all().offered.clear();
    }

    /// Keeps a descriptor of a socket that this process has opened, so that it can be passed on. If there is no descriptor left, a new
    /// process will have to open a socket of its own.
    pub(crate) fn opened(&self, kind: &str, key: &str, socket: &impl AsFd) {
        match socket.as_fd().try_clone_to_owned() {
            Ok(socket) => self.all().open.push((name(kind, key), socket)),
            Err(error) => tracing::warn!(kind, key, %error, "this socket cannot be passed on by an upgrade"),
        }
    }

    /// Returns descriptors of the open sockets of the control plane.
    pub(crate) fn open(&self) -> io::Result<Vec<(SocketName, OwnedFd)>> {
        self.all().open.iter().map(|(name, socket)| Ok((name.clone(), socket.try_clone()?))).collect()
    }

    /// Closes the kept descriptors, as another process goes on with the sockets.
    pub(crate) fn close(&self) {
        self.all().open.clear();
    }
}

fn take(all: &mut All, name: SocketName) -> Option<Vec<OwnedFd>> {
    let sockets = all.offered.remove(&name)?;
    all.taken.insert(name);
    Some(sockets)
}

/// Returns the name of a socket.
pub(crate) fn name(kind: &str, key: &str) -> SocketName {
    SocketName { kind: kind.to_owned(), key: key.to_owned() }
}

/// Returns the kind and the key of the sockets of a data-plane listener.
pub(crate) fn name_of(key: &SocketKey) -> (&'static str, String) {
    match key {
        SocketKey::Bound(bind) => (LISTENER, bind.to_string()),
        SocketKey::Passed(name) => (PASSED, name.to_string()),
    }
}
