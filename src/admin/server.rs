//! The HTTP servers: the admin API, and the separate listeners for metrics and health.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;

use super::dashboard::{self, Explained};
use super::explain::{ExplainRequest, Explanation, Running, explain};
use super::horizon::{self, horizon};
use super::limits::Counters;
use super::maintenance::{self, Order, Refused};
use super::problems;
use super::registry_metrics;
use super::{
    Command, Sources, check_metrics, clients, endpoints, enrolment, limit_metrics, networks, overview,
    peer_metrics, peers, recent, traces, views,
};
use isthmus_api::connection::Connection;
use isthmus_api::trace::{Trace, TracedConnection};
use isthmus_dataplane::withdrawals::Withdrawal;
use isthmus_model::identity::Identity;
use isthmus_model::name::HostName;
use isthmus_model::record::ConnectionRecord;
use isthmus_model::trace::TraceId;
use isthmus_net::incoming::{Accept, Guarded, Incoming, Limits, Seat};
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::exposition::Exposition;
use isthmus_telemetry::process;

/// The media type of the Prometheus text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The time that `/livez` waits for the data plane before it reports a delay. The status stays 200, because a restart would end
/// all connections.
const ALIVE_WITHIN: Duration = Duration::from_secs(5);

/// The time within which a client must send the head of a request, for each request of a connection.
const HEADER_WITHIN: Duration = Duration::from_secs(10);
/// The size of the largest request head, in bytes.
const HEADER_BYTES_MAX: usize = 32 * 1024;

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

/// Serves until the process ends.
pub fn serve<L>(part: Part, listener: L, hosts: Hosts, sources: Sources, scope: &Scope)
where
    L: Accept + Send + Sync + 'static,
{
    let connections = sources.program.load().limits.http_connections;
    let limits = Limits { connections, unsettled: connections, first_request: None };
    let incoming =
        Incoming::new(listener, part.name(), limits, sources.own.clone(), &sources.telemetry.recorder);
    let app = match part {
        Part::Admin => admin(sources, hosts),
        Part::Metrics => metrics_only(sources),
        Part::Health => health_only(sources),
    };
    let connections = scope.clone();
    scope.spawn(async move {
        loop {
            let (socket, seat) = incoming.accept().await;
            connections.spawn(serve_connection(socket, seat, app.clone()));
        }
    });
}

