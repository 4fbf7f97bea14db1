//! The HTTP servers: the admin API, and the separate listeners for metrics and health. This file owns the listeners, the paths,
//! and the requests that list something.
//!
//! - `connection`: one client. `guard`: the requests that are accepted. `response`: the responses that all share.
//! - `probes`: metrics and health. `pages`: the dashboard. `explanations`: explained names and traces. `orders`: changes.

mod connection;
mod explanations;
mod guard;
mod orders;
mod pages;
mod probes;
mod response;

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::middleware;
use axum::response::Response;
use axum::routing::{get, post};

use self::connection::serve_connection;
use self::explanations::{explain_and_probe, explain_name, horizon_of, trace};
use self::guard::{guard, own_host_only};
use self::orders::{
    accept_registry, close_connection, disable_endpoint, drain, drain_endpoint, enable_endpoint, end_drain,
    invitation_of, invite_peer, join_peer, log_level, order_drain, plan_drain, reload, upgrade,
};
use self::pages::{asset, dashboard_page, overview_of};
use self::probes::{livez, metrics, readyz};
use self::response::{error, json_response, not_admin, not_found, wrong_method};
use super::{Sources, clients, dashboard, drains, endpoints, networks, overview, peers, views};
use isthmus_api::connection::Connection;
use isthmus_model::name::HostName;
use isthmus_net::door::Limits;
use isthmus_net::incoming::{Accept, Incoming};
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;

/// The query parameters of a request.
type Parameters = Query<BTreeMap<String, String>>;

/// The part of the API that an address serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The whole API, with metrics, liveness and readiness.
    Admin,
    /// Metrics only.
    Metrics,
    /// Liveness and readiness only.
    Health,
}

impl Part {
    /// Returns the name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Metrics => "metrics",
            Self::Health => "health",
        }
    }
}

/// The `Host` headers that the admin listener accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// The host of a request must be an IP address or `localhost`. If other names were accepted, a web page could send requests
    /// to this listener by DNS rebinding.
    Own,
    /// Any host, for a unix socket, which web pages cannot reach.
    Any,
}

/// Serves until the order to stop: then requests in progress are answered, and no more are accepted.
pub fn serve<L>(part: Part, listener: L, hosts: Hosts, sources: Sources, scope: &Scope, stop: &Stop)
where
    L: Accept + Send + Sync + 'static,
{
    let connections = sources.program.load().limits.http_connections;
    let limits = Limits::new(connections);
    let incoming =
        Incoming::new(listener, part.name(), limits, sources.own.clone(), &sources.telemetry.recorder);
    let app = match part {
        Part::Admin => admin(sources, hosts),
        Part::Metrics => metrics_only(sources),
        Part::Health => health_only(sources),
    };
    let (connections, stop) = (scope.clone(), stop.clone());
    scope.spawn(async move {
        let mut stopped = stop.receiver();
        loop {
            tokio::select! {
                biased;
                () = stopped.ordered() => return,
                (socket, seat) = incoming.accept() => {
                    connections.spawn(serve_connection(socket, seat, app.clone(), stop.receiver()));
                }
            }
        }
    });
}

fn metrics_routes() -> Router<Sources> {
    Router::new().route("/metrics", get(metrics)).route("/stats/prometheus", get(metrics))
}

fn health_routes() -> Router<Sources> {
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/healthz/ready", get(readyz))
}

fn metrics_only(sources: Sources) -> Router {
    metrics_routes().method_not_allowed_fallback(wrong_method).fallback(not_admin).with_state(sources)
}

fn health_only(sources: Sources) -> Router {
    health_routes().method_not_allowed_fallback(wrong_method).fallback(not_admin).with_state(sources)
}

