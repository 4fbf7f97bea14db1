//! A registry that reads what an istiod tells ztunnels (WDS: `istio.workload.Address`, `istio.security.Authorization`), without
//! access to the API server of its cluster.
//!
//! - `registry`: follows one istiod. `stream`: one stream of its xDS server. `reading`: converts resources to items, without I/O.
//!   `convert`: the same for single messages.

mod convert;
pub mod reading;
pub mod registry;
mod stream;
