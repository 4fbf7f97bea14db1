//! The fuzz targets. Each accepts any bytes, and panics if the program violates one of its guarantees. `tests/fuzz/run` runs
//! the targets in libFuzzer; `tests/hello` runs them over the corpora of `tests/fuzz/corpus` and over mutations of the inputs
//! there.

mod config;
mod connect;
mod convert;
mod dns;
mod drains;
mod enrolment;
mod etcd;
mod gateway_api;
mod hello;
mod istiod;
mod meters;
mod names;
mod proxy;
mod upgrade;
mod wds;
mod xds;

use std::cell::OnceCell;
use std::io::Write as _;
use std::sync::Arc;

use isthmus::config::load;
use isthmus::document::problem::Problem;
use isthmus::settings::policy::Policy;

use crate::random::Random;

/// A target: its name, which is also the name of its corpus, and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const ALL: [Target; 16] = [
    ("hello", hello::run),
    ("proxy", proxy::run),
    ("meters", meters::run),
    ("connect", connect::run),
    ("names", names::run),
    ("config", config::run),
    ("etcd", etcd::run),
    ("xds", xds::run),
    ("enrolment", enrolment::run),
    ("dns", dns::run),
    ("upgrade", upgrade::run),
    ("drains", drains::run),
    ("gateway_api", gateway_api::run),
    ("convert", convert::run),
    ("wds", wds::run),
    ("istiod", istiod::run),
];

/// Checks the problems of a text that is refused: each has a position within the text, and is one short line.
fn check_problems(problems: &[Problem], text: &str) {
    assert!(!problems.is_empty(), "refused without a reason");
    // In YAML, a carriage return alone ends a line, too.
    let lines = text.matches(['\n', '\r']).count() + 2;
    for problem in problems {
        assert!(problem.line as usize <= lines, "line {} of {lines}: {problem}", problem.line);
        assert!(!problem.message.is_empty() && problem.message.len() < 4_096, "{problem}");
        assert!(!problem.to_string().contains(['\0', '\x1b', '\n']), "{:?}", problem.to_string());
    }
}

/// Returns the policy of a config that exports all services.
fn policy() -> Arc<Policy> {
    thread_local!(static POLICY: OnceCell<Arc<Policy>> = const { OnceCell::new() });
    let read = || {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let text =
            b"{listen: \":15443\", node: {network: east, cluster: east}, exports: [{services: [\"*\"]}]}";
        file.write_all(text).expect("written");
        load(file.path(), &|_| None, &mut |_| {}).expect("good").policy
    };
    POLICY.with(|policy| policy.get_or_init(read).clone())
}

/// Returns a random generator whose seed is a hash of the input, so that a finding can be repeated.
fn random_of(data: &[u8]) -> Random {
    // FNV-1a.
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    Random::new(data.iter().fold(0xcbf2_9ce4_8422_2325, step))
}
