//! # Isthmus: the map
//!
//! The world is one immutable value, the [`snapshot::Snapshot`]. Only the [`aggregator`] makes snapshots; the data plane
//! and the [`discovery`] servers read them, and are connected to the aggregator in no other way. Admission
//! ([`snapshot::admit`], with the rules of [`snapshot::exports`] on sources and identities), the choice of an endpoint
//! ([`balance`]) and split horizon ([`snapshot::view`]) are pure functions. Each is written once, and the data path, xDS,
//! the commands `explain` and `horizon`, and the tests all call it.
//!
//! ```text
//!  registries ─Change─▶ aggregator ─Snapshot, Delta─▶ world ──Reader──▶ dataplane, discovery
//!  (config, files)          ▲                                           │
//!                           └── config ◀── file, SIGHUP, POST           └──▶ telemetry
//! ```
//!
//! A module imports only modules of the lines above its own in this table; `tests/architecture.rs` checks that.
//!
//! | layer | module | owns |
//! |---|---|---|
//! | 0 | [`model`] | the field's nouns as values |
//! | 0 | [`api`] | the values of the admin API, for server, commands and pages |
//! | 0 | [`wire`] | bytes ↔ values: ClientHello, TLS alerts, CONNECT heads, HTTP/2 frame headers, PROXY headers |
//! | 0 | [`proto`] | generated messages of xDS, certificate authorities, etcd and the peer protocol |
//! | 1 | [`snapshot`] | policy, shards, merged services, routes, exports; building, admission, split horizon |
//! | 1 | [`telemetry`] | events → metrics, access log, failures, spans; the log writer |
//! | 2 | [`balance`] | the choice among candidates, and its odds |
//! | 2 | [`world`] | publisher and readers of snapshots |
//! | 2 | [`document`] | YAML with positions, readers, the `services:` list |
//! | 2 | [`net`] | sockets, spare sockets, pipes, timers, fair shares and limits of connections, own addresses, task scopes, file watching, backoff |
//! | 3 | [`tls`] | certificates of the gateway, their sources, trusted roots by trust domain |
//! | 4 | [`dataplane`] | accept → peek → admit → choose → dial → relay, for SNI connections and CONNECT streams |
//! | 4 | [`aggregator`] | registries, name resolution, the one maker of snapshots |
//! | 4 | [`discovery`] | xDS: endpoints as seen from each client's network; DNS: names, virtual addresses; links with peers |
//! | 5 | [`admin`] | HTTP API, dashboard, readiness, explain, horizon |
//! | 5 | [`config`] | the file → checked `Config` |
//! | 6 | [`app`], [`cli`] | composition, commands, `top`, spans over OTLP, notices to the service manager |

pub mod admin;
pub mod aggregator;
pub mod api;
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
