//! A connection or CONNECT stream, as in the access log and in the answers of `connections` and `failures`. A member without a
//! value is left out.

use serde::{Deserialize, Serialize};

fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// A connection or CONNECT stream. `docs/access-log.md` has the meaning of each member, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Connection {
    /// The time of the accept.
    pub time: String,
    /// The number of the connection, unique in the process.
    pub id: u64,
    /// The name of the listener.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub listener: String,
    /// The protocol: `sni` or `hbone`.
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
    /// The rule that matched: the key of a route, or the host name of a service.
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
    /// The endpoint that was dialled last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// The endpoint's cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub endpoint_cluster: String,
    /// The endpoint's locality.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub endpoint_locality: String,
    /// The number of endpoints that were dialled.
    #[serde(skip_serializing_if = "is_zero")]
    pub attempts: u8,
    /// The SPIFFE ID that the caller's certificate proves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_identity: Option<String>,
    /// The name of the peer that the caller belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The workload that the caller claims to be; unverified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_claimed: Option<String>,
    /// The id in the PROXY header of version 2 that the endpoint got.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unique_id: Option<String>,
    /// The reason why the connection ended; absent while it is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The exact fault, if the reason alone does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The party that ended the connection: `client`, `endpoint` or `gateway`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<String>,
    /// The time in milliseconds from accept to the end of the connection; of an open connection, to this response.
    pub duration_ms: f64,
    /// The time from accept to the complete ClientHello, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hello_ms: Option<f64>,
    /// The time from the first dial until an endpoint accepted the connection, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connect_ms: Option<f64>,
    /// The time from accept to the endpoint's first byte, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<f64>,
    /// The number of bytes from client to endpoint.
    pub bytes_up: u64,
    /// The number of bytes from endpoint to client.
    pub bytes_down: u64,
    /// The id of the trace that the connection belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// The gateway's `node.name`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gateway: String,
    /// The gateway's `node.network`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gateway_network: String,
    /// The gateway's `node.cluster`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gateway_cluster: String,
}

impl Connection {
    /// Returns the server name or the authority that the client asked for.
    pub fn name(&self) -> Option<&str> {
        self.sni.as_deref().or(self.authority.as_deref())
    }
}
