//! Planned drains: their list, the plan of an order, and orders.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::SystemTime;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use super::Sources;
use super::maintenance;
use super::response::{Refused, answered, error, json_response};
use super::routes::{Parameters, Routes};
use isthmus_aggregator::drain_orders::OrderError;
use isthmus_api::drain as api;
use isthmus_api::requests;
use isthmus_dataplane::withdrawals::Which;
use isthmus_decisions::view::{Assignment, Entry, Viewer, view};
use isthmus_document::drains;
use isthmus_model::drain::{Drain, DrainTarget, PARTS};
use isthmus_model::endpoint::Health;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::record::ConnectionRecord;
use isthmus_model::time::{rfc3339_seconds, unix_seconds};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::Role;
use isthmus_snapshot::drain_scope::Emptied;
use isthmus_snapshot::drains::{ActiveDrain, DrainSource};
use isthmus_tasks::background;

/// The largest number of changes that a plan lists.
const CHANGES_MAX: usize = 1_000;
/// The largest number of source addresses that the list shows of a drain.
const SOURCES_MAX: usize = 5;
/// The name of an order in problems.
const ORDER: &str = "drain";

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .with(&requests::DRAINS, async |State(sources): State<Sources>| {
            json_response(&drains(&sources).await)
        })
        .with(&requests::ORDER_DRAIN, ordered)
        .with(&requests::PLAN_DRAIN, async |State(sources): State<Sources>, document: String| {
            answered(order(&sources, Mode::Plan, false, &document).await)
        })
        .with(&requests::END_DRAIN, end)
}

async fn ordered(State(sources): State<Sources>, Query(query): Parameters, document: String) -> Response {
    let mode = if query.contains_key("force") { Mode::Force } else { Mode::Order };
    answered(order(&sources, mode, query.contains_key("raise"), &document).await)
}

async fn end(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let (Some(kind), Some(name), 2) = (query.get("kind"), query.get("name"), query.len()) else {
        return error(StatusCode::BAD_REQUEST, "give the target, and nothing else: ?kind=network&name=west");
    };
    let result = withdraw(&sources, kind, name).await;
    answered(result.map(|result| json!({ "result": result })))
}

/// Returns the drains in force that concern anything, and those of operators.
async fn drains(sources: &Sources) -> Vec<api::Drain> {
    let snapshot = sources.reader.latest();
    if snapshot.drains.is_empty() {
        return Vec::new();
    }
    let connections = sources.dataplane.connections().await;
    let own = sources.own.clone();
    let now = unix_seconds(SystemTime::now());
    let shown = move || {
        let is_own = |address: SocketAddr| own.is_own(address);
        let of = |active: &ActiveDrain| shown(active, &snapshot, &connections, &is_own, now);
        snapshot.effective_drains().map(of).collect()
    };
    // The connections of a busy gateway are many.
    background::run(shown).await.unwrap_or_default()
}

fn shown(
    active: &ActiveDrain,
    snapshot: &Snapshot,
    connections: &[ConnectionRecord],
    is_own: &dyn Fn(SocketAddr) -> bool,
    now: u64,
) -> api::Drain {
    let drain = &active.drain;
    let services = snapshot.drained_by(active);
    let mut emptied = Emptied::new(active, snapshot, is_own);
    let left: Vec<&ConnectionRecord> = connections.iter().filter(|record| emptied.has(record)).collect();
    let mut by_source: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for record in &left {
        *by_source.entry(record.source.ip()).or_default() += 1;
    }
    let mut by_source: Vec<(IpAddr, usize)> = by_source.into_iter().collect();
    by_source.sort_by_key(|(ip, count)| (std::cmp::Reverse(*count), *ip));
    let all = if emptied.is_this_gateway() {
        connections.len()
    } else {
        let names: BTreeSet<&str> = services.iter().map(HostName::as_str).collect();
        let is_of_them =
            |record: &&ConnectionRecord| record.service.as_deref().is_some_and(|name| names.contains(name));
        connections.iter().filter(is_of_them).count()
    };
    api::Drain {
        kind: drain.target.kind().to_owned(),
        name: drain.target.name(),
        source: active.source.text(),
        reason: drain.reason.to_string(),
        since: if drain.since == 0 { String::new() } else { rfc3339_seconds(drain.since) },
        over_s: drain.over.as_secs(),
        to_percent: drain.to_percent,
        until: drain.until.map(rfc3339_seconds),
        close_after_s: drain.close_after.map(|after| after.as_secs()),
        left_percent: percent(active.left.into(), PARTS.into()),
        connections_percent: (all > 0).then(|| percent(left.len() as u64, all as u64)),
        ramp_left_s: drain.ramp_ends().saturating_sub(now),
        services: services.len(),
        connections: left.len(),
        bytes: left.iter().map(|record| record.bytes_up + record.bytes_down).sum(),
        sources: by_source.into_iter().take(SOURCES_MAX).map(|(ip, _)| ip.to_string()).collect(),
    }
}

