//! The items that a registry makes of the Gateways and routes of the Gateway API (`docs/gateway-api.md, "Routes"`). A route
//! applies at the listeners of its Gateways, and nowhere else.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use isthmus_model::name::NamePattern;
use isthmus_settings::backend::Backend;

/// The addresses and port to which clients of a Gateway connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// The port.
    pub port: u16,
    /// The address of this process to which clients connect; `None`: all addresses, except where another place has this
    /// port of an address.
    pub address: Option<IpAddr>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(f, "{}", std::net::SocketAddr::new(address, self.port)),
            None => write!(f, ":{}", self.port),
        }
    }
}

/// The bytes that clients send at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PlaceProtocol {
    /// TLS, routed by server name.
    Tls,
    /// Any bytes; no hello is read.
    Tcp,
}

/// The places of one Gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayPlaces {
    /// The object, such as `Gateway infra/edge`; unique in its registry.
    pub object: Arc<str>,
    /// The generation of the object that this item was made of.
    pub generation: i64,
    /// The places with their protocols. Gateways that share a place have the same protocol there.
    pub places: Vec<(Place, PlaceProtocol)>,
    /// The listeners for TLS. Copies of earlier versions have none: then each place for TLS has one without a host name.
    #[serde(default)]
    pub listeners: Vec<GatewayListener>,
}

/// A listener for TLS of a Gateway or of one of its ListenerSets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GatewayListener {
    /// The place.
    pub place: Place,
    /// The names that the listener has there.
    pub key: ListenerKey,
    /// When the Gateway or ListenerSet was created, as RFC 3339.
    pub created: Arc<str>,
}

/// The names of a listener. Listeners of one namespace with equal names at one place are one listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ListenerKey {
    /// The namespace of the Gateway.
    pub owner: Arc<str>,
    /// The host name; [`NamePattern::Any`]: the listener has none.
    #[serde(with = "pattern")]
    pub name: NamePattern,
}

impl Default for ListenerKey {
    fn default() -> Self {
        Self { owner: Arc::default(), name: NamePattern::Any }
    }
}

impl fmt::Display for ListenerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            NamePattern::Any => write!(f, "without a host name of the namespace {}", self.owner),
            name => write!(f, "{name} of the namespace {}", self.owner),
        }
    }
}

/// A route of the Gateway API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayRoute {
    /// The object, such as `TLSRoute shop/web`; unique in its registry.
    pub object: Arc<str>,
    /// When the object was created, as RFC 3339. Of two routes for the same name at the same place, the older one applies.
    pub created: Arc<str>,
    /// The names that the route applies to, and the places.
    pub claims: Vec<Claim>,
    /// The backends, among which connections are divided by weight.
    pub backends: Arc<[Backend]>,
}

/// The application of a route to a name at a listener.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Claim {
    /// The place.
    pub place: Place,
    /// The listener to which the route is attached.
    #[serde(default)]
    pub listener: ListenerKey,
    /// The names as the route has them; those that the listener has too apply. `None`: the route takes every connection, and no hello
    /// is read.
    #[serde(with = "optional_pattern")]
    pub name: Option<NamePattern>,
}

impl Claim {
    /// Returns the names that the route has at the listener; `None`: every connection.
    pub fn applied(&self) -> Option<&NamePattern> {
        self.name.as_ref().map(|name| name.intersection(&self.listener.name).unwrap_or(name))
    }
}

/// Stores a pattern as its text.
mod pattern {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    use isthmus_model::name::NamePattern;

    pub(super) fn serialize<S: Serializer>(name: &NamePattern, to: S) -> Result<S::Ok, S::Error> {
        name.to_string().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<NamePattern, D::Error> {
        NamePattern::parse(&String::deserialize(from)?).map_err(serde::de::Error::custom)
    }
}

/// Stores a pattern that may be missing as its text.
mod optional_pattern {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    use isthmus_model::name::NamePattern;

    pub(super) fn serialize<S: Serializer>(name: &Option<NamePattern>, to: S) -> Result<S::Ok, S::Error> {
        name.as_ref().map(ToString::to_string).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NamePattern>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| NamePattern::parse(&text).map_err(serde::de::Error::custom)).transpose()
    }
}
