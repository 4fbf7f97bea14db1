//! The verdict on a ClientHello: on the corpus of `tests/corpus`, cut in many ways, and on generated hellos, compared with two
//! other readers (rustls' `Acceptor` and tls-parser). The fuzz targets for everything that strangers send also run here, over
//! their corpora and over mutations of the inputs there.

mod corpus;
mod differential;
mod fuzz;
mod generate;
mod judge;
mod random;
#[path = "../fuzz/targets/mod.rs"]
mod targets;

use judge::{Judged, judge, judge_pieces};
use random::Random;

/// The size of a TCP segment in bytes, with an MTU of 1500 and TCP timestamps.
const SEGMENT: usize = 1448;
const RANDOM_CUTS: u64 = 200;

#[test]
fn the_corpus_gets_its_verdicts_however_it_is_cut() {
    let cases = corpus::read();
    let mut counts = std::collections::BTreeMap::new();
    for case in &cases {
        let whole = judge(&case.stream);
        assert_eq!(whole, case.expected, "{}", case.name);
        let (dripped, decided_at) = judge_pieces(&case.stream, 1..=case.stream.len());
        assert_eq!(dripped, case.expected, "{}, byte by byte", case.name);

        let check = |ends: Vec<usize>, how: &str| {
            // The verdict comes with the piece that contains the deciding byte, and not earlier.
            let expected_at =
                ends.iter().copied().find(|end| *end >= decided_at).unwrap_or(case.stream.len());
            let (judged, at) = judge_pieces(&case.stream, ends);
            assert_eq!(judged, case.expected, "{}, {how}", case.name);
            assert_eq!(at, expected_at, "{}, {how}: decided at another byte", case.name);
        };
        check(segments(case.stream.len()), "in segments");
        for seed in 0..RANDOM_CUTS {
            let ends = Random::new(seed).cuts(case.stream.len());
            check(ends, &format!("random cuts of seed {seed}"));
        }
        *counts.entry(whole.word()).or_insert(0) += 1;
    }
    println!("{} hellos: {counts:?}", cases.len());
    assert!(cases.len() >= 60);
    for word in [
        "admit",
        "no_sni",
        "bad_hello",
        "sni_invalid",
        "hello_too_large",
        "hello_fragments",
        "not_tls",
        "hello_timeout",
        "client_gone",
    ] {
        assert!(counts.contains_key(word), "no hello of the corpus is {word}");
    }
}

#[test]
fn a_verdict_is_final_whatever_follows() {
    for case in corpus::read() {
        if matches!(case.expected, Judged::Incomplete | Judged::Nothing) {
            continue;
        }
        let (_, decided_at) = judge_pieces(&case.stream, 1..=case.stream.len());
        let mut longer = case.stream[..decided_at].to_vec();
        longer.extend(Random::new(7).bytes(3000));
        assert_eq!(judge(&case.stream[..decided_at]), case.expected, "{}", case.name);
        assert_eq!(judge_pieces(&longer, [decided_at, longer.len()]).0, case.expected, "{}", case.name);
    }
}

#[test]
fn generated_hellos_get_one_verdict_however_they_are_cut() {
    for seed in 0..20_000 {
        let stream = generate::stream(seed);
        let whole = judge(&stream);
        let ends = Random::new(!seed).cuts(stream.len());
        assert_eq!(judge_pieces(&stream, ends.iter().copied()).0, whole, "seed {seed}, cut at {ends:?}");
    }
}

#[test]
fn generated_hellos_get_the_verdict_of_rustls_but_for_known_differences() {
    println!("{}", differential::against_rustls());
}

#[test]
fn tls_parser_finds_the_same_names_in_single_records() {
    println!("{}", differential::against_tls_parser());
}

/// A test for each fuzz target, with the number of mutated inputs.
macro_rules! fuzzed {
    ($($test:ident: $target:literal, $mutations:literal;)*) => {
        $(
            #[test]
            fn $test() {
                fuzz::run($target, $mutations);
            }
        )*

        #[test]
        fn every_fuzz_target_is_among_the_tests() {
            let tested = [$($target),*];
            let targets: Vec<_> = targets::ALL.iter().map(|(name, _)| *name).collect();
            assert_eq!(targets, tested);
        }
    };
}

fuzzed! {
    mutated_hellos_break_no_promise: "hello", 20_000;
    mutated_proxy_headers_break_no_promise: "proxy", 20_000;
    mutated_frames_and_records_break_no_promise: "meters", 20_000;
    mutated_connect_heads_break_no_promise: "connect", 20_000;
    mutated_names_break_no_promise: "names", 20_000;
    mutated_configs_break_no_promise: "config", 1_500;
    mutated_etcd_values_break_no_promise: "etcd", 3_000;
    mutated_xds_requests_break_no_promise: "xds", 3_000;
    mutated_enrolments_break_no_promise: "enrolment", 3_000;
    mutated_dns_messages_break_no_promise: "dns", 10_000;
    mutated_upgrade_messages_break_no_promise: "upgrade", 3_000;
    mutated_drains_break_no_promise: "drains", 10_000;
    mutated_gateway_api_objects_break_no_promise: "gateway_api", 1_500;
    mutated_configs_of_other_programs_break_no_promise: "convert", 3_000;
    mutated_wds_requests_break_no_promise: "wds", 3_000;
    mutated_responses_of_an_istiod_break_no_promise: "istiod", 3_000;
}

fn segments(length: usize) -> Vec<usize> {
    (1..).map(|n| n * SEGMENT).take_while(|end| *end < length).chain([length]).collect()
}
