//! The commands: each reads its arguments, calls the layers below and writes text to the writer it is given.

pub mod certs;
