//! Isthmus.

pub mod admin;
pub mod aggregator;
pub mod app;
pub mod balance;
pub mod cli;
pub mod config;
pub mod dataplane;
pub mod document;
pub mod model;
pub mod net;
pub mod snapshot;
pub mod telemetry;
pub mod tls;
pub mod wire;
pub mod world;
