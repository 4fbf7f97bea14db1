//! The routes of the API: each request of [`isthmus_api::requests`] with the function that answers it.

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::{Query, State};
use axum::handler::Handler;
use axum::routing::{MethodFilter, on};
use serde::Serialize;

use super::Sources;
use super::response::json_response;
use isthmus_api::requests::{Method, Request};

/// The query parameters of a request.
pub(crate) type Parameters = Query<BTreeMap<String, String>>;

/// Requests with the functions that answer them.
#[derive(Default)]
pub(crate) struct Routes {
    router: Router<Sources>,
    /// The requests, for the test that all have a route.
    #[cfg(test)]
    pub(crate) answered: Vec<(&'static str, &'static str)>,
}

impl Routes {
    /// Answers a request with a value.
    pub(crate) fn value<T: Serialize + 'static>(self, request: &Request<T>, view: fn(&Sources) -> T) -> Self {
        self.with(
            request,
            move |State(sources): State<Sources>| async move { json_response(&view(&sources)) },
        )
    }

    /// Answers a request by a handler.
    pub(crate) fn with<T, P: 'static>(self, request: &Request<T>, handler: impl Handler<P, Sources>) -> Self {
        let method = match request.method {
            Method::Get => MethodFilter::GET,
            Method::Post => MethodFilter::POST,
        };
        Self {
            router: self.router.route(request.path, on(method, handler)),
            #[cfg(test)]
            answered: self.answered.into_iter().chain([(request.method.text(), request.path)]).collect(),
        }
    }

    /// Returns the router of these requests.
    pub(crate) fn router(self) -> Router<Sources> {
        self.router
    }
}
