//! The open listeners. Each socket is keyed by its bind address, so only a change of that address rebinds it. If the service
//! manager passes a socket with the name of a listener, the listener uses that socket.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::dataplane::handle::Dataplane;
use crate::model::address::Bind;
use crate::net::inherited::Inherited;
use crate::net::listen::{Listening, listen, listen_beside, share};
use crate::snapshot::policy::Policy;

/// The open listeners.
pub(super) struct Listeners {
    /// The sockets that the service manager has passed. They stay open until the process ends, because a listener may be
    /// removed and added again.
    inherited: Inherited,
    open: BTreeMap<Bind, Open>,
}

struct Open {
    name: Arc<str>,
    address: SocketAddr,
}

/// Sockets that are bound but do not accept yet.
pub(super) struct Bound(Vec<(Bind, Arc<str>, Listening)>);

impl Listeners {
    /// Returns listeners that will use the passed sockets; none of them is open yet.
    pub(super) fn new(inherited: Inherited) -> Self {
        Self { inherited, open: BTreeMap::new() }
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
            if self.open.contains_key(&listener.bind) {
                continue;
            }
            let passed = self.inherited.named(&listener.name);
            let other = self.open.iter().find(|(bind, _)| bind.overlaps(&listener.bind));
            let listening = match (passed, other) {
                (Some(passed), _) => share(passed, workers),
                (None, None) => listen(listener.bind, workers),
                (None, Some((bind, _))) => match policy.listeners.iter().find(|stays| stays.bind == *bind) {
                    Some(stays) => Err(io::Error::other(format!(
                        "the listener {:?} of the config listens on {bind}",
                        &*stays.name
                    ))),
                    None => listen_beside(listener.bind, workers),
                },
            };
            match listening {
                Ok(listening) => bound.0.push((listener.bind, listener.name.clone(), listening)),
                Err(error) => problems.push(format!(
                    "listener {:?}: cannot listen on {}: {error}",
                    &*listener.name, listener.bind
                )),
            }
        }
        if problems.is_empty() { Ok(bound) } else { Err(problems) }
    }

    /// Accepts connections on bound sockets.
    pub(super) async fn open(&mut self, bound: Bound, dataplane: &mut Dataplane) {
        for (bind, name, listening) in bound.0 {
            let address = listening.address;
            tracing::info!(listener = &*name, %address, "listening");
            dataplane.open(bind, listening).await;
            self.open.insert(bind, Open { name, address });
        }
    }

    /// Closes the addresses that are not in the policy, and gives the others the names of the policy. The connections of an
    /// address that is closed or gets another name may finish within the time `within`, unless their listener has moved.
    pub(super) async fn close_others(
        &mut self,
        policy: &Policy,
        dataplane: &mut Dataplane,
        within: Duration,
    ) {
        for (bind, Open { name, address }) in std::mem::take(&mut self.open) {
            let wanted = policy.listeners.iter().find(|listener| listener.bind == bind);
            if let Some(wanted) = wanted {
                self.open.insert(bind, Open { name: wanted.name.clone(), address });
            } else {
                tracing::info!(listener = &*name, %address, "listener closed");
                dataplane.close(bind).await;
            }
            if wanted.is_none_or(|wanted| wanted.name != name) {
                dataplane.retire(&name, within).await;
            }
        }
    }

    /// Returns the bound addresses by listener name.
    pub(super) fn listening(&self) -> Vec<(Arc<str>, SocketAddr)> {
        self.open.values().map(|open| (open.name.clone(), open.address)).collect()
    }
}
