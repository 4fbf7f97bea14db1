//! Services of the mesh, with their ports and endpoints.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::endpoint::Endpoint;
use super::table::{Table, list, text};

/// A service in the list of services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// The service's host name.
    pub hostname: String,
    /// The service's namespace.
    pub namespace: String,
    /// The service's virtual addresses.
    pub addresses: Vec<String>,
    /// The service's ports.
    pub ports: Vec<Port>,
    /// The clusters that have the service.
    pub clusters: Vec<String>,
    /// The conflicts between registries, one line each.
    pub conflicts: Vec<String>,
}

/// A port of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Port {
    /// The port's name.
    pub name: String,
    /// The port's number.
    pub port: u16,
    /// The port's protocol.
    pub protocol: String,
    /// The export rules that allow the port.
    pub exported_by: Vec<String>,
    /// The number of endpoints that this gateway can choose.
    pub endpoints_here: usize,
    /// The port on which the endpoints listen, if their registries agree on one; absent in the list of services.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_port: Option<u16>,
}

/// One service with all its endpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServiceDetail {
    /// The service's host name.
    pub hostname: String,
    /// The service's namespace.
    pub namespace: String,
    /// The service's virtual addresses.
    pub addresses: Vec<String>,
    /// The service's ports.
    pub ports: Vec<Port>,
    /// The names of the service's subsets.
    pub subsets: Vec<String>,
    /// The clusters that have the service.
    pub clusters: Vec<String>,
    /// The conflicts between registries, one line each.
    pub conflicts: Vec<String>,
    /// The service's endpoints on every network.
    pub endpoints: Vec<Endpoint>,
}

/// Parses the list of services, and returns it as a table in which each port has a row.
pub(crate) fn table(services: Value) -> serde_json::Result<Table> {
    let all: Vec<Service> = serde_json::from_value(services)?;
    let row = |service: &Service, port: &Port| {
        vec![
            text(&service.hostname),
            text(&service.namespace),
            format!("{}/{}", port.port, port.protocol),
            list(&service.clusters),
            port.endpoints_here.to_string(),
            list(&port.exported_by),
        ]
    };
    let rows = all.iter().flat_map(|service| service.ports.iter().map(move |port| row(service, port)));
    Ok(Table {
        heading: vec!["HOSTNAME", "NAMESPACE", "PORT", "CLUSTERS", "ENDPOINTS HERE", "EXPORTED BY"],
        rows: rows.collect(),
    })
}
