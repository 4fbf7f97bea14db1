//! See `tests/fuzz/targets/drains.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("drains", data));
