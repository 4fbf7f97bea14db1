//! `isthmus watch`: follows the changes in a running gateway, one line per change.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::arguments::Reading;
use isthmus_api::connection::Connection;
use isthmus_api::endpoint::Endpoint;
use isthmus_api::requests;
use isthmus_api::status::Problem;
use isthmus_api::table::{Listed, Table};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Format, one_of_many};
use isthmus_telemetry::clock::rfc3339;

/// The interval at which the list is requested from the gateway.
const EVERY: Duration = Duration::from_secs(1);

pub(super) const EXAMPLES: &str = "Examples:
  isthmus watch failures             connections that are refused or fail from now on
  isthmus watch connections          connections that open and close
  isthmus watch endpoints            endpoints that come, go, or change their state
  isthmus watch problems             problems that begin and end
  isthmus watch failures -o json     a JSON object per line

The command asks the gateway once per second, so it misses a connection that opens and closes in between. The access log has every connection.";

/// The list to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Followed {
    Failures,
    Connections,
    Endpoints,
    Problems,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Failed,
    Opened,
    Closed,
    Added,
    Removed,
    Changed,
    Began,
    Ended,
}

impl How {
    const fn word(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Opened => "opened",
            Self::Closed => "closed",
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Changed => "changed",
            Self::Began => "began",
            Self::Ended => "ended",
        }
    }
}

/// The part of an item that never changes and identifies the item in the next answer.
type Key = (String, String);

/// Runs `isthmus watch`, until the output is closed.
pub(super) fn run(followed: Followed, reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    match followed {
        Followed::Failures => {
            let key = |failed: &Connection| (failed.time.clone(), failed.id.to_string());
            // A failure that leaves the list is not a change: the list keeps only the newest thousand.
            let told = |old: Option<&Connection>, new: Option<&Connection>| match (old, new) {
                (None, Some(_)) => Some(How::Failed),
                _ => None,
            };
            let cells = |all: &[Connection]| Table::of(Connection::FAILED, all).rows;
            Watch { path: requests::FAILURES.path, within: "", key, told, cells }.run(reading, out)
        }
        Followed::Connections => {
            let key = |open: &Connection| (open.time.clone(), open.id.to_string());
            let told = |old: Option<&Connection>, new: Option<&Connection>| match (old, new) {
                (None, Some(_)) => Some(How::Opened),
                (Some(_), None) => Some(How::Closed),
                _ => None,
            };
            let cells = |all: &[Connection]| Table::of(Connection::COLUMNS, all).rows;
            Watch { path: requests::CONNECTIONS.path, within: "", key, told, cells }.run(reading, out)
        }
        Followed::Endpoints => {
            let key = |endpoint: &Endpoint| {
                let of = endpoint.service.as_ref().or(endpoint.route.as_ref()).cloned().unwrap_or_default();
                (of, format!("{} {:?}", endpoint.address, endpoint.ports))
            };
            let told = |old: Option<&Endpoint>, new: Option<&Endpoint>| match (old, new) {
                (None, Some(_)) => Some(How::Added),
                (Some(_), None) => Some(How::Removed),
                // Only some members are compared, because times and numbers of failures change while the state stays the same.
                (Some(old), Some(new)) => (looks(old) != looks(new)).then_some(How::Changed),
                (None, None) => None,
            };
            let cells = |all: &[Endpoint]| Table::of(Endpoint::COLUMNS, all).rows;
            Watch { path: requests::ENDPOINTS.path, within: "", key, told, cells }.run(reading, out)
        }
        Followed::Problems => {
            // The text of a problem may have numbers that change while the problem stays the same.
            let key = |problem: &Problem| (problem.code.clone(), problem.about.clone());
            let told = |old: Option<&Problem>, new: Option<&Problem>| match (old, new) {
                (None, Some(_)) => Some(How::Began),
                (Some(_), None) => Some(How::Ended),
                _ => None,
            };
            let cells = |all: &[Problem]| Table::of(Problem::COLUMNS, all).rows;
            Watch { path: requests::STATUS.path, within: "/problems", key, told, cells }.run(reading, out)
        }
    }
}

/// Returns those members of an endpoint that are compared: a change of any other member is not shown.
fn looks(endpoint: &Endpoint) -> (&str, &str, u32, Option<&str>, &str) {
    (&endpoint.state, &endpoint.health, endpoint.weight, endpoint.standing.as_deref(), &endpoint.network)
}

/// The contact with a gateway that a command follows. The command waits for a gateway that restarts.
#[derive(Default)]
pub(super) struct Contact {
    is_lost: bool,
}

