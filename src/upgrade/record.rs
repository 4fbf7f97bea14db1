//! The form of one live connection on its way to a new process: all that the new process needs to go on with it, beside its two
//! sockets and the bytes that the old process holds.
//!
//! The properties that logs and metrics show are the [`ConnectionRecord`] itself, so none can be forgotten. A record with a member
//! that the reader does not know, or without one that the reader needs, is refused as a whole: its connection stays in the old
//! process.

use std::net::SocketAddr;
use std::time::Duration;

use isthmus_model::record::ConnectionRecord;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A connection that is relayed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The properties that logs and metrics show.
    pub connection: ConnectionRecord,
    /// The part of the policy that admitted the connection.
    pub permit: Permit,
    /// The endpoint by whose state the connection is counted.
    pub endpoint: Endpoint,
    /// The time since the accept.
    pub age: Duration,
    /// The time since the client's last byte, if the endpoint has sent none since.
    pub asked: Option<Duration>,
    /// The time since a byte last moved, in seconds.
    pub idle: u32,
    /// The time until a planned drain ends the connection, in seconds; `None`: no drain has set an end. A program that does not know the
    /// member leaves such connections where they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drained_in: Option<u32>,
    /// The direction from the client to the endpoint.
    pub up: Direction,
    /// The direction from the endpoint to the client.
    pub down: Direction,
    /// True once the endpoint has sent its first byte.
    pub answered: bool,
    /// The reason, by its name, if the connection has failed by a fault of the endpoint.
    pub failure: Option<String>,
}

/// The part of the policy that admitted a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Permit {
    /// A route of the config file.
    Route,
    /// A route of the Gateway API.
    GatewayRoute,
    /// An export rule of a service port.
    Export {
        /// The host name.
        hostname: String,
        /// The port.
        port: u16,
        /// True if the rule needs `tls: own` to lead to the endpoint.
        own: bool,
    },
}

/// The key of an endpoint's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The group of endpoints: the key of the route, or `hostname:port`.
    pub group: String,
    /// The first address of the endpoint, by which its state is kept.
    pub first: SocketAddr,
}

/// One direction of a connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Direction {
    /// True once the source has ended.
    pub read_out: bool,
    /// True once the end was passed on to the sink.
    pub ended: bool,
    /// True once urgent data has arrived.
    pub urgent: bool,
    /// The progress of the sink while it owes acknowledgements.
    pub owed: Option<Owed>,
}

/// The progress of a peer that has not acknowledged all bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owed {
    /// The number of acknowledged bytes at the last examination.
    pub acknowledged: u64,
    /// The time since the number last changed, in seconds.
    pub since: u32,
}

