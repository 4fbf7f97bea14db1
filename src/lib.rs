//! Isthmus.

pub mod model;
pub mod snapshot;
