//! The columns of the tables that the commands print.

use isthmus_api::certificate::Certificate;
use isthmus_api::client::Client;
use isthmus_api::connection::Connection;
use isthmus_api::endpoint::{Endpoint, LastFailure, Times};
use isthmus_api::explanation::{Candidate, Probe};
use isthmus_api::listener::{Exposed, Identities, Listener, Route};
use isthmus_api::network::{Gateway, Network};
use isthmus_api::registry::Registry;
use isthmus_api::status::{Bandwidth, Problem};
use isthmus_console::output::{Column, list, optional, text};

pub(super) const CANDIDATES: [Column<Candidate>; 8] = [
    ("ENDPOINT", |candidate| text(&candidate.address)),
    ("CLUSTER", |candidate| text(&candidate.cluster)),
    ("LOCALITY", |candidate| text(&candidate.locality)),
    ("WEIGHT", |candidate| candidate.weight.to_string()),
    ("STATE", |candidate| text(&candidate.state)),
    ("ODDS", |candidate| format!("{:.1} %", candidate.odds * 100.0)),
    ("LAST FAILURE", |candidate| failure(candidate.last_failure.as_ref())),
    ("PROBE", |candidate| optional(candidate.probe.as_ref().map(Probe::text).as_ref())),
];

pub(super) const PROBLEMS: [Column<Problem>; 3] = [
    ("PROBLEM", |problem| text(&problem.code)),
    ("TEXT", |problem| text(&problem.text)),
    ("SEE", |problem| text(&problem.look_at)),
];

pub(super) const EXPOSED: [Column<Exposed>; 8] = [
    ("NAME", |exposed| text(&exposed.name)),
    ("LISTENER", |exposed| text(&exposed.listener)),
    ("BY", |exposed| text(&exposed.by)),
    ("LEADS TO", |exposed| list(&exposed.leads_to)),
    ("TLS", |exposed| list(&exposed.tls)),
    ("SOURCES", |exposed| text(&exposed.sources)),
    ("IDENTITIES", |exposed| match &exposed.identities {
        Identities::Words(words) => text(words),
        Identities::Patterns(patterns) => list(patterns),
    }),
    ("HIDDEN BY", |exposed| list(&exposed.hidden_by)),
];

const ID: Column<Connection> = ("ID", |connection| connection.id.to_string());
const TIME: Column<Connection> = ("TIME", |connection| text(&connection.time));
const REASON: Column<Connection> = ("REASON", |connection| optional(connection.reason.as_ref()));
const LISTENER: Column<Connection> = ("LISTENER", |connection| text(&connection.listener));
const SOURCE: Column<Connection> = ("SOURCE", |connection| text(&connection.source));
const CALLER: Column<Connection> = ("CALLER", |connection| optional(connection.source_identity.as_ref()));
/// The server name or authority of a connection.
const NAME: Column<Connection> = ("NAME", |connection| text(connection.name().unwrap_or_default()));
const ROUTE: Column<Connection> = ("ROUTE", |connection| optional(connection.route.as_ref()));
const ENDPOINT: Column<Connection> = ("ENDPOINT", |connection| optional(connection.endpoint.as_ref()));
const DURATION: Column<Connection> = ("MS", |connection| format!("{:?}", connection.duration_ms));
const DETAIL: Column<Connection> = ("DETAIL", |connection| optional(connection.detail.as_ref()));
const UP: Column<Connection> = ("UP", |connection| connection.bytes_up.to_string());
const DOWN: Column<Connection> = ("DOWN", |connection| connection.bytes_down.to_string());

pub(super) const FAILURES: [Column<Connection>; 10] =
    [TIME, REASON, LISTENER, SOURCE, CALLER, NAME, ROUTE, ENDPOINT, DURATION, DETAIL];
pub(super) const CONNECTIONS: [Column<Connection>; 11] =
    [ID, TIME, LISTENER, SOURCE, CALLER, NAME, ROUTE, ENDPOINT, DURATION, UP, DOWN];

pub(super) const REGISTRIES: [Column<Registry>; 9] = [
    ("REGISTRY", |registry| text(&registry.name)),
    ("CLUSTER", |registry| text(&registry.cluster)),
    ("NETWORK", |registry| text(&registry.network)),
    ("STATE", |registry| text(&registry.state)),
    ("SINCE", |registry| text(&registry.since)),
    ("SERVICES", |registry| registry.services.to_string()),
    ("ENDPOINTS", |registry| registry.endpoints.to_string()),
    ("DENIED", |registry| {
        (registry.denied_services + registry.denied_endpoints + registry.denied_addresses).to_string()
    }),
    ("PROBLEMS", |registry| list(&registry.problems)),
];

pub(super) const GATEWAYS: [Column<Gateway>; 11] = [
    ("NETWORK", |gateway| text(&gateway.network)),
    ("ADDRESS", |gateway| text(&gateway.address)),
    ("STANDS FOR", |gateway| list(&gateway.addresses)),
    ("SNI", |gateway| optional(gateway.sni_port.as_ref())),
    ("HBONE", |gateway| optional(gateway.hbone_port.as_ref())),
    ("CLUSTER", |gateway| text(&gateway.cluster)),
    ("LOCALITY", |gateway| text(&gateway.locality)),
    ("WEIGHT", |gateway| gateway.weight.to_string()),
    ("STATE", |gateway| text(&gateway.state)),
    ("USABLE", |gateway| gateway.usable.to_string()),
    ("WHY NOT", |gateway| optional(gateway.why.as_ref())),
];

