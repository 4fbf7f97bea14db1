//! Sans-IO codecs between bytes and values. No function waits, allocates without a bound, or panics.
//!
//! - `client_hello`: SNI and ALPN of a ClientHello.
//! - `connect`: CONNECT heads and their responses. `frames`, `records`: counts of HTTP/2 frames and TLS records that cost their receiver.
//! - `outline`: the items of a protobuf message, counted before it is decoded.
//! - `proxy_protocol`: PROXY headers.

pub mod client_hello;
pub mod connect;
pub mod frames;
pub mod outline;
pub mod proxy_protocol;
pub mod records;
