//! Converts keys and values of etcd into changes of services, and into reports of keys with mistakes. Does no I/O, and accepts
//! any bytes.

use std::path::Path;
use std::sync::Arc;

use super::flaws::Flaws;
use super::keys::{KeyFault, Keys, shown};
use isthmus_document::drains;
use isthmus_document::services::{KeptPositions, ServiceReader};
use isthmus_model::service::Service;
use isthmus_proto::mvccpb::event::EventType;
use isthmus_proto::mvccpb::{Event, KeyValue};
use isthmus_registry::change::{Change, Item, Key, RegistryDrain};

/// The largest value that is parsed, in bytes.
pub const VALUE_BYTES_MAX: usize = 4 << 20;
/// The largest number of reported mistakes per value; further ones are counted.
const PROBLEMS_MAX: usize = 8;

/// Parses the keys of one registry.
pub(super) struct Reading {
    keys: Keys,
    flaws: Flaws,
    /// The reader of the present listing, which shares equal values among its services.
    listing: ServiceReader,
}

/// The result of parsing a key.
#[derive(Debug)]
pub enum ParsedKey {
    /// The service.
    Service(Service),
    /// An order to drain.
    Drain(RegistryDrain),
    /// A key with mistakes.
    Flawed {
        /// The item of the key, if the key can be one of an item.
        item: Option<Key>,
        /// The mistakes, a line each.
        problems: Vec<String>,
    },
}

impl Reading {
    pub(super) fn new(keys: Keys) -> Self {
        Self { flaws: Flaws::new(keys.prefix()), keys, listing: ServiceReader::new(KeptPositions::Services) }
    }

    /// Begins a listing.
    pub(super) fn begin(&mut self) -> Vec<Change> {
        self.listing = ServiceReader::new(KeptPositions::Services);
        self.flaws.begin();
        vec![Change::Begin]
    }

    /// Parses a part of the listing.
    pub(super) fn listed(&mut self, values: &[KeyValue]) -> Vec<Change> {
        let mut changes = Vec::with_capacity(values.len());
        for value in values {
            match read(&self.keys, &mut self.listing, &value.key, &value.value) {
                ParsedKey::Service(service) => changes.push(Change::Put(Item::Service(Arc::new(service)))),
                ParsedKey::Drain(drain) => changes.push(Change::Put(Item::Drain(drain))),
                ParsedKey::Flawed { item, problems } => {
                    self.keep(&value.key, item, problems, &mut changes);
                }
            }
        }
        self.flaws.settle(&mut changes);
        changes
    }

    /// Reports a listed key whose value is larger than a message may be.
    pub(super) fn oversize(&mut self, key: &[u8]) -> Vec<Change> {
        let mut changes = Vec::new();
        self.keep(key, item(&self.keys, key).ok(), vec![oversize(key)], &mut changes);
        self.flaws.settle(&mut changes);
        changes
    }

    /// Completes the listing.
    pub(super) fn complete(&mut self) -> Vec<Change> {
        self.listing = ServiceReader::new(KeptPositions::Services);
        let mut changes = Vec::new();
        self.flaws.complete(&mut changes);
        changes.push(Change::Complete);
        changes
    }

    /// Parses changes after the listing.
    pub(super) fn changed(&mut self, events: &[Event]) -> Vec<Change> {
        let mut changes = Vec::with_capacity(events.len());
        let mut reader = ServiceReader::new(KeptPositions::Services);
        for event in events {
            let Some(value) = &event.kv else { continue };
            match event.r#type() {
                EventType::Put => self.put(&mut reader, value, &mut changes),
                EventType::Delete => {
                    if let Ok(item) = item(&self.keys, &value.key) {
                        changes.push(Change::Remove(item));
                    }
                    self.right(&value.key, &mut changes);
                }
            }
        }
        self.flaws.settle(&mut changes);
        changes
    }

    fn put(&mut self, reader: &mut ServiceReader, value: &KeyValue, changes: &mut Vec<Change>) {
        match read(&self.keys, reader, &value.key, &value.value) {
            ParsedKey::Service(service) => {
                changes.push(Change::Put(Item::Service(Arc::new(service))));
                self.right(&value.key, changes);
            }
            ParsedKey::Drain(drain) => {
                changes.push(Change::Put(Item::Drain(drain)));
                self.right(&value.key, changes);
            }
            ParsedKey::Flawed { problems, .. } => self.flaws.flawed(shown(&value.key), problems, changes),
        }
    }

    /// Reports a listed key whose value has mistakes, and keeps the last good state of its item.
    fn keep(&mut self, key: &[u8], item: Option<Key>, problems: Vec<String>, changes: &mut Vec<Change>) {
        changes.extend(item.map(Change::Keep));
        self.flaws.flawed(shown(key), problems, changes);
    }

    fn right(&mut self, key: &[u8], changes: &mut Vec<Change>) {
        // The text of the key is made only if some key has mistakes, which is rare.
        if !self.flaws.is_empty() {
            self.flaws.right(&shown(key), changes);
        }
    }
}

