//! Documents that an operator writes: YAML text becomes a tree with positions, is checked against a table,
//! and is read into values. This module knows the `services:` list, which config and registry files share,
//! and no other key of a config file.

pub mod environment;
mod foreign;
pub mod form;
pub mod intern;
pub mod key;
mod mistakes;
pub mod nearest;
pub mod problem;
pub mod reader;
pub mod scalar;
pub mod services;
pub mod table;
pub mod tree;
