//! The messages of xDS, of Istio's certificate authority and of the SPIFFE Workload API, generated from `proto/` by
//! `build.rs`: types only, no services and no decisions.
//!
//! The modules are the packages: `envoy.config.core.v3` is `envoy::config::core::v3`; the Workload API has none. The
//! `.proto` files hold the part of the official ones that we speak, under the same names and numbers; a test compares
//! them. Decoding skips the fields that are not there, so what a peer sent is never to be encoded again and passed on.

#![expect(missing_docs, reason = "the documents of the protocols describe their messages")]

include!(concat!(env!("OUT_DIR"), "/proto.rs"));

/// All messages as a `google.protobuf.FileDescriptorSet`, imports included.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
