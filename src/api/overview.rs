//! The overview that the dashboard and `isthmus top` show: all areas on one page. Every list has a limit.

use serde::{Deserialize, Serialize};

use super::certificate::Certificate;
use super::client::Client;
use super::connection::Connection;
use super::listed::{Part, Past, Service};
use super::network::{Gateway, Network};
use super::peer::Peer;
use super::selection::Selection;
use super::status::Status;

/// The state of the gateway on one page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overview {
    /// The time at which the overview was made.
    pub time: String,
    /// The status, with long lists cut.
    pub status: Status,
    /// The totals of the traffic since the start.
    pub traffic: Traffic,
    /// The traffic of the last 15 minutes.
    pub past: Past,
    /// The requested page of the services and routes.
    pub services: Services,
    /// The refusals and failures, grouped by reason, the most recent first.
    pub refusals: Vec<Refusal>,
    /// The last connections that were refused or failed, newest first.
    pub failures: Vec<Connection>,
    /// The networks: first the gateway's own, then the largest ones.
    pub networks: Part<Network>,
    /// The gateways of the networks in `networks`.
    pub gateways: Part<Gateway>,
    /// The peers: first those that are not live.
    pub peers: Part<Peer>,
    /// The clients of the xDS server: first those that have not acknowledged a response or have rejected one.
    pub clients: Part<Client>,
    /// The certificates and roots.
    pub certificates: Part<Certificate>,
    /// The network, service or endpoint that the request opens; `null` if it opens none.
    pub selection: Option<Selection>,
}

/// Counts of connections, streams and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// The number of connections and streams that are open at present.
    pub active: usize,
    /// The number of connections and streams that an endpoint has accepted since the start.
    pub opened: u64,
    /// The number of bytes from clients to endpoints since the start.
    pub bytes_up: u64,
    /// The number of bytes from endpoints to clients since the start.
    pub bytes_down: u64,
    /// The number of connections and streams that ended with a reason other than `ok` since the start.
    pub failed: u64,
}

/// One page of the services and routes: first those that are down or degraded, then by traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Services {
    /// The number of services and routes.
    pub total: usize,
    /// The number of services and routes that are down or degraded.
    pub troubled: usize,
    /// The text that a name must contain; empty: any name.
    pub query: String,
    /// The number of services and routes whose name contains `query`.
    pub matching: usize,
    /// The number of the page, counted from 1.
    pub page: usize,
    /// The number of pages.
    pub pages: usize,
    /// The services and routes of the page.
    pub shown: Vec<Service>,
}

/// The connections that were refused or failed with one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Refusal {
    /// The reason why these connections were refused or failed.
    pub reason: String,
    /// The meaning of the reason.
    pub meaning: String,
    /// The command, key or document that an operator checks next.
    pub look_at: String,
    /// The number of connections with this reason since the start.
    pub total: u64,
    /// The number of connections with this reason in the last five minutes, among the last 1,000 failures.
    pub recent: u64,
    /// The last name that a connection with this reason asked for.
    pub last_name: Option<String>,
    /// The time of the last connection with this reason, if it is among the last 1,000 failures.
    pub last_time: Option<String>,
}
