//! The `isthmus` command.

use std::process::ExitCode;

/// mimalloc returns the memory of a burst to the system; the C library's allocator under many threads does not.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    isthmus::cli::main()
}
