//! Sockets, and the limits on what connections may take.
//!
//! - `listen`, `inherited`, `unix`, `handed`: listening sockets, those that a service manager or another listener hands over.
//! - `incoming`: accepted connections of the control plane's servers. `door`: their places, and which connection gives way.
//! - `admission`: the rules of the limits on connections, per process, source, service and peer. `ranking`: which waiting entry
//!   gives way. `turns`: the order of clients that wait for each other. `budget`: descriptors. `memory`: the memory budget of the
//!   process.
//! - `socket`, `option`: options and resets. `pacing`: the rate of a socket. `pipe`: pipes for splice. `diag`: the kernel's connection table.
//! - `lookup`: host names. `dial`: connections to servers by name. `channel`: gRPC over our own TLS. `metered`: limits on the frames
//!   of HTTP/2 connections. `own`: the addresses of this host.

pub mod admission;
pub mod budget;
pub mod channel;
pub mod diag;
pub mod dial;
pub mod door;
pub mod handed;
pub mod incoming;
pub mod inherited;
pub mod listen;
pub mod lookup;
pub mod memory;
pub mod metered;
mod option;
pub mod own;
pub mod pacing;
pub mod pipe;
pub mod ranking;
pub mod socket;
pub mod turns;
pub mod unix;
