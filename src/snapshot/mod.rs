//! The world as one immutable value, and the pure functions over it.

pub mod policy;
pub mod shard;
