//! Documents an operator writes: a YAML text becomes a tree that knows where each value stands, is
//! checked against a table, and is read into values. Knows nothing of which keys a config file has,
//! only of the `services:` list, which config and registry files share.

pub mod environment;
mod foreign;
pub mod intern;
mod mistakes;
pub mod nearest;
pub mod problem;
pub mod reader;
pub mod scalar;
pub mod services;
pub mod table;
pub mod tree;
