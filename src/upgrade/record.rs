//! The record of one live connection: all that the new process needs to go on with it, beside its two sockets and the bytes that
//! the old process holds.
//!
//! A record with a member that the reader does not know, or without one that the reader needs, is refused as a whole: its
//! connection stays in the old process. So a version that adds a member whose loss would harm a connection adds it here.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A connection that is relayed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The id.
    pub id: u64,
    /// The name of the listener that accepted the connection.
    pub listener: String,
    /// True if no hello was read from the connection; absent if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub raw: bool,
    /// The address of the client.
    pub source: SocketAddr,
    /// The proxy that announced `source`.
    pub proxied: Option<Proxied>,
    /// The local address that the client has reached.
    pub local: Option<SocketAddr>,
    /// The SNI in hexadecimal.
    pub sni: Option<Hex>,
    /// The protocols that the client offered by ALPN, in hexadecimal.
    pub alpn: Option<Hex>,
    /// The key of the route, or the host name of the service.
    pub route: Option<String>,
    /// The service that the name means.
    pub service: Option<Service>,
    /// The part of the policy that admitted the connection.
    pub permit: Permit,
    /// The peer that the caller belongs to.
    pub peer: Option<String>,
    /// The endpoint.
    pub endpoint: Endpoint,
    /// The number of endpoints that were dialled.
    pub attempts: u8,
    /// The trace that begins with the hello, in hexadecimal.
    pub trace: Option<Hex>,
    /// The id in the PROXY header that the endpoint got.
    pub unique_id: Option<String>,
    /// The detail for the access log.
    pub detail: Option<String>,
    /// The times.
    pub times: Times,
    /// The direction from the client to the endpoint.
    pub up: Direction,
    /// The direction from the endpoint to the client.
    pub down: Direction,
    /// True once the endpoint has sent its first byte.
    pub answered: bool,
    /// True if the first bytes of the endpoint are not TLS.
    pub not_tls: bool,
}

/// The proxy that announced a source by a PROXY header.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proxied {
    /// The address of the proxy.
    pub proxy: SocketAddr,
    /// The address that the client has reached, as the proxy announced it.
    pub destination: SocketAddr,
}

/// A service port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// The host name.
    pub hostname: String,
    /// The namespace.
    pub namespace: String,
    /// The port.
    pub port: Option<u16>,
    /// The subset; empty for all endpoints.
    pub subset: String,
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
    },
}

/// The endpoint of a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The address that was dialled.
    pub address: SocketAddr,
    /// The group of endpoints: the key of the route, or `hostname:port`.
    pub group: String,
    /// The first address of the endpoint, by which its state is kept.
    pub first: SocketAddr,
    /// The cluster.
    pub cluster: Option<String>,
    /// The locality.
    pub locality: Option<String>,
}

/// The times of a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Times {
    /// The time of the accept, in microseconds since 1970.
    pub accepted: u64,
    /// The age, in microseconds.
    pub age: u64,
    /// The time until the hello was complete, in microseconds.
    pub hello: Option<u64>,
    /// The time from the first dial until an endpoint accepted, in microseconds.
    pub connect: Option<u64>,
    /// The time until the endpoint's first byte, in microseconds.
    pub first_byte: Option<u64>,
    /// The time since the client's last byte, if the endpoint has sent none since, in microseconds.
    pub asked: Option<u64>,
    /// The time since a byte last moved, in seconds.
    pub idle: u32,
}

/// One direction of a connection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Direction {
    /// The number of bytes that were passed on.
    pub bytes: u64,
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

/// Bytes that are written in hexadecimal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hex(pub Vec<u8>);

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |value: u8| char::from(DIGITS[usize::from(value & 15)]);
        to.collect_str(&self.0.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect::<String>())
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|value| u8::try_from(value).ok());
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes: Option<Vec<u8>> =
            pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
        bytes
            .filter(|_| rest.is_empty())
            .map(Self)
            .ok_or_else(|| serde::de::Error::custom("malformed hexadecimal digits"))
    }
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
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn record() -> impl Strategy<Value = Record> {
        let direction = || {
            (any::<u64>(), any::<(bool, bool)>(), proptest::option::of(any::<(u64, u32)>())).prop_map(
                |(bytes, (read_out, urgent), owed)| Direction {
                    bytes,
                    read_out,
                    ended: false,
                    urgent,
                    owed: owed.map(|(acknowledged, since)| Owed { acknowledged, since }),
                },
            )
        };
        let address = || any::<(std::net::IpAddr, u16)>().prop_map(SocketAddr::from);
        let texts = proptest::option::of(("\\PC*", "\\PC*", proptest::option::of(any::<u16>()), "\\PC*"));
        let bytes = || {
            proptest::option::of(proptest::collection::vec(any::<u8>(), 0..64)).prop_map(|some| some.map(Hex))
        };
        let times = any::<(u64, u64, Option<u64>, Option<u64>, Option<u64>, Option<u64>, u32)>();
        (
            any::<(u64, bool, bool, u8)>(),
            (address(), address()),
            texts,
            (bytes(), bytes()),
            times,
            (direction(), direction()),
        )
            .prop_map(
                |(
                    (id, answered, not_tls, attempts),
                    (source, endpoint),
                    texts,
                    (sni, alpn),
                    times,
                    (up, down),
                )| {
                    let permit = match &texts {
                        None => Permit::Route,
                        Some((hostname, ..)) => Permit::Export { hostname: hostname.clone(), port: 1 },
                    };
                    let (accepted, age, hello, connect, first_byte, asked, idle) = times;
                    Record {
                        id,
                        listener: "edge".to_owned(),
                        raw: attempts % 2 == 1,
                        source,
                        proxied: texts.as_ref().map(|_| Proxied { proxy: endpoint, destination: source }),
                        local: None,
                        sni,
                        trace: alpn.clone(),
                        alpn,
                        route: texts.as_ref().map(|(_, _, _, subset)| subset.clone()),
                        service: texts.map(|(hostname, namespace, port, subset)| Service {
                            hostname,
                            namespace,
                            port,
                            subset,
                        }),
                        permit,
                        peer: None,
                        endpoint: Endpoint {
                            address: endpoint,
                            group: "a:1".to_owned(),
                            first: endpoint,
                            cluster: None,
                            locality: None,
                        },
                        attempts,
                        unique_id: None,
                        detail: None,
                        times: Times { accepted, age, hello, connect, first_byte, asked, idle },
                        up,
                        down,
                        answered,
                        not_tls,
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
