//! Tests of the Helm chart and of the container image: the objects that the chart renders, whether a real API server accepts
//! them, and whether the program runs in its image as the chart configures it.

#[path = "../support/mod.rs"]
mod support;

mod alerts;
mod cluster;
mod documents;
mod image;
mod monitoring;
mod pod;
mod rendered;
mod values;
mod variants;
