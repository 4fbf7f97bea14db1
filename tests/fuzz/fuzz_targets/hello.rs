//! See `tests/fuzz/targets/hello.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("hello", data));