/// Serves one client until it disconnects, is idle for too long, or must give way to another client.
async fn serve_connection<S>(socket: S, seat: Arc<Seat>, app: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(Guarded::new(socket, &seat));
    let app = TowerToHyperService::new(app);
    let asking = seat.clone();
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        asking.settle();
        request.extensions_mut().insert(Caller(asking.peer().ip().to_canonical()));
        let (answer, asking) = (app.call(request), asking.clone());
        async move {
            let answer = answer.await;
            asking.idle();
            answer
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_WITHIN).max_buf_size(HEADER_BYTES_MAX);
    if let Err(error) = builder.serve_connection(io, service).await {
        if error.is_timeout() {
            seat.was_silent();
        }
        tracing::debug!(peer = %seat.peer(), %error, "HTTP connection ends");
    }
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
        .route("/connections/close", post(close_connection))
        .route("/reload", post(reload))
        .route("/drain", post(drain))
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

/// The address that a request comes from.
#[derive(Clone, Copy)]
struct Caller(IpAddr);

/// Refuses requests that come neither over loopback nor over a unix socket.
async fn own_host_only(hosts: Hosts, request: Request, next: Next) -> Response {
    let is_loopback = request.extensions().get().is_some_and(|Caller(address)| address.is_loopback());
    if hosts == Hosts::Own && !is_loopback {
        return error(
            StatusCode::FORBIDDEN,
            "the gateway accepts invitations and joins only from its own host: run the command there, and give a loopback \
             address or unix socket of admin.bind with --admin",
        );
    }
    next.run(request).await
}

/// Refuses requests that come from web pages: requests with a foreign host name (DNS rebinding), and POST requests from another
/// origin.
async fn guard(hosts: Hosts, request: Request, next: Next) -> Response {
    let headers = request.headers();
    if hosts == Hosts::Own && !is_own_host(headers) {
        return error(StatusCode::FORBIDDEN, "the Host header must be an address or localhost");
    }
    if request.method() != Method::GET && headers.contains_key(header::ORIGIN) {
        return error(
            StatusCode::FORBIDDEN,
            "a POST request with an Origin header, as web pages send it, is \
             refused",
        );
    }
    next.run(request).await
}

/// Returns true if `Host` is an address or `localhost`, with or without a port.
fn is_own_host(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let Ok(host) = host.to_str() else {
        return false;
    };
    if host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

async fn metrics(State(sources): State<Sources>) -> Response {
    sources.identities.context.report_expiry(&sources.telemetry);
    let mut exposition = Exposition::default();
    sources.telemetry.recorder.expose(&mut exposition);
    problems::expose(&problems::problems(&sources), &mut exposition);
    check_metrics::expose(&sources.dataplane.checks(), &mut exposition);
    limit_metrics::expose(&sources.program.load().limits, &mut exposition);
    registry_metrics::expose(&sources.aggregator.borrow().registries, &mut exposition);
    peer_metrics::expose(&sources, &mut exposition);
    process::expose(&mut exposition);
    let text = exposition.text();
    ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response()
}

/// Answers 200 while the control runtime works. The text reports a data plane that does not respond.
async fn livez(State(sources): State<Sources>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    if !query.contains_key("verbose") {
        return "ok\n".into_response();
    }
    let alive = sources.dataplane.alive(ALIVE_WITHIN).await;
    let text = if alive { "[+] data plane answers\nok\n" } else { "[-] data plane does not answer\nok\n" };
    text.into_response()
}

async fn readyz(State(sources): State<Sources>, Query(query): Query<BTreeMap<String, String>>) -> Response {
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
    let all = peers::peers(&sources.reader.latest(), &sources.links, &sources.aggregator.borrow());
    json_response(&all)
}

async fn one_peer(State(sources): State<Sources>, Path(name): Path<String>) -> Response {
    match peers::peer(&sources.reader.latest(), &name) {
        Some(peer) => json_response(&peer),
        None => error(StatusCode::NOT_FOUND, "the config has no peer of this name"),
    }
}

async fn invitation_of(State(sources): State<Sources>, Path(name): Path<String>) -> Response {
    match enrolment::invitation(&sources, &name) {
        Some(invitation) => json_response(&invitation),
        None => error(StatusCode::NOT_FOUND, "the peer was not invited since the start of this gateway"),
    }
}

async fn invite_peer(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    match enrolment::invite(&sources, &name, &query) {
        Ok(token) => json_response(&token),
        Err(problem) => error(StatusCode::CONFLICT, &problem),
    }
}

async fn join_peer(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
    token: String,
) -> Response {
    match enrolment::join(&sources, &name, &token, &query).await {
        Ok(link) => json_response(&link),
        Err(problem) => error(StatusCode::CONFLICT, &problem),
    }
}

async fn registries(State(sources): State<Sources>) -> Response {
    json_response(&views::registries(&sources.aggregator.borrow()))
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

/// Reads the parameters of a page of the overview; ignores unknown ones.
fn page_of(query: &BTreeMap<String, String>) -> overview::Ask {
    let number = |text: &String| text.parse().unwrap_or(1);
    overview::Ask {
        query: query.get("q").cloned().unwrap_or_default(),
        page: query.get("page").map_or(1, number),
    }
}

async fn overview_of(
    State(sources): State<Sources>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    json_response(&overview::overview(&sources, &page_of(&query)).await)
}

async fn dashboard_page(
    State(sources): State<Sources>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
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
fn asset(media: &'static str, text: impl IntoResponse) -> Response {
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

async fn explain_name(
    State(sources): State<Sources>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
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
async fn explain_and_probe(
    State(sources): State<Sources>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    let explanation = inquiry(query).and_then(|inquiry| explained(&sources, &inquiry));
    match explanation {
        Ok(mut explanation) => {
            explanation.probe().await;
            json_response(&explanation.view())
        }
        Err(problem) => error(StatusCode::BAD_REQUEST, &problem),
    }
}

fn explained(sources: &Sources, inquiry: &ExplainRequest) -> Result<Explanation, String> {
    let program = sources.program.load();
    let dataplane = &sources.dataplane;
    let counters = Counters { admission: dataplane.admission(), services: dataplane.services() };
    let running = Running { upstreams: dataplane.upstreams(), counters, listening: &program.listening };
    let mut explanation = explain(&sources.reader.latest(), inquiry, Some(running))?;
    explanation.recent = recent::recent(&sources.telemetry.failures.list(), inquiry);
    explanation.warnings.extend(problems::concerning(sources, inquiry.authority));
    Ok(explanation)
}

fn inquiry(query: BTreeMap<String, String>) -> Result<ExplainRequest, String> {
    let mut inquiry = ExplainRequest::default();
    for (key, value) in query {
        match key.as_str() {
            "sni" | "authority" if inquiry.name.is_some() => {
                return Err("expected exactly one of the parameters sni and authority".to_owned());
            }
            "sni" => inquiry.name = (!value.is_empty()).then_some(value),
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
            "alpn" => {
                let names = value.split(',').filter(|name| !name.is_empty());
                inquiry.alpn = Some(names.map(str::to_owned).collect());
            }
            other => {
                return Err(format!(
                    "unknown parameter {other:?}; expected one of sni, authority, listener, from, alpn, \
                     identity"
                ));
            }
        }
    }
    Ok(inquiry)
}

async fn horizon_of(
    State(sources): State<Sources>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    let answer = horizon::HorizonRequest::from_parameters(query)
        .map_err(horizon::HorizonError::Invalid)
        .and_then(|inquiry| horizon(&sources.reader.latest(), &inquiry));
    match answer {
        Ok(horizon::Answer::One(one)) => json_response(&one),
        Ok(horizon::Answer::All(all)) => json_response(&all),
        Err(horizon::HorizonError::Invalid(text)) => error(StatusCode::BAD_REQUEST, &text),
        Err(horizon::HorizonError::Unknown(text)) => error(StatusCode::NOT_FOUND, &text),
    }
}

async fn gateways(State(sources): State<Sources>) -> Response {
    json_response(&networks::gateways(&sources.reader.latest()))
}

async fn networks_list(State(sources): State<Sources>) -> Response {
    json_response(&networks::networks(&sources.reader.latest()))
}

async fn config(State(sources): State<Sources>) -> Response {
    json_response(&(sources.program.load().in_use.0)())
}

async fn reload(State(sources): State<Sources>) -> Response {
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

async fn drain(State(sources): State<Sources>) -> Response {
    match sources.commands.send(Command::Drain).await {
        Ok(()) => (StatusCode::ACCEPTED, json_response(&json!({ "result": "draining" }))).into_response(),
        Err(_) => error(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping"),
    }
}

/// The query parameters of a request.
type Parameters = Query<BTreeMap<String, String>>;

async fn drain_endpoint(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    obeyed(maintenance::endpoint(&sources, Order::Withdraw(Withdrawal::Drained), &query).await)
}

async fn disable_endpoint(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    obeyed(maintenance::endpoint(&sources, Order::Withdraw(Withdrawal::Disabled), &query).await)
}

async fn enable_endpoint(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    obeyed(maintenance::endpoint(&sources, Order::Enable, &query).await)
}

async fn close_connection(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    obeyed(maintenance::close(&sources, &query).await)
}

fn obeyed(result: Result<Value, Refused>) -> Response {
    match result {
        Ok(value) => json_response(&value),
        Err(Refused::Parameters(text)) => error(StatusCode::BAD_REQUEST, &text),
        Err(Refused::Unknown(text)) => error(StatusCode::NOT_FOUND, &text),
        Err(Refused::Conflict(text)) => error(StatusCode::CONFLICT, &text),
    }
}

async fn log_level(
    State(sources): State<Sources>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
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

async fn wrong_method() -> Response {
    error(
        StatusCode::METHOD_NOT_ALLOWED,
        "this path has no such method: GET reads, POST changes something; docs/api.md lists the methods of each path",
    )
}

async fn not_found() -> Response {
    error(
        StatusCode::NOT_FOUND,
        "there is no such path in this API; docs/api.md lists the paths, for example /api/v1/status",
    )
}

/// Answers a path that a listener for metrics or health checks does not have.
async fn not_admin() -> Response {
    error(
        StatusCode::NOT_FOUND,
        "this listener is only for metrics or health checks, and has no such path; the admin API is at the address admin.bind of \
         the config",
    )
}

fn json_response(value: &impl Serialize) -> Response {
    // Serialisation fails only for maps with keys that are not strings, and no value of the API has one.
    let mut text = serde_json::to_string(value).unwrap_or_default();
    text.push('\n');
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}

fn error(status: StatusCode, text: &str) -> Response {
    (status, json_response(&json!({ "error": text }))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_hosts_of_ours() {
        let own = |host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().expect("a value"));
            is_own_host(&headers)
        };
        for host in ["127.0.0.1:15000", "localhost", "LOCALHOST:1", "[::1]:15000", "[::1]", "10.0.0.1"] {
            assert!(own(host), "{host}");
        }
        for host in
            ["evil.example", "evil.example:15000", "localhost.evil.example", "127.0.0.1.evil.example", ""]
        {
            assert!(!own(host), "{host}");
        }
        assert!(!is_own_host(&HeaderMap::new()));
    }
}
