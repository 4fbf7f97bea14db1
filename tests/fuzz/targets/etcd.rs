//! Keys and values of an etcd registry: the first line is the key, and the rest is the value.

use isthmus::aggregator::etcd::keys::Keys;
use isthmus::aggregator::etcd::reading::{ParsedKey, read};
use isthmus::document::services::{KeptPositions, ServiceReader};

const PREFIX: &str = "/isthmus/";

pub(super) fn run(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (key, value) = (&data[..end], data.get(end + 1..).unwrap_or_default());
    let keys = Keys::new(PREFIX.into());
    let service_of_key = keys.service(key);
    if let (Ok(service), true) = (&service_of_key, key.starts_with(PREFIX.as_bytes())) {
        assert_eq!(keys.key(service).as_bytes(), key, "a service with two keys");
    }
    let mut reader = ServiceReader::new(KeptPositions::Services);
    match read(&keys, &mut reader, key, value) {
        ParsedKey::Service(service) => {
            assert_eq!(Ok(&service.key), service_of_key.as_ref());
            // The reader's cache does not change the result.
            let ParsedKey::Service(again) = read(&keys, &mut reader, key, value) else {
                panic!("refused the second time")
            };
            assert_eq!(format!("{again:?}"), format!("{service:?}"));
        }
        ParsedKey::Drain(_) => assert!(keys.order(key).is_some()),
        ParsedKey::Flawed { item, problems } => {
            assert_eq!(item.is_some(), service_of_key.is_ok() || keys.order(key).is_some());
            assert!((1..=16).contains(&problems.len()), "{problems:?}");
            for problem in &problems {
                assert!(problem.len() < 8_192 && !problem.contains(['\0', '\x1b', '\n']), "{problem:?}");
            }
        }
    }
}
