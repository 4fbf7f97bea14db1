//! See `tests/fuzz/targets/convert.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("convert", data));
