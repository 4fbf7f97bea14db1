//! The dashboard and the overview that it is made from.

use std::collections::BTreeMap;

use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::explanations::{explained, inquiry};
use crate::dashboard::{self, Explained};
use crate::response::json_response;
use crate::routes::{Parameters, Routes};
use crate::{Sources, overview, selection};
use isthmus_api::requests;

pub(super) fn answers(routes: Routes) -> Routes {
    routes.with(&requests::DASHBOARD, dashboard_page).with(&requests::OVERVIEW, overview_of)
}

/// Reads the parameters of a page of the overview; ignores unknown ones.
fn page_of(query: &BTreeMap<String, String>) -> selection::Ask {
    let number = |text: &String| text.parse().unwrap_or(1);
    let name = |key: &str| query.get(key).cloned();
    selection::Ask {
        query: query.get("q").cloned().unwrap_or_default(),
        page: query.get("page").map_or(1, number),
        opens: selection::Opens {
            network: name("network"),
            service: name("service"),
            endpoint: name("endpoint"),
        },
    }
}

async fn overview_of(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    json_response(&overview::overview(&sources, &page_of(&query)).await)
}

async fn dashboard_page(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let text = |key: &str| query.get(key).map(|text| text.trim().to_owned()).unwrap_or_default();
    let mut explained = Explained {
        name: text("explain"),
        authority: query.contains_key("authority"),
        from: text("from"),
        answer: None,
    };
    if !explained.name.is_empty() {
        let name = if explained.authority { "authority" } else { "sni" };
        let mut parameters = BTreeMap::from([(name.to_owned(), explained.name.clone())]);
        if !explained.from.is_empty() {
            parameters.insert("from".to_owned(), explained.from.clone());
        }
        let answer = inquiry(parameters).and_then(|inquiry| self::explained(&sources, &inquiry));
        explained.answer = Some(answer.map(|answer| answer.view()));
    }
    let overview = overview::overview(&sources, &page_of(&query)).await;
    asset("text/html; charset=utf-8", dashboard::page(&overview, &explained))
}

/// Returns a resource of the dashboard, with headers that limit what browsers may do with it.
pub(super) fn asset(media: &'static str, text: impl IntoResponse) -> Response {
    let headers = [
        (header::CONTENT_TYPE, media),
        (header::CONTENT_SECURITY_POLICY, dashboard::POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, text).into_response()
}