pub(super) const CLIENTS: [Column<Client>; 11] = [
    ("NODE", |client| text(&client.node)),
    ("PEER", |client| text(&client.peer)),
    ("CLIENT", |client| text(&client.client)),
    ("PROTOCOL", |client| text(&client.protocol)),
    ("NETWORK", |client| text(&client.network)),
    ("CLUSTER", |client| text(&client.cluster)),
    ("SUBSCRIPTIONS", |client| list(&client.subscriptions)),
    ("HELD BACK", |client| client.held_back.to_string()),
    ("LAST ACK", |client| optional(client.last_ack.as_ref())),
    ("NACKS", |client| client.nacks.to_string()),
    ("LAST NACK", |client| optional(client.last_nack.as_ref())),
];

pub(super) const ROUTES: [Column<Route>; 4] = [
    ("NAME", |route| text(&route.name)),
    ("LISTENERS", |route| list(&route.listeners)),
    ("LEADS TO", |route| list(&route.leads_to)),
    ("ENDPOINTS", |route| optional(route.endpoints.as_ref())),
];

pub(super) const NETWORKS: [Column<Network>; 10] = [
    ("NAME", |network| text(&network.name)),
    ("ACCESS", |network| text(&network.access)),
    ("CIDRS", |network| list(&network.cidrs)),
    ("GATEWAYS", |network| network.gateways.to_string()),
    ("UP", |network| network.gateways_up.to_string()),
    ("DISTANCE", |network| optional(network.distance.as_ref().map(|distance| distance.text()).as_ref())),
    ("RING", |network| text(&network.ring())),
    ("SHARE", |network| text(&network.percent())),
    ("ENDPOINTS", |network| network.endpoints.to_string()),
    ("READY WEIGHT", |network| network.ready_weight.to_string()),
];

pub(super) const CERTIFICATES: [Column<Certificate>; 6] = [
    ("KIND", |certificate| text(&certificate.kind)),
    ("TRUST DOMAIN", |certificate| text(&certificate.trust_domain)),
    ("IDENTITY", |certificate| optional(certificate.identity.as_ref())),
    ("STATE", |certificate| text(&certificate.state)),
    ("NOT AFTER", |certificate| optional(certificate.not_after.as_ref())),
    ("SERIAL", |certificate| optional(certificate.serial.as_ref())),
];

pub(super) const LISTENERS: [Column<Listener>; 6] = [
    ("NAME", |listener| text(&listener.name)),
    ("ADDRESS", |listener| optional(listener.address.as_ref())),
    ("PROTOCOL", |listener| text(&listener.protocol)),
    ("FROM", |listener| sources(&listener.from, &listener.except_from)),
    ("ALPN", |listener| list(&listener.alpn)),
    ("PROXY HEADER", |listener| text(&listener.proxy_protocol.text())),
];

pub(super) const BANDWIDTH: [Column<Bandwidth>; 8] = [
    ("BANDWIDTH OF", |bandwidth| text(&bandwidth.of)),
    ("LIMIT", |bandwidth| per_second(bandwidth.limit)),
    ("UP", |bandwidth| per_second(bandwidth.bytes_up)),
    ("DOWN", |bandwidth| per_second(bandwidth.bytes_down)),
    ("SOURCES UP", |bandwidth| bandwidth.sources_up.to_string()),
    ("SOURCES DOWN", |bandwidth| bandwidth.sources_down.to_string()),
    ("BUSY UP", |bandwidth| bandwidth.busy_up.to_string()),
    ("BUSY DOWN", |bandwidth| bandwidth.busy_down.to_string()),
];

fn per_second(bytes: u64) -> String {
    format!("{}/s", isthmus_api::text::bytes(bytes as f64))
}

pub(super) const LISTENERS_IN_SHORT: [Column<Listener>; 3] = [
    ("LISTENER", |listener| text(&listener.name)),
    ("ADDRESS", |listener| optional(listener.address.as_ref())),
    ("PROTOCOL", |listener| text(&listener.protocol)),
];

pub(super) const ENDPOINTS: [Column<Endpoint>; 11] = [
    ("SERVICE OR ROUTE", |endpoint| optional(endpoint.service.as_ref().or(endpoint.route.as_ref()))),
    ("ADDRESS", |endpoint| text(&endpoint.address)),
    ("CLUSTER", |endpoint| text(&endpoint.cluster)),
    ("NETWORK", |endpoint| text(&endpoint.network)),
    ("LOCALITY", |endpoint| text(&endpoint.locality)),
    ("WEIGHT", |endpoint| endpoint.weight.to_string()),
    ("STATE", |endpoint| text(&endpoint.state)),
    ("STANDING", |endpoint| optional(endpoint.standing.as_ref())),
    ("CONNECT", |endpoint| times(endpoint.connect)),
    ("ANSWER", |endpoint| times(endpoint.answer)),
    ("LAST FAILURE", |endpoint| failure(endpoint.last_failure.as_ref())),
];

/// Returns times as a cell: `0.4/12.8 ms`, the median and the 99th percentile.
fn times(times: Option<Times>) -> String {
    optional(times.map(|times| format!("{:.1}/{:.1} ms", times.p50_ms, times.p99_ms)).as_ref())
}

/// Returns the last failure of an endpoint as a cell: `endpoint_refused, 8 in a row, at 2026-…`.
fn failure(last: Option<&LastFailure>) -> String {
    let cell = |last: &LastFailure| {
        let detail = last.detail.as_ref().map_or(String::new(), |detail| format!(": {detail}"));
        format!("{}{detail}, {} in a row, at {}", last.reason, last.in_a_row, last.time)
    };
    optional(last.map(cell).as_ref())
}

/// Returns the admitted sources, and those that are refused although they are among them.
fn sources(from: &[String], except: &[String]) -> String {
    match (from, except) {
        (_, []) => list(from),
        ([], except) => format!("any except {}", list(except)),
        (from, except) => format!("{} except {}", list(from), list(except)),
    }
}
