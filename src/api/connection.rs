//! A connection or CONNECT stream, as the access log, `connections` and `failures` show it. A member without a value
//! is left out.

use serde::{Deserialize, Serialize};

fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// A connection. The meaning of each member is in `docs/access-log.md`, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Connection {
    /// When it was accepted.
    pub time: String,
    /// A number that is unique in the process.
    pub id: u64,
    /// The name of the listener.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub listener: String,
    /// `sni` or `hbone`.
    pub protocol: String,
    /// The client's address and port.
    pub source: String,
    /// The address and port of the load balancer that announced the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<String>,
    /// The network of the client's address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub source_network: String,
    /// The address and port that the client connected to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<String>,
    /// The server name as received, escaped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sni: Option<String>,
    /// The authority of a CONNECT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
    /// The protocols that the client offered, escaped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpn: Option<String>,
    /// The rule that matched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The service's host name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// The service port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The subset of the service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subset: Option<String>,
    /// The last endpoint dialled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The endpoint's cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub endpoint_cluster: String,
    /// The endpoint's locality.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub endpoint_locality: String,
    /// The number of endpoints dialled.
    #[serde(skip_serializing_if = "is_zero")]
    pub attempts: u8,
    /// The SPIFFE ID that the caller has proven.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_identity: Option<String>,
    /// The peer whose caller it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The workload that the caller says it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_claimed: Option<String>,
    /// The id that the endpoint was sent in a PROXY header of version 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unique_id: Option<String>,
    /// Why it ended; absent while it is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The exact fault, where the reason does not say all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// `client`, `endpoint` or `gateway`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<String>,
    /// From accept to the end, or to now.
    pub duration_ms: f64,
    /// From accept to the whole hello.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hello_ms: Option<f64>,
    /// From the first dial to the endpoint that took the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_ms: Option<f64>,
    /// From accept to the endpoint's first byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<f64>,
    /// Bytes from client to endpoint.
    pub bytes_up: u64,
    /// Bytes from endpoint to client.
    pub bytes_down: u64,
    /// The trace that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// `node.name` of the gateway.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gateway: String,
    /// `node.network` of the gateway.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gateway_network: String,
    /// `node.cluster` of the gateway.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gateway_cluster: String,
}

impl Connection {
    /// Returns the server name or the authority that the client asked for.
    pub fn name(&self) -> Option<&str> {
        self.sni.as_deref().or(self.authority.as_deref())
    }
}
