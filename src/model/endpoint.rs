//! One instance of a service, as a registry declares it.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::address::Host;
use super::identity::Identity;
use super::place::{Locality, Network};

/// A relative share of traffic, from 1 to 2^32 − 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Weight(NonZeroU32);

impl Weight {
    /// The weight 1, which is the default.
    pub const ONE: Self = Self(NonZeroU32::MIN);

    /// Returns the weight; `None` for 0.
    pub fn new(value: u32) -> Option<Self> {
        NonZeroU32::new(value).map(Self)
    }

    /// Returns the weight as a number.
    pub fn value(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The version of the PROXY header that the gateway sends to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProxyVersion {
    /// One line of text with the addresses.
    V1,
    /// A binary header with the addresses, the name that the client asked for, and an id of the connection.
    V2,
}

impl ProxyVersion {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::V1, Self::V2];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }
}

/// The health that a registry declares for an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Health {
    /// The endpoint accepts connections.
    #[default]
    Healthy,
    /// The endpoint is chosen only if no healthy endpoint is left.
    Unhealthy,
    /// The endpoint accepts no new connections.
    Draining,
}

impl Health {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 3] = [Self::Healthy, Self::Unhealthy, Self::Draining];

    /// Returns the value as it is written in a `services:` document.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
            Self::Draining => "draining",
        }
    }
}

/// The kind of TLS that an endpoint speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TlsMode {
    /// Mutual TLS with SPIFFE identities.
    Mesh,
    /// The application's own TLS.
    Own,
    /// No TLS; such an endpoint cannot be reached by SNI.
    None,
}

impl TlsMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 3] = [Self::Mesh, Self::Own, Self::None];

    /// Returns the value as it is written in a `services:` document.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Mesh => "mesh",
            Self::Own => "own",
            Self::None => "none",
        }
    }
}

/// The port on which workloads accept HBONE.
pub const HBONE_PORT: u16 = 15_008;

/// The TLS mode that an endpoint declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DeclaredTls {
    /// The endpoint uses this mode on every port.
    Mode(TlsMode),
    /// The workload is outside the mesh: the mode is `own` on ports of protocol TLS or HTTPS, else `none`.
    Application,
}

impl DeclaredTls {
    /// Returns the value as the API writes it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Mode(mode) => mode.text(),
            Self::Application => "application",
        }
    }
}

/// The kind of object that turns the mesh's mutual TLS off on a port of a workload in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MeshTlsOff {
    /// A DestinationRule, by which clients do not use the mesh's mutual TLS.
    DestinationRule,
    /// A PeerAuthentication, by which the workload does not accept the mesh's mutual TLS.
    PeerAuthentication,
}

impl MeshTlsOff {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::DestinationRule, Self::PeerAuthentication];

    /// Returns the value as `explain` shows it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::DestinationRule => "mTLS off by DestinationRule",
            Self::PeerAuthentication => "mTLS off by PeerAuthentication",
        }
    }
}

/// The state of the mesh's mutual TLS on a service port of a workload in the mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PortMeshTls {
    /// The name of the service port.
    pub port: Arc<str>,
    /// The subset by which callers ask for the port, in lower case; empty: every subset that has no entry of its own.
    pub subset: Arc<str>,
    /// The kind of object that turns mutual TLS off; `None`: it is on.
    pub off: Option<MeshTlsOff>,
}

/// The encapsulation that an endpoint accepts beside plain TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Encapsulation {
    /// No encapsulation.
    #[default]
    None,
    /// HBONE: HTTP/2 CONNECT over mutual TLS, on [`HBONE_PORT`].
    Hbone,
}

impl Encapsulation {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::None, Self::Hbone];

    /// Returns the value as it is written after `tunnel` in a `services:` document.
    pub const fn text(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Hbone => "hbone",
        }
    }
}

/// Labels of an object, or the labels that a subset selects, in order of name.
///
/// A clone shares the labels: the same labels are in the record of an object, in the items made from it, and in the snapshot.
/// A `BTreeMap` takes 384 bytes for a single label, in each of these places.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(from = "BTreeMap<Arc<str>, Arc<str>>")]
pub struct Labels(Arc<[(Arc<str>, Arc<str>)]>);

impl Labels {
    /// Returns the value of a label.
    pub fn get(&self, name: &str) -> Option<&Arc<str>> {
        let at = self.0.binary_search_by(|(known, _)| (**known).cmp(name)).ok()?;
        Some(&self.0[at].1)
    }

