//! The messages of xDS, of WDS, of Istio's certificate authority and of the SPIFFE Workload API, generated from `proto/` by
//! `build.rs`: types with their shapes (`isthmus_wire::outline`), no services and no decisions.
//!
//! Each module is named after its protobuf package: `envoy.config.core.v3` is `envoy::config::core::v3`. The Workload API
//! has no package. The `.proto` files hold the subset of the official messages that this program uses, with the same names
//! and numbers; a test compares them. Decoding drops unknown fields, so a received message must never be encoded again and
//! passed on.

#![expect(missing_docs, reason = "the documents of the protocols describe their messages")]
#![expect(clippy::large_enum_variant, reason = "messages are encoded as soon as they are made")]

include!(concat!(env!("OUT_DIR"), "/proto.rs"));

mod shapes {
    include!(concat!(env!("OUT_DIR"), "/shapes.rs"));
}

/// All messages as a `google.protobuf.FileDescriptorSet`, including the imported ones.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(test)]
mod tests;
