//! Accepts connections, with one task per worker and address.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::admission::admit_accepted;
use super::connection;
use super::core::Core;
use super::entry::Entry;
use super::eviction::{self, take_slot_of_unannounced};
use super::peek::{Accepted, announced_at_once};
use super::refuse::{self, Farewell};
use super::shared::Queue;
use super::socket_key::SocketKey;
use isthmus_model::address::{Bind, canonical_socket};
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord};
use isthmus_net::admission::Holder;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_net::socket::is_out_of_descriptors;
use isthmus_settings::listener::{Listener, ListenerProtocol, ProxyProtocol};
use isthmus_settings::scope::admits;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::local::ListenerCounts;

/// The number of connections accepted before other tasks get their turn.
const ACCEPTS_AT_ONCE: usize = 64;
/// The pause after the kernel refused a connection for lack of descriptors or memory.
const REST: Duration = Duration::from_millis(50);
/// Limits the rate of log lines about failed accepts, for all workers together.
static CANNOT_ACCEPT: LogThrottle = LogThrottle::new(Duration::from_secs(1));

/// A listening socket and the task that accepts from it.
pub(crate) struct OpenListener {
    stop: oneshot::Sender<Stop>,
    socket: Rc<TcpListener>,
}

/// The order to stop accepting.
pub(crate) struct Stop {
    /// Says who accepts the connections in the kernel's queue.
    pub(crate) queue: Queue,
    /// Dropped once the socket is closed.
    pub(crate) closed: Rc<oneshot::Sender<()>>,
}

impl OpenListener {
    /// Starts to accept from a listening socket. Fails if the runtime cannot watch it.
    pub(crate) fn start(core: &Rc<Core>, key: SocketKey, socket: OwnedFd) -> io::Result<Self> {
        let socket = Rc::new(TcpListener::from_std(socket.into())?);
        let accepts = socket.clone();
        let (stop, mut stopped) = oneshot::channel();
        // The local address is known only if the socket is bound to one address, because then it accepts connections to no
        // other.
        let local =
            socket.local_addr().ok().map(canonical_socket).filter(|local| !local.ip().is_unspecified());
        let incoming = Incoming { core: core.clone(), key, local, listener: RefCell::new(None) };
        core.scope.spawn(async move {
            let stop = accept(&incoming, &accepts, &mut stopped).await;
            if stop.as_ref().is_none_or(|stop| stop.queue == Queue::Accept) {
                accept_queued(&incoming, &accepts);
            }
            drop(accepts);
            drop(stop.map(|stop| stop.closed));
        });
        Ok(Self { stop, socket })
    }

    /// Closes the socket.
    pub(crate) fn stop(self, stop: Stop) {
        // This fails only if the runtime has ended the task, and the socket is closed.
        let _ = self.stop.send(stop);
    }

    /// Returns another descriptor of the socket.
    pub(crate) fn socket(&self) -> io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }
}

/// The data for serving accepted connections.
struct Incoming {
    core: Rc<Core>,
    key: SocketKey,
    /// The local address of the accepted connections; `None` if it may differ between them.
    local: Option<SocketAddr>,
    /// The policy's listener for these sockets, with the generation of the policy.
    listener: RefCell<Option<(u64, Configured)>>,
}

/// A listener of the policy, and its metrics.
type Configured = (Arc<Listener>, Rc<ListenerCounts>);

