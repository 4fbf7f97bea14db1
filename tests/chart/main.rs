//! Tests of what is installed: the objects that the Helm chart renders, whether a real API server accepts them, whether the program
//! runs in its image as the chart configures it, and whether each file of a release can be installed.

#[path = "../support/mod.rs"]
mod support;

mod alerts;
mod cluster;
mod documents;
mod image;
mod monitoring;
mod pod;
mod release;
mod rendered;
mod values;
mod variants;
