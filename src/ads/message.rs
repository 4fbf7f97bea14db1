//! Responses in pieces that share the bytes of resources and are encoded when they are sent.
//!
//! A response that waits for a client to read holds references to resources that other clients hold too. Large resources are
//! never copied. Small resources are copied chunk by chunk, as the connection sends them.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;
use tonic::Code;

use super::protocol::{Protocol, Response};
use super::resource::{Resource, field_length, put_field, put_head};
use isthmus_proto::envoy::service::discovery::v3::{ResourceError, ResourceName};
use isthmus_proto::google::rpc;

/// The size in bytes from which a resource is sent as a shared slice. For a smaller resource, a frame of its own costs more
/// than a copy.
const SHARED_FROM: usize = 4096;
/// The size in bytes of a piece that is made of small resources.
const CHUNK: usize = 16 * 1024;
/// The length of the prefix of a gRPC message, in bytes: the compression flag and the message length.
const PREFIX: usize = 5;
/// The space for the version, type and nonce of a response, in bytes.
const FIELDS: usize = 128;

/// Field numbers of `DiscoveryResponse`, and of `DeltaDiscoveryResponse` where they differ.
const VERSION: u32 = 1;
const RESOURCES: u32 = 2;
const TYPE_URL: u32 = 4;
const NONCE: u32 = 5;
const DELTA_REMOVED: u32 = 6;
const WORLD_ERRORS: u32 = 7;
const DELTA_ERRORS: u32 = 9;

/// The largest number of errors for resources of a type that is not served; the other names have the same error.
const NOT_SERVED_MAX: usize = 16;

/// A response that is being sent.
pub struct Message {
    protocol: Protocol,
    /// The bytes before the resources; empty after they were sent.
    head: BytesMut,
    resources: std::vec::IntoIter<Arc<Resource>>,
    /// The bytes of a large resource whose field header was sent.
    shared: Option<Bytes>,
}

impl Message {
    /// Prepares to send a response.
    pub fn new(response: Response) -> Self {
        let Response { protocol, type_url, nonce, version, resources, removed, missing, is_served } =
            response;
        let size: usize = resources.iter().map(|resource| field_length(length(resource, protocol))).sum();
        // A large resource is not copied.
        let copied = resources.first().map_or(0, |first| field_length(length(first, protocol)));
        let copied = if copied < SHARED_FROM { size.min(CHUNK) } else { 0 };
        let mut head = BytesMut::with_capacity(PREFIX + FIELDS + copied);
        // The compression flag (none), and the length, which is filled in below.
        head.put_bytes(0, PREFIX);
        put_field(&mut head, VERSION, version.text().as_bytes());
        put_field(&mut head, TYPE_URL, type_url.as_bytes());
        put_field(&mut head, NONCE, nonce.as_bytes());
        for name in removed {
            put_field(&mut head, DELTA_REMOVED, name.as_bytes());
        }
        let errors = match protocol {
            Protocol::Delta => DELTA_ERRORS,
            Protocol::StateOfTheWorld => WORLD_ERRORS,
        };
        let (error, most): (fn(&str) -> ResourceError, _) = match is_served {
            true => (not_found, usize::MAX),
            false => (not_served, NOT_SERVED_MAX),
        };
        for name in missing.iter().take(most) {
            put_field(&mut head, errors, &error(name).encode_to_vec());
        }
        let length = u32::try_from(head.len() - PREFIX + size).unwrap_or(u32::MAX);
        head[1..PREFIX].copy_from_slice(&length.to_be_bytes());
        Self { protocol, head, resources: resources.into_iter(), shared: None }
    }

