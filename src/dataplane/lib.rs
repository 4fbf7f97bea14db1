//! The data plane: accept → peek → admit → choose → dial → relay; `hbone` does the same for each CONNECT stream.
//!
//! There is one thread per core. Each has a single-threaded runtime, its own `SO_REUSEPORT` sockets and its own table of
//! connections. A connection takes only one lock that the workers share: that of its source's entry in the admission table,
//! at its accept and at its end. The cost of a connection is kept low as follows:
//!
//! - The first read is tried when the connection is accepted, and the first write when the endpoint is dialled: on a fast
//!   network neither waits for the poller.
//! - The hello is read into the worker's scratch buffer; only a hello that comes in pieces has a buffer of its own.
//! - The first bytes for the endpoint acknowledge its part of the handshake, which saves a packet.
//! - The snapshot is borrowed, endpoints are found by index in a `balancer`, and metrics are counted in cells of the
//!   worker.
//! - An idle connection holds two sockets, its entry in the table and its task: no buffer, no pipe, no timer.
//! - A task that handles many connections yields to other tasks after each batch.
//!
//! The files:
//!
//! - The phases, each of which gives the next one what it needs: `listener` accepts; `peek` reads the hello, and `hello` says which
//!   server it asks for; `admission` admits; `attempts` chooses an endpoint (`balancer`) and blames those that fail, `connect` dials it;
//!   `relay` passes bytes, `refuse` refuses. `connection` goes through them for a connection by SNI, `hbone` for CONNECT.
//! - `socket_key` names the sockets of a listener. `worker` is a thread and the orders it receives, such as draining. `core` is the
//!   state that its connections borrow: `connections`, with an `entry` for each, which has the record that each phase fills in;
//!   `departures`, those that are to leave; `mesh_view`, `buffers`, `numbers`; `stalled`, their kernel memory. `shared` is the state that
//!   all workers share, `handle` the interface to the rest of the program.
//! - `permits` asks [`isthmus_net::admission`] for a place; `eviction` ends connections to make room for others; `killing` ends
//!   those that an operator names. `bandwidth` counts connections under limits of bandwidth, and `shares` applies the shares of one.
//!   `announce` writes PROXY headers. `pacer` limits TLS handshakes to one step a turn.
//!   `holders` counts what HBONE holds over all workers, and bounds it.
//! - `carriers`: connections with gateways of peers on which calls cross, dialled by the side that has no open port.
//!   `onward`: calls of clients on the own network to other networks, which go through the gateways there.
//! - `checks` is the health checks: `checks/dial` dials an endpoint, `checks/schedule` says when. `upstreams` is the run-time
//!   state of endpoints: ejection, the verdicts of checks, and `times`; `endpoint_state` is that state in one word for operators;
//!   `withdrawals` are the endpoints that operators have taken out.
//! - Once a second `tick` ends idle connections, with the help of `clock`. `standstill` and `examine` find connections
//!   whose peers are dead or do not read. `readmission` ends connections that a newer config or trust bundle refuses;
//!   `retire` those that are too old or drained, at the times in their `retirement`.
//! - `handover` moves connections to a new process of the gateway, and takes them over from an earlier one; `parcel` is a connection
//!   on its way. `testing` is a worker's state for tests.

pub(crate) mod admission;
pub(crate) mod announce;
pub(crate) mod attempts;
pub(crate) mod balancer;
pub(crate) mod bandwidth;
pub(crate) mod buffers;
pub mod carriers;
pub mod checks;
pub(crate) mod clock;
pub(crate) mod connect;
pub(crate) mod connection;
pub(crate) mod connections;
pub(crate) mod core;
pub(crate) mod departures;
pub mod endpoint_state;
pub(crate) mod entry;
pub(crate) mod eviction;
pub(crate) mod examine;
pub mod handle;
pub(crate) mod handover;
pub(crate) mod hbone;
pub(crate) mod hello;
pub(crate) mod holders;
pub(crate) mod killing;
pub(crate) mod listener;
pub(crate) mod mesh_view;
pub(crate) mod numbers;
pub(crate) mod onward;
pub(crate) mod pacer;
pub mod parcel;
pub(crate) mod peek;
pub(crate) mod permits;
pub(crate) mod readmission;
pub(crate) mod refuse;
pub(crate) mod relay;
pub(crate) mod retire;
pub(crate) mod retirement;
pub(crate) mod shared;
pub(crate) mod shares;
pub mod socket_key;
pub(crate) mod stalled;
pub(crate) mod standstill;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod tick;
pub(crate) mod times;
pub mod upstreams;
pub mod withdrawals;
pub(crate) mod worker;
