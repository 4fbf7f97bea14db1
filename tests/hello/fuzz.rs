//! Runs the fuzz targets on stable Rust, over their corpora and over mutations of the inputs there, which depend only on a
//! seed.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::random::Random;
use crate::targets::ALL;

/// The length of the longest mutated input in bytes.
const BYTES_MAX: usize = 4_096;
/// Values at which programs often branch.
const EDGES: [&[u8]; 8] = [b"\0", b"\xff", b"\x7f", b"\xff\xff", b"\0\0", b":", b".", b"\n"];

/// Returns the inputs in the corpus of a target, each with its name, in the order of the names.
pub(crate) fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("an entry"))
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read(entry.path()).expect("a file"))
        })
        .collect();
    files.sort();
    assert!(files.len() >= 8, "the corpus of {target} has {} files", files.len());
    files
}

/// Runs a target over its corpus, and over this number of mutations.
pub(crate) fn run(target: &str, mutations: u64) {
    let (_, run) = ALL.iter().find(|(name, _)| *name == target).expect("a target");
    let check = |what: String, input: &[u8]| {
        if catch_unwind(AssertUnwindSafe(|| run(input))).is_err() {
            panic!("{target}: {what}: {:?}", String::from_utf8_lossy(input));
        }
    };
    let corpus = corpus(target);
    for (name, input) in &corpus {
        check(name.clone(), input);
    }
    for seed in 0..mutations {
        let mut random = Random::new(seed);
        let mut input = random.pick(&corpus).1.clone();
        for _ in 0..=random.below(4) {
            mutate(&mut input, &corpus, &mut random);
        }
        input.truncate(BYTES_MAX);
        check(format!("mutation of seed {seed}"), &input);
    }
}

fn mutate(input: &mut Vec<u8>, corpus: &[(String, Vec<u8>)], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let end = at + random.below((input.len() - at).min(16) + 1);
    match random.below(6) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = random.byte(),
        2 => drop(input.drain(at..end)),
        3 => drop(input.splice(at..at, random.pick(&EDGES).iter().copied())),
        4 => {
            let again = input[at..end].to_vec();
            drop(input.splice(at..at, again));
        }
        _ => {
            let other = &random.pick(corpus).1;
            let from = random.below(other.len() + 1);
            let until = from + random.below((other.len() - from).min(64) + 1);
            drop(input.splice(at..end, other[from..until].iter().copied()));
        }
    }
}
