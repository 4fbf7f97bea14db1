//! See `tests/fuzz/targets/meters.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("meters", data));
