//! The processors on which the threads of a benchmark run.

use rustix::thread::{CpuSet, sched_setaffinity};

/// The processor of the measured program.
pub(crate) const MEASURED: usize = 0;
/// The processor of the clients and backends.
pub(crate) const ENDS: usize = 1;

/// Binds this thread to one processor, if the system allows it. Threads and processes that this thread starts later run on the
/// same processor.
pub(crate) fn pin(processor: usize) {
    let mut set = CpuSet::new();
    set.set(processor);
    let _ = sched_setaffinity(None, &set);
}

/// Starts the measured program, whose processes and threads stay on its processor. This thread is on the other one afterwards.
pub(crate) fn measured<T>(start: impl FnOnce() -> T) -> T {
    pin(MEASURED);
    let started = start();
    pin(ENDS);
    started
}
