//! Sockets and their upkeep: listening, dialling, resetting, pipes, descriptor budgets, admission by source and identity,
//! gRPC, waits between attempts, the scopes that tasks are started in, files and the threads for reading them, and the threads
//! for long work.

pub mod admission;
pub mod backoff;
pub mod budget;
pub mod channel;
pub mod diag;
pub mod fetch;
pub mod file;
pub mod incoming;
pub mod labour;
pub mod listen;
pub mod own;
pub mod pipe;
pub mod ranking;
pub mod reading;
pub mod scope;
pub mod seldom;
pub mod socket;
pub mod watch;
