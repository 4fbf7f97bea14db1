//! Isthmus.

pub mod balance;
pub mod dataplane;
pub mod model;
pub mod net;
pub mod snapshot;
pub mod telemetry;
pub mod wire;
pub mod world;
