//! Connections that the data plane accepts and hands to the server of peer links and enrolments, and those that the dialling of links
//! hands to the data plane.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use isthmus_model::identity::{Identity, TrustDomain};

/// The number of connections that may wait in the queue. It takes those of a short flood, most of which give way as soon as
/// they are taken out of it.
const WAITING_MAX: usize = 1_024;

/// The purpose of a connection that is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The link with a peer.
    Link,
    /// The enrolment of a peer.
    Enrolment,
}

/// A connection with the bytes that were already read from it.
#[derive(Debug)]
pub struct HandedOver {
    /// The socket.
    pub socket: OwnedFd,
    /// The address of the client.
    pub source: SocketAddr,
    /// The name of the listener that accepted the connection.
    pub listener: Arc<str>,
    /// The purpose of the connection, recognised by its hello.
    pub purpose: Purpose,
    /// The bytes that were already read: the TLS hello.
    pub first: Box<[u8]>,
}

/// A connection to a gateway of a peer that the data plane is to serve as a carrier.
#[derive(Debug)]
pub struct Carrying {
    /// The socket, which is connected.
    pub socket: OwnedFd,
    /// The address of the peer's gateway.
    pub address: SocketAddr,
    /// Our name for the peer.
    pub peer: Arc<str>,
    /// The identity that the peer's gateway must have, under our name for its trust domain.
    pub gateway: Identity,
    /// Our name for the trust domain of the peer.
    pub alias: TrustDomain,
    /// Receives the order to end the carrier. If the sender is dropped, the carrier goes on.
    pub end: oneshot::Receiver<()>,
    /// Is sent the reason why the carrier ended, or takes no new calls.
    pub ended: oneshot::Sender<String>,
}

/// Creates the queue of handed-over connections. The data plane must not wait, so it refuses a connection if the queue is
/// full.
pub fn queue() -> (mpsc::Sender<HandedOver>, mpsc::Receiver<HandedOver>) {
    mpsc::channel(WAITING_MAX)
}
