//! The program for the container image, not a test: `tests/run` links it statically. As a test target, it is built of the
//! libraries that were compiled for the tests; a binary target would need another build of them, with other features.

#[path = "../src/main.rs"]
mod program;

fn main() -> std::process::ExitCode {
    program::main()
}
