//! Isthmus.

pub mod config;
pub mod document;
pub mod model;
pub mod snapshot;
