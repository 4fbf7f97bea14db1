//! The overview that the dashboard and `isthmus top` show: all areas on one page, with a bound on every list.

use serde::{Deserialize, Serialize};

use super::certificate::Certificate;
use super::client::Client;
use super::connection::Connection;
use super::network::{Gateway, Network};
use super::peer::Peer;
use super::status::Status;

/// The state of the gateway on one page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overview {
    /// When this was made.
    pub time: String,
    /// The status; long lists in it are cut.
    pub status: Status,
    /// Totals of the traffic since the start.
    pub traffic: Traffic,
    /// The services and routes that were asked for.
    pub services: Services,
    /// The refusals and failures by reason, the most recent first.
    pub refusals: Vec<Refusal>,
    /// The last connections that were refused or failed, newest first.
    pub failures: Vec<Connection>,
    /// The networks: that of the gateway, then the largest ones.
    pub networks: Part<Network>,
    /// The gateways of these networks.
    pub gateways: Part<Gateway>,
    /// The peers, those that are not live first.
    pub peers: Part<Peer>,
    /// The clients of the xDS server; those that wait for an acknowledgement or have rejected something come first.
    pub clients: Part<Client>,
    /// The certificates and roots.
    pub certificates: Part<Certificate>,
}

/// The beginning of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part<T> {
    /// The length of the whole list.
    pub total: usize,
    /// Its first items.
    pub shown: Vec<T>,
}

impl<T> Part<T> {
    /// Returns the first items of a list.
    pub fn of(mut all: Vec<T>, most: usize) -> Self {
        let total = all.len();
        all.truncate(most);
        Self { total, shown: all }
    }

    /// Returns the number of items that are not shown.
    pub fn hidden(&self) -> usize {
        self.total.saturating_sub(self.shown.len())
    }
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// Connections and streams that are open now.
    pub active: usize,
    /// Connections and streams that an endpoint took.
    pub opened: u64,
    /// Bytes from clients to endpoints.
    pub bytes_up: u64,
    /// Bytes from endpoints to clients.
    pub bytes_down: u64,
    /// Connections and streams that ended with another reason than `ok`.
    pub failed: u64,
}

/// One page of the services and routes: those in trouble first, then by traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Services {
    /// The number of services and routes.
    pub total: usize,
    /// The number of those in trouble.
    pub troubled: usize,
    /// The text that names have to contain; empty: all.
    pub query: String,
    /// The number of those whose name contains it.
    pub matching: usize,
    /// The page, from 1.
    pub page: usize,
    /// The number of pages.
    pub pages: usize,
    /// The services and routes of the page.
    pub shown: Vec<Service>,
}

/// A service or a route with its traffic and health.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Service {
    /// The host name of the service, or the key of the route.
    pub name: String,
    /// `service` or `route`.
    pub kind: String,
    /// Its health: one of [`states`].
    pub state: String,
    /// True if it can be reached through a listener.
    pub reachable: bool,
    /// The number of endpoints that this gateway can choose.
    pub endpoints: usize,
    /// The number of those that are healthy, not ejected and not failing.
    pub ready: usize,
    /// Open connections and streams.
    pub active: u64,
    /// Connections and streams that an endpoint took since the start.
    pub opened: u64,
    /// Bytes from clients to endpoints since the start.
    pub bytes_up: u64,
    /// Bytes from endpoints to clients since the start.
    pub bytes_down: u64,
    /// Connections and streams that ended with another reason than `ok` since the start.
    pub failed: u64,
}

/// The words of [`Service::state`].
pub mod states {
    /// No endpoint is ready.
    pub const DOWN: &str = "down";
    /// Some endpoints are not ready.
    pub const DEGRADED: &str = "degraded";
    /// All endpoints are ready.
    pub const OK: &str = "ok";
    /// All endpoints are on other networks.
    pub const ELSEWHERE: &str = "elsewhere";
}

/// How often connections ended for a reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Refusal {
    /// The reason.
    pub reason: String,
    /// Its meaning.
    pub meaning: String,
    /// The command, key or document to look at.
    pub look_at: String,
    /// How often since the start.
    pub total: u64,
    /// How often in the last five minutes, among the last 1,000 failures.
    pub recent: u64,
    /// The last name that was asked for.
    pub last_name: Option<String>,
    /// The last time, if it is among the last 1,000 failures.
    pub last_time: Option<String>,
}
