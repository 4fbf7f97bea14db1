//! The field's nouns as plain values. No I/O, no clock, no randomness: everything here can be made
//! in a test from literals. What a noun *does* (match, admit, choose) lives in the layers above.

pub mod address;
pub mod alpn;
pub mod authority;
pub mod endpoint;
pub mod identity;
pub mod mesh_name;
pub mod name;
pub mod place;
pub mod reason;
pub mod record;
pub mod service;
pub mod trace;
