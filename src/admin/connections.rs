//! Connections: the open ones, and the last that failed.

use axum::extract::State;
use axum::response::Response;

use super::response::json_response;
use super::routes::Routes;
use super::{Sources, overview};
use isthmus_api::connection::Connection;
use isthmus_api::requests;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes.with(&requests::CONNECTIONS, open).value(&requests::FAILURES, overview::failures)
}

async fn open(State(sources): State<Sources>) -> Response {
    let records = sources.dataplane.connections().await;
    let gateway = sources.telemetry.gateway.load();
    let open: Vec<Connection> = records.iter().map(|record| Connection::of(record, &gateway)).collect();
    json_response(&open)
}
