//! Sockets and what they need: listening, dialling, resetting, spare sockets, pipes, timers, descriptor budgets, admission by source
//! and identity, gRPC, backoff, task scopes, files and the threads that read them, and threads for long
//! computations.

pub mod admission;
pub mod budget;
pub mod channel;
pub mod diag;
pub mod handed;
pub mod incoming;
pub mod inherited;
pub mod listen;
pub mod lookup;
pub mod own;
pub mod pipe;
pub mod ranking;
pub mod socket;
pub mod spare;
pub mod unix;
