//! The data plane: accept → peek → admit → choose → dial → relay; `hbone` does the same for each CONNECT stream.
//!
//! One thread per core, each with a single-threaded runtime, its own `SO_REUSEPORT` sockets and its own table of
//! connections. On a connection's way the workers share one lock, that of its source's entry in the admission table, taken
//! when it is accepted and when it ends. The cost of a connection, and why:
//!
//! - the first read is tried when the connection is accepted, the first write when the endpoint is dialled: on a fast
//!   network neither waits for the poller;
//! - the hello is read in the worker's scratch buffer; only a hello that comes in pieces has a buffer of its own;
//! - the snapshot is lent, endpoints are found by index in a `balancer`, metrics are counted in cells of the worker;
//! - an idle connection holds two sockets, its entry in the table and its task: no buffer, no pipe, no timer;
//! - a task that looks at many connections gives others a turn after some of them.
//!
//! The files, on a connection's way and beside it:
//!
//! - `listener` accepts, `peek` reads the hello and asks for admission, `refuse` says no; `connect` chooses (`balancer`) and
//!   dials, `relay` passes bytes; `connection` is the whole way, `hbone` that of callers with CONNECT.
//! - `worker` is a thread with its orders, such as draining; `core` is what its connections borrow, `entry` one connection in
//!   its table, `seen_hello` what it keeps of its hello; `shared` is what all workers share, `handle` the interface to the rest of the program.
//! - `upstreams`: the run-time state of endpoints, with ejection.
//! - Once a second `tick`, by `clock`, ends idle connections; `standstill` and `examine` find those whose peers are dead or do
//!   not read; `readmission` ends those that a newer config or trust bundle refuses.

pub(crate) mod announce;
pub(crate) mod balancer;
pub mod checks;
pub(crate) mod clock;
pub(crate) mod connect;
pub(crate) mod connection;
pub(crate) mod core;
pub(crate) mod entry;
pub(crate) mod examine;
pub mod handle;
pub(crate) mod hbone;
pub(crate) mod killing;
pub(crate) mod listener;
pub(crate) mod pacer;
pub(crate) mod peek;
pub(crate) mod readmission;
pub(crate) mod refuse;
pub(crate) mod relay;
pub(crate) mod seen_hello;
pub(crate) mod shared;
pub(crate) mod standstill;
pub(crate) mod tick;
pub mod upstreams;
pub mod withdrawals;
pub(crate) mod worker;
