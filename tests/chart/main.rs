//! Tests of the Helm chart and of the container image: what the chart renders, whether a real API server takes it, and whether
//! the program runs in its image as the chart runs it.

#[path = "../support/mod.rs"]
mod support;

mod cluster;
mod documents;
mod image;
mod monitoring;
mod pod;
mod rendered;
mod values;
