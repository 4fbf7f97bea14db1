//! Sans-IO codecs between bytes and values. No function waits, allocates without a bound, or panics.

pub mod alert;
pub mod client_hello;
pub mod connect;
pub mod frames;
pub mod proxy_protocol;
pub mod records;
