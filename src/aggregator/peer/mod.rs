//! The registry of a peer: another organisation that offers services over a link (SPEC §18).

pub mod spec;
