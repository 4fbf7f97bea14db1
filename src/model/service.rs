//! Services: what is behind a host name, as one registry declares it.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::endpoint::{Endpoint, Labels, TlsMode};
use super::identity::Identity;
use super::name::HostName;

/// The same key in two clusters is the same service.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceKey {
    pub namespace: Arc<str>,
    pub hostname: HostName,
}

impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.hostname)
    }
}

/// What is spoken on a service port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    #[default]
    Tcp,
    Http,
    Http2,
    Grpc,
    Tls,
    Https,
}

impl Protocol {
    pub const ALL: [Self; 6] = [Self::Tcp, Self::Http, Self::Http2, Self::Grpc, Self::Tls, Self::Https];

    pub fn text(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Http => "HTTP",
            Self::Http2 => "HTTP2",
            Self::Grpc => "GRPC",
            Self::Tls => "TLS",
            Self::Https => "HTTPS",
        }
    }

    /// Whether the application itself speaks TLS here, so that a bare host name can be its SNI.
    pub fn is_tls(self) -> bool {
        matches!(self, Self::Tls | Self::Https)
    }

    /// The `tls` of an endpoint that says nothing of it.
    pub fn default_tls(self) -> TlsMode {
        if self.is_tls() { TlsMode::Own } else { TlsMode::Mesh }
    }
}

/// One port of a service.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServicePort {
    pub name: Arc<str>,
    pub port: u16,
    /// Where endpoints listen that have no port of their own for it.
    pub target_port: u16,
    pub protocol: Protocol,
}

/// A proxy that takes a service's connections before its endpoints do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Waypoint {
    /// Where it takes HBONE.
    pub address: SocketAddr,
    /// Its own SPIFFE ID, by which it is known when it calls; absent: it is not known.
    pub identity: Option<Identity>,
}

/// All that one registry says of one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub key: ServiceKey,
    /// Virtual addresses.
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<ServicePort>,
    pub subsets: BTreeMap<Arc<str>, Labels>,
    pub waypoint: Option<Waypoint>,
    pub endpoints: Arc<[Endpoint]>,
}
