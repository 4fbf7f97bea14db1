//! See `tests/fuzz/targets/xds.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("xds", data));
