//! See `tests/fuzz/targets/dns.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("dns", data));
