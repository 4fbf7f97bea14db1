//! A parked connection on its way between two processes.

use std::os::fd::OwnedFd;

use isthmus_upgrade::record::Record;

/// The place of a connection in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The index of the worker.
    pub worker: usize,
    /// The key in the worker's table.
    pub key: usize,
    /// The id of the connection. When the connection has ended, another one may get its key, but never its id.
    pub id: u64,
}

/// A connection that is parked in one process and may go on in another.
#[derive(Debug)]
pub struct Parcel {
    /// The place in this process; for a connection of another process, that of no connection.
    pub place: Place,
    /// The record.
    pub record: Record,
    /// The socket of the client.
    pub client: OwnedFd,
    /// The socket of the endpoint.
    pub endpoint: OwnedFd,
    /// The bytes that were read from the client and not passed on.
    pub up: Box<[u8]>,
    /// The bytes that were read from the endpoint and not passed on.
    pub down: Box<[u8]>,
}
