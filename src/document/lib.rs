//! Documents that an operator writes: YAML text is parsed into a tree with positions, checked against a table, and read into
//! values. The only keys of a config file that this module knows are those of the `services:` list, which registry files share.
//!
//! - `tree`: YAML with positions. `problem`: problems with their positions. `mistakes`, `foreign`, `nearest`: hints.
//! - `key`, `table`, `form`, `scalar`: what a key is, what a value may be, and its parser. `reader`: checks a tree and reads it.
//! - `environment`: variables in values. `services`: the `services:` list. `drains`: planned drains. `intern`: equal values stored once.

pub mod drains;
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
