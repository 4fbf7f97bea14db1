//! One encoded resource. All clients that get the resource share its bytes.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::encode_varint;
use twox_hash::XxHash3_64;

use super::kind::ResourceKind;

/// A resource in its wire format.
#[derive(Debug, PartialEq, Eq)]
pub struct Resource {
    /// The name of the resource.
    pub name: Arc<str>,
    /// The version: a hash of the content.
    pub version: Version,
    /// True for an assignment without endpoints.
    pub is_empty: bool,
    /// A `Resource` message: name, version, and at the end the `Any` with the resource itself.
    bytes: Bytes,
    /// The offset of the `Any`.
    any: usize,
}

/// A hash of the content. The hash is equal on every replica and after a restart, so that a client that reconnects gets only
/// the resources that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(u64);

impl Version {
    /// Hashes the content.
    pub fn of(content: &[u8]) -> Self {
        Self(XxHash3_64::oneshot(content))
    }

    /// Returns the version as 16 hexadecimal digits.
    pub fn text(self) -> String {
        format!("{:016x}", self.0)
    }

    /// Parses the form that [`Version::text`] returns.
    pub fn parse(text: &str) -> Option<Self> {
        (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok().map(Self))?
    }

    /// Returns a common version of several resources, independent of their order.
    pub fn of_all(versions: impl Iterator<Item = Self>) -> Self {
        Self(versions.fold(0, |all, version| all.wrapping_add(version.0.wrapping_mul(0x9e37_79b9_7f4a_7c15))))
    }
}

/// Field numbers of `envoy.service.discovery.v3.Resource` and `google.protobuf.Any`.
const RESOURCE_VERSION: u32 = 1;
const RESOURCE_RESOURCE: u32 = 2;
const RESOURCE_NAME: u32 = 3;
const ANY_TYPE_URL: u32 = 1;
const ANY_VALUE: u32 = 2;

impl Resource {
    /// Encodes a resource.
    pub fn new(kind: impl ResourceKind, name: Arc<str>, value: &impl prost::Message) -> Self {
        Self::of_type(kind.type_url(), name, value)
    }

    /// Encodes a resource of any type.
    pub fn of_type(type_url: &str, name: Arc<str>, value: &impl prost::Message) -> Self {
        Self::encoded(type_url, name, &value.encode_to_vec())
    }

    /// Makes a resource of any type from its encoded message.
    pub fn encoded(type_url: &str, name: Arc<str>, value: &[u8]) -> Self {
        let version = Version::of(value);
        let any_length = field_length(type_url.len()) + field_length(value.len());
        let text = version.text();
        let head = field_length(name.len()) + field_length(text.len());
        let mut bytes = BytesMut::with_capacity(head + field_length(any_length));
        put_field(&mut bytes, RESOURCE_NAME, name.as_bytes());
        put_field(&mut bytes, RESOURCE_VERSION, text.as_bytes());
        put_head(&mut bytes, RESOURCE_RESOURCE, any_length);
        let any = bytes.len();
        put_field(&mut bytes, ANY_TYPE_URL, type_url.as_bytes());
        put_field(&mut bytes, ANY_VALUE, value);
        Self { name, version, is_empty: false, bytes: bytes.freeze(), any }
    }

    /// Marks the resource as an assignment without endpoints.
    #[must_use]
    pub fn without_endpoints(self) -> Self {
        Self { is_empty: true, ..self }
    }

    /// Returns the `Resource` message, the form of delta responses.
    pub fn message(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the `Any`, the form of state-of-the-world responses.
    pub fn any(&self) -> Bytes {
        self.bytes.slice(self.any..)
    }

    /// Returns the length of [`Self::any`] in bytes.
    pub fn any_length(&self) -> usize {
        self.bytes.len() - self.any
    }
}

/// Returns the encoded length of a protobuf bytes field whose number is below 16.
pub(super) fn field_length(length: usize) -> usize {
    1 + prost::encoding::encoded_len_varint(length as u64) + length
}

/// Writes the tag and length of a protobuf bytes field.
pub(super) fn put_head(buffer: &mut impl BufMut, number: u32, length: usize) {
    const LENGTH_DELIMITED: u32 = 2;
    encode_varint(u64::from(number << 3 | LENGTH_DELIMITED), buffer);
    encode_varint(length as u64, buffer);
}

/// Writes a protobuf bytes field.
pub(super) fn put_field(buffer: &mut impl BufMut, number: u32, bytes: &[u8]) {
    put_head(buffer, number, bytes.len());
    buffer.put_slice(bytes);
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::ztunnel::Kind;
    use isthmus_proto::envoy::config::endpoint::v3::ClusterLoadAssignment;
    use isthmus_proto::envoy::service::discovery::v3 as discovery;

    #[test]
    fn what_is_encoded_by_hand_reads_as_the_messages() {
        let value = ClusterLoadAssignment { cluster_name: "outbound|443||a".into(), ..Default::default() };
        let resource = Resource::new(Kind::Address, "outbound|443||a".into(), &value);
        let read = discovery::Resource::decode(resource.message().clone()).expect("a message");
        assert_eq!((&*read.name, &read.version), (&*resource.name, &resource.version.text()));
        let any = read.resource.expect("an Any");
        assert_eq!(any, prost_types::Any::decode(resource.any()).expect("an Any"));
        assert_eq!(any.type_url, Kind::Address.type_url());
        assert_eq!(ClusterLoadAssignment::decode(&*any.value), Ok(value));
        assert_eq!(Version::parse(&resource.version.text()), Some(resource.version));
        assert_eq!(Version::parse("1"), None);
    }
}
