//! Responses with parts of a wide change.

use std::collections::BTreeSet;

use super::super::draft::WIDE_BYTES;
use super::*;
use crate::hub::{Mailbox, Permit};

/// Names of services that are so long that their assignments do not fit into one response of a wide change, and two short ones.
fn long_names() -> Vec<String> {
    let label = "x".repeat(60);
    let long = (0..200).map(|number| format!("s{number:03}.{label}.{label}.{label}"));
    long.chain(["a", "z"].map(str::to_owned)).collect()
}

/// Returns services by name with an endpoint on this host; `a` and `z` have it on the other one.
fn one_host_each<'a>(names: &'a [String], host: &'a [u8], other: &'a [u8]) -> Vec<(&'a str, &'a [u8])> {
    let host = |name: &str| if name.len() == 1 { other } else { host };
    names.iter().map(|name| (name.as_str(), host(name))).collect()
}

impl Client {
    /// Acknowledges a response with assignments, and returns their names.
    fn acknowledges(&mut self, response: &Response) -> Vec<String> {
        let names = match self.session.protocol() {
            Protocol::Delta => Vec::new(),
            Protocol::StateOfTheWorld => self.names[&Kind::Assignment].clone(),
        };
        let answer = Request { names, nonce: response.nonce.clone(), ..Request::default() };
        self.session.request(Kind::Assignment, answer).expect("taken");
        response.resources.iter().map(|resource| resource.name.to_string()).collect()
    }

    /// Asks for the assignments of all of these services, and takes them.
    fn has_all(&mut self, names: &[String]) {
        let names: Vec<String> = names.iter().map(|name| format!("outbound|80||{name}")).collect();
        self.ask(Kind::Assignment, &names.iter().map(String::as_str).collect::<Vec<_>>());
        self.hears();
    }
}

fn bytes_of(response: &Response) -> usize {
    response.resources.iter().map(|resource| resource.message().len()).sum()
}

#[test]
fn a_wide_change_is_sent_in_parts_behind_urgent_ones() {
    let names = long_names();
    for protocol in BOTH {
        let mut stage = Stage::new(&one_host_each(&names, &[1], &[1]));
        let mut client = stage.client(protocol);
        client.has_all(&names);
        stage.becomes(&one_host_each(&names, &[2], &[1]));
        let first = client.session.response().expect("a part");
        assert!(bytes_of(&first) < WIDE_BYTES + 1024, "{}", bytes_of(&first));
        assert!(client.session.response().is_none(), "the next part waits for the answer");
        // `z` is the last in the order of names.
        stage.changes_alone("z", &one_host_each(&names, &[2], &[3]));
        assert!(client.session.response().is_none());
        let mut heard = client.acknowledges(&first);
        let second = client.session.response().expect("the next part");
        assert_eq!(&*second.resources[0].name, "outbound|80||z", "{protocol:?}");
        heard.extend(client.acknowledges(&second));
        while let Some(part) = client.session.response() {
            assert!(bytes_of(&part) < WIDE_BYTES + 1024);
            heard.extend(client.acknowledges(&part));
        }
        heard.sort();
        let mut expected: Vec<String> = names.iter().map(|name| format!("outbound|80||{name}")).collect();
        expected.retain(|name| name != A);
        expected.sort();
        assert_eq!(heard, expected, "{protocol:?}: each once, and nothing that did not change");
        assert!(
            client.session.resources().subscriptions.wide.is_empty()
                && client.session.resources().subscriptions.permit.is_none()
        );
    }
}

#[test]
fn urgent_changes_without_end_do_not_hold_up_a_wide_one() {
    let names = long_names();
    for protocol in BOTH {
        let mut stage = Stage::new(&one_host_each(&names, &[1], &[1]));
        let mut client = stage.client(protocol);
        client.has_all(&names);
        // Other sessions have all permits at first.
        let others: Vec<Arc<Mailbox>> = (0..100).map(|_| Arc::default()).collect();
        let mut permits: Vec<Permit> = others.iter().filter_map(|other| stage.hub.permit(other)).collect();
        stage.becomes(&one_host_each(&names, &[2], &[1]));
        let mut heard = BTreeSet::new();
        let parts = (2..20).find(|part| {
            // An urgent change is always there when the client answers, so a response is always in flight otherwise.
            stage.changes_alone("a", &one_host_each(&names, &[2], &[*part]));
            let response = client.session.response().expect("the urgent change");
            assert_eq!(&*response.resources[0].name, A, "{protocol:?}");
            permits.clear();
            others.iter().for_each(|other| drop(other.take()));
            assert!(client.session.response().is_none());
            heard.extend(client.acknowledges(&response));
            heard.len() == names.len() - 1
        });
        // One response without a permit, and not one more than the wide change has parts.
        let bytes: usize = names.iter().map(|name| 2 * name.len()).sum();
        assert!(parts.is_some_and(|parts| usize::from(parts) - 1 <= 2 + 2 * bytes / WIDE_BYTES), "{parts:?}");
    }
}

#[test]
fn names_that_are_unsubscribed_are_not_sent_with_a_wide_change() {
    let names = long_names();
    for protocol in BOTH {
        let mut stage = Stage::new(&one_host_each(&names, &[1], &[1]));
        let mut client = stage.client(protocol);
        client.has_all(&names);
        let permits: Vec<Option<Permit>> = (0..100).map(|_| stage.hub.permit(&Arc::default())).collect();
        stage.becomes(&one_host_each(&names, &[2], &[2]));
        assert!(client.session.response().is_none(), "others have all permits");
        let request = match protocol {
            Protocol::Delta => Request {
                unsubscribe: client.names[&Kind::Assignment]
                    .iter()
                    .filter(|name| *name != A)
                    .cloned()
                    .collect(),
                ..Request::default()
            },
            Protocol::StateOfTheWorld => {
                client.names.insert(Kind::Assignment, vec![A.into()]);
                let nonce = client.nonces[&Kind::Assignment].clone();
                Request { names: vec![A.into()], nonce, ..Request::default() }
            }
        };
        client.session.request(Kind::Assignment, request).expect("taken");
        drop(permits);
        assert_eq!(client.hears(), ["eds: a"], "{protocol:?}");
        // A session that ends gives its permit back.
        stage.becomes(&one_host_each(&names, &[3], &[3]));
        assert!(
            client.session.response().is_some()
                && client.session.resources().subscriptions.used_permit.is_some()
        );
        drop(client);
        let permits: Vec<Option<Permit>> = (0..100).map(|_| stage.hub.permit(&Arc::default())).collect();
        assert_eq!(permits.iter().flatten().count(), crate::hub::SENDERS);
    }
}
