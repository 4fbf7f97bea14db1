//! TLS of our own: who we are, whom we trust, and the certificates that say so. The workloads' own TLS,
//! which passes through untouched, is none of its business.

pub mod certificate;
pub mod client;
pub mod context;
pub mod development;
pub mod files;
mod istio_ca;
pub mod proof;
pub mod server;
pub mod source;
pub mod trust;
mod workload_api;
