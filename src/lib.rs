//! Isthmus.

pub mod balance;
pub mod model;
pub mod snapshot;
pub mod wire;
pub mod world;
