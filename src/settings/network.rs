//! The networks of the config file, and the gateways through which others reach them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::steering::Cost;
use isthmus_model::address::Host;
use isthmus_model::endpoint::Weight;
use isthmus_model::identity::Identity;
use isthmus_model::place::{ClusterId, Locality, Network};

isthmus_model::words!(Access, Egress);

/// How the gateways of a network are probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GatewayProbes {
    /// Not at all.
    Off,
    /// By connecting.
    Connect,
    /// By connecting, and every other time by a ClientHello.
    #[default]
    Hello,
}

/// The settings of one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// The name of the network.
    pub name: Network,
    /// How other networks reach the endpoints of the network.
    pub access: Access,
    /// How clients on the network call services of other networks.
    pub egress: Egress,
    /// The address blocks of the network, which no other network shares. An endpoint without a network belongs to the network
    /// whose block contains its address.
    pub cidrs: Vec<IpNet>,
    /// The gateways of the network.
    pub gateways: Vec<Gateway>,
    /// How the gateways are probed, so that viewers do not get one that has ceased to answer.
    pub probes: GatewayProbes,
    /// The round-trip times from viewers on other networks, as far as the operator sets them.
    pub distance: BTreeMap<Network, Duration>,
    /// The costs of traffic from viewers on other networks.
    pub cost: BTreeMap<Network, Cost>,
    /// The part of the ready endpoints of a service, in percent, that calls of other networks may use; `None`: what the calls of the
    /// network itself leave.
    pub visitors_percent: Option<u8>,
}

/// How endpoints of a network are reached from other networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Access {
    /// Endpoints are reached only through the network's gateways.
    #[default]
    Gateway,
    /// Endpoints are reached by their own addresses: the network is routable from all other networks.
    Direct,
}

impl Access {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Gateway, Self::Direct];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Direct => "direct",
        }
    }
}

/// How clients on a network call services of other networks, and of peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Egress {
    /// Clients connect to the gateways of the other network.
    #[default]
    Direct,
    /// Clients connect to the gateways of their own network, which pass the calls on.
    Gateway,
}

impl Egress {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Direct, Self::Gateway];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Gateway => "gateway",
        }
    }
}

/// A gateway through which other networks reach a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    /// The address of the gateway, or a host name. Each address of a name gets an equal part of the weight.
    pub host: Host,
    /// The port for TLS that is routed by SNI. At least one of `sni_port` and `hbone_port` is set.
    pub sni_port: Option<u16>,
    /// The port for HBONE.
    pub hbone_port: Option<u16>,
    /// The cluster that the gateway serves; `""`: all clusters of the network.
    pub cluster: ClusterId,
    /// The locality of the gateway.
    pub locality: Locality,
    /// The weight among the gateways of the network.
    pub weight: Weight,
    /// The SPIFFE ID that clients expect of the gateway.
    pub identity: Option<Identity>,
    /// The addresses of the gateway's instances on their own network, as far as a registry knows them.
    pub instances: Arc<[SocketAddr]>,
    /// The parts of [`PARTS`](isthmus_model::drain::PARTS) of the weight that a peer's planned drain has taken away.
    #[serde(default, rename = "drained_parts")]
    pub drained: u16,
}
