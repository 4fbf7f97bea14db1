//! Tests of the JSON of the API against the files of `tests/golden/api`. Each file has every member of its type. A file changes
//! only with its type; `docs/api.md` leads to the files.

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::*;

macro_rules! golden {
    ($name:literal) => {
        include_str!(concat!("../../tests/golden/api/", $name, ".json"))
    };
}

/// Parses the file as the type, writes the value again, and compares both texts. The texts differ if the type or the file lacks
/// a member.
fn is_whole<T: DeserializeOwned + Serialize + Debug>(name: &str, text: &str) {
    let value: T = serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    let written = serde_json::to_string_pretty(&value).expect("JSON");
    let found = format!("{written}\n");
    assert!(text == found, "tests/golden/api/{name}.json is not the shape of its type, which is\n{found}");
}

/// The check of a file against its type.
type Check = fn(&str, &str);
/// Each answer: the path of its request, the name and the text of its file, and the check of its type.
const ANSWERS: [(&str, &str, &str, Check); 20] = [
    ("overview", "overview", golden!("overview"), is_whole::<overview::Overview>),
    ("status", "status", golden!("status"), is_whole::<status::Status>),
    ("listeners", "listeners", golden!("listeners"), is_whole::<listener::Listener>),
    ("registries", "registries", golden!("registries"), is_whole::<registry::Registry>),
    ("routes", "routes", golden!("routes"), is_whole::<listener::Route>),
    ("services", "services", golden!("services"), is_whole::<service::Service>),
    ("services/{hostname}", "service", golden!("service"), is_whole::<service::ServiceDetail>),
    ("endpoints", "endpoints", golden!("endpoints"), is_whole::<endpoint::Endpoint>),
    ("gateways", "gateways", golden!("gateways"), is_whole::<network::Gateway>),
    ("networks", "networks", golden!("networks"), is_whole::<network::Network>),
    ("drains", "drains", golden!("drains"), is_whole::<drain::Drain>),
    ("peers", "peers", golden!("peers"), is_whole::<peer::Peer>),
    ("peers/{name}", "peer", golden!("peer"), is_whole::<peer::PeerDetail>),
    ("exposed", "exposed", golden!("exposed"), is_whole::<listener::Exposed>),
    ("connections", "connections", golden!("connections"), is_whole::<connection::Connection>),
    ("clients", "clients", golden!("clients"), is_whole::<client::Client>),
    ("certificates", "certificates", golden!("certificates"), is_whole::<certificate::Certificate>),
    ("explain", "explain", golden!("explain"), is_whole::<explanation::Explanation>),
    ("traces/{trace}", "trace", golden!("trace"), is_whole::<trace::Trace>),
    ("horizon", "horizon", golden!("horizon"), is_whole::<horizon::Horizon>),
];

#[test]
fn the_golden_files_are_the_shapes_of_the_types() {
    for (_, file, text, check) in ANSWERS {
        check(file, text);
    }
}

#[test]
fn the_document_leads_to_every_file() {
    let document = include_str!("../../docs/api.md");
    for (path, file, _, _) in ANSWERS {
        let row = document
            .lines()
            .find(|line| {
                let rest = line.strip_prefix(&format!("| `GET /api/v1/{path}"));
                rest.is_some_and(|rest| rest.starts_with('`') || rest.starts_with('?'))
            })
            .unwrap_or_else(|| panic!("no row for {path}"));
        assert!(row.contains(&format!("(../tests/golden/api/{file}.json)")), "{row}");
    }
}

#[test]
fn a_connection_has_the_members_of_the_access_log() {
    let golden: Value = serde_json::from_str(golden!("connections")).expect("JSON");
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
