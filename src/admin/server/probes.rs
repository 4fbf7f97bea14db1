//! The paths that monitoring and orchestration read: metrics, liveness and readiness.

use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::SCRAPED;
use crate::Sources;
use crate::routes::{Parameters, Routes};
use isthmus_api::requests;
use isthmus_telemetry::exposition::Exposition;
use isthmus_telemetry::process;

/// The media type of the Prometheus text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The time that `/livez` waits for the data plane before it reports a delay. The status stays 200, because a restart would end
/// all connections.
const ALIVE_WITHIN: Duration = Duration::from_secs(5);

pub(super) fn metrics_answers(routes: Routes) -> Routes {
    routes.with(&requests::METRICS, scrape)
}

pub(super) fn health_answers(routes: Routes) -> Routes {
    routes.with(&requests::LIVEZ, livez).with(&requests::READYZ, readyz)
}

pub(super) async fn scrape(State(sources): State<Sources>) -> Response {
    sources.identities.context.report_expiry(&sources.telemetry);
    let mut exposition = Exposition::default();
    sources.telemetry.recorder.expose(&mut exposition);
    for scraped in &SCRAPED {
        (scraped.expose)(&sources, &mut exposition);
    }
    process::expose(&mut exposition);
    let text = exposition.text();
    ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response()
}

/// Answers 200 while the control runtime works. The text reports a data plane that does not respond.
async fn livez(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    if !query.contains_key("verbose") {
        return "ok\n".into_response();
    }
    let alive = sources.dataplane.alive(ALIVE_WITHIN).await;
    let text = if alive { "[+] data plane answers\nok\n" } else { "[-] data plane does not answer\nok\n" };
    text.into_response()
}

pub(super) async fn readyz(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let own = sources.reader.latest().policy.node.cluster.clone();
    let gates = sources.gates(&own);
    let ready = gates.iter().all(|gate| gate.closed.is_none());
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut text = String::new();
    for gate in &gates {
        match &gate.closed {
            None if query.contains_key("verbose") => text.push_str(&format!("[+] {}\n", gate.name)),
            None => {}
            Some(why) => text.push_str(&format!("[-] {}: {why}\n", gate.name)),
        }
    }
    text.push_str(if ready { "ok\n" } else { "not ready\n" });
    (status, text).into_response()
}
