//! # Isthmus: the map
//!
//! The world is one immutable value, the [`snapshot::Snapshot`]. The [`aggregator`] is its only maker, the data plane and
//! the [`discovery`] servers its readers; they never meet otherwise. Admission ([`snapshot::admit`]) and the choice of an endpoint ([`balance`])
//! are pure functions, each written once, called alike by the data path, by `explain` and by the tests; so is split
//! horizon ([`snapshot::view`]), called alike by whoever answers viewers, by `horizon` and by the tests.
//!
//! ```text
//!  registries ─Change─▶ aggregator ─Snapshot, Delta─▶ world ──Reader──▶ dataplane, discovery
//!  (config, files)          ▲                                           │
//!                           └── config ◀── file, SIGHUP, POST           └──▶ telemetry
//! ```
//!
//! Modules import only from lines above their own; `tests/architecture.rs` holds that.
//!
//! | layer | module | owns |
//! |---|---|---|
//! | 0 | [`model`] | the field's nouns as values |
//! | 0 | [`wire`] | bytes ↔ values: ClientHello, TLS alerts, CONNECT heads, HTTP/2 frame headers |
//! | 0 | [`proto`] | the messages of xDS and of those who certify us, generated |
//! | 1 | [`snapshot`] | policy, shards, merged services, routes, exports; building, admission, split horizon |
//! | 1 | [`telemetry`] | events → metrics, access log, failures, spans; the log writer |
//! | 2 | [`balance`] | the choice among candidates, and its odds |
//! | 2 | [`world`] | publisher and readers of snapshots |
//! | 2 | [`document`] | YAML with positions, readers, the `services:` list |
//! | 2 | [`net`] | sockets, pipes, admission by source and identity, own addresses, scopes of tasks, file watching, back-off |
//! | 3 | [`tls`] | who we are and whom we trust: certificates, their sources, roots by trust domain |
//! | 4 | [`dataplane`] | accept → peek → admit → choose → dial → relay, for SNI connections and CONNECT streams |
//! | 4 | [`aggregator`] | registries, name resolution, the one owner of the world |
//! | 4 | [`discovery`] | xDS: every client is told the endpoints as its network sees them |
//! | 5 | [`admin`] | HTTP API, readiness, explain, horizon |
//! | 5 | [`config`] | the file → checked `Config` |
//! | 6 | [`app`], [`cli`] | composition, commands, spans over OTLP |

pub mod admin;
pub mod aggregator;
pub mod app;
pub mod balance;
pub mod cli;
pub mod config;
pub mod dataplane;
pub mod discovery;
pub mod document;
pub mod model;
pub mod net;
pub mod proto;
pub mod snapshot;
pub mod telemetry;
pub mod tls;
pub mod wire;
pub mod world;
