//! The values of the domain, such as services, endpoints, names and identities. They need no I/O, no clock and no randomness,
//! so that a test can make every value from literals. Functions that decide over these values (matching, admission, choice)
//! live in the layers above.

pub mod address;
pub mod alpn;
pub mod authority;
pub mod endpoint;
pub mod identity;
pub mod import;
pub mod limits;
pub mod link;
pub mod mesh_name;
pub mod name;
pub mod place;
pub mod reason;
pub mod record;
pub mod service;
pub mod set_hash;
pub mod stored;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod time;
pub mod trace;
pub mod words;
