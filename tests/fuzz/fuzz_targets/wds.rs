//! See `tests/fuzz/targets/wds.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("wds", data));
