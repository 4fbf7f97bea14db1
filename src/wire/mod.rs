//! Sans-IO codecs: bytes of the network ↔ values. Nothing here waits, allocates without a bound, or panics.

pub mod alert;
pub mod client_hello;
pub mod connect;
pub mod frames;
pub mod records;
