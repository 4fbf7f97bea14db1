//! Answers of the real API server, recorded in `tests/corpus/kube` for the comparison with the fake. `tests/kube/record`
//! records them again; the test here compares them with the server's current answers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::kube::{self, Cluster, Options, Pod};
use crate::support::kube_client::{Answer, Client, at};

const SELECTED: &str = "fieldSelector=status.phase!%3DFailed%2Cstatus.phase!%3DSucceeded";
const STREAMED: &str = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
const METADATA: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
const METADATA_EVENTS: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// A version that no cluster of a test reaches.
const TOO_LARGE: u64 = 99_999_999;

/// The records of one file: requests with their answers, in order.
#[derive(Default)]
struct Records(Vec<Value>);

impl Records {
    fn answer(&mut self, client: &Client, path: &str) -> Answer {
        let answer = client.get(path);
        // The body is not JSON if the request is for an unknown API group.
        let body = serde_json::from_str(&answer.body).unwrap_or_else(|_| json!(answer.body));
        self.0.push(json!({"request": format!("GET {path}"), "status": answer.status, "body": body}));
        answer
    }

    /// Watches until the server ends the stream; runs `change` while the stream is open.
    fn watch(&mut self, client: &Client, path: &str, change: impl FnOnce()) {
        let mut watch = client.watch(path);
        change();
        let events: Vec<Value> = std::iter::from_fn(|| watch.next()).collect();
        self.0.push(json!({"request": format!("GET {path}"), "status": 200, "events": events}));
    }
}

fn pods() -> String {
    at("v1", "pods", "shop/")
}

fn create(cluster: &Cluster, number: usize) {
    let (key, address) = (format!("shop/web-{number}"), format!("10.244.7.{number}"));
    let mut pod = Pod::new(&key, &address);
    pod.labels = json!({"app": "web"});
    cluster.pod(&pod);
}

/// Records a list in pages of two.
fn pages(cluster: &Cluster) -> Records {
    let mut records = Records::default();
    let first = format!("{}?{SELECTED}&limit=2", pods());
    let mut page = records.answer(cluster.admin(), &first).json();
    while let Some(next) = page["metadata"]["continue"].as_str().map(str::to_owned) {
        page = records.answer(cluster.admin(), &format!("{first}&continue={next}")).json();
    }
    records.answer(cluster.admin(), &format!("{}?resourceVersion=0", pods()));
    records
}

/// Records a streaming list and changes after it. The watch selects pods by phase, so a pod that fails is not selected any
/// more.
fn stream(cluster: &Cluster) -> Records {
    let mut records = Records::default();
    let path = format!("{}?watch=1&{SELECTED}&{STREAMED}&timeoutSeconds=10", pods());
    records.watch(cluster.admin(), &path, || {
        create(cluster, 7);
        cluster.admin().patch_status(&at("v1", "pods", "shop/web-7"), &json!({"phase": "Failed"}));
        cluster.delete_pod("shop/web-7");
    });
    records
}

/// Records a watch that starts from a list's version and lasts until the server ends it. The server sends a bookmark before it
/// ends the watch.
fn watch(cluster: &Cluster) -> Records {
    let list = cluster.admin().read(&pods());
    let version = list["metadata"]["resourceVersion"].as_str().expect("a version");
    let mut records = Records::default();
    let path =
        format!("{}?watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=10", pods());
    records.watch(cluster.admin(), &path, || {
        create(cluster, 8);
        cluster.set_ready("shop/web-8", "False");
        cluster.terminate_pod("shop/web-8");
        cluster.delete_pod("shop/web-8");
    });
    records
}

/// Records metadata without the rest of the objects, listed and streamed.
fn metadata(cluster: &Cluster) -> Records {
    let mut records = Records::default();
    let mut client = cluster.client(cluster.admin_token());
    let path = at("v1", "namespaces", "");
    let selected = "labelSelector=kubernetes.io%2Fmetadata.name%3Dshop";
    client.accept = METADATA.to_owned();
    records.answer(&client, &format!("{path}?{selected}"));
    client.accept = METADATA_EVENTS.to_owned();
    records.watch(&client, &format!("{path}?watch=1&{selected}&{STREAMED}&timeoutSeconds=10"), || {});
    records
}

