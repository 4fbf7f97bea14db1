//! See `tests/fuzz/targets/istiod.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("istiod", data));
