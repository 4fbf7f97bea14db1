//! The open listeners. Each socket is keyed by its bind address, so only a change of that address rebinds it. If the service
//! manager passes a socket with the name of a listener, the listener uses that socket, whatever its bind address is.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::upgrade::sockets::{PASSED, Sockets, name, name_of};
use isthmus_dataplane::handle::Dataplane;
use isthmus_dataplane::socket_key::SocketKey;
use isthmus_model::address::Bind;
use isthmus_net::inherited::Inherited;
use isthmus_net::listen::{Listening, adopt, listen, listen_beside, share};
use isthmus_settings::listener::Listener;
use isthmus_settings::policy::Policy;
use isthmus_upgrade::message::SocketName;

/// The open listeners.
pub(super) struct Listeners {
    /// The sockets that the service manager has passed. They stay open until the process ends, because a listener may be
    /// removed and added again.
    inherited: Inherited,
    open: BTreeMap<SocketKey, Open>,
    /// The sockets of an earlier process.
    sockets: Sockets,
}

struct Open {
    name: Arc<str>,
    address: SocketAddr,
}

/// Sockets that are bound but do not accept yet.
pub(super) struct Bound(Vec<(SocketKey, Arc<str>, Listening)>);

impl Listeners {
    /// Returns listeners that will use the passed sockets; none of them is open yet.
    pub(super) fn new(inherited: Inherited, sockets: Sockets) -> Self {
        Self { inherited, open: BTreeMap::new(), sockets }
    }

    /// Logs a warning for each socket from the service manager that no listener uses.
    pub(super) fn warn_of_unused(&self, policy: &Policy) {
        let has = |name: &str| policy.listeners.iter().any(|listener| &*listener.name == name);
        for name in self.inherited.names().filter(|name| !has(name)) {
            tracing::warn!(
                name,
                "no listener uses this socket of the service manager; set FileDescriptorName= to the name of a listener"
            );
        }
    }

    /// Binds the addresses of the policy that are not open; if one of them cannot be bound, all are released again.
    pub(super) fn bind(&self, policy: &Policy, workers: usize) -> Result<Bound, Vec<String>> {
        let mut bound = Bound(Vec::new());
        let mut problems = Vec::new();
        for listener in &policy.listeners {
            let key = self.key(listener);
            if self.open.contains_key(&key) {
                continue;
            }
            let (kind, text) = name_of(&key);
            let listening = match &key {
                SocketKey::Bound(_) if let Some(handed) = self.sockets.take(kind, &text) => {
                    adopt(handed, workers)
                }
                SocketKey::Passed(name) => share(self.inherited.named(name).unwrap_or_default(), workers),
                SocketKey::Bound(bind) => {
                    let other = self
                        .open
                        .keys()
                        .find(|other| matches!(other, SocketKey::Bound(other) if other.overlaps(bind)));
                    let stays = policy.listeners.iter().find(|stays| Some(&self.key(stays)) == other);
                    match (other, stays) {
                        (None, _) => {
                            listen(*bind, workers).or_else(|error| self.beside_earlier(*bind, workers, error))
                        }
                        (Some(_), None) => listen_beside(*bind, workers),
                        (Some(other), Some(stays)) => Err(io::Error::other(format!(
                            "the listener {:?} of the config listens on {other}",
                            &*stays.name
                        ))),
                    }
                }
            };
            match listening {
                Ok(listening) => bound.0.push((key, listener.name.clone(), listening)),
                Err(error) => problems.push(format!(
                    "listener {:?}: cannot listen on {}: {error}",
                    &*listener.name, listener.bind
                )),
            }
        }
        if problems.is_empty() { Ok(bound) } else { Err(problems) }
    }

    /// Binds an address beside a socket of the earlier process for the same port, which is about to be closed.
    fn beside_earlier(&self, bind: Bind, workers: usize, error: io::Error) -> io::Result<Listening> {
        if error.kind() == io::ErrorKind::AddrInUse && self.sockets.has_more() {
            return listen_beside(bind, workers);
        }
        Err(error)
    }

    /// Returns descriptors of the sockets that the service manager has passed.
    pub(super) fn inherited(&self) -> io::Result<Vec<(SocketName, OwnedFd)>> {
        let all = self.inherited.all();
        all.map(|(key, socket)| Ok((name(PASSED, key), socket.try_clone()?))).collect()
    }

    /// Accepts connections on bound sockets.
    pub(super) async fn open(&mut self, bound: Bound, dataplane: &mut Dataplane) {
        for (key, name, listening) in bound.0 {
            let address = listening.address;
            tracing::info!(listener = &*name, %address, "listening");
            dataplane.open(key.clone(), listening).await;
            self.open.insert(key, Open { name, address });
        }
    }

    /// Closes the sockets that no listener of the policy has, and gives the others the names of the policy. The connections of
    /// sockets that are closed or get another name may finish within the time `within`, unless their listener has moved. Waits
    /// up to a second for each socket that is closed.
    pub(super) async fn close_others(
        &mut self,
        policy: &Policy,
        dataplane: &mut Dataplane,
        within: Duration,
    ) {
        let before = Instant::now();
        for (key, Open { name, address }) in std::mem::take(&mut self.open) {
            let wanted = policy.listeners.iter().find(|listener| self.key(listener) == key);
            if let Some(wanted) = wanted {
                self.open.insert(key, Open { name: wanted.name.clone(), address });
            } else {
                tracing::info!(listener = &*name, %address, "listener closed");
                dataplane.close(&key).await;
            }
            if wanted.is_none_or(|wanted| wanted.name != name) {
                dataplane.retire(&name, before, within).await;
            }
        }
    }

    /// Returns which sockets a listener uses.
    fn key(&self, listener: &Listener) -> SocketKey {
        match self.inherited.named(&listener.name) {
            Some(_) => SocketKey::Passed(listener.name.clone()),
            None => SocketKey::Bound(listener.bind),
        }
    }

    /// Returns the bound addresses by listener name.
    pub(super) fn listening(&self) -> Vec<(Arc<str>, SocketAddr)> {
        self.open.values().map(|open| (open.name.clone(), open.address)).collect()
    }
}
