//! See `tests/fuzz/targets/upgrade.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("upgrade", data));
