//! Networks and their gateways.

use serde::{Deserialize, Serialize};

use super::text::counted;

/// A network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Network {
    /// Its name; empty: the unknown network.
    pub name: String,
    /// `gateway` or `direct`.
    pub access: String,
    /// Its address blocks.
    pub cidrs: Vec<String>,
    /// The number of its gateways.
    pub gateways: usize,
    /// The number of its endpoints; an endpoint counts once for each service that has it.
    pub endpoints: usize,
    /// The weight of its ready endpoints.
    pub ready_weight: u64,
}

impl Network {
    /// Returns the number of its endpoints and their weight in words.
    pub fn size(&self) -> String {
        format!("{}, ready weight {}", counted(self.endpoints, "endpoint"), self.ready_weight)
    }
}

/// A gateway of a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gateway {
    /// Its network.
    pub network: String,
    /// Its address or host name.
    pub address: String,
    /// The addresses that this stands for.
    pub addresses: Vec<String>,
    /// Its port for connections by server name.
    pub sni_port: Option<u16>,
    /// Its port for HBONE.
    pub hbone_port: Option<u16>,
    /// Its cluster.
    pub cluster: String,
    /// Its locality.
    pub locality: String,
    /// Its weight.
    pub weight: u32,
    /// True if some viewer can use it.
    pub usable: bool,
    /// Why no viewer can use it.
    pub why: Option<String>,
}

impl Gateway {
    /// Returns its address and ports in words.
    pub fn place(&self) -> String {
        let ports = [("sni", self.sni_port), ("hbone", self.hbone_port)];
        let ports: Vec<String> =
            ports.into_iter().filter_map(|(name, port)| Some(format!("{name} {}", port?))).collect();
        format!("{} {}", self.address, ports.join(", "))
    }
}
