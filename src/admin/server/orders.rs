//! Requests that change something: reloads, the drain, the log level, endpoints, connections and enrolments.

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;
use tokio::sync::oneshot;

use super::Parameters;
use super::response::{error, json_response};
use crate::drains::{self, Mode};
use crate::maintenance::{self, Order, Refused};
use crate::{Command, Patience, Sources, Upgraded, enrolment};
use isthmus_aggregator::owner::NotAccepted;
use isthmus_dataplane::withdrawals::Withdrawal;

pub(super) async fn reload(State(sources): State<Sources>) -> Response {
    let (answer, wait) = oneshot::channel();
    if sources.commands.send(Command::Reload(answer)).await.is_err() {
        return error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping");
    }
    match wait.await {
        Ok(Ok(done)) => json_response(&json!({ "result": done })),
        Ok(Err(problems)) => {
            (StatusCode::BAD_REQUEST, json_response(&json!({ "problems": problems }))).into_response()
        }
        Err(_) => error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping"),
    }
}

pub(super) async fn drain(State(sources): State<Sources>) -> Response {
    match sources.commands.send(Command::Drain).await {
        Ok(()) => (StatusCode::ACCEPTED, json_response(&json!({ "result": "draining" }))).into_response(),
        Err(_) => error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping"),
    }
}

pub(super) async fn upgrade(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let patience = if query.contains_key("wait") { Patience::Wait } else { Patience::Now };
    let (answer, wait) = oneshot::channel();
    if sources.commands.send(Command::Upgrade(answer, patience)).await.is_err() {
        return error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping");
    }
    match wait.await {
        Ok(Ok(done)) => {
            let Upgraded { process, version, moved, left, took, within } = done;
            let seconds = took.as_secs_f64();
            let mut result = format!(
                "process {process}, version {version}, has taken over in {seconds:.1} s; connections moved: {moved}"
            );
            if left > 0 {
                result += &format!(
                    "; connections and streams that end in the old process, within {} s: {left}",
                    within.as_secs()
                );
            }
            json_response(&json!({
                "result": result, "process": process, "version": version, "moved": moved, "left": left,
                "seconds": seconds,
            }))
        }
        Ok(Err(problem)) => error(StatusCode::CONFLICT, &problem),
        Err(_) => error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping"),
    }
}

pub(super) async fn drain_endpoint(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    maintenance_response(maintenance::endpoint(&sources, Order::Withdraw(Withdrawal::Drained), &query).await)
}

pub(super) async fn disable_endpoint(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    maintenance_response(maintenance::endpoint(&sources, Order::Withdraw(Withdrawal::Disabled), &query).await)
}

pub(super) async fn enable_endpoint(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    maintenance_response(maintenance::endpoint(&sources, Order::Enable, &query).await)
}

pub(super) async fn order_drain(
    State(sources): State<Sources>,
    Query(query): Parameters,
    document: String,
) -> Response {
    let mode = if query.contains_key("force") { Mode::Force } else { Mode::Order };
    maintenance_response(drains::order(&sources, mode, query.contains_key("raise"), &document).await)
}

pub(super) async fn plan_drain(State(sources): State<Sources>, document: String) -> Response {
    maintenance_response(drains::order(&sources, Mode::Plan, false, &document).await)
}

pub(super) async fn end_drain(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let (Some(kind), Some(name), 2) = (query.get("kind"), query.get("name"), query.len()) else {
        return error(StatusCode::BAD_REQUEST, "give the target, and nothing else: ?kind=network&name=west");
    };
    let result = drains::withdraw(&sources, kind, name).await;
    maintenance_response(result.map(|result| json!({ "result": result })))
}

pub(super) async fn accept_registry(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let (Some(name), 1) = (query.get("name"), query.len()) else {
        return error(
            StatusCode::BAD_REQUEST,
            "give the name of the registry, and nothing else: ?name=etcd-west",
        );
    };
    let accepted = sources.aggregator.accept(name).await;
    let refused = |why: NotAccepted| match why {
        NotAccepted::Unknown => Refused::Unknown(why.to_string()),
        NotAccepted::NothingHeld | NotAccepted::Ended => Refused::Conflict(why.to_string()),
    };
    let result = accepted.map_err(refused);
    maintenance_response(result.map(|()| json!({ "result": "the update that was held back is applied" })))
}

pub(super) async fn close_connection(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    maintenance_response(maintenance::close(&sources, &query).await)
}

fn maintenance_response(result: Result<impl Serialize, Refused>) -> Response {
    match result {
        Ok(value) => json_response(&value),
        Err(Refused::Parameters(text)) => error(StatusCode::BAD_REQUEST, &text),
        Err(Refused::Unknown(text)) => error(StatusCode::NOT_FOUND, &text),
        Err(Refused::Conflict(text)) => error(StatusCode::CONFLICT, &text),
    }
}

pub(super) async fn log_level(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let Some(level) = query.get("level").cloned() else {
        return error(
            StatusCode::BAD_REQUEST,
            "the level is missing; add ?level=error, warn, info, debug or trace",
        );
    };
    let (answer, wait) = oneshot::channel();
    if sources.commands.send(Command::LogLevel(level.clone(), answer)).await.is_err() {
        return error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping");
    }
    match wait.await {
        Ok(Ok(())) => json_response(&json!({ "result": level })),
        Ok(Err(problem)) => error(StatusCode::BAD_REQUEST, &problem),
        Err(_) => error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping"),
    }
}

pub(super) async fn invitation_of(State(sources): State<Sources>, Path(name): Path<String>) -> Response {
    match enrolment::invitation(&sources, &name) {
        Some(invitation) => json_response(&invitation),
        None => error(StatusCode::NOT_FOUND, "the peer was not invited since the start of this gateway"),
    }
}

pub(super) async fn invite_peer(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    Query(query): Parameters,
) -> Response {
    match enrolment::invite(&sources, &name, &query) {
        Ok(token) => json_response(&token),
        Err(problem) => error(StatusCode::CONFLICT, &problem),
    }
}

pub(super) async fn join_peer(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    Query(query): Parameters,
    token: String,
) -> Response {
    match enrolment::join(&sources, &name, &token, &query).await {
        Ok(link) => json_response(&link),
        Err(problem) => error(StatusCode::CONFLICT, &problem),
    }
}
