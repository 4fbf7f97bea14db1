//! TLS that this gateway terminates or originates: its own certificates and the roots that it trusts. The workloads' TLS passes
//! through the gateway untouched and is not handled here.

mod announced;
pub mod certificate;
pub mod client;
pub mod context;
pub mod development;
pub mod files;
mod istio_ca;
pub mod pinned;
pub mod proof;
pub mod root_file;
pub mod roots;
pub mod server;
mod signatures;
pub mod source;
pub mod status;
pub mod trust;
mod workload_api;
