//! The buffers that all connections of a worker use in turn, so that an idle connection has none.

use std::cell::RefCell;

use isthmus_net::pipe::Pipes;
use isthmus_wire::client_hello;

/// The largest number of bytes that one read returns.
const SCRATCH: usize = 64 * 1024;
/// The number of pipes of one worker; when all are in use, bulk data is copied. Under Linux, an unprivileged user gets at
/// most 64 pipes of the large size.
const PIPES: usize = 16;

/// The buffers of one worker.
pub(crate) struct Buffers {
    /// The buffers of the connection whose task runs.
    pub(crate) scratch: RefCell<Scratch>,
    /// The pipes for bulk data.
    pub(crate) pipes: RefCell<Pipes>,
}

/// The buffers of one read.
pub(crate) struct Scratch {
    /// The bytes of the current read.
    pub(crate) bytes: Box<[u8]>,
    /// The parts of the ClientHello that is being read.
    pub(crate) hello: client_hello::Scratch,
}

impl Default for Buffers {
    fn default() -> Self {
        let scratch = Scratch { bytes: vec![0; SCRATCH].into(), hello: client_hello::Scratch::new() };
        Self { scratch: RefCell::new(scratch), pipes: RefCell::new(Pipes::new(PIPES)) }
    }
}
