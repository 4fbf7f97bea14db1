//! The answer to `horizon`.

use serde::{Deserialize, Serialize};
use serde_json::Number;

/// The endpoints of one service port as a viewer gets them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Horizon {
    /// The client for which the entries were computed.
    pub viewer: Viewer,
    /// The host name of the service.
    pub service: String,
    /// The service port.
    pub port: u16,
    /// The subset; empty: all endpoints.
    pub subset: String,
    /// The entries that the viewer gets.
    pub entries: Vec<Entry>,
    /// The endpoints that the viewer does not get, by network, cluster and cause.
    pub missing: Vec<Missing>,
    /// The groups among which steering divides the viewer's calls, nearest first; absent if the service is not steered.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
}

/// The endpoints of the service port on one network, as steering sees them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Group {
    /// The network.
    pub network: String,
    /// The ring: 0 for the viewer's own network; the first bound of `steering.rings` ends ring 1.
    pub ring: u32,
    /// The round-trip time in milliseconds; absent for the viewer's own network, and if only localities are known.
    #[serde(rename = "roundTripMs", skip_serializing_if = "Option::is_none")]
    pub round_trip_ms: Option<f64>,
    /// How the distance is known: `by hand`, `measured here`, `from peer NAME`, or `by locality: same zone`, `same region` or
    /// `elsewhere`; empty for the own network.
    pub source: String,
    /// The seconds since the last measurement; absent if the distance is not measured.
    #[serde(rename = "ageSeconds", skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
    /// The cost per GiB, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// The summed weight of the ready endpoints that the viewer can reach.
    pub ready: u64,
    /// The summed weight of the endpoints that are not ready, without those that are draining.
    #[serde(rename = "notReady")]
    pub not_ready: u64,
    /// The summed weight of the endpoints for which the calls of the network are meant; absent: `ready` and `notReady` together.
    #[serde(rename = "standsFor", skip_serializing_if = "Option::is_none")]
    pub stands_for: Option<u64>,
    /// The share of the viewer's calls, from 0 to 1: exact where the policy sets it, else in steps of 1/32.
    pub share: f64,
    /// The part of the share that endpoints in the viewer's zone have; absent for other networks, and if the zones make no difference.
    #[serde(rename = "zoneShare", skip_serializing_if = "Option::is_none")]
    pub zone_share: Option<f64>,
    /// The priority of the ready endpoints; absent if none is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Why the group has this share.
    pub why: String,
}

/// The properties of a client that decide which entries it gets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Viewer {
    /// The viewer's network.
    pub network: String,
    /// The viewer's cluster.
    pub cluster: String,
    /// The kind of tunnel that the viewer uses: `sni` or `hbone`.
    pub tunnel: String,
    /// The address families that the viewer can use: 4, 6.
    pub families: Vec<u8>,
    /// The viewer's region and zone; absent: not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// `grpc` for gRPC clients; absent for Envoy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// The networks that the viewer asks to see; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sees: Option<Vec<String>>,
}

/// An endpoint or a gateway that a viewer gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// The address and port.
    pub address: String,
    /// The other addresses of the endpoint, which the viewer tries if it cannot connect to the first one; absent: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub additional_addresses: Vec<String>,
    /// The kind of entry: `endpoint` or `gateway`.
    pub kind: String,
    /// The peer on whose carriers the gateway, one of the viewer's own network, passes calls on; absent: on none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub carrier_of: Option<String>,
    /// True if the gateway is one of the viewer's own network, and passes calls on to gateways of `network`; absent: false.
    #[serde(rename = "passesOn", skip_serializing_if = "std::ops::Not::not")]
    pub passes_on: bool,
    /// The network of the endpoint, or the network behind the gateway.
    pub network: String,
    /// The cluster of the endpoint or gateway.
    pub cluster: String,
    /// The locality of the endpoint or gateway.
    pub locality: String,
    /// The priority: a viewer uses the entries of a later priority only if too few of the earlier ones are healthy. Absent: 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// The weight that the viewer gets.
    pub weight: u32,
    /// The ready weight behind the entry: a whole number, or rounded to billionths.
    #[serde(rename = "standsFor")]
    pub stands_for: Number,
    /// The health of the endpoint; absent if it is healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<String>,
}

impl Default for Entry {
    fn default() -> Self {
        let text = String::new;
        Self {
            address: text(),
            additional_addresses: Vec::new(),
            kind: text(),
            carrier_of: None,
            passes_on: false,
            network: text(),
            cluster: text(),
            locality: text(),
            priority: None,
            weight: 0,
            stands_for: 0.into(),
            health: None,
        }
    }
}

/// A group of endpoints that a viewer does not get, all for the same cause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Missing {
    /// The network of the endpoints.
    pub network: String,
    /// The cluster of the endpoints.
    pub cluster: String,
    /// The sum of the endpoints' weights.
    pub weight: u64,
    /// The reason why the viewer does not get the endpoints.
    pub why: String,
}