fn admin(sources: Sources, hosts: Hosts) -> Router {
    let api = Router::new()
        .route("/overview", get(overview_of))
        .route("/status", get(async |State(sources): State<Sources>| json_response(&views::status(&sources))))
        .route(
            "/listeners",
            get(async |State(sources): State<Sources>| json_response(&views::listeners(&sources))),
        )
        .route("/endpoints", get(all_endpoints))
        .route("/config", get(config))
        .route("/registries", get(registries))
        .route("/routes", get(routes))
        .route("/services", get(services))
        .route("/services/{hostname}", get(service))
        .route("/exposed", get(exposed))
        .route("/connections", get(connections))
        .route(
            "/clients",
            get(async |State(sources): State<Sources>| json_response(&clients::clients(&sources.clients))),
        )
        .route(
            "/certificates",
            get(async |State(sources): State<Sources>| json_response(&sources.identities.certificates())),
        )
        .route("/failures", get(failures))
        .route("/traces/{trace}", get(trace))
        .route("/explain", get(explain_name).post(explain_and_probe))
        .route("/horizon", get(horizon_of))
        .route("/gateways", get(gateways))
        .route("/networks", get(networks_list))
        .route("/peers", get(all_peers))
        .route("/peers/{name}", get(one_peer))
        .merge(enrolments(hosts))
        .route("/endpoints/drain", post(drain_endpoint))
        .route("/endpoints/disable", post(disable_endpoint))
        .route("/endpoints/enable", post(enable_endpoint))
        .route("/registries/accept", post(accept_registry))
        .route("/connections/close", post(close_connection))
        .route("/reload", post(reload))
        .route("/drain", post(drain))
        .route("/drains", get(drains_list).post(order_drain))
        .route("/drains/plan", post(plan_drain))
        .route("/drains/end", post(end_drain))
        .route("/upgrade", post(upgrade))
        .route("/log-level", post(log_level))
        .method_not_allowed_fallback(wrong_method);
    Router::new()
        .merge(metrics_routes())
        .merge(health_routes())
        .nest("/api/v1", api)
        .route("/", get(dashboard_page))
        .route("/dashboard.css", get(async || asset("text/css; charset=utf-8", dashboard::STYLE)))
        .route("/dashboard.js", get(async || asset("text/javascript; charset=utf-8", dashboard::SCRIPT)))
        .route("/reload", post(reload))
        .route("/drain", post(drain))
        .method_not_allowed_fallback(wrong_method)
        .fallback(not_found)
        .layer(middleware::from_fn(move |request, next| guard(hosts, request, next)))
        .with_state(sources)
}

/// The routes of requests about enrolments. A client that may send such requests can make itself a peer, so the gateway accepts
/// them only from its own host.
fn enrolments(hosts: Hosts) -> Router<Sources> {
    Router::new()
        .route("/peers/{name}/invite", get(invitation_of).post(invite_peer))
        .route("/peers/{name}/join", post(join_peer))
        .route_layer(middleware::from_fn(move |request, next| own_host_only(hosts, request, next)))
}

async fn services(State(sources): State<Sources>) -> Response {
    json_response(&views::services(&sources.reader.latest()))
}

async fn service(State(sources): State<Sources>, Path(hostname): Path<String>) -> Response {
    let name = HostName::parse(&hostname).ok();
    let upstreams = sources.dataplane.upstreams();
    let view = name.and_then(|name| views::service(&sources.reader.latest(), name.as_str(), upstreams));
    match view {
        Some(view) => json_response(&view),
        None => error(StatusCode::NOT_FOUND, "no such service is known"),
    }
}

async fn all_peers(State(sources): State<Sources>) -> Response {
    let all = peers::peers(&sources);
    json_response(&all)
}

async fn one_peer(State(sources): State<Sources>, Path(name): Path<String>) -> Response {
    match peers::peer(&sources.reader.latest(), &name) {
        Some(peer) => json_response(&peer),
        None => error(StatusCode::NOT_FOUND, "the config has no peer of this name"),
    }
}

async fn registries(State(sources): State<Sources>) -> Response {
    json_response(&views::registries(&sources.aggregator.status.borrow()))
}

async fn routes(State(sources): State<Sources>) -> Response {
    json_response(&views::routes(&sources.reader.latest()))
}

async fn all_endpoints(State(sources): State<Sources>) -> Response {
    json_response(&endpoints::endpoints(&sources.reader.latest(), sources.dataplane.upstreams()))
}

async fn exposed(State(sources): State<Sources>) -> Response {
    json_response(&views::exposed(&sources.reader.latest()))
}

async fn connections(State(sources): State<Sources>) -> Response {
    let records = sources.dataplane.connections().await;
    let gateway = sources.telemetry.gateway.load();
    let views: Vec<Connection> = records.iter().map(|record| Connection::of(record, &gateway)).collect();
    json_response(&views)
}

async fn failures(State(sources): State<Sources>) -> Response {
    json_response(&overview::failures(&sources))
}

async fn gateways(State(sources): State<Sources>) -> Response {
    json_response(&networks::gateways(&sources.reader.latest(), &sources.liveness.states()))
}

async fn networks_list(State(sources): State<Sources>) -> Response {
    json_response(&networks::of(&sources))
}

async fn drains_list(State(sources): State<Sources>) -> Response {
    json_response(&drains::drains(&sources).await)
}

async fn config(State(sources): State<Sources>) -> Response {
    json_response(&(sources.program.load().in_use.0)())
}
