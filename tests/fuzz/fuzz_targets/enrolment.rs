//! See `tests/fuzz/targets/enrolment.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isthmus_fuzz::run("enrolment", data));
