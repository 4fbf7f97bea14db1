//! See `tests/fuzz/targets/gateway_api.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("gateway_api", data));
