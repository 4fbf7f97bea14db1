//! The values of the domain, such as services, endpoints, names and identities. They need no I/O, no clock and no randomness,
//! so that a test can make every value from literals. Functions that decide over these values (matching, admission, choice)
//! live in the layers above.
//!
//! - `reason`: the closed list of reasons for refusals and ends; `alert`: the TLS alert of a reason. `record`: the record of one connection; `side`: its parties. `trace`: its trace.
//! - `name`, `mesh_name`, `authority`, `alpn`: what a client asks for. `identity`: who asks. `limits`: how much.
//! - `service`, `endpoint`, `place`, `address`, `load_balancing`: the mesh. `probe`: how its gateways answer probes. `ambient`: what only ztunnels need of it. `demand`: how many endpoints its calls are meant for. `drain`: orders that empty parts of it. `import`, `link`, `set_hash`: the exchange with peers.
//! - `words`: values that are fixed words in the config. `stored`: values in copies on disk. `time`: times as text. `hex`: bytes as text.
//! - `testing`: values for tests.

pub mod address;
pub mod alert;
pub mod alpn;
pub mod ambient;
pub mod authority;
pub mod demand;
pub mod drain;
pub mod endpoint;
pub mod hex;
pub mod identity;
pub mod import;
pub mod limits;
pub mod link;
pub mod load_balancing;
pub mod mesh_name;
pub mod name;
pub mod place;
pub mod probe;
pub mod reason;
pub mod record;
pub mod service;
pub mod set_hash;
pub mod side;
pub mod stored;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod time;
pub mod trace;
pub mod words;
