//! The `isthmus` command.

use std::process::ExitCode;

/// mimalloc returns memory to the system after a burst of connections; the allocator of the C library, used by many
/// threads, does not.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

pub(crate) fn main() -> ExitCode {
    isthmus_cli::main()
}
