//! The requests of the API, one row each: the server routes these rows, the commands send them, `isthmus get` shows those that have
//! words for it, and the table of `docs/api.md` is made of them.

use std::marker::PhantomData;
use std::ops::Deref;

use serde_json::Value;

use super::certificate::Certificate;
use super::client::Client;
use super::connection::Connection;
use super::drain::{Drain, Ordered};
use super::endpoint::Endpoint;
use super::explanation::Explanation;
use super::horizon::Horizon;
use super::listener::{Exposed, Listener, Route};
use super::network::{Gateway, Network};
use super::overview::Overview;
use super::peer::{Invitation, Peer, PeerDetail, Token, WrittenLink};
use super::registry::Registry;
use super::service::{self, Service, ServiceDetail};
use super::status::Status;
use super::table::{Listed, Table, listed};
use super::text::encoded;
use super::trace::Trace;

/// The method of a request. `GET` never changes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are named for themselves")]
pub enum Method {
    Get,
    Post,
}

impl Method {
    /// Returns the method as HTTP writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
        }
    }
}

/// The members of an answer, for the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Members {
    /// The members in the file with this name in `tests/golden/api`, which has one entry of a list.
    Golden(&'static str),
    /// The members, in Markdown.
    Text(&'static str),
}

/// The way in which `isthmus get` shows an answer.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The word for the answer, and shorter ones.
    pub words: &'static [&'static str],
    /// Makes the table of an answer; `None` if the answer is a tree.
    pub table: Option<fn(Value) -> serde_json::Result<Table>>,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The method.
    pub method: Method,
    /// The path; the part in braces is the name of an object.
    pub path: &'static str,
    /// The parameters of the query, as the documentation writes them; may be empty.
    pub query: &'static str,
    /// The answer in words, in Markdown.
    pub answer: &'static str,
    /// The members of the answer.
    pub members: Members,
    /// The way in which `isthmus get` shows the answer; `None`: it does not.
    pub shown: Option<Shown>,
}

impl Row {
    /// Returns the path of the object with this name.
    pub fn at(&self, name: &str) -> String {
        match (self.path.find('{'), self.path.find('}')) {
            (Some(begin), Some(end)) => {
                format!("{}{}{}", &self.path[..begin], encoded(name), &self.path[end + 1..])
            }
            _ => self.path.to_owned(),
        }
    }

    /// Returns the path with these parameters, percent-encoded.
    pub fn with(&self, parameters: &[(&str, &str)]) -> String {
        format!("{}?{}", self.path, query(parameters))
    }
}

/// Returns the query of these parameters, percent-encoded.
pub fn query(parameters: &[(&str, &str)]) -> String {
    parameters.iter().map(|(key, value)| format!("{key}={}", encoded(value))).collect::<Vec<_>>().join("&")
}

/// A request whose answer is a `T`.
pub struct Request<T> {
    row: Row,
    answer: PhantomData<fn() -> T>,
}

impl<T> Deref for Request<T> {
    type Target = Row;

    fn deref(&self) -> &Row {
        &self.row
    }
}

/// Defines the requests. Each row has the method, or `list` for a `GET` that answers with a list; the name in the code; the type of the
/// answer, or of an entry of the list; the path and the query; the answer in words; its members; and how `isthmus get` shows it.
macro_rules! requests {
    ($($kind:ident $name:ident: $type:ty = $path:literal, $query:literal, $answer:literal, $members:expr $(, $shown:expr)?;)+) => {
        $(
            #[doc = concat!("`", $path, "`: ", $answer, ".")]
            pub const $name: Request<requests!(@type $kind $type)> = Request {
                row: Row {
                    method: requests!(@method $kind),
                    path: $path,
                    query: $query,
                    answer: $answer,
                    members: $members,
                    shown: requests!(@shown $($shown)?),
                },
                answer: PhantomData,
            };
        )+

        /// All requests, in the order of the documentation.
        pub const ALL: &[Row] = &[$($name.row),+];

        /// The check of each request's golden file.
        #[cfg(test)]
        pub(crate) const CHECKS: &[(Row, fn(&str, &str) -> String)] =
            &[$(($name.row, super::tests::rewritten::<$type>)),+];
    };
    (@type list $type:ty) => { Vec<$type> };
    (@type $kind:ident $type:ty) => { $type };
    (@method post) => { Method::Post };
    (@method $kind:ident) => { Method::Get };
    (@shown) => { None };
    (@shown $shown:expr) => { Some($shown) };
}

