//! The responses that all requests share: JSON, errors, and the answers to unknown paths and methods.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;

pub(crate) async fn wrong_method() -> Response {
    error(
        StatusCode::METHOD_NOT_ALLOWED,
        "this path has no such method: GET reads, POST changes something; docs/api.md lists the methods of each path",
    )
}

pub(crate) async fn not_found() -> Response {
    error(
        StatusCode::NOT_FOUND,
        "there is no such path in this API; docs/api.md lists the paths, for example /api/v1/status",
    )
}

/// Answers a path that a listener for metrics or health checks does not have.
pub(crate) async fn not_admin() -> Response {
    error(
        StatusCode::NOT_FOUND,
        "this listener is only for metrics or health checks, and has no such path; the admin API is at the address admin.bind of \
         the config",
    )
}

pub(crate) fn json_response(value: &impl Serialize) -> Response {
    // Serialisation fails only for maps with keys that are not strings, and no value of the API has one.
    let mut text = serde_json::to_string(value).unwrap_or_default();
    text.push('\n');
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

pub(crate) fn error(status: StatusCode, text: &str) -> Response {
    (status, json_response(&json!({ "error": text }))).into_response()
}

/// The reason why an order is refused.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The parameters are wrong.
    Parameters(String),
    /// The object of the order does not exist.
    Unknown(String),
    /// The order contradicts the current state.
    Conflict(String),
}

/// Answers an order.
pub(crate) fn answered<T: Serialize>(result: Result<T, Refused>) -> Response {
    match result {
        Ok(value) => json_response(&value),
        Err(Refused::Parameters(text)) => error(StatusCode::BAD_REQUEST, &text),
        Err(Refused::Unknown(text)) => error(StatusCode::NOT_FOUND, &text),
        Err(Refused::Conflict(text)) => error(StatusCode::CONFLICT, &text),
    }
}
