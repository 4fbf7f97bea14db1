//! Networks and their gateways.

use serde::{Deserialize, Serialize};

use super::table::{Column, Listed, list, optional, text};
use super::text::{counted, rate};

/// A network of the mesh, with its address blocks and the numbers of its gateways and endpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    /// The number of gateways that answer probes.
    pub gateways_up: usize,
    /// The distance from the gateway's own network; absent for that network itself and for the unknown one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distance: Option<Distance>,
    /// The mean share, from 0 to 1, of the calls from the gateway's own network to services with steering; absent if there are no
    /// such services.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// The connections of the network's clients to this gateway; absent if there were none in the last 15 minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<Calls>,
}

/// The connections and CONNECT streams from one network that ended at this gateway in the last 15 minutes. Clients belong to the network
/// whose `cidrs` have their address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Calls {
    /// The number per second in the last step of 15 seconds.
    pub per_second: f64,
    /// The highest number per second in a step.
    pub per_second_max: f64,
    /// The number in all steps.
    pub ended: u64,
    /// The number of these that ended with a reason other than `ok`.
    pub failed: u64,
}

impl Calls {
    /// Returns the rate and the failures in words.
    pub fn text(&self) -> String {
        let failed = if self.failed > 0 { format!(", {} failed", self.failed) } else { String::new() };
        format!("{}{failed}", rate(self.per_second))
    }
}

/// The distance of a network, by which steering orders networks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Distance {
    /// The ring, from 1: the nearest.
    pub ring: u32,
    /// The round-trip time in milliseconds; absent if only localities are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round_trip_ms: Option<f64>,
    /// How the distance is known: as in the groups of a horizon.
    pub source: String,
    /// The seconds since the last measurement; absent if the distance is not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
}

impl Distance {
    /// Returns the distance in words.
    pub fn text(&self) -> String {
        match self.round_trip_ms {
            None => self.source.clone(),
            Some(time) => format!("{time} ms ({})", self.source),
        }
    }
}

impl Network {
    /// Returns the number of endpoints and their weight in words.
    pub fn size(&self) -> String {
        format!("{}, ready weight {}", counted(self.endpoints, "endpoint"), self.ready_weight)
    }

    /// Returns the ring; empty for the gateway's own network and for the unknown one.
    pub fn ring(&self) -> String {
        self.distance.as_ref().map(|distance| distance.ring.to_string()).unwrap_or_default()
    }

    /// Returns the share of calls in percent; empty if no service has steering.
    pub fn percent(&self) -> String {
        self.share.map(|share| format!("{:.1} %", share * 100.0)).unwrap_or_default()
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

impl Listed for Network {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAME", |network| text(&network.name)),
        ("ACCESS", |network| text(&network.access)),
        ("CIDRS", |network| list(&network.cidrs)),
        ("GATEWAYS", |network| network.gateways.to_string()),
        ("UP", |network| network.gateways_up.to_string()),
        ("DISTANCE", |network| optional(network.distance.as_ref().map(|distance| distance.text()).as_ref())),
        ("RING", |network| text(&network.ring())),
        ("SHARE", |network| text(&network.percent())),
        ("CALLS FROM IT", |network| optional(network.calls.map(|calls| calls.text()).as_ref())),
        ("ENDPOINTS", |network| network.endpoints.to_string()),
        ("READY WEIGHT", |network| network.ready_weight.to_string()),
    ];
}

impl Listed for Gateway {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NETWORK", |gateway| text(&gateway.network)),
        ("ADDRESS", |gateway| text(&gateway.address)),
        ("STANDS FOR", |gateway| list(&gateway.addresses)),
        ("SNI", |gateway| optional(gateway.sni_port.as_ref())),
        ("HBONE", |gateway| optional(gateway.hbone_port.as_ref())),
        ("CLUSTER", |gateway| text(&gateway.cluster)),
        ("LOCALITY", |gateway| text(&gateway.locality)),
        ("WEIGHT", |gateway| gateway.weight.to_string()),
        ("STATE", |gateway| text(&gateway.state)),
        ("USABLE", |gateway| gateway.usable.to_string()),
        ("WHY NOT", |gateway| optional(gateway.why.as_ref())),
    ];
}
