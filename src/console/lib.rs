//! What every command has in common: the client of the admin API, the output, and the failures that become exit codes.

pub mod client;
pub mod failure;
pub mod output;
