//! The `isthmus` command.

use std::process::ExitCode;

/// Returns memory of a burst to the system, unlike the C library's allocator under many threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    isthmus::cli::main()
}
