//! Registries in Kubernetes: a cluster's Services, EndpointSlices and pods as services and endpoints, its gateways, and the
//! objects that mark services for export.
//!
//! - `spec`: the settings. `access`, `credentials`, `kubeconfig`: how the API server is reached. `client`: the connection to
//!   it.
//! - `watch`: follows one kind of object (`kinds`). `objects`: the fields that are read. `records`: the fields that are kept.
//! - `index`: the objects of a cluster, and the items made from them. `endpoints`: converts slices to endpoints, and decides
//!   which of them are believed. `gateways`: the gateways of networks.
//! - `registry`: one cluster as a registry. `clusters`: registries of clusters that are found while the gateway runs.
//! - `exports`: writes the conditions of ServiceExports. `remote`: makes kubeconfigs for other clusters.

#[cfg(feature = "kubernetes")]
mod access;
#[cfg(feature = "kubernetes")]
mod client;
#[cfg(feature = "kubernetes")]
mod clock;
#[cfg(feature = "kubernetes")]
pub mod clusters;
#[cfg(feature = "kubernetes")]
mod credentials;
#[cfg(feature = "kubernetes")]
mod endpoints;
#[cfg(feature = "kubernetes")]
mod exports;
#[cfg(feature = "kubernetes")]
mod gateways;
#[cfg(feature = "kubernetes")]
mod index;
#[cfg(feature = "kubernetes")]
mod kinds;
#[cfg(feature = "kubernetes")]
mod kubeconfig;
#[cfg(feature = "kubernetes")]
mod objects;
#[cfg(feature = "kubernetes")]
mod records;
#[cfg(feature = "kubernetes")]
pub mod registry;
#[cfg(feature = "kubernetes")]
pub mod remote;
pub mod spec;
#[cfg(feature = "kubernetes")]
mod watch;
