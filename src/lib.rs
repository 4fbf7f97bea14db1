//! # Isthmus: the map
//!
//! The world is one immutable value, the [`snapshot::Snapshot`]. Only the [`aggregator`] makes snapshots; the data plane
//! and the servers of [`xds`], [`wds`], [`dns`] and [`peer`] read them, and are connected to the aggregator in no other way. Admission
//! ([`decisions::admit`], with the rules of [`snapshot::exports`] on sources and identities), the choice of an endpoint
//! ([`balance`]) and split horizon ([`decisions::view`]) are pure functions. Each is written once, and the data path, xDS,
//! the commands `explain` and `horizon`, and the tests all call it.
//!
//! ```text
//!  registries ──Change──▶ aggregator ──Snapshot, Delta──▶ world ──Reader──▶ dataplane, xds, wds, dns, peer
//!  (files, etcd, istiod,      ▲                                             │
//!   kubernetes, peer)         └── config ◀── file, SIGHUP, POST             └──▶ telemetry
//! ```
//!
//! Each folder of `src/` is a crate `isthmus-NAME`, whose `lib.rs` begins with a description of its files. A crate can import
//! only the crates that its `Cargo.toml` names, so the compiler keeps this table; every arrow points upwards.
//!
//! | crate | owns | imports |
//! |---|---|---|
//! | [`model`] | the field's nouns as values, and the closed list of reasons | – |
//! | [`api`] | the values of the admin API and the members of an access log line | model |
//! | [`wire`] | bytes ↔ values: ClientHello, CONNECT heads, HTTP/2 frame headers, outlines of messages, PROXY headers | model |
//! | [`proto`] | generated messages of xDS, certificate authorities, etcd and the peer protocol | wire |
//! | [`settings`] | the checked settings of the config file | model |
//! | [`registry`] | what registries report, and the table of all that one says | settings |
//! | [`snapshot`] | merged services, networks, routes, exports; building | registry |
//! | [`decisions`] | admission and split horizon, as pure functions of a snapshot | snapshot |
//! | [`balance`] | the choice among candidates, and its odds | decisions |
//! | [`world`] | publisher and readers of snapshots | snapshot |
//! | [`document`] | YAML with positions, readers, the `services:` list | registry |
//! | [`tasks`] | task scopes, background threads, newest values, shared work, backoff, throttles, timers | – |
//! | [`files`] | reading, watching and replacing files | tasks |
//! | [`telemetry`] | events → metrics, access log, failures, spans; the log writer | api |
//! | [`net`] | sockets, pipes, fair shares and limits of connections, the memory budget, own addresses, gRPC channels | wire, tasks, telemetry |
//! | [`tls`] | certificates of the gateway, their sources, trusted roots by trust domain | net, files, proto |
//! | [`upgrade`] | the messages and the socket by which a new process takes over sockets, connections and beliefs | model |
//! | [`dataplane`] | accept → peek → admit → choose → dial → relay, for SNI connections and CONNECT streams; health checks | wire, balance, world, tls, upgrade |
//! | [`ads`] | the xDS transport protocol for all types of resources: connections, streams, budgets, clients | decisions, tls, proto |
//! | [`xds`] | endpoints as seen from each client's network | world, ads |
//! | [`wds`] | workloads, services and policies for ztunnels | world, ads |
//! | [`dns`] | names, virtual addresses | world, tls |
//! | [`aggregator`] | registries in files and etcd, name resolution, the one maker of snapshots | document, decisions, world, tls, proto, upgrade |
//! | [`istiod`] | registries that are read from an istiod | aggregator, ads |
//! | `kubernetes` | registries in Kubernetes, and the Gateway API (an optional crate) | aggregator |
//! | [`peer`] | federation: links, enrolment, and the registry of a peer's services | aggregator, proto |
//! | [`config`] | the file → checked `Config` | xds, wds, dns, peer |
//! | [`admin`] | HTTP API, dashboard, readiness, explain, horizon | dataplane, config, api |
//! | [`app`] | composition, spans over OTLP, notices to the service manager | all above |
//! | [`console`] | the client of the admin API, output and failures of commands | api |
//! | `convert` | configs of other programs as drafts of ours (an optional crate) | console, document |
//! | `demo` | the demo: networks of real processes that measure and check (an optional crate) | console, tls |
//! | [`cli`] | the commands | all above |
//!
//! The last column leaves out what an import leads to by its own row. `tests/architecture.rs` keeps what the compiler cannot:
//! no clock, socket or randomness in `model`, `wire`, `api`, `settings`, `registry`, `snapshot`, `decisions` and `balance`, and no circle among the files of a crate.

pub use isthmus_admin as admin;
pub use isthmus_ads as ads;
pub use isthmus_aggregator as aggregator;
pub use isthmus_api as api;
pub use isthmus_app as app;
pub use isthmus_balance as balance;
pub use isthmus_cli as cli;
pub use isthmus_config as config;
pub use isthmus_console as console;
#[cfg(feature = "convert")]
pub use isthmus_convert as convert;
pub use isthmus_dataplane as dataplane;
pub use isthmus_decisions as decisions;
#[cfg(feature = "demo")]
pub use isthmus_demo as demo;
pub use isthmus_dns as dns;
pub use isthmus_document as document;
pub use isthmus_files as files;
pub use isthmus_istiod as istiod;
#[cfg(feature = "kubernetes")]
pub use isthmus_kubernetes as kubernetes;
pub use isthmus_model as model;
pub use isthmus_net as net;
pub use isthmus_peer as peer;
pub use isthmus_proto as proto;
pub use isthmus_registry as registry;
pub use isthmus_settings as settings;
pub use isthmus_snapshot as snapshot;
pub use isthmus_tasks as tasks;
pub use isthmus_telemetry as telemetry;
pub use isthmus_tls as tls;
pub use isthmus_upgrade as upgrade;
pub use isthmus_wds as wds;
pub use isthmus_wire as wire;
pub use isthmus_world as world;
pub use isthmus_xds as xds;
