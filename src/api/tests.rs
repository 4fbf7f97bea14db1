//! Tests of the JSON of the API against the files of `tests/golden/api`. Each file has every member of its type. A file changes
//! only with its type.

use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fs};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::requests::{ALL, CHECKS, Members};
use super::*;

/// Parses a golden file as the type, and writes the value again. The texts differ if the type or the file lacks a member.
pub(crate) fn rewritten<T: DeserializeOwned + Serialize>(name: &str, text: &str) -> String {
    let value: T = serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    format!("{}\n", serde_json::to_string_pretty(&value).expect("JSON"))
}

#[test]
fn the_golden_files_are_the_shapes_of_the_types() {
    let mut checked = 0;
    for (row, rewritten) in CHECKS {
        let Members::Golden(name) = row.members else { continue };
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/api/{name}.json"));
        let text = fs::read_to_string(&file).unwrap_or_default();
        let found = rewritten(name, if text.is_empty() { "{}" } else { &text });
        if env::var_os("ISTHMUS_BLESS").is_some() {
            fs::write(&file, &found).expect("written");
            continue;
        }
        assert!(
            text == found,
            "tests/golden/api/{name}.json is not the shape of its type, which is\n{found}"
        );
        checked += 1;
    }
    assert!(checked >= 20 || env::var_os("ISTHMUS_BLESS").is_some(), "only {checked} files were found");
}

#[test]
fn each_request_has_one_row() {
    let mut seen = BTreeSet::new();
    for row in ALL {
        assert!(seen.insert((row.method.text(), row.path)), "{} twice", row.path);
    }
}

#[test]
fn paths_take_names_and_parameters() {
    assert_eq!(requests::PEER.at("a b"), "/api/v1/peers/a%20b");
    assert_eq!(requests::INVITE_PEER.at("west"), "/api/v1/peers/west/invite");
    let path = requests::EXPLAIN.with(&[("sni", "a_b.c"), ("alpn", "h2,é &")]);
    assert_eq!(path, "/api/v1/explain?sni=a_b.c&alpn=h2%2C%C3%A9%20%26");
}

#[test]
fn a_connection_has_the_members_of_the_access_log() {
    let golden: Value =
        serde_json::from_str(include_str!("../../tests/golden/api/connections.json")).expect("JSON");
    let table: Vec<&str> = connection::FIELDS.iter().map(|(name, _)| *name).collect();
    let members: Vec<&str> = golden.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(members, table);
}

#[test]
fn answers_of_other_versions_are_read() {
    let older: status::Status = serde_json::from_str("{\"version\": \"0.0.1\"}").expect("read");
    assert_eq!((older.version.as_str(), older.ready), ("0.0.1", false));
    let newer: status::Problem = serde_json::from_str("{\"code\": \"x\", \"next\": 1}").expect("read");
    assert_eq!(newer.code, "x");
}
