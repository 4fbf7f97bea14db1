//! The link with a peer: another organisation with which services are exchanged (SPEC §18).

pub mod options;
