//! Orders about single endpoints and connections.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use axum::extract::{Query, State};
use serde_json::{Value, json};

use super::Sources;
use super::response::{Refused, answered};
use super::routes::{Parameters, Routes};
use isthmus_api::requests;
use isthmus_dataplane::withdrawals::{Which, Withdrawal, WithdrawalError};
use isthmus_decisions::dialled::Dialled;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::{EndpointKey, service_of};
use isthmus_tasks::background;

/// The largest number of endpoints that a message lists.
const LISTED_MAX: usize = 5;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .with(&requests::DRAIN_ENDPOINT, async |State(sources): State<Sources>, Query(query): Parameters| {
            answered(endpoint(&sources, Order::Withdraw(Withdrawal::Drained), &query).await)
        })
        .with(
            &requests::DISABLE_ENDPOINT,
            async |State(sources): State<Sources>, Query(query): Parameters| {
                answered(endpoint(&sources, Order::Withdraw(Withdrawal::Disabled), &query).await)
            },
        )
        .with(&requests::ENABLE_ENDPOINT, async |State(sources): State<Sources>, Query(query): Parameters| {
            answered(endpoint(&sources, Order::Enable, &query).await)
        })
        .with(
            &requests::CLOSE_CONNECTION,
            async |State(sources): State<Sources>, Query(query): Parameters| {
                answered(close(&sources, &query).await)
            },
        )
}

/// An operator's request about the withdrawal of endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Withdraws the endpoints.
    Withdraw(Withdrawal),
    /// Ends the withdrawal of the endpoints.
    Enable,
}

impl From<WithdrawalError> for Refused {
    fn from(error: WithdrawalError) -> Self {
        match error {
            WithdrawalError::NotWithdrawn(_) => Self::Unknown(error.to_string()),
            WithdrawalError::TooMany | WithdrawalError::PartOf(..) => Self::Conflict(error.to_string()),
        }
    }
}

/// Applies a request to the endpoints that the parameters `address` and `service` select.
async fn endpoint(
    sources: &Sources,
    order: Order,
    query: &BTreeMap<String, String>,
) -> Result<Value, Refused> {
    let which = which(query)?;
    let upstreams = sources.dataplane.upstreams();
    let snapshot = sources.reader.latest();
    let asked = which.clone();
    // The search takes long in a large config, so it runs on a background thread.
    let found = background::run(move || find(&snapshot, &asked)).await;
    let found = found
        .map_err(|_| Refused::Conflict("internal error: the search for the endpoint panicked".to_owned()))?;
    let closed = match order {
        Order::Withdraw(_) if found.meant.is_empty() => return Err(Refused::Unknown(found.unknown(&which))),
        Order::Withdraw(withdrawal) => sources.dataplane.withdraw(which.clone(), withdrawal).await? as u64,
        Order::Enable => {
            let ended = upstreams.withdrawals().enable(&which);
            // An operator's order ends an ejection too. If a wider order keeps the endpoints out, nothing changes.
            let is_free = !matches!(ended, Err(WithdrawalError::PartOf(..)));
            let ejected = found.meant.iter().filter(|key| is_free && upstreams.end_ejection(key)).count();
            match ended {
                Err(WithdrawalError::NotWithdrawn(_)) if ejected > 0 => {}
                other => other?,
            }
            0
        }
    };
    let in_flight = |key: &EndpointKey| upstreams.state(key).map_or(0, |state| u64::from(state.in_flight));
    let open: u64 = found.meant.iter().map(in_flight).sum();
    let (word, and) = match order {
        Order::Withdraw(Withdrawal::Drained) => {
            ("drained", format!("; open connections that continue: {open}"))
        }
        Order::Withdraw(Withdrawal::Disabled) => ("disabled", format!("; connections closed: {closed}")),
        Order::Enable => ("enabled", String::new()),
    };
    tracing::info!(order = word, endpoint = %which, "an operator changed an endpoint");
    let listed = found
        .meant
        .iter()
        .map(|key| json!({"address": key.address.to_string(), "service": service_of(&key.group)}));
    Ok(json!({
        "result": format!("{word}: {}{and}", texts(&found.meant, &which)),
        "endpoints": listed.collect::<Vec<_>>(),
        "connections": if order == Order::Withdraw(Withdrawal::Disabled) { closed } else { open },
    }))
}

