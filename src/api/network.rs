//! Networks and their gateways.

use serde::{Deserialize, Serialize};

use super::text::counted;

/// A network of the mesh, with its address blocks and the numbers of its gateways and endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// The network's name; empty: the unknown network.
    pub name: String,
    /// The access from other networks: `gateway` or `direct`.
    pub access: String,
    /// The address blocks of the network.
    pub cidrs: Vec<String>,
    /// The number of gateways of the network.
    pub gateways: usize,
    /// The number of endpoints on the network. An endpoint counts once for each service that has it.
    pub endpoints: usize,
    /// The sum of the weights of the network's ready endpoints.
    pub ready_weight: u64,
}

impl Network {
    /// Returns the number of endpoints and their weight in words.
    pub fn size(&self) -> String {
        format!("{}, ready weight {}", counted(self.endpoints, "endpoint"), self.ready_weight)
    }
}

/// A gateway of a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gateway {
    /// The network that the gateway leads to.
    pub network: String,
    /// The gateway's address or host name.
    pub address: String,
    /// The gateway's IP addresses; for a host name, the addresses that it resolves to.
    pub addresses: Vec<String>,
    /// The port for connections that are routed by SNI.
    pub sni_port: Option<u16>,
    /// The port for HBONE.
    pub hbone_port: Option<u16>,
    /// The gateway's cluster.
    pub cluster: String,
    /// The gateway's locality.
    pub locality: String,
    /// The gateway's weight.
    pub weight: u32,
    /// True if at least one viewer can use the gateway.
    pub usable: bool,
    /// The reason why no viewer can use the gateway.
    pub why: Option<String>,
    /// The result of the probes: `answers`; `never_answered`: it has never answered this replica, and is used; `stopping`: it is a
    /// peer's, and has said that it stops; `unreachable`: an address of it has ceased to answer; empty: it is not probed.
    pub state: String,
    /// The addresses and ports that are probed.
    pub probes: Vec<Probe>,
}

/// The result of the probes of one address and port of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Probe {
    /// The address and port.
    pub address: String,
    /// The state, as of the gateway.
    pub state: String,
    /// When the address ceased to answer (RFC 3339).
    pub since: Option<String>,
    /// The time of the last connect in microseconds.
    pub connect_us: Option<u64>,
}

impl Gateway {
    /// Returns the gateway's address and ports in words.
    pub fn place(&self) -> String {
        let ports = [("sni", self.sni_port), ("hbone", self.hbone_port)];
        let ports: Vec<String> =
            ports.into_iter().filter_map(|(name, port)| Some(format!("{name} {}", port?))).collect();
        format!("{} {}", self.address, ports.join(", "))
    }
}