/// Records requests for versions that are too old, or that do not exist yet.
fn expired(cluster: &mut Cluster) -> Records {
    let mut records = Records::default();
    let page = records.answer(cluster.admin(), &format!("{}?limit=1", pods())).json();
    let next = page["metadata"]["continue"].as_str().expect("a further page");
    // Another object changes, so that the page's version is not the newest one.
    cluster.namespace("other", &json!({}));
    cluster.compact();
    cluster.kill();
    cluster.restart();
    records.answer(cluster.admin(), &format!("{}?limit=1&continue={next}", pods()));
    records.answer(cluster.admin(), &format!("{}?resourceVersion=1&resourceVersionMatch=Exact", pods()));
    records.watch(cluster.admin(), &format!("{}?watch=1&resourceVersion=1", pods()), || {});
    records.answer(cluster.admin(), &format!("{}?resourceVersion={TOO_LARGE}", pods()));
    records
}

/// Records refused requests.
fn refused(cluster: &Cluster) -> Records {
    let mut records = Records::default();
    let reader = cluster.client(&cluster.account("shop/reader"));
    records.answer(&reader, &at("v1", "pods", ""));
    records.answer(&reader, &format!("{}?watch=1", at("discovery.k8s.io/v1", "endpointslices", "")));
    records.answer(&cluster.client("nobody's"), &at("v1", "pods", ""));
    records.answer(cluster.admin(), &at("gateway.networking.k8s.io/v1", "gateways", ""));
    records.answer(cluster.admin(), &at("v1", "pods", "shop/none"));
    records.answer(cluster.admin(), &format!("{}?limit=2&continue=x", pods()));
    records.answer(cluster.admin(), &format!("{}?fieldSelector=status.podIP%3Dx%2Cno.field%3Dx", pods()));
    records
}

/// Records requests for streaming lists to a server that does not support them.
fn unstreamed(cluster: &Cluster) -> Records {
    let mut records = Records::default();
    records.answer(cluster.admin(), &format!("{}?watch=1&{STREAMED}", pods()));
    records
}

#[test]
fn recorded_answers_are_those_of_the_real_server() {
    let Some(program) = kube::installed() else { return };
    let mut cluster = Cluster::start(&program, "east", &Options::default());
    cluster.namespace("shop", &json!({"istio-discovery": "enabled"}));
    (0..5).for_each(|number| create(&cluster, number));
    compare("pods-pages", pages(&cluster));
    compare("pods-stream", stream(&cluster));
    compare("pods-watch", watch(&cluster));
    compare("namespaces-metadata", metadata(&cluster));
    compare("refused", refused(&cluster));
    compare("expired", expired(&mut cluster));
    drop(cluster);
    let options = Options { flags: &["--feature-gates=WatchList=false"], ..Options::default() };
    compare("no-streams", unstreamed(&Cluster::start(&program, "old", &options)));
}

/// Compares records with the file of this name, or writes it if `ISTHMUS_BLESS` is set.
#[track_caller]
fn compare(name: &str, Records(records): Records) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/kube");
    let path = folder.join(format!("{name}.jsonl"));
    let mut steady = Steady::default();
    records.iter().for_each(|record| steady.find_versions(record, ""));
    let records: Vec<Value> = records.iter().map(|record| steady.replace(record, "")).collect();
    if std::env::var_os("ISTHMUS_BLESS").is_some() {
        std::fs::create_dir_all(folder).expect("a folder");
        let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
        return std::fs::write(path, lines).expect("written");
    }
    let text = std::fs::read_to_string(&path).expect("tests/kube/record writes it");
    let recorded: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    for (now, then) in records.iter().zip(&recorded) {
        let [now, then] = [now, then].map(|record| without_versions(&without_late_bookmarks(record)));
        assert_eq!(now, then, "{name}");
    }
    assert_eq!(records.len(), recorded.len(), "{name}");
}

/// Returns a record without the bookmarks that the server sends from time to time: which event comes before them depends on how
/// busy the machine is. The bookmark at the end of the initial events has an annotation.
fn without_late_bookmarks(record: &Value) -> Value {
    let mut record = record.clone();
    if let Some(events) = record.get_mut("events").and_then(Value::as_array_mut) {
        let is_late = |event: &Value| {
            event["type"] == "BOOKMARK" && !event["object"]["metadata"]["annotations"].is_object()
        };
        events.retain(|event| !is_late(event));
    }
    record
}

