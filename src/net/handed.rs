//! Connections that the data plane has accepted and that another part of the program serves.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::mpsc;

/// Connections that may wait to be taken.
const WAITING_MAX: usize = 64;

/// The purpose of a connection that is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The link with a peer.
    Link,
    /// The enrolment of a peer.
    Enrolment,
}

/// A connection with the bytes that were read of it.
#[derive(Debug)]
pub struct HandedOver {
    /// The socket.
    pub socket: OwnedFd,
    /// The address of the client.
    pub source: SocketAddr,
    /// The listener that it arrived at.
    pub listener: Arc<str>,
    /// What the client wants, by its hello.
    pub purpose: Purpose,
    /// The bytes that were read: the TLS hello.
    pub first: Box<[u8]>,
}

/// Makes the queue of connections that are handed over. Who hands over must not wait: a full queue refuses.
pub fn queue() -> (mpsc::Sender<HandedOver>, mpsc::Receiver<HandedOver>) {
    mpsc::channel(WAITING_MAX)
}
