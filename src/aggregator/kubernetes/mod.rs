//! Registries in Kubernetes: a cluster's Services, EndpointSlices and pods as services and endpoints, its gateways, and the
//! objects that mark services for export.

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
