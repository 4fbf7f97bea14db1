//! The answer of `horizon`.

use serde::{Deserialize, Serialize};
use serde_json::Number;

/// One service port as a viewer gets it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Horizon {
    /// The viewer.
    pub viewer: Viewer,
    /// The host name of the service.
    pub service: String,
    /// The service port.
    pub port: u16,
    /// The subset; empty: all endpoints.
    pub subset: String,
    /// Entries that the viewer gets.
    pub entries: Vec<Entry>,
    /// Endpoints that the viewer does not get, by network, cluster and cause.
    pub missing: Vec<Missing>,
}

/// The viewer: the client, by what decides on its entries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Viewer {
    /// Its network.
    pub network: String,
    /// Its cluster.
    pub cluster: String,
    /// `sni` or `hbone`.
    pub tunnel: String,
    /// The address families that it can use: 4, 6.
    pub families: Vec<u8>,
    /// `grpc`; absent for Envoy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// The networks that it asked for; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sees: Option<Vec<String>>,
}

/// An endpoint or a gateway that a viewer gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// The address and port.
    pub address: String,
    /// `endpoint` or `gateway`.
    pub kind: String,
    /// Its network.
    pub network: String,
    /// Its cluster.
    pub cluster: String,
    /// Its locality.
    pub locality: String,
    /// The weight that the viewer gets.
    pub weight: u32,
    /// The ready weight behind it, a whole number or rounded to billionths.
    #[serde(rename = "standsFor")]
    pub stands_for: Number,
    /// Its health; absent if it is healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<String>,
}

impl Default for Entry {
    fn default() -> Self {
        let text = String::new;
        Self {
            address: text(),
            kind: text(),
            network: text(),
            cluster: text(),
            locality: text(),
            weight: 0,
            stands_for: 0.into(),
            health: None,
        }
    }
}

/// Endpoints that a viewer does not get.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Missing {
    /// Their network.
    pub network: String,
    /// Their cluster.
    pub cluster: String,
    /// Their weight.
    pub weight: u64,
    /// Why the viewer does not get them.
    pub why: String,
}
