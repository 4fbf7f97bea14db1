//! Registries in Kubernetes: a cluster's Services, EndpointSlices and pods as services and endpoints, its gateways, and the
//! objects that mark services for export.

mod access;
mod client;
pub mod clusters;
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
pub mod spec;
mod watch;
