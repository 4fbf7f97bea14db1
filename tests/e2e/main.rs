//! End-to-end tests: the real binary, real sockets, real peers.

#[path = "../support/mod.rs"]
mod support;

mod cost;
mod endpoints;
mod explain;
mod hello;
mod interop;
mod lifecycle;
mod relay;