impl Record {
    /// Returns the record as it is sent.
    pub fn write(&self) -> Value {
        // A record has no map whose keys are not texts, so this cannot fail; `null` is no record.
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Reads a record. The error says why the connection must stay where it is.
    pub fn read(value: Value) -> Result<Self, String> {
        let record: Self = serde_json::from_value(value).map_err(|error| error.to_string())?;
        if record.up.ended && record.down.ended {
            return Err("both directions have ended".to_owned());
        }
        if record.connection.endpoint.is_none() {
            return Err("it has no endpoint".to_owned());
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use isthmus_model::record::Proxied;
    use isthmus_model::trace::TraceId;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn record() -> impl Strategy<Value = Record> {
        let direction = || {
            (any::<(bool, bool)>(), proptest::option::of(any::<(u64, u32)>())).prop_map(
                |((read_out, urgent), owed)| Direction {
                    read_out,
                    ended: false,
                    urgent,
                    owed: owed.map(|(acknowledged, since)| Owed { acknowledged, since }),
                },
            )
        };
        let address = || any::<(std::net::IpAddr, u16)>().prop_map(SocketAddr::from);
        let texts = proptest::option::of(("\\PC*", "\\PC*", proptest::option::of(any::<u16>())));
        let bytes = || proptest::option::of(proptest::collection::vec(any::<u8>(), 0..64));
        let time = || any::<u32>().prop_map(|micros| Duration::from_micros(micros.into()));
        let times =
            (time(), time(), proptest::option::of(time()), proptest::option::of(time()), any::<u32>());
        (
            any::<(u64, bool, u8, u64, u64)>(),
            (address(), address()),
            texts,
            (bytes(), bytes(), proptest::option::of(any::<[u8; 16]>())),
            times,
            (direction(), direction()),
        )
            .prop_map(
                |(
                    (id, answered, attempts, bytes_up, bytes_down),
                    (source, endpoint),
                    texts,
                    (sni, alpn, trace),
                    (accepted, age, first_byte, asked, idle),
                    (up, down),
                )| {
                    let permit = match &texts {
                        None => Permit::Route,
                        Some((hostname, ..)) => {
                            Permit::Export { hostname: hostname.clone(), port: 1, own: answered }
                        }
                    };
                    let mut connection =
                        ConnectionRecord::new(id, SystemTime::UNIX_EPOCH + accepted, "edge".into(), source);
                    connection.proxied =
                        texts.as_ref().map(|_| Box::new(Proxied { proxy: endpoint, destination: source }));
                    (connection.sni, connection.alpn) = (sni.map(Into::into), alpn.map(Into::into));
                    connection.hello_trace = trace.map(TraceId);
                    if let Some((hostname, namespace, port)) = texts {
                        connection.service = Some(hostname.into());
                        connection.service_namespace = Some(namespace.into());
                        connection.port = port;
                    }
                    connection.endpoint = Some(endpoint);
                    (connection.bytes_up, connection.bytes_down) = (bytes_up, bytes_down);
                    (connection.attempts, connection.first_byte) = (attempts, first_byte);
                    Record {
                        connection,
                        permit,
                        endpoint: Endpoint { group: "a:1".to_owned(), first: endpoint },
                        age,
                        asked,
                        idle,
                        drained_in: answered.then_some(idle),
                        up,
                        down,
                        answered,
                        failure: answered.then(|| "endpoint_not_tls".to_owned()),
                    }
                },
            )
    }

    /// Returns the paths of all members of a value.
    fn members(value: &Value) -> Vec<Vec<String>> {
        let Some(object) = value.as_object() else { return Vec::new() };
        let mut all = Vec::new();
        for (name, inner) in object {
            all.push(vec![name.clone()]);
            all.extend(members(inner).into_iter().map(|path| [vec![name.clone()], path].concat()));
        }
        all
    }

    fn parent<'v>(value: &'v mut Value, path: &[String]) -> &'v mut serde_json::Map<String, Value> {
        let mut at = value;
        for name in &path[..path.len() - 1] {
            at = &mut at[name];
        }
        at.as_object_mut().expect("an object")
    }

    proptest! {
        #[test]
        fn a_record_that_is_written_is_read(record in record()) {
            prop_assert_eq!(Record::read(record.write()), Ok(record));
        }

        #[test]
        fn an_unknown_member_anywhere_refuses_the_record(record in record(), at: prop::sample::Index) {
            let mut value = record.write();
            let paths = members(&value);
            parent(&mut value, at.get::<Vec<String>>(&paths)).insert("later".to_owned(), json!(1));
            prop_assert!(Record::read(value).is_err());
        }

        #[test]
        fn a_needed_member_that_is_missing_refuses_the_record(record in record(), at: prop::sample::Index) {
            let mut value = record.write();
            let paths = members(&value);
            let path = at.get::<Vec<String>>(&paths);
            let removed = parent(&mut value, path).remove(path.last().expect("a name"));
            // Without a member that may be null, the record is the same as with null.
            let read = Record::read(value);
            match removed {
                Some(Value::Null) => prop_assert_eq!(read, Ok(record)),
                _ => prop_assert!(read.is_err() || read != Ok(record)),
            }
        }
    }
}