    /// Returns true if all the wanted labels are among these labels.
    pub fn has_all(&self, wanted: &Self) -> bool {
        wanted.iter().all(|(name, value)| self.get(name) == Some(value))
    }

    /// Returns the labels in order of name, each with its value.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<str>)> {
        self.0.iter().map(|(name, value)| (name, value))
    }

    /// Returns true if there are no labels.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<BTreeMap<Arc<str>, Arc<str>>> for Labels {
    fn from(labels: BTreeMap<Arc<str>, Arc<str>>) -> Self {
        // The default is shared by all empty lists, and needs no allocation.
        if labels.is_empty() { Self::default() } else { Self(labels.into_iter().collect()) }
    }
}

impl FromIterator<(Arc<str>, Arc<str>)> for Labels {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, Arc<str>)>>(labels: I) -> Self {
        labels.into_iter().collect::<BTreeMap<_, _>>().into()
    }
}

impl fmt::Debug for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// Ports on which an endpoint listens, by the name of the service port.
pub type OwnPorts = BTreeMap<Arc<str>, u16>;

/// One instance of a service. The fields that all endpoints of a shard share (cluster, default network) are in the shard.
///
/// A snapshot may hold millions of endpoints. Therefore an endpoint's own fields are small, and the template is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The addresses of the endpoint. In a shard this may be a host name, which the aggregator later resolves to addresses.
    pub host: Host,
    /// The locality; empty if the registry declares none.
    pub locality: Locality,
    /// The endpoint's share of the traffic of a service port.
    pub weight: Weight,
    /// The health that the registry declares.
    pub health: Health,
    /// The fields that this endpoint shares with other instances of its workload.
    pub template: Arc<EndpointTemplate>,
}

/// The fields that instances of one workload share; stored once per shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EndpointTemplate {
    /// The ports on which the endpoint listens. For a service port that is not listed, the endpoint listens on the service's
    /// target port. With 0 it does not listen for that service port.
    pub ports: OwnPorts,
    /// The service ports for which the endpoint listens, in order of name; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Arc<[Arc<str>]>>,
    /// The labels by which subsets select endpoints.
    pub labels: Labels,
    /// The network; `None`: the network of the registry.
    pub network: Option<Network>,
    /// The TLS mode; `None`: `own` on ports of protocol TLS or HTTPS, else `mesh`.
    pub tls: Option<DeclaredTls>,
    /// The ports on which the mesh's mutual TLS is off, or off for some subsets; `None`: it is on for every port, if `tls` is `mesh`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh_tls: Option<Arc<[PortMeshTls]>>,
    /// The names of the service ports on which the endpoint refuses connections without the mesh's mutual TLS; `None`: no port is known
    /// to do so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strict: Option<Arc<[Arc<str>]>>,
    /// The encapsulation that the endpoint accepts.
    pub encapsulation: Encapsulation,
    /// The SPIFFE ID that clients verify; `None` if the registry declares none.
    pub identity: Option<Identity>,
    /// The parts of [`PARTS`](crate::drain::PARTS) of the weight that a peer's planned drain has taken away.
    #[serde(default, rename = "drained_parts", skip_serializing_if = "is_none_taken")]
    pub drained: u16,
}

/// Returns true if a drain has taken nothing away.
fn is_none_taken(drained: &u16) -> bool {
    *drained == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_small() {
        assert_eq!(size_of::<Endpoint>(), 48);
    }

    #[test]
    fn labels_are_sorted_and_each_name_occurs_once() {
        let labels = |all: &[(&str, &str)]| -> Labels {
            all.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
        };
        let all = labels(&[("b", "2"), ("a", "0"), ("c", ""), ("a", "1")]);
        assert_eq!(format!("{all:?}"), r#"{"a": "1", "b": "2", "c": ""}"#);
        assert_eq!((all.get("a").map(|value| &**value), all.get("d")), (Some("1"), None));
        assert_eq!(all, labels(&[("a", "1"), ("b", "2"), ("c", "")]));
        assert!(all.has_all(&labels(&[("c", ""), ("b", "2")])) && all.has_all(&Labels::default()));
        assert!(!all.has_all(&labels(&[("b", "1")])) && !Labels::default().has_all(&all));
    }

    #[test]
    fn clones_of_labels_share_their_entries() {
        let labels = Labels::from_iter([("a".into(), "b".into())]);
        assert!(Arc::ptr_eq(&labels.0, &labels.clone().0));
    }
}
