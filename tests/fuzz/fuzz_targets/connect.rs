//! See `tests/fuzz/targets/connect.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("connect", data));
