//! See `tests/fuzz/targets/etcd.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("etcd", data));