/// Parses one key. `reader` shares values among the keys that it parses.
pub fn read(keys: &Keys, reader: &mut ServiceReader, key: &[u8], value: &[u8]) -> ParsedKey {
    let item = match item(keys, key) {
        Ok(item) => item,
        Err(fault) => {
            return ParsedKey::Flawed { item: None, problems: vec![format!("{}: {fault}", shown(key))] };
        }
    };
    let flawed = |problems| ParsedKey::Flawed { item: Some(item.clone()), problems };
    if value.len() > VALUE_BYTES_MAX {
        return flawed(vec![oversize(key)]);
    }
    let text = match std::str::from_utf8(value) {
        Ok(text) => text,
        Err(error) => {
            let (line, column) = place(&value[..error.valid_up_to()]);
            return flawed(vec![format!("{}:{line}:{column}: the value is not UTF-8", shown(key))]);
        }
    };
    let name = shown(key);
    let parsed = match &item {
        Key::Service(service) => reader.read_alone(Path::new(&*name), text, service).map(ParsedKey::Service),
        _ => drains::read(Path::new(&*name), text).map(|drain| {
            let object = keys.order(key).unwrap_or_default();
            ParsedKey::Drain(RegistryDrain { object, drain: drain.into() })
        }),
    };
    match parsed {
        Ok(parsed) => parsed,
        Err(problems) => {
            let more = problems.len().saturating_sub(PROBLEMS_MAX);
            let mut lines: Vec<String> =
                problems.iter().take(PROBLEMS_MAX).map(ToString::to_string).collect();
            lines.extend((more > 0).then(|| format!("{}: {more} more mistakes", shown(key))));
            flawed(lines)
        }
    }
}

/// Returns the item that a key is the key of.
fn item(keys: &Keys, key: &[u8]) -> Result<Key, KeyFault> {
    match keys.order(key) {
        Some(order) => Ok(Key::Drain(order)),
        None => keys.service(key).map(Key::Service),
    }
}

fn oversize(key: &[u8]) -> String {
    format!("{}: the value is larger than {} MiB", shown(key), VALUE_BYTES_MAX >> 20)
}

