//! Compares the fake API server's answers with the recorded answers of a real one (`tests/corpus/kube`).

use std::path::Path;

use serde_json::{Value, json};

use crate::support::fake_kube::FakeKube;
use crate::support::kube_world::TOKEN;

/// Returns the records of one file.
fn recorded(name: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/kube");
    let text = std::fs::read_to_string(folder.join(format!("{name}.jsonl"))).expect("recorded");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Returns the path of a recorded request.
fn path(record: &Value) -> String {
    record["request"].as_str().expect("a request").trim_start_matches("GET ").to_owned()
}

/// The continue tokens that the fake API server returned; the records have `continue-1`, `continue-2` and so on instead.
#[derive(Default)]
struct Tokens(Vec<String>);

impl Tokens {
    /// Returns the path of a recorded request, with each recorded continue token replaced by the token that the fake API server
    /// returned for it.
    fn asked(&self, path: &str) -> String {
        let numbered = self.0.iter().enumerate();
        numbered
            .fold(path.to_owned(), |path, (at, token)| path.replace(&format!("continue-{}", at + 1), token))
    }

    /// Returns a response body of the fake API server, with its continue token replaced by the one in the record.
    fn steady(&mut self, mut body: Value) -> Value {
        if let Some(token) = body["metadata"].get("continue").and_then(Value::as_str) {
            self.0.push(token.to_owned());
            body["metadata"]["continue"] = format!("continue-{}", self.0.len()).into();
        }
        body
    }
}

#[track_caller]
fn compare(fake: &FakeKube, token: &str, tokens: &mut Tokens, record: &Value) {
    let path = tokens.asked(&path(record));
    let answer = fake.client(token).get(&path);
    let body = serde_json::from_str(&answer.body).unwrap_or_else(|_| json!(answer.body));
    let body = if body.is_object() { tokens.steady(body) } else { body };
    assert_eq!(
        json!({"status": answer.status, "body": body}),
        json!({"status": record["status"], "body": record["body"]}),
        "{path}"
    );
}

fn pods_of(record: &Value) -> Vec<Value> {
    let items = record["body"]["items"].as_array().expect("a list").iter();
    items.map(|item| with(item, |item| item["kind"] = "Pod".into())).collect()
}

fn with(value: &Value, change: impl FnOnce(&mut Value)) -> Value {
    let mut value = value.clone();
    change(&mut value);
    value
}

/// Opens the recorded watch on the fake, applies the changes in the recorded events to the fake's objects, and compares the
/// events that arrive with the record.
#[track_caller]
fn compare_watch(fake: &FakeKube, record: &Value) {
    let path = path(record);
    let quick = path.replace("timeoutSeconds=10", "timeoutSeconds=3");
    let mut watch = fake.client(TOKEN).watch(&quick);
    let events = record["events"].as_array().expect("events");
    let is_end = |event: &Value| !event["object"]["metadata"]["annotations"].is_null();
    let listed = events.iter().position(is_end).map_or(0, |at| at + 1);
    let mut found: Vec<Value> = (0..listed).map(|_| watch.next().expect("an event")).collect();
    for event in &events[listed..] {
        let object = &event["object"];
        match event["type"].as_str().expect("a type") {
            "DELETED" if path.contains("fieldSelector") => {
                // The pod has failed, so it leaves the selector, and the watch says nothing about it after that.
                fake.put(&with(object, |object| object["status"]["phase"] = "Failed".into()));
                fake.delete("pods", "shop/web-7");
            }
            "DELETED" => fake.delete("pods", "shop/web-8"),
            "BOOKMARK" | "ERROR" => {}
            _ => fake.put(object),
        }
    }
    found.extend(std::iter::from_fn(|| watch.next()));
    assert_eq!(json!(found), json!(events), "{path}");
}

#[test]
fn the_fake_answers_as_the_real_server_does() {
    let pages = recorded("pods-pages");
    let fake = FakeKube::start();
    pods_of(pages.last().expect("the whole list")).iter().for_each(|pod| fake.put(pod));
    let mut tokens = Tokens::default();
    pages.iter().for_each(|record| compare(&fake, TOKEN, &mut tokens, record));
    compare_watch(&fake, &recorded("pods-stream")[0]);

    let fake = FakeKube::start();
    fake.change(|world| world.version = 1001);
    compare_watch(&fake, &recorded("pods-watch")[0]);

    let records = recorded("expired");
    let fake = FakeKube::start();
    let first = &pods_of(&records[0])[0];
    for number in 0..5 {
        fake.put(&with(first, |pod| pod["metadata"]["name"] = format!("web-{number}").into()));
    }
    fake.change(|world| world.version = 1002);
    let mut tokens = Tokens::default();
    compare(&fake, TOKEN, &mut tokens, &records[0]);
    fake.change(|world| {
        world.forget();
        (world.floor, world.version) = (1003, 1004);
    });
    for record in &records[1..] {
        match record.get("events") {
            None => compare(&fake, TOKEN, &mut tokens, record),
            Some(_) => compare_watch(&fake, record),
        }
    }

    fake.change(|world| {
        world.users.insert("reader's".to_owned(), "system:serviceaccount:shop:reader".to_owned())
    });
    for (at, record) in recorded("refused").iter().enumerate() {
        let token = ["reader's", "reader's", "nobody's"].get(at).unwrap_or(&TOKEN);
        compare(&fake, token, &mut Tokens::default(), record);
    }
    fake.change(|world| world.streams = false);
    compare(&fake, TOKEN, &mut Tokens::default(), &recorded("no-streams")[0]);
}