fn percent(part: u64, of: u64) -> u8 {
    u8::try_from((part * 100 + of / 2) / of.max(1)).unwrap_or(100)
}

/// Says whether an order is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// The order is carried out, unless a service would be left with nothing but what is drained.
    Order,
    /// The order is carried out in any case.
    Force,
    /// The plan of the order is returned, and nothing is changed.
    Plan,
}

/// Carries out or plans an order. `document` is a drain as in the config; without `since` it begins now. An order for a target that has
/// one goes on from what is left of it, and is refused if more would be left at its end, unless it `raises`.
async fn order(sources: &Sources, mode: Mode, raises: bool, document: &str) -> Result<api::Ordered, Refused> {
    let drain = read(document).map_err(Refused::Parameters)?;
    let snapshot = sources.reader.latest();
    let now = unix_seconds(SystemTime::now());
    let left = parts_left(sources, &snapshot, &drain.target, now);
    let end = drain.parts_at_end();
    let is_raised = end > left;
    let may_raise = raises || drain.raises;
    let drain = Drain { raises: is_raised && may_raise, ..drain };
    let drain = if left < PARTS { drain.going_on_from(left, now) } else { drain };
    let planned = drain.clone();
    let plan = background::run(move || plan(&snapshot, &planned)).await;
    let plan = plan.map_err(|_| Refused::Conflict("internal error: the plan panicked".to_owned()))?;
    let services = plan.services;
    let mut answer = plan.answer;
    let of_all = |parts: u16| percent(parts.into(), PARTS.into());
    (answer.left_percent, answer.to_percent) = (of_all(left), of_all(end));
    if mode == Mode::Plan {
        return Ok(answer);
    }
    if is_raised && !may_raise {
        let text = format!(
            "the drain of {} has {} % left, and this order would raise it to {} %: --raise does so, and `isthmus undrain` ends the drain",
            drain.target, answer.left_percent, answer.to_percent
        );
        return Err(Refused::Conflict(text));
    }
    if mode == Mode::Order && services == 0 {
        let text = format!(
            "no service has an endpoint or a gateway at {}{}; --force keeps the order for those that come",
            drain.target,
            of_route(sources, &drain.target).await
        );
        return Err(Refused::Unknown(text));
    }
    if mode == Mode::Order && !answer.emptied.is_empty() {
        let names =
            answer.emptied.iter().take(SOURCES_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
        let text = format!(
            "{} of {services} services would be left with nothing but what is drained: {names}; --plan shows all changes, and \
             --force drains in any case: what is drained stays the last choice",
            answer.emptied.len()
        );
        return Err(Refused::Conflict(text));
    }
    let target = drain.target.clone();
    let orders = &sources.drain_orders;
    let by_kubectl =
        kubectl(sources, &drain).map(|line| format!("\nfor all gateways that read the cluster:\n{line}"));
    let places = orders.order(drain).await.map_err(|error| Refused::Conflict(error.to_string()))?;
    tracing::info!(target = %target, "an operator ordered a drain");
    answer.result = format!(
        "draining {target}, with endpoints of {services} services: now {} % → {} % of its weight: {places}{}",
        answer.left_percent,
        answer.to_percent,
        by_kubectl.unwrap_or_default()
    );
    Ok(answer)
}

/// Returns the smallest part that is left of the drains of a target; [`PARTS`] if it has none.
fn parts_left(sources: &Sources, snapshot: &Snapshot, target: &DrainTarget, now: u64) -> u16 {
    let in_force = snapshot.drains.0.iter().filter(|active| active.drain.target == *target);
    // An order of a moment ago may not be in the snapshot yet.
    let orders = sources.drain_orders.all().into_iter().filter(|drain| drain.target == *target);
    let ordered = orders.filter_map(|drain| drain.parts_left(now));
    in_force.map(|active| active.left).chain(ordered).min().unwrap_or(PARTS)
}

/// Says what drains the endpoint of a route, if the target is one; else nothing.
async fn of_route(sources: &Sources, target: &DrainTarget) -> String {
    let DrainTarget::Endpoint(ip, port) = target else { return String::new() };
    let (which, snapshot) = (Which { ip: *ip, port: *port, service: None }, sources.reader.latest());
    let (asked, name) = (which.clone(), target.name());
    match background::run(move || maintenance::is_dialled(&snapshot, &asked)).await {
        Ok(true) => {
            format!(", but a route has: `isthmus endpoint drain {name}` takes it out at this gateway")
        }
        Ok(false) | Err(_) => String::new(),
    }
}

/// Returns the command that orders the drain of a Kubernetes Service in its cluster.
fn kubectl(sources: &Sources, drain: &Drain) -> Option<String> {
    let DrainTarget::Service(name) = &drain.target else { return None };
    let snapshot = sources.reader.latest();
    let service = snapshot.service(name.as_str())?;
    let aggregator = sources.aggregator.status.borrow().clone();
    // Only API servers have a version.
    let is_cluster = |registry: &str| {
        let mut named = aggregator.registries.iter().filter(|status| *status.name == *registry);
        named.any(|status| status.report.as_ref().is_some_and(|report| !report.version.is_empty()))
    };
    service.parts.iter().find(|part| is_cluster(&part.origin.registry))?;
    let timing = drains::written(drain).into_iter().filter(|(key, _)| *key != drain.target.kind());
    let timing: BTreeMap<&str, String> = timing.collect();
    let (name, namespace) = (name.as_str().split('.').next()?, &service.namespace);
    let document = serde_json::to_string(&timing).ok()?;
    Some(format!("kubectl annotate --overwrite service -n {namespace} {name} 'isthmus.io/drain={document}'"))
}

/// Ends an operator's drain of a target.
async fn withdraw(sources: &Sources, kind: &str, name: &str) -> Result<String, Refused> {
    let target = DrainTarget::parse(kind, name).map_err(Refused::Parameters)?;
    let snapshot = sources.reader.latest();
    let of_target = || snapshot.drains.0.iter().filter(|active| active.drain.target == target);
    // Another replica may have written the order to a registry.
    let shown_by = of_target().filter_map(|active| match &active.source {
        DrainSource::Registry(name) => Some(name.clone()),
        DrainSource::Config | DrainSource::Operator => None,
    });
    match sources.drain_orders.withdraw(&target, shown_by.collect()).await {
        Ok(places) => {
            tracing::info!(target = %target, "an operator ended a drain");
            let failed = places.failed.iter().map(|failed| format!("; {failed}"));
            let is_ended = |source: &DrainSource| match source {
                DrainSource::Operator => true,
                DrainSource::Config => false,
                DrainSource::Registry(name) => places.registries.contains(name),
            };
            let others = of_target().filter(|active| !is_ended(&active.source));
            let others =
                others.map(|active| format!("; the target is still drained by {}", active.source.text()));
            Ok(format!("the drain of {target} has ended{}", failed.chain(others).collect::<String>()))
        }
        Err(error @ OrderError::Unknown(_)) => Err(Refused::Unknown(error.to_string())),
        Err(error) => Err(Refused::Conflict(error.to_string())),
    }
}

fn read(document: &str) -> Result<Drain, String> {
    let mut fields: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(document).map_err(|error| format!("the body is no JSON object: {error}"))?;
    let now = rfc3339_seconds(unix_seconds(SystemTime::now()));
    fields.entry("since").or_insert(now.into());
    let text = serde_json::Value::Object(fields).to_string();
    drains::read(Path::new(ORDER), &text)
        .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

/// The plan of an order.
struct Plan {
    answer: api::Ordered,
    /// The number of services with an endpoint that would be drained.
    services: usize,
}

/// Computes what callers on each network would get at the end of the drain, with the function that makes their views.
fn plan(snapshot: &Snapshot, drain: &Drain) -> Plan {
    let end = drain.parts_left(drain.ramp_ends().max(drain.since)).unwrap_or(0);
    let active = ActiveDrain { drain: drain.clone().into(), source: DrainSource::Operator, left: end };
    let after = snapshot.with_drain(active.clone());
    let mut names = snapshot.drained_by(&active);
    if active.is_of_gateways() {
        let networks =
            after.networks().iter().filter(|(name, entry)| snapshot.networks().get(name) != Some(entry));
        let behind: BTreeSet<HostName> =
            networks.flat_map(|(name, _)| snapshot.services_behind(name)).cloned().collect();
        names = behind.into_iter().collect();
    }
    let mut answer = api::Ordered::default();
    let mut emptied = BTreeSet::new();
    for name in &names {
        for change in changes(snapshot, &after, name) {
            if change.is_emptied {
                emptied.insert(change.service.clone());
            }
            match answer.changes.len() < CHANGES_MAX {
                true => answer.changes.push(change),
                false => answer.further += 1,
            }
        }
    }
    answer.emptied = emptied.into_iter().collect();
    Plan { answer, services: names.len() }
}

/// Returns the changes for the callers of a service on the networks of its endpoints and on this gateway's network.
fn changes(before: &Snapshot, after: &Snapshot, name: &HostName) -> Vec<api::Planned> {
    let (Some(service), Some(drained)) = (before.service(name.as_str()), after.service(name.as_str())) else {
        return Vec::new();
    };
    let own = &before.policy.node.network;
    let networks: BTreeSet<&Network> = service.networks.iter().chain([own]).collect();
    let mut all = Vec::new();
    for network in networks {
        let viewer =
            Viewer { network: network.clone(), cluster: cluster_of(before, network), ..Viewer::default() };
        for port in &service.ports {
            let Some(port_after) = drained.port(port.port) else { continue };
            let seen =
                |snapshot, service, port| view(snapshot, service, port, "", &viewer).unwrap_or_default();
            let (one, other) = (seen(before, service, port), seen(after, drained, port_after));
            let is_regular = |entry: &Entry| entry.role == Role::Regular && entry.health == Health::Healthy;
            let regular = |of: &Assignment| of.entries.iter().any(is_regular);
            let (shares, shares_after) = (shares(&one), shares(&other));
            if shares == shares_after && regular(&one) == regular(&other) {
                continue;
            }
            all.push(api::Planned {
                service: name.to_string(),
                port: port.port,
                network: network.to_string(),
                before: shares,
                after: shares_after,
                is_emptied: regular(&one) && !regular(&other),
            });
        }
    }
    all
}

/// Returns this gateway's cluster for its own network: endpoints of the unknown network are reached from their own cluster.
fn cluster_of(snapshot: &Snapshot, network: &Network) -> ClusterId {
    let node = &snapshot.policy.node;
    if *network == node.network { node.cluster.clone() } else { Default::default() }
}

/// Returns the shares of the networks in the entries of the first priority, in percent.
fn shares(assignment: &Assignment) -> Vec<api::Share> {
    let first = assignment.entries.iter().filter(|entry| entry.priority == 0);
    let mut weights: BTreeMap<&Network, u64> = BTreeMap::new();
    for entry in first {
        *weights.entry(&entry.network).or_default() += u64::from(entry.weight);
    }
    let total: u64 = weights.values().sum();
    let share = |(network, weight): (&Network, u64)| api::Share {
        network: network.to_string(),
        percent: percent(weight, total),
    };
    weights.into_iter().map(share).collect()
}
