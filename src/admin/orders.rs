//! Orders to the process: to read its config again, to stop, to hand over to a new process, to log more or less.

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio::sync::oneshot;

use super::response::{error, json_response};
use super::routes::{Parameters, Routes};
use super::{Command, Patience, Sources, Upgraded};
use isthmus_api::requests;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .with(&requests::RELOAD, reload)
        .with(&requests::STOP, stop)
        .with(&requests::UPGRADE, upgrade)
        .with(&requests::LOG_LEVEL, log_level)
}

pub(crate) async fn reload(State(sources): State<Sources>) -> Response {
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

pub(crate) async fn stop(State(sources): State<Sources>) -> Response {
    match sources.commands.send(Command::Drain).await {
        Ok(()) => (StatusCode::ACCEPTED, json_response(&json!({ "result": "draining" }))).into_response(),
        Err(_) => error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping"),
    }
}

async fn upgrade(State(sources): State<Sources>, Query(query): Parameters) -> Response {
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

async fn log_level(State(sources): State<Sources>, Query(query): Parameters) -> Response {
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
