//! Requests for explanations: of a name, of the connections of a trace, and of the endpoints that a client gets.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;

use crate::explain::{ExplainRequest, Explanation, Running, explain};
use crate::horizon::{self, horizon};
use crate::limits::Counters;
use crate::response::{error, json_response};
use crate::routes::{Parameters, Routes};
use crate::{Sources, problems, recent, traces};
use isthmus_api::connection::Connection;
use isthmus_api::requests;
use isthmus_api::trace::{Trace, TracedConnection};
use isthmus_model::identity::Identity;
use isthmus_model::record::ConnectionRecord;
use isthmus_model::trace::TraceId;

pub(super) fn answers(routes: Routes) -> Routes {
    routes
        .with(&requests::EXPLAIN, explain_name)
        .with(&requests::EXPLAIN_AND_PROBE, explain_and_probe)
        .with(&requests::HORIZON, horizon_of)
        .with(&requests::TRACE, trace)
}

async fn explain_name(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let inquiry = match inquiry(query) {
        Ok(inquiry) => inquiry,
        Err(problem) => return error(StatusCode::BAD_REQUEST, &problem),
    };
    match explained(&sources, &inquiry) {
        Ok(explanation) => json_response(&explanation.view()),
        Err(problem) => error(StatusCode::BAD_REQUEST, &problem),
    }
}

/// Explains a name and dials the candidates. The method is POST because dialling has effects.
async fn explain_and_probe(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let explanation = inquiry(query).and_then(|inquiry| explained(&sources, &inquiry));
    match explanation {
        Ok(mut explanation) => {
            explanation.probe().await;
            json_response(&explanation.view())
        }
        Err(problem) => error(StatusCode::BAD_REQUEST, &problem),
    }
}

pub(super) fn explained(sources: &Sources, inquiry: &ExplainRequest) -> Result<Explanation, String> {
    let program = sources.program.load();
    let dataplane = &sources.dataplane;
    let counters = Counters {
        admission: dataplane.admission(),
        services: dataplane.services(),
        bandwidths: dataplane.bandwidths(),
    };
    let running = Running { upstreams: dataplane.upstreams(), counters, listening: &program.listening };
    let mut explanation = explain(&sources.reader.latest(), inquiry, Some(running))?;
    explanation.recent = recent::recent(&sources.telemetry.failures.list(), inquiry);
    explanation.warnings.extend(problems::concerning(sources, inquiry.authority));
    Ok(explanation)
}

/// The error for parameters that describe two requests.
const ONE_REQUEST: &str = "expected exactly one of the parameters sni, authority and tls=false";

pub(super) fn inquiry(query: BTreeMap<String, String>) -> Result<ExplainRequest, String> {
    let mut inquiry = ExplainRequest::default();
    for (key, value) in query {
        match key.as_str() {
            "sni" | "authority" if inquiry.name.is_some() => {
                return Err(ONE_REQUEST.to_owned());
            }
            "sni" => inquiry.name = (!value.is_empty()).then_some(value),
            "tls" if value == "false" => inquiry.is_not_tls = true,
            "authority" => {
                inquiry.authority = true;
                inquiry.name = Some(value);
            }
            "identity" => {
                let identity =
                    Identity::parse(&value).map_err(|error| format!("identity: {value:?}: {error}"))?;
                inquiry.identity = Some(identity);
            }
            "listener" => inquiry.listener = Some(value),
            "from" => {
                let source: IpAddr =
                    value.parse().map_err(|_| format!("from: {value:?} is not an IP address"))?;
                inquiry.source = Some(source.to_canonical());
            }
            "to" => {
                let local: IpAddr =
                    value.parse().map_err(|_| format!("to: {value:?} is not an IP address"))?;
                inquiry.local = Some(local.to_canonical());
            }
            "alpn" => {
                let names = value.split(',').filter(|name| !name.is_empty());
                inquiry.alpn = Some(names.map(str::to_owned).collect());
            }
            other => {
                return Err(format!(
                    "unknown parameter {other:?}; expected one of sni, authority, tls=false, listener, from, to, \
                     alpn, identity"
                ));
            }
        }
    }
    if inquiry.is_not_tls && inquiry.name.is_some() {
        return Err(ONE_REQUEST.to_owned());
    }
    Ok(inquiry)
}

async fn horizon_of(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let answer = horizon::HorizonRequest::from_parameters(query)
        .map_err(horizon::HorizonError::Invalid)
        .and_then(|inquiry| horizon(&sources.reader.latest(), &sources.liveness.distances(), &inquiry));
    match answer {
        Ok(horizon::Answer::One(one)) => json_response(&one),
        Ok(horizon::Answer::All(all)) => json_response(&all),
        Err(horizon::HorizonError::Invalid(text)) => error(StatusCode::BAD_REQUEST, &text),
        Err(horizon::HorizonError::Unknown(text)) => error(StatusCode::NOT_FOUND, &text),
    }
}

/// Answers with the connections of a trace, live ones first.
async fn trace(State(sources): State<Sources>, Path(text): Path<String>) -> Response {
    let Some(trace) = TraceId::parse(&text) else {
        return error(StatusCode::BAD_REQUEST, "a trace id has 32 hexadecimal digits, not all of them zero");
    };
    let live = sources.dataplane.connections().await;
    let mut records: Vec<_> =
        live.into_iter().filter(|record| record.trace_id() == Some(trace)).map(Arc::new).collect();
    let ended = sources.telemetry.recent.of(trace, traces::SHOWN_MAX);
    records.retain(|record| ended.iter().all(|other| other.id != record.id));
    records.extend(ended);
    records.truncate(traces::SHOWN_MAX);
    let gateway = sources.telemetry.gateway.load();
    let one = |record: &Arc<ConnectionRecord>| TracedConnection {
        connection: Connection::of(record, &gateway),
        // If a reload has removed the listener, there is no decision.
        decision: traces::question(record)
            .and_then(|question| explained(&sources, &question).ok())
            .map(|found| found.view()),
    };
    json_response(&Trace { trace_id: trace.to_string(), connections: records.iter().map(one).collect() })
}
