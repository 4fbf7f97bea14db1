//! Sockets and their upkeep: listening, dialling, resetting, pipes, descriptor budgets, waits between attempts, and the scopes that
//! tasks are started in.

pub mod backoff;
pub mod budget;
pub mod fetch;
pub mod listen;
pub mod pipe;
pub mod scope;
pub mod socket;
pub mod watch;
