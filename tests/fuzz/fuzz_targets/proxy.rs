//! See `tests/fuzz/targets/proxy.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("proxy", data));