/// Closes the connection that the parameter `id` names.
async fn close(sources: &Sources, query: &BTreeMap<String, String>) -> Result<Value, Refused> {
    let only = |key: &String| key == "id";
    let id = query.get("id").filter(|_| query.keys().all(only)).and_then(|id| id.parse::<u64>().ok());
    let id = id.ok_or_else(|| {
        Refused::Parameters("give the id of a connection, and nothing else: ?id=17".to_owned())
    })?;
    if !sources.dataplane.close(id).await {
        return Err(Refused::Unknown(format!(
            "there is no live connection with the id {id}; `isthmus get connections` lists them"
        )));
    }
    tracing::info!(id, "an operator closed a connection");
    Ok(json!({"result": format!("closed: connection {id}")}))
}

fn which(query: &BTreeMap<String, String>) -> Result<Which, Refused> {
    if let Some(other) = query.keys().find(|key| !matches!(key.as_str(), "address" | "service")) {
        let text = format!("unknown parameter {other:?}; expected one of address, service");
        return Err(Refused::Parameters(text));
    }
    let address = query.get("address").ok_or_else(|| {
        Refused::Parameters("the address is missing; add ?address=10.0.0.1:8443".to_owned())
    })?;
    Which::parse(address, query.get("service").map(String::as_str)).map_err(Refused::Parameters)
}

/// The endpoints of a snapshot at the IP address of a request.
#[derive(Default)]
struct Found {
    /// The endpoints that the request selects.
    meant: BTreeSet<EndpointKey>,
    /// Endpoints at the same IP address that the request does not select.
    others: BTreeSet<EndpointKey>,
}

fn find(snapshot: &Snapshot, which: &Which) -> Found {
    let anywhere = Which { port: None, service: None, ..which.clone() };
    let mut found = Found::default();
    for candidates in Dialled::new(&snapshot.policy).with_gateway_api(snapshot).all(snapshot) {
        let service = service_of(&candidates.group);
        let keys = candidates.endpoints().iter().map(|candidate| &candidate.key);
        for key in keys.filter(|key| anywhere.covers(service, key.address)) {
            let into = if which.covers(service, key.address) { &mut found.meant } else { &mut found.others };
            into.insert(key.clone());
        }
    }
    found
}

/// Returns true if the gateway itself has such an endpoint, of a route or of a service.
pub(crate) fn is_dialled(snapshot: &Snapshot, which: &Which) -> bool {
    !find(snapshot, which).meant.is_empty()
}

impl Found {
    /// Returns the error text for a request that selects no endpoint.
    fn unknown(&self, which: &Which) -> String {
        let there_are = match self.others.is_empty() {
            true => String::new(),
            false => format!("; at the same IP address there is {}", texts(&self.others, which)),
        };
        format!(
            "no service or route has an endpoint {which}{there_are}; `isthmus get endpoints` lists all endpoints"
        )
    }
}

/// Describes a set of endpoints by the first ones and the number of the remaining ones. If the set is empty, describes the
/// request instead.
fn texts(keys: &BTreeSet<EndpointKey>, which: &Which) -> String {
    let named: BTreeSet<(SocketAddr, &str)> =
        keys.iter().map(|key| (key.address, service_of(&key.group))).collect();
    if named.is_empty() {
        return which.to_string();
    }
    let first = named.iter().take(LISTED_MAX).map(|(address, service)| format!("{address} of {service}"));
    let more = match named.len().saturating_sub(LISTED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    first.collect::<Vec<_>>().join(", ") + &more
}
