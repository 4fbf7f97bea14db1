//! The kernel memory of connections whose peers do not read: of one worker, and of all. [`super::examine`] bounds it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::standstill::Standstill;
use isthmus_net::diag::{self, Diag};

/// Kernel memory that connections hold because their peers do not read.
#[derive(Default)]
pub(crate) struct KernelMemory {
    /// The number of bytes.
    pub(crate) bytes: AtomicU64,
    /// The number of connections that hold them.
    pub(crate) holders: AtomicU64,
}

impl KernelMemory {
    /// Records that the memory of a connection has changed from `before` to `bytes` bytes.
    fn change(&self, before: u32, bytes: u32) {
        // The additions wrap, so they also subtract.
        let add = |count: &AtomicU64, from: u32, to: u32| {
            count.fetch_add(u64::from(to).wrapping_sub(from.into()), Ordering::Relaxed);
        };
        add(&self.bytes, before, bytes);
        add(&self.holders, u32::from(before > 0), u32::from(bytes > 0));
    }
}

/// The kernel memory of one worker's connections.
pub(crate) struct Stalled {
    /// The socket through which the kernel reports the state of TCP sockets; `None` if the kernel does not report it.
    diag: Option<Diag>,
    /// The number of bytes that connections of this worker hold.
    bytes: Cell<u64>,
    all: Arc<KernelMemory>,
}

impl Stalled {
    /// Creates the state of a worker without connections. `all` is the memory of all workers.
    pub(crate) fn new(all: Arc<KernelMemory>) -> Self {
        Self { diag: diag::is_answered().then(Diag::open).flatten(), bytes: Cell::new(0), all }
    }

    /// Returns the socket through which the kernel reports the state of TCP sockets; `None` if it does not report it.
    pub(super) fn diag(&self) -> Option<&Diag> {
        self.diag.as_ref()
    }

    /// Returns the number of bytes that connections of this worker hold.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Records how many bytes a connection holds.
    pub(super) fn set(&self, standstill: &Standstill, bytes: u32) {
        let before = standstill.memory.replace(bytes);
        if before == bytes {
            return;
        }
        debug_assert!(self.bytes.get() >= u64::from(before), "kernel memory is counted once");
        self.bytes.set(self.bytes.get() + u64::from(bytes) - u64::from(before));
        self.all.change(before, bytes);
    }
}
