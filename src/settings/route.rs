//! The routes of the config file and of the Gateway API: the names that they match, their conditions and their targets.

use std::fmt;
use std::num::NonZero;
use std::ops::Deref;
use std::sync::Arc;

use super::backend::Backend;
use super::scope::SourceRule;
use super::tuning::Tuning;
use isthmus_model::address::Host;
use isthmus_model::endpoint::Weight;
use isthmus_model::name::{HostName, NamePattern};
use isthmus_model::place::Locality;

/// A route of the config file, or of the Gateway API.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// The name in logs and labels, unique: the key, for a route of one listener `LISTENER/KEY`, and for one that another route
    /// leads to `KEY#PROTOCOL`; of the Gateway API the object, such as `TLSRoute shop/web`.
    pub name: Arc<str>,
    /// The names that the route matches.
    pub key: RouteName,
    /// The conditions under which the route applies.
    pub conditions: RouteConditions,
    /// The destination of the route's connections.
    pub to: RouteTarget,
}

impl Route {
    /// Returns a route of the table that all listeners share, which admits every source.
    pub fn new(key: RouteName, to: RouteTarget) -> Self {
        Self { name: key.shared(), key, conditions: RouteConditions::default(), to }
    }

    /// Returns true if the route applies on the listener, of those that share its table.
    pub fn on_listener(&self, listener: &str) -> bool {
        has_listener(&self.conditions.listeners, listener)
    }

    /// Returns true if the route has its own endpoints and they are checked actively.
    pub fn is_checked(&self) -> bool {
        matches!(&self.to, RouteTarget::Endpoints { tuning, .. } if tuning.health.is_some())
    }
}

/// Returns true if a list of the names of listeners has this one, or is empty, which means all.
pub fn has_listener(listeners: &[Arc<str>], listener: &str) -> bool {
    listeners.is_empty() || listeners.iter().any(|name| &**name == listener)
}

/// The listeners, sources and protocols that a route distinguishes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conditions {
    /// The listener whose own route this is; `None`: the route is in the table that all listeners share.
    pub own_of: Option<Arc<str>>,
    /// The names of the listeners on which the route applies; empty: all.
    pub listeners: Vec<Arc<str>>,
    /// The source addresses that the route admits.
    pub sources: SourceRule,
    /// The names of the routes that clients take whose ALPN protocols are named here, in the order of the file.
    pub by_alpn: Vec<(Box<[u8]>, Arc<str>)>,
}

/// The [`Conditions`] of a route in the 8 bytes of a pointer: most routes of a large config have none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteConditions(Option<Box<Conditions>>);

impl From<Conditions> for RouteConditions {
    fn from(conditions: Conditions) -> Self {
        Self((conditions != Conditions::default()).then(|| Box::new(conditions)))
    }
}

impl Deref for RouteConditions {
    type Target = Conditions;

    fn deref(&self) -> &Conditions {
        static NONE: Conditions = Conditions {
            own_of: None,
            listeners: Vec::new(),
            sources: SourceRule::EVERYONE,
            by_alpn: Vec::new(),
        };
        self.0.as_deref().unwrap_or(&NONE)
    }
}

/// The key of a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteName {
    /// `"-"`: hellos without a host name.
    NoSni,
    /// A name, `*.suffix`, or `"*"`.
    Name(NamePattern),
    /// Connections from which no hello is read: those of a listener of protocol `tcp`, and those whose first bytes are not TLS.
    Raw,
    /// None: another route leads to this one, by the client's ALPN protocols.
    Alpn,
}

impl RouteName {
    /// Returns the key as text. A single name shares its own text.
    pub fn shared(&self) -> Arc<str> {
        match self {
            Self::Name(NamePattern::Exact(name)) => name.shared(),
            Self::NoSni | Self::Name(_) | Self::Raw | Self::Alpn => self.to_string().into(),
        }
    }

    /// Returns the names, if the route is one for names.
    pub fn pattern(&self) -> Option<&NamePattern> {
        match self {
            Self::Name(pattern) => Some(pattern),
            Self::NoSni | Self::Raw | Self::Alpn => None,
        }
    }
}

impl fmt::Display for RouteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSni => f.write_str("-"),
            Self::Name(pattern) => pattern.fmt(f),
            Self::Raw => f.write_str("raw"),
            Self::Alpn => f.write_str("byAlpn"),
        }
    }
}

/// The destination of a route's connections.
#[derive(Clone, Debug, PartialEq)]
pub enum RouteTarget {
    /// The route's own endpoints.
    Endpoints {
        /// The endpoints, in the order of the file.
        endpoints: Vec<RouteEndpoint>,
        /// The settings by which the endpoints are chosen and dialled.
        tuning: Arc<Tuning>,
    },
    /// A service port; the tuning of the service applies to it.
    Service {
        /// The host name of the service.
        hostname: HostName,
        /// The service port.
        port: u16,
        /// The subset; empty for all endpoints.
        subset: Arc<str>,
    },
    /// The backends of a route of the Gateway API, among which connections are divided by weight.
    Backends(Arc<[Backend]>),
}

/// An endpoint of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteEndpoint {
    /// The address of the endpoint, or a host name that is resolved, or a name of SRV records.
    pub host: Host,
    /// The port that is dialled; 0 with a name of SRV records, which have the ports.
    pub port: u16,
    /// The weight of the endpoint among the endpoints of the route.
    pub weight: Weight,
    /// The locality of the endpoint; may be empty.
    pub locality: Locality,
    /// True if the endpoint is chosen only while no other endpoint of the route is healthy.
    pub is_backup: bool,
    /// The number of connections with which the endpoint is full, on each replica; `None`: there is no limit.
    pub connections_max: Option<NonZero<u32>>,
}

impl fmt::Display for RouteEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.name() {
            Some(name) if name.is_service() => name.fmt(f),
            Some(_) | None => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_cost_a_route_that_has_none_a_pointer() {
        assert_eq!((size_of::<RouteConditions>(), size_of::<Route>()), (8, 88));
        assert_eq!(RouteConditions::from(Conditions::default()), RouteConditions(None));
    }
}
