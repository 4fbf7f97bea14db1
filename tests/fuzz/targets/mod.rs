//! The fuzz targets. Each accepts any bytes, and panics if the program violates one of its guarantees. `tests/fuzz/run` runs
//! the targets in libFuzzer; `tests/hello` runs them over the corpora of `tests/fuzz/corpus` and over mutations of the inputs
//! there.

mod config;
mod connect;
mod enrolment;
mod etcd;
mod hello;
mod meters;
mod names;
mod proxy;
mod xds;

use crate::random::Random;

/// A target: its name, which is also the name of its corpus, and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const ALL: [Target; 9] = [
    ("hello", hello::run),
    ("proxy", proxy::run),
    ("meters", meters::run),
    ("connect", connect::run),
    ("names", names::run),
    ("config", config::run),
    ("etcd", etcd::run),
    ("xds", xds::run),
    ("enrolment", enrolment::run),
];

/// Returns a random generator whose seed is a hash of the input, so that a finding can be repeated.
fn random_of(data: &[u8]) -> Random {
    // FNV-1a.
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    Random::new(data.iter().fold(0xcbf2_9ce4_8422_2325, step))
}