    /// Returns the next piece; `None` at the end.
    pub fn next_piece(&mut self) -> Option<Bytes> {
        if let Some(shared) = self.shared.take() {
            return Some(shared);
        }
        // A response of small resources is one piece, because each piece costs a pass through the connection.
        let mut chunk = std::mem::take(&mut self.head);
        while chunk.len() < CHUNK
            && let Some(resource) = self.resources.next()
        {
            let length = length(&resource, self.protocol);
            put_head(&mut chunk, RESOURCES, length);
            let bytes = match self.protocol {
                Protocol::Delta => resource.message().clone(),
                Protocol::StateOfTheWorld => resource.any(),
            };
            if length >= SHARED_FROM {
                self.shared = Some(bytes);
                break;
            }
            chunk.put_slice(&bytes);
        }
        (!chunk.is_empty()).then(|| chunk.freeze())
    }
}

fn length(resource: &Resource, protocol: Protocol) -> usize {
    match protocol {
        Protocol::Delta => resource.message().len(),
        Protocol::StateOfTheWorld => resource.any_length(),
    }
}

fn not_found(name: &str) -> ResourceError {
    resource_error(name, Code::NotFound, format!("no service {name:?} is known"))
}

fn not_served(name: &str) -> ResourceError {
    resource_error(name, Code::Unimplemented, "resources of this type are not served".to_owned())
}

fn resource_error(name: &str, code: Code, message: String) -> ResourceError {
    ResourceError {
        resource_name: Some(ResourceName { name: name.to_owned() }),
        error_detail: Some(rpc::Status { code: code as i32, message, details: Vec::new() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::ResourceKind;
    use crate::resource::Version;
    use crate::ztunnel::Kind;
    use isthmus_proto::envoy::config::cluster::v3::Cluster;
    use isthmus_proto::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse};

    fn response(protocol: Protocol) -> Response {
        let resource = |name: &str, size: usize| {
            let value = Cluster { name: name.into(), alt_stat_name: "x".repeat(size), ..Cluster::default() };
            Arc::new(Resource::new(Kind::Address, name.into(), &value))
        };
        Response {
            protocol,
            type_url: Kind::Address.type_url().into(),
            nonce: "7".into(),
            version: Version::of(b"v"),
            resources: vec![resource("a", 3), resource("b", 100_000), resource("c", 9_000), resource("d", 0)],
            removed: vec!["e".into()],
            missing: Vec::new(),
            is_served: true,
        }
    }

    fn bytes(response: Response) -> Vec<u8> {
        let mut message = Message::new(response);
        let mut all = Vec::new();
        while let Some(piece) = message.next_piece() {
            all.extend_from_slice(&piece);
        }
        let length = u32::from_be_bytes(all[1..PREFIX].try_into().expect("four bytes"));
        assert_eq!((all[0], length as usize), (0, all.len() - PREFIX));
        all.split_off(PREFIX)
    }

    #[test]
    fn bodies_read_as_the_messages() {
        let given = response(Protocol::Delta);
        let read = DeltaDiscoveryResponse::decode(&*bytes(given)).expect("a message");
        assert_eq!((read.type_url.as_str(), read.nonce.as_str()), (Kind::Address.type_url(), "7"));
        assert_eq!(read.removed_resources, ["e"]);
        let names: Vec<_> = read.resources.iter().map(|resource| resource.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c", "d"]);
        let given = Response {
            removed: Vec::new(),
            missing: vec!["m".into()],
            ..response(Protocol::StateOfTheWorld)
        };
        let read = DiscoveryResponse::decode(&*bytes(given.clone())).expect("a message");
        assert_eq!((read.version_info, read.resources.len()), (given.version.text(), 4));
        assert_eq!(read.resource_errors[0].resource_name.as_ref().map(|name| &*name.name), Some("m"));
        let second = Cluster::decode(&*read.resources[1].value).expect("a cluster");
        assert_eq!(second.alt_stat_name.len(), 100_000);
    }

    #[test]
    fn large_resources_are_shared_slices() {
        let given = response(Protocol::Delta);
        let large = given.resources[1].clone();
        let mut message = Message::new(given);
        let shared = std::iter::from_fn(|| message.next_piece())
            .any(|piece| piece.as_ptr() == large.message().as_ptr());
        assert!(shared);
    }
}