/// Accepts connections until the order to stop, and returns it.
async fn accept(
    incoming: &Incoming,
    socket: &TcpListener,
    stopped: &mut oneshot::Receiver<Stop>,
) -> Option<Stop> {
    loop {
        let accepted = tokio::select! {
            biased;
            stop = &mut *stopped => return stop.ok(),
            accepted = socket.accept() => accepted,
        };
        if !incoming.handle(accepted).await {
            continue;
        }
        for _ in 1..ACCEPTS_AT_ONCE {
            let Poll::Ready(accepted) = socket.poll_accept(&mut Context::from_waker(Waker::noop())) else {
                break;
            };
            if !incoming.handle(accepted).await {
                break;
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Accepts the connections that are in the kernel's queue now. The runtime is not asked, because it may not have heard of them
/// yet, and they would be reset with the socket.
fn accept_queued(incoming: &Incoming, socket: &TcpListener) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    while let Ok((client, source)) = acceptfrom_with(socket, flags) {
        let source = source.and_then(|source| SocketAddr::try_from(source).ok());
        if let (Some(source), Ok(client)) = (source, TcpStream::from_std(client.into())) {
            incoming.take(client, source);
        }
    }
}

impl Incoming {
    /// Handles the result of an accept. Returns false after an error, because there may be no more connections for a while.
    async fn handle(&self, accepted: io::Result<(TcpStream, SocketAddr)>) -> bool {
        match accepted {
            Ok((client, source)) => self.take(client, source),
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                if Errno::from_io_error(&error).is_some_and(is_out_of_descriptors) {
                    self.core.shared.limits.refusals.record(FullLimit::Descriptors);
                }
                if let Some(times) = CANNOT_ACCEPT.occurred() {
                    tracing::warn!(on = %self.key, %error, times, "cannot accept a connection");
                }
                tokio::time::sleep(REST).await;
                return false;
            }
        }
        true
    }

    fn take(&self, client: TcpStream, source: SocketAddr) {
        let core = &self.core;
        let source = canonical_socket(source);
        let Some((listener, counts)) = self.listener().or_else(|| self.successor(&client)) else {
            // The socket is about to be closed, and the client sees the same as if it had connected a moment later.
            return;
        };
        let listener = if listener.is_of_gateways { self.of_gateways(&listener, &client) } else { listener };
        let holder = match &listener.proxy_protocol {
            ProxyProtocol::Require { from } if admits(from, source.ip()) => Holder::Unannounced,
            ProxyProtocol::Require { .. } | ProxyProtocol::Forbid => {
                core.shared.limits.admission.source(source.ip())
            }
        };
        counts.accepted();
        let mut record =
            ConnectionRecord::new(core.next_id(), SystemTime::now(), counts.name.clone(), source);
        if listener.protocol == ListenerProtocol::Tcp {
            record.protocol = ConnectionProtocol::Tcp;
        }
        let entry = Rc::new(Entry::new(counts, record, core.clock.now()));
        let mut admitted = eviction::admit(core, &entry, holder.clone());
        if admitted.is_err() && holder == Holder::Unannounced {
            admitted = match announced_at_once(core, &entry, &client) {
                Some(holder) => eviction::admit(core, &entry, holder),
                None => take_slot_of_unannounced(core),
            };
        }
        match admitted {
            Ok(permit) => drop(entry.permit.replace(Some(permit))),
            Err(refused) => {
                // The checks of the listener come before the limits. If the listener refuses the connection too, its reason is
                // reported.
                let by_listener = admit_accepted(&listener, &entry).err();
                let reason = by_listener.unwrap_or_else(|| core.refused(&entry, refused));
                refuse::at_once(core, &client, Farewell::of(listener.refusal, entry.alert(reason)));
                core.finish(&entry, reason);
                return;
            }
        }
        entry.record.borrow_mut().local = self.local_address(&client);
        let accepted = Accepted { registration: core.register(entry), listener, client };
        // Boxed, because the runtime copies a task's future seven times: 4 % of the instructions of a short connection.
        core.scope.spawn(Box::pin(connection::serve(accepted)));
    }

    /// Returns the address to which a client has connected.
    fn local_address(&self, client: &TcpStream) -> Option<SocketAddr> {
        self.local.or_else(|| client.local_addr().ok().map(canonical_socket))
    }

    /// Returns the listener of a port of Gateways with the protocol that they have at the address to which the client has connected.
    fn of_gateways(&self, listener: &Arc<Listener>, client: &TcpStream) -> Arc<Listener> {
        let local = self.local_address(client).map(|local| local.ip());
        let protocol = self.core.mesh.snapshot().gateway_api.protocol(listener, local);
        if protocol == listener.protocol {
            return listener.clone();
        }
        Arc::new(Listener { protocol, ..Listener::clone(listener) })
    }

    fn listener(&self) -> Option<Configured> {
        let snapshot = self.core.mesh.snapshot();
        let mut cached = self.listener.borrow_mut();
        if let Some((generation, configured)) = &*cached
            && *generation == snapshot.policy_generation
        {
            return Some(configured.clone());
        }
        let found = snapshot.policy.listeners.iter().find(|listener| self.key.is_of(listener));
        let found = found.map(|listener| self.configured(listener));
        *cached = found.clone().map(|configured| (snapshot.policy_generation, configured));
        found
    }

    fn configured(&self, listener: &Arc<Listener>) -> Configured {
        (listener.clone(), self.core.local.listener(&listener.name))
    }

    /// Returns the listener that would accept a connection to the client's address a moment later, when the policy has another
    /// bind address for these sockets' port and they are about to be closed.
    fn successor(&self, client: &TcpStream) -> Option<Configured> {
        let local = Bind::Address(client.local_addr().ok().map(canonical_socket)?);
        let snapshot = self.core.mesh.snapshot();
        let found = snapshot.policy.listeners.iter().find(|listener| listener.bind.overlaps(&local));
        found.map(|listener| self.configured(listener))
    }
}
