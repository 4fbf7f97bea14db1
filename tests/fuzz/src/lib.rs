//! The fuzz targets for libFuzzer: the same targets that `tests/hello` runs over the corpora as an ordinary test.

#[path = "../../hello/judge.rs"]
#[allow(dead_code, reason = "it is made for more tests")]
mod judge;
#[path = "../../hello/random.rs"]
#[allow(dead_code, reason = "it is made for more tests")]
mod random;
#[path = "../targets/mod.rs"]
mod targets;

/// Runs the target of this name.
pub fn run(name: &str, data: &[u8]) {
    let (_, target) = targets::ALL.iter().find(|(known, _)| *known == name).expect("a target of this name");
    target(data);
}