impl Contact {
    /// Returns what a request has brought; `None` if the gateway cannot be reached, which is reported the first time.
    pub(super) fn after<T>(&mut self, request: Result<T, Failure>) -> Result<Option<T>, Failure> {
        match request {
            Err(failure @ Failure::Client(client::ClientError::Unreachable { .. })) => {
                if !self.is_lost {
                    writeln!(io::stderr(), "{failure}; waiting for the gateway")?;
                }
                self.is_lost = true;
                Ok(None)
            }
            other => {
                self.is_lost = false;
                other.map(Some)
            }
        }
    }
}

/// A list that is followed.
struct Watch<T> {
    path: &'static str,
    /// The place of the list in the answer, as a JSON pointer (RFC 6901).
    within: &'static str,
    key: fn(&T) -> Key,
    /// Returns the change between an item's old and its new value, or `None` if it should not be shown.
    told: fn(Option<&T>, Option<&T>) -> Option<How>,
    cells: fn(&[T]) -> Vec<Vec<String>>,
}

impl<T: DeserializeOwned + Serialize + Clone> Watch<T> {
    fn run(&self, reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
        let mut before = self.list(reading)?;
        let mut contact = Contact::default();
        loop {
            std::thread::sleep(EVERY);
            let Some(now) = contact.after(self.list(reading))? else { continue };
            let time = rfc3339(SystemTime::now());
            for (how, value) in self.changes(&before, &now) {
                self.print(&time, how, value, reading.output, out)?;
            }
            out.flush()?;
            before = now;
        }
    }

    fn list(&self, reading: &Reading) -> Result<BTreeMap<Key, T>, Failure> {
        let value = client::get(&reading.admin.url(), self.path)?.json()?;
        let all: Vec<T> = client::typed(value.pointer(self.within).cloned().unwrap_or_default())?;
        Ok(all.into_iter().map(|value| ((self.key)(&value), value)).collect())
    }

    /// Returns the items that were removed, then those that are new or changed, each group in the order of the keys.
    fn changes<'a>(&self, before: &'a BTreeMap<Key, T>, now: &'a BTreeMap<Key, T>) -> Vec<(How, &'a T)> {
        let gone = before.iter().filter(|(key, _)| !now.contains_key(*key));
        let gone = gone.filter_map(|(_, value)| Some(((self.told)(Some(value), None)?, value)));
        let rest =
            now.iter().filter_map(|(key, value)| Some(((self.told)(before.get(key), Some(value))?, value)));
        gone.chain(rest).collect()
    }

    fn print(
        &self,
        time: &str,
        how: How,
        value: &T,
        format: Format,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        match format {
            Format::Table => {
                for row in (self.cells)(std::slice::from_ref(value)) {
                    writeln!(out, "{time}  {:7}  {}", how.word(), row.join("  "))?;
                }
            }
            format => {
                one_of_many(out, &json!({"at": time, "change": how.word(), "value": value}), format)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> Watch<Endpoint> {
        Watch {
            path: "",
            within: "",
            key: |endpoint| (String::new(), endpoint.address.clone()),
            told: |old, new| match (old, new) {
                (None, _) => Some(How::Added),
                (_, None) => Some(How::Removed),
                (Some(old), Some(new)) => (looks(old) != looks(new)).then_some(How::Changed),
            },
            cells: |_| Vec::new(),
        }
    }

    #[test]
    fn what_has_gone_comes_before_what_is_new_and_what_differs() {
        let endpoint = |address: &str, state: &str| Endpoint {
            address: address.to_owned(),
            state: state.to_owned(),
            ..Endpoint::default()
        };
        let all = |list: &[(&str, &str)]| -> BTreeMap<Key, Endpoint> {
            list.iter()
                .map(|(address, state)| ((String::new(), (*address).to_owned()), endpoint(address, state)))
                .collect()
        };
        let before = all(&[("a", "healthy"), ("b", "healthy"), ("c", "healthy")]);
        let now = all(&[("b", "ejected"), ("c", "healthy"), ("d", "healthy")]);
        let watch = watch();
        let changes: Vec<(How, &str)> = watch
            .changes(&before, &now)
            .into_iter()
            .map(|(how, endpoint)| (how, &*endpoint.address))
            .collect();
        assert_eq!(changes, [(How::Removed, "a"), (How::Changed, "b"), (How::Added, "d")]);
        // An item that leaves a list of limited length is not a change.
        let told = |old: Option<&Endpoint>, new: Option<&Endpoint>| match (old, new) {
            (None, Some(_)) => Some(How::Added),
            _ => None,
        };
        let cut = Watch { told, ..watch };
        let changes: Vec<&str> =
            cut.changes(&before, &now).into_iter().map(|(_, endpoint)| &*endpoint.address).collect();
        assert_eq!(changes, ["d"]);
    }
}
