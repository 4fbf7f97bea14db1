//! Registries in Kubernetes: a cluster's Services, EndpointSlices and pods as services and endpoints, its gateways, and the
//! objects that mark services for export.
//!
//! - `access`, `credentials`, `kubeconfig`: how the API server is reached. `client`: the connection to it. `clock`: its time.
//!   The settings are in [`isthmus_aggregator::spec::kubernetes`].
//! - `watch`: follows one kind of object. `kinds`: what is read and kept of each kind, and what depends on it. `objects`: what
//!   all kinds have in common. `table`, `interner`: how records are kept.
//! - `index`: the objects of a cluster, and the items made from them. `endpoints`: converts slices to endpoints, and decides
//!   which of them are believed. `entries`: the endpoints of ServiceEntries and WorkloadEntries; `claims`: the hosts and addresses
//!   that these may have. `demand`: how many pods a service is meant to have. `gateways`: the gateways of networks.
//!   `authorization`: the policies of ztunnels. `mutual_tls`: the ports on which the mesh's mutual TLS is off.
//! - `registry`: one cluster as a registry. `clusters`: finds clusters while the gateway runs. `sources`: all places of a config
//!   in which clusters are found, and the registries of these clusters.
//! - `exports`: writes the conditions of ServiceExports. `gateway_api`: evaluates Gateways and routes of the Gateway API, and writes
//!   their status. `imports`: writes ServiceImports; `import_slices`: their EndpointSlices; `import_services`: Services with a
//!   virtual address for them; `import_objects`: which of these a cluster should have; `own_objects`: creates, changes and
//!   removes all three. `writer`: the task of each of the three; `lease`: which replica writes; `notes`: what each replica serves;
//!   `writing`: whether it can. `remote`: makes kubeconfigs for other clusters. `reviews`: has tokens reviewed.
//! - `scripted`: an API server in memory, for tests. `testing`: a cluster with objects of the Gateway API, for tests.
//!
//! A kind is added in three places:
//!
//! 1. `kinds/KIND.rs`: the fields that are read, the record that is kept, and `impl Watched`, which says how the kind is
//!    requested, how an object becomes a record, and what a changed record marks to be made again.
//! 2. `kinds.rs`: the module, and a line in `kinds!` with the name of the table. The watches, the index and the ends of
//!    listings follow from it. Code that uses the records reads the table as `tables.NAME`.
//! 3. `charts/isthmus/templates/_rbac.tpl`: the right to list and watch the kind, in `isthmus.reads.all` if registries of other clusters
//!    read it too.

mod access;
mod authorization;
mod claims;
mod client;
mod clock;
pub mod clusters;
mod credentials;
mod demand;
mod endpoints;
mod entries;
mod exports;
mod gateway_api;
mod gateways;
mod import_objects;
mod import_services;
mod import_slices;
mod imports;
mod index;
mod interner;
mod kinds;
mod kubeconfig;
mod lease;
mod mutual_tls;
mod notes;
mod objects;
mod own_objects;
pub mod registry;
pub mod remote;
pub mod reviews;
#[cfg(test)]
mod scripted;
pub mod sources;
mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod watch;
mod writer;
mod writing;
