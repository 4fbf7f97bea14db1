//! The data plane: accept → peek → admit → choose → dial → relay; `hbone` does the same for each CONNECT stream.
//!
//! One thread per core, each with a single-threaded runtime, its own `SO_REUSEPORT` sockets and its own table of
//! connections; no lock is shared on the way of a connection. What a connection costs, and why:
//!
//! - the first read is tried when it is accepted, the first write when the endpoint was dialled: on a fast network
//!   neither has to wait for the poller;
//! - the hello is read in the worker's scratch buffer; a buffer of its own is made only for one that comes in pieces;
//! - an idle connection holds two sockets, its entry in the table and its task: no buffer, no pipe, no timer.

pub(crate) mod balancer;
pub(crate) mod clock;
pub(crate) mod connect;
pub(crate) mod connection;
pub(crate) mod core;
pub(crate) mod entry;
pub(crate) mod examine;
pub mod handle;
pub(crate) mod hbone;
pub(crate) mod listener;
pub(crate) mod pacer;
pub(crate) mod peek;
pub(crate) mod readmission;
pub(crate) mod refuse;
pub(crate) mod relay;
pub(crate) mod shared;
pub(crate) mod standstill;
pub(crate) mod tick;
pub mod upstreams;
pub(crate) mod worker;
