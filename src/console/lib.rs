//! The parts that every command shares.
//!
//! - `client`: the client of the admin API. `output`: tables, JSON, YAML and colours.
//! - `failure`: why a command failed, from which the exit code follows.

pub mod client;
pub mod failure;
pub mod output;