/// Replaces the values that differ between recordings by constant ones. The order of versions stays.
#[derive(Default)]
struct Steady {
    versions: BTreeSet<u64>,
    uids: BTreeMap<String, String>,
    tokens: BTreeMap<String, String>,
}

impl Steady {
    fn find_versions(&mut self, value: &Value, key: &str) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(key, value)| self.find_versions(value, key)),
            Value::Array(values) => values.iter().for_each(|value| self.find_versions(value, key)),
            Value::String(text) if is_version(key, text) => self.versions.extend(numbers(text)),
            _ => {}
        }
    }

    fn replace(&mut self, value: &Value, key: &str) -> Value {
        match value {
            Value::Object(fields) => {
                fields.iter().map(|(key, value)| (key.clone(), self.replace(value, key))).collect()
            }
            Value::Array(values) => {
                let mut values: Vec<Value> = values.iter().map(|value| self.replace(value, key)).collect();
                // The server may or may not send a bookmark that differs from the one before only in its version.
                values.dedup_by(|next, last| {
                    next["type"] == "BOOKMARK" && without_versions(next) == without_versions(last)
                });
                values.into()
            }
            Value::String(text) => self.replace_text(text, key).into(),
            _ => value.clone(),
        }
    }

    fn replace_text(&mut self, text: &str, key: &str) -> String {
        let number = |count: usize| format!("00000000-0000-0000-0000-{count:012}");
        match key {
            "uid" => {
                let next = number(self.uids.len() + 1);
                self.uids.entry(text.to_owned()).or_insert(next).clone()
            }
            "continue" => {
                let next = format!("continue-{}", self.tokens.len() + 1);
                self.tokens.entry(text.to_owned()).or_insert(next).clone()
            }
            _ if is_time(text) => "2026-01-01T00:00:00Z".to_owned(),
            _ if is_version(key, text) => self.replace_versions(text),
            "request" => {
                self.tokens.iter().fold(text.to_owned(), |text, (token, short)| text.replace(token, short))
            }
            _ => text.to_owned(),
        }
    }

    /// Replaces each version in a text by its rank among all versions, counted from 1001.
    fn replace_versions(&self, text: &str) -> String {
        let mut replaced = text.to_owned();
        for number in numbers(text) {
            let rank = 1001 + self.versions.range(..number).count();
            replaced = replaced.replace(&number.to_string(), &rank.to_string());
        }
        replaced
    }
}

/// Returns true if the text is a version, or a message or request that contains versions.
fn is_version(key: &str, text: &str) -> bool {
    match key {
        "resourceVersion" => true,
        "message" => text.contains("resource version: "),
        "request" => text.contains("resourceVersion="),
        _ => false,
    }
}

/// Returns the numbers in a text that are versions of this run. Numbers up to 10 and [`TOO_LARGE`] are left out: the tests' own
/// requests contain them, as versions that are too old or too large.
fn numbers(text: &str) -> Vec<u64> {
    let numbers =
        text.split(|letter: char| !letter.is_ascii_digit()).filter_map(|digits| digits.parse().ok());
    numbers.filter(|number| *number > 10 && *number != TOO_LARGE).collect()
}

fn is_time(text: &str) -> bool {
    text.len() == 20 && text.starts_with("20") && text.ends_with('Z') && text.as_bytes()[10] == b'T'
}

/// Returns the value without the digits of versions, and without the digits of messages that contain versions. These digits
/// depend on all other writes of the server.
fn without_versions(value: &Value) -> Value {
    fn strip(value: &mut Value, key: &str) {
        match value {
            Value::Object(fields) => fields.iter_mut().for_each(|(key, value)| strip(value, &key.clone())),
            Value::Array(values) => values.iter_mut().for_each(|value| strip(value, key)),
            Value::String(text) if is_version(key, text) => text.retain(|letter| !letter.is_ascii_digit()),
            _ => {}
        }
    }
    let mut value = value.clone();
    strip(&mut value, "");
    value
}