/// Returns the line and column, from 1, of the character that follows a text.
fn place(text: &[u8]) -> (usize, usize) {
    let last = text.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
    let lines = text.iter().filter(|byte| **byte == b'\n').count();
    (lines + 1, String::from_utf8_lossy(last).chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "/isthmus/services/";
    const GOOD: &str = "hostname: a.test\nnamespace: shop\nports: [{name: p, port: 1}]\n";

    fn reading() -> Reading {
        Reading::new(Keys::new(PREFIX.into()))
    }

    fn pair(key: &str, value: impl Into<Vec<u8>>) -> KeyValue {
        KeyValue { key: format!("{PREFIX}{key}").into(), value: value.into(), ..KeyValue::default() }
    }

    fn put(key: &str, value: impl Into<Vec<u8>>) -> Event {
        Event { r#type: EventType::Put.into(), kv: Some(pair(key, value)) }
    }

    fn delete(key: &str) -> Event {
        Event { r#type: EventType::Delete.into(), kv: Some(pair(key, "")) }
    }

    /// Returns changes as short texts.
    fn told(changes: &[Change]) -> Vec<String> {
        let text = |change: &Change| match change {
            Change::Begin => "begin".to_owned(),
            Change::Put(item) => format!("put {}", item.key()),
            Change::Keep(key) => format!("keep {key}"),
            Change::Remove(key) => format!("remove {key}"),
            Change::Complete => "complete".to_owned(),
            Change::Failed(problems) => format!("failed {problems:?}"),
            Change::Readable => "readable".to_owned(),
            Change::Flawed { object, problems } if problems.is_empty() => format!("right {object}"),
            Change::Flawed { problems, .. } => problems.join(" | "),
            Change::Report(report) => format!("{report:?}"),
            Change::StillWorks => "still works".to_owned(),
            Change::Forget => "forget".to_owned(),
        };
        changes.iter().map(text).collect()
    }

    #[test]
    fn a_listing_puts_what_is_right_and_keeps_what_is_not() {
        let mut reading = reading();
        let json = r#"{"hostname": "b.test", "namespace": "shop", "ports": [{"name": "p", "port": 1}]}"#;
        let mut changes = reading.begin();
        changes.extend(reading.listed(&[
            pair("shop/a.test", GOOD),
            pair("shop/b.test", json),
            pair("shop/c.test", "hostname: c.test\nnamespace: shop\nports: [{name: p, port: 0}]\n"),
            pair("shop", GOOD),
        ]));
        changes.extend(reading.oversize(format!("{PREFIX}shop/d.test").as_bytes()));
        changes.extend(reading.complete());
        assert_eq!(
            told(&changes),
            [
                "begin",
                "put service shop/a.test",
                "put service shop/b.test",
                "keep service shop/c.test",
                "/isthmus/services/shop/c.test:3:25: ports[0].port: found the number 0; expected a whole number from 1 \
                 to 65535",
                "/isthmus/services/shop: the key has no slash after its namespace; expected \
                 /isthmus/services/<namespace>/<hostname>",
                "keep service shop/d.test",
                "/isthmus/services/shop/d.test: the value is larger than 4 MiB",
                "complete"
            ]
        );
        // In the next listing the key `shop/c.test` is correct, and the key `shop` is gone.
        let mut changes = reading.begin();
        changes.extend(reading.listed(&[pair("shop/c.test", GOOD.replace("a.test", "c.test"))]));
        changes.extend(reading.oversize(format!("{PREFIX}shop/d.test").as_bytes()));
        changes.extend(reading.complete());
        assert_eq!(
            told(&changes),
            [
                "begin",
                "put service shop/c.test",
                "keep service shop/d.test",
                "/isthmus/services/shop/d.test: the value is larger than 4 MiB",
                "right /isthmus/services/shop",
                "right /isthmus/services/shop/c.test",
                "complete"
            ]
        );
    }

    #[test]
    fn events_put_remove_and_report() {
        let mut reading = reading();
        let bad = "hostname: a.test\nnamespace: shop\nports: x\n";
        let changes = reading.changed(&[put("shop/a.test", GOOD), put("shop/a.test", bad), put("x", "")]);
        let told_changes = told(&changes);
        assert_eq!(told_changes.len(), 3, "{told_changes:?}");
        assert_eq!(told_changes[0], "put service shop/a.test");
        assert!(
            told_changes[1].starts_with("/isthmus/services/shop/a.test:3:8: ports: "),
            "{told_changes:?}"
        );
        assert!(told_changes[2].starts_with("/isthmus/services/x: the key has no slash"), "{told_changes:?}");
        let changes = reading.changed(&[delete("shop/a.test"), delete("x"), delete("shop/b.test")]);
        assert_eq!(
            told(&changes),
            [
                "remove service shop/a.test",
                "right /isthmus/services/shop/a.test",
                "right /isthmus/services/x",
                "remove service shop/b.test"
            ]
        );
    }

    #[test]
    fn a_value_has_to_be_of_the_service_of_its_key() {
        let mut reading = reading();
        let changes = reading.changed(&[put("shop/b.test", GOOD), put("shop2/a.test", GOOD)]);
        assert_eq!(
            told(&changes),
            [
                "/isthmus/services/shop/b.test:1:11: hostname: found \"a.test\", expected the hostname that the etcd key names \
                 (did you \
                 mean \"b.test\"?)",
                "/isthmus/services/shop2/a.test:2:12: namespace: found \"shop\", expected the namespace that the etcd key \
                 names (did \
                 you mean \"shop2\"?)"
            ]
        );
    }

    #[test]
    fn values_that_are_no_item_are_named_with_their_place() {
        let mut reading = reading();
        for (value, wanted) in [
            (&b""[..], ":1:1: found nothing, expected a map with the keys hostname"),
            (b"5", ":1:1: found a text, expected a map"),
            (b"hostname: a.test\nnamespace: sh\xffop\n", ":2:14: the value is not UTF-8"),
            (b"services: []", ":1:1: services: found the unknown key \"services\""),
            (b"a: b\n---\nc: d\n", ": found a second document"),
            (b"hostname: a.test\n\tnamespace: shop", ":2:1: found a tab"),
        ] {
            let changes = reading.changed(&[put("shop/a.test", value)]);
            assert!(told(&changes)[0].contains(wanted), "{:?}", told(&changes));
        }
        let large = [GOOD.as_bytes(), &vec![b'#'; VALUE_BYTES_MAX]].concat();
        let changes = reading.changed(&[put("shop/a.test", large)]);
        assert_eq!(told(&changes), ["/isthmus/services/shop/a.test: the value is larger than 4 MiB"]);
        let ports: String = (0..20).map(|at| format!("{{name: n{at}, port: x}}, ")).collect();
        let many = format!("hostname: a.test\nnamespace: shop\nports: [{ports}]\n");
        let Change::Flawed { problems, .. } = &reading.changed(&[put("shop/a.test", many)])[0] else {
            panic!()
        };
        assert_eq!(problems.len(), PROBLEMS_MAX + 1);
        assert_eq!(problems[PROBLEMS_MAX], "/isthmus/services/shop/a.test: 12 more mistakes");
        // An event without a key is ignored.
        assert_eq!(reading.changed(&[Event::default()]), []);
    }

    proptest::proptest! {
        #[test]
        fn whatever_a_value_holds_there_is_an_answer(key in ".{0,20}", value: Vec<u8>) {
            let mut reading = reading();
            let changes = reading.changed(&[put(&key, value.clone()), put("shop/a.test", value), delete(&key)]);
            proptest::prop_assert!(changes.len() <= 7);
        }
    }
}