/// The answer is shown as a table.
const fn rows<T: Listed>(words: &'static [&'static str]) -> Shown {
    Shown { words, table: Some(listed::<T>) }
}

/// The answer is shown as a tree.
const fn tree(words: &'static [&'static str]) -> Shown {
    Shown { words, table: None }
}

use Members::{Golden, Text};

requests! {
    get LIVEZ: String = "/livez", "", "text; depends on no gate", Text("");
    get READYZ: String = "/readyz", "", "text; 503 while a gate is closed; `?verbose` names all gates", Text("");
    get METRICS: String = "/metrics", "", "[metrics](metrics.md), also `/stats/prometheus`", Text("");
    get DASHBOARD: String = "/", "", "the [dashboard](operate-and-debug.md#dashboard), HTML", Text("");
    get STATUS: Status = "/api/v1/status", "", "object", Golden("status");
    get OVERVIEW: Overview = "/api/v1/overview", "?q=&page=&network=&service=&endpoint=",
        "object for the dashboard and `isthmus top`, with bounded lists; `q` selects services by a part of their names; the last three open \
         one network, service or endpoint (`selection`)",
        Golden("overview");
    list SERVICES: Service = "/api/v1/services", "", "list", Golden("services"), Shown { words: &["services", "svc"], table: Some(service::table) };
    get SERVICE: ServiceDetail = "/api/v1/services/{hostname}", "", "object", Golden("service");
    list ENDPOINTS: Endpoint = "/api/v1/endpoints", "", "list", Golden("endpoints"), rows::<Endpoint>(&["endpoints", "ep"]);
    list ROUTES: Route = "/api/v1/routes", "", "list", Golden("routes"), rows::<Route>(&["routes"]);
    list REGISTRIES: Registry = "/api/v1/registries", "", "list", Golden("registries"), rows::<Registry>(&["registries"]);
    get CONFIG: Value = "/api/v1/config", "", "object: the config in use with its defaults, without secrets",
        Text("keys of the [config](../config/REFERENCE.md)"), tree(&["config"]);
    list GATEWAYS: Gateway = "/api/v1/gateways", "", "list", Golden("gateways"), rows::<Gateway>(&["gateways"]);
    list CLIENTS: Client = "/api/v1/clients", "", "list of xDS clients", Golden("clients"), rows::<Client>(&["clients"]);
    list NETWORKS: Network = "/api/v1/networks", "", "list", Golden("networks"), rows::<Network>(&["networks"]);
    list CONNECTIONS: Connection = "/api/v1/connections", "", "list", Golden("connections"),
        rows::<Connection>(&["connections"]);
    list FAILURES: Connection = "/api/v1/failures", "", "list: the last 1,000, newest first", Golden("connections");
    get TRACE: Trace = "/api/v1/traces/{trace}", "", "object: at most 32 connections, open ones first", Golden("trace");
    list LISTENERS: Listener = "/api/v1/listeners", "", "list", Golden("listeners"), rows::<Listener>(&["listeners"]);
    list CERTIFICATES: Certificate = "/api/v1/certificates", "", "list", Golden("certificates"),
        rows::<Certificate>(&["certificates"]);
    list EXPOSED: Exposed = "/api/v1/exposed", "", "list", Golden("exposed");
    get EXPLAIN: Explanation = "/api/v1/explain", "?sni=&authority=&tls=&from=&to=&alpn=&identity=&listener=",
        "object; `sni`, `authority` or `tls=false`", Golden("explain");
    post EXPLAIN_AND_PROBE: Explanation = "/api/v1/explain", "?…",
        "as GET, and dials the candidates (`candidates[].probe`)", Text("");
    get HORIZON: Horizon = "/api/v1/horizon", "?network=&cluster=&zone=&service=&port=&subset=&tunnel=&families=&client=&sees=",
        "object; without `service` a list", Golden("horizon");
    list PEERS: Peer = "/api/v1/peers", "", "list", Golden("peers");
    get PEER: PeerDetail = "/api/v1/peers/{name}", "", "object", Golden("peer");
    post INVITE_PEER: Token = "/api/v1/peers/{name}/invite", "?address=&valid=&print&replace",
        "object; a token; 409 for a peer that has a link without `replace`. This request and the next two: only over loopback or the \
         unix socket, else 403",
        Text("`token`, `addresses`, `valid_seconds`");
    get INVITATION: Invitation = "/api/v1/peers/{name}/invite", "", "object: the last invitation", Text("`state`, `link`");
    post JOIN_PEER: WrittenLink = "/api/v1/peers/{name}/join", "?print&replace", "object; redeems the token in the body",
        Text("`peer`, `identity`, `config`, `file`, `roots`");
    post DRAIN_ENDPOINT: Value = "/api/v1/endpoints/drain", "?address=&service=",
        "object; no new connections; `address` is an IP address, with or without a port",
        Text("`result`, `endpoints`, `connections`");
    post DISABLE_ENDPOINT: Value = "/api/v1/endpoints/disable", "?address=&service=",
        "object; open connections are closed, too", Text("`result`, `endpoints`, `connections`");
    post ENABLE_ENDPOINT: Value = "/api/v1/endpoints/enable", "?address=&service=",
        "object; ends both orders, and ejections", Text("`result`, `endpoints`, `connections`");
    list DRAINS: Drain = "/api/v1/drains", "", "list of [planned drains](drains.md)", Golden("drains");
    post ORDER_DRAIN: Ordered = "/api/v1/drains", "?force&raise",
        "object; orders the drain in the body, as in `drains` of the config; 409 if a service would be left with nothing else, \
         without `force`, or more would be left than of an earlier drain, without `raise`",
        Text("`result`, `left_percent`, `to_percent`, `changes`, `further`, `emptied`");
    post PLAN_DRAIN: Ordered = "/api/v1/drains/plan", "", "the same, but nothing is changed",
        Text("the same, with an empty `result`");
    post END_DRAIN: Value = "/api/v1/drains/end", "?kind=&name=", "object; ends an operator's drain; 409 if it goes on",
        Text("`result`");
    post ACCEPT_REGISTRY: Value = "/api/v1/registries/accept", "?name=",
        "object; applies the update of a registry that is held back (`registry_held`); 409 if none is", Text("`result`");
    post CLOSE_CONNECTION: Value = "/api/v1/connections/close", "?id=", "object; closes a connection or CONNECT stream",
        Text("`result`");
    post RELOAD: Value = "/api/v1/reload", "", "`{\"result\": \"applied\"}`, or 400 with `problems`", Text("`result`");
    post STOP: Value = "/api/v1/drain", "", "202; drains as SIGTERM does", Text("");
    post UPGRADE: Value = "/api/v1/upgrade", "?wait",
        "object, after the [upgrade](upgrade.md); 409 with the reason if the old process goes on; with `wait`, the upgrade begins when no other is under way",
        Text("`result`, `process`, `version`, `moved`, `left`, `seconds`");
    post LOG_LEVEL: Value = "/api/v1/log-level", "?level=",
        "object; the level is `error`, `warn`, `info`, `debug`, `trace`, or a filter as in `RUST_LOG`", Text("`result`");
}
