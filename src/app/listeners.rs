//! The open listeners. Each socket is keyed by its bind address, so only a change of that address rebinds it. If the service
//! manager passes a socket with the name of a listener, the listener uses that socket.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::dataplane::handle::Dataplane;
use crate::model::address::Bind;
use crate::net::inherited::Inherited;
use crate::net::listen::{Listening, listen, share};
use crate::snapshot::policy::Policy;

/// The open listeners.
pub(super) struct Listeners {
    /// The sockets that the service manager has passed. They stay open until the process ends, because a listener may be
    /// removed and added again.
    inherited: Inherited,
    open: BTreeMap<Bind, Open>,
    /// The former names of listeners that were renamed.
    former: Vec<Arc<str>>,
}

struct Open {
    name: Arc<str>,
    address: SocketAddr,
}

/// Sockets that are bound but do not accept yet.
pub(super) struct Bound {
    new: Vec<(Bind, Listening)>,
    /// The listener name of each address of the policy.
    names: BTreeMap<Bind, Arc<str>>,
}

impl Listeners {
    /// Returns listeners that will use the passed sockets; none of them is open yet.
    pub(super) fn new(inherited: Inherited) -> Self {
        Self { inherited, open: BTreeMap::new(), former: Vec::new() }
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
        let mut bound = Bound { new: Vec::new(), names: BTreeMap::new() };
        let mut problems = Vec::new();
        for listener in &policy.listeners {
            bound.names.insert(listener.bind, listener.name.clone());
            if self.open.contains_key(&listener.bind) {
                continue;
            }
            let passed = self.inherited.named(&listener.name);
            match passed.map_or_else(|| listen(listener.bind, workers), |passed| share(passed, workers)) {
                Ok(listening) => bound.new.push((listener.bind, listening)),
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
        for (bind, listening) in bound.new {
            let address = listening.address;
            let name = bound.names.get(&bind).cloned().unwrap_or_default();
            tracing::info!(listener = &*name, %address, "listening");
            dataplane.open(bind, listening).await;
            self.open.insert(bind, Open { name, address });
        }
        for (bind, name) in bound.names {
            if let Some(open) = self.open.get_mut(&bind) {
                let former = std::mem::replace(&mut open.name, name);
                self.former.extend(Some(former).filter(|former| *former != open.name));
            }
        }
    }

    /// Closes the addresses that are not in the policy, and lets the connections of listeners whose names are not in the policy
    /// finish within the time `within`.
    pub(super) async fn close_others(
        &mut self,
        policy: &Policy,
        dataplane: &mut Dataplane,
        within: Duration,
    ) {
        let wanted = |bind: &Bind| policy.listeners.iter().any(|listener| listener.bind == *bind);
        let gone: Vec<Bind> = self.open.keys().filter(|bind| !wanted(bind)).copied().collect();
        for bind in gone {
            if let Some(open) = self.open.remove(&bind) {
                tracing::info!(listener = &*open.name, address = %open.address, "listener closed");
                dataplane.close(bind).await;
                self.former.push(open.name);
            }
        }
        let is_gone = |name: &Arc<str>| policy.listeners.iter().all(|listener| listener.name != *name);
        for name in std::mem::take(&mut self.former).into_iter().filter(is_gone) {
            dataplane.retire(&name, within).await;
        }
    }

    /// Returns the bound addresses by listener name.
    pub(super) fn listening(&self) -> Vec<(Arc<str>, SocketAddr)> {
        self.open.values().map(|open| (open.name.clone(), open.address)).collect()
    }
}
