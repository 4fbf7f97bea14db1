//! The HTTP servers: the admin API, and the separate listeners for metrics and health. This file owns the listeners, and the lists
//! of the files that answer requests and have metrics.
//!
//! - `connection`: one client. `guard`: the requests that are accepted.
//! - `probes`: metrics and health. `pages`: the dashboard. `explanations`: explained names and traces.

mod connection;
mod explanations;
mod guard;
mod pages;
mod probes;

use axum::Router;
use axum::middleware;
use axum::routing::{get, post};

use self::connection::serve_connection;
use self::guard::{guard, own_host_only};
use self::pages::asset;
use self::probes::{readyz, scrape};
use super::response::{not_admin, not_found, wrong_method};
use super::routes::Routes;
use super::scraped::Scraped;
use super::{
    Sources, certificates, clients, connections, dashboard, drains, endpoints, enrolment, exposed,
    limit_metrics, listeners, maintenance, networks, orders, peer_metrics, peers, problems, registries,
    services, status, steering, time_metrics,
};
use isthmus_net::door::Limits;
use isthmus_net::incoming::{Accept, Incoming};
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;

/// The functions that add the requests which a file answers, but for those of [`enrolment`].
const OWNERS: [fn(Routes) -> Routes; 18] = [
    probes::metrics_answers,
    probes::health_answers,
    pages::answers,
    status::answers,
    services::answers,
    endpoints::answers,
    listeners::answers,
    registries::answers,
    networks::answers,
    clients::answers,
    connections::answers,
    certificates::answers,
    exposed::answers,
    explanations::answers,
    peers::answers,
    drains::answers,
    maintenance::answers,
    orders::answers,
];

/// The metrics that are computed at each scrape.
pub static SCRAPED: [Scraped; 8] = [
    problems::METRICS,
    endpoints::METRICS,
    time_metrics::METRICS,
    limit_metrics::METRICS,
    networks::METRICS,
    steering::METRICS,
    registries::METRICS,
    peer_metrics::METRICS,
];

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
        Part::Metrics => only(probes::metrics_answers, metrics_aliases(), sources),
        Part::Health => only(probes::health_answers, health_aliases(), sources),
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

/// Serves only metrics, or only health checks.
fn only(answers: fn(Routes) -> Routes, aliases: Router<Sources>, sources: Sources) -> Router {
    let routes = answers(Routes::default()).router().merge(aliases);
    routes.method_not_allowed_fallback(wrong_method).fallback(not_admin).with_state(sources)
}

/// A further path of the metrics, which Envoy has.
fn metrics_aliases() -> Router<Sources> {
    Router::new().route("/stats/prometheus", get(scrape))
}

/// A further path of readiness, which sidecars of Istio have.
fn health_aliases() -> Router<Sources> {
    Router::new().route("/healthz/ready", get(readyz))
}

fn admin(sources: Sources, hosts: Hosts) -> Router {
    let owned = OWNERS.iter().fold(Routes::default(), |routes, answers| answers(routes));
    // A client that may send requests about enrolments can make itself a peer, so the gateway accepts them only from its own host.
    let enrolments = enrolment::answers(Routes::default()).router();
    let enrolments =
        enrolments.route_layer(middleware::from_fn(move |request, next| own_host_only(hosts, request, next)));
    owned
        .router()
        .merge(enrolments)
        .merge(metrics_aliases())
        .merge(health_aliases())
        .route("/dashboard.css", get(async || asset("text/css; charset=utf-8", dashboard::STYLE)))
        .route("/dashboard.js", get(async || asset("text/javascript; charset=utf-8", dashboard::SCRIPT)))
        .route("/reload", post(orders::reload))
        .route("/drain", post(orders::stop))
        .method_not_allowed_fallback(wrong_method)
        .fallback(not_found)
        .layer(middleware::from_fn(move |request, next| guard(hosts, request, next)))
        .with_state(sources)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use isthmus_api::requests;

    #[test]
    fn each_request_of_the_table_has_a_route() {
        let owned = OWNERS.iter().fold(Routes::default(), |routes, answers| answers(routes));
        let answered: BTreeSet<_> = enrolment::answers(owned).answered.into_iter().collect();
        let listed: BTreeSet<_> = requests::ALL.iter().map(|row| (row.method.text(), row.path)).collect();
        assert_eq!(answered, listed);
    }
}
