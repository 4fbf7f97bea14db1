//! TLS that this gateway terminates or originates: its own certificates and the roots that it trusts. The workloads' TLS passes
//! through the gateway untouched and is not handled here.
//!
//! - `certificate`: a workload's certificate. `source`, `files`, `istio_ca`, `workload_api`: where it comes from. `context`: the gateway's
//!   own, and its renewal. `status`: the sources, for operators.
//! - `trust`: the roots of each trust domain. `roots`: all of them by source. `announced`, `root_file`: those of peers, on disk.
//! - `server`, `client`: TLS of our servers, and to servers that the operator names. `istiod`: a connection to istiod. `pinned`: between gateways without common roots.
//! - `presented`: the certificate of a server to which clients show none.
//! - `probe`: how an endpoint answers a ClientHello. `proof`, `signatures`: what a handshake has proven. `development`: a CA for
//!   tests and the demo.

mod announced;
pub mod certificate;
pub mod client;
pub mod context;
pub mod development;
pub mod files;
mod istio_ca;
pub mod istiod;
pub mod pinned;
pub mod presented;
pub mod probe;
pub mod proof;
pub mod root_file;
pub mod roots;
pub mod server;
mod signatures;
pub mod source;
pub mod status;
pub mod trust;
mod workload_api;
