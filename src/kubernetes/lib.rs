//! Registries in Kubernetes: a cluster's Services, EndpointSlices and pods as services and endpoints, its gateways, and the
//! objects that mark services for export.
//!
//! - `access`, `credentials`, `kubeconfig`: how the API server is reached. `client`: the connection to it. The settings are in
//!   [`isthmus_aggregator::spec::kubernetes`].
//! - `watch`: follows one kind of object (`kinds`). `objects`: the fields that are read. `records`: the fields that are kept.
//! - `index`: the objects of a cluster, and the items made from them. `endpoints`: converts slices to endpoints, and decides
//!   which of them are believed. `gateways`: the gateways of networks.
//! - `registry`: one cluster as a registry. `clusters`: registries of clusters that are found while the gateway runs.
//! - `exports`: writes the conditions of ServiceExports. `remote`: makes kubeconfigs for other clusters.

mod access;
mod client;
mod clock;
pub mod clusters;
mod credentials;
mod endpoints;
mod exports;
mod gateways;
mod index;
mod kinds;
mod kubeconfig;
mod objects;
mod records;
pub mod registry;
pub mod remote;
mod watch;
