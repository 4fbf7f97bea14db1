//! Requests and responses, in the form that both variants of the protocol share.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::resource::{Resource, Version};
use isthmus_proto::envoy::config::core::v3::Node;
use isthmus_proto::envoy::service::discovery::v3 as discovery;
use isthmus_wire::outline::Outlined;

/// The largest length of a name in bytes; a request with a longer name ends the stream. Every name that can be parsed is
/// shorter: it has at most about 350 bytes.
pub const NAME_BYTES_MAX: usize = 512;

/// The protocol variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// State of the world: a response has all subscribed resources.
    StateOfTheWorld,
    /// Delta: a response has the changed resources.
    Delta,
}

/// A request of a known type, of either variant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Delta: names to subscribe to. State of the world: all names.
    pub names: Vec<String>,
    /// Delta: names to unsubscribe from.
    pub unsubscribe: Vec<String>,
    /// Delta, first request: `initial_resource_versions`, the names and versions of the resources of an earlier stream.
    pub has: Vec<(String, String)>,
    /// First request: true if the client has resources of an earlier stream.
    pub returns: bool,
    /// The nonce of the response that the request answers; empty if the request answers none.
    pub nonce: String,
    /// The error text if the request is a NACK.
    pub error: Option<String>,
}

/// A response to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// The variant of the protocol.
    pub protocol: Protocol,
    /// The type URL.
    pub type_url: Cow<'static, str>,
    /// The nonce, unique in the stream.
    pub nonce: String,
    /// The version of all resources together.
    pub version: Version,
    /// The resources.
    pub resources: Vec<Arc<Resource>>,
    /// The names of resources that do not exist, for a stream in the delta variant.
    pub removed: Vec<Arc<str>>,
    /// The names of requested resources that do not exist, for a stream in the state-of-the-world variant; each name once. Of a
    /// type that is not served: all names, in both variants.
    pub missing: Vec<Arc<str>>,
    /// True if resources of the type are served.
    pub is_served: bool,
}

/// The client's answer to the last response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acknowledgement {
    /// The request answers no response, or a response before the last one.
    None,
    /// The client accepted the response, with the time of the earliest change in it.
    Ack(Option<Instant>),
    /// The client refused the response with this text.
    Nack(String),
}

/// The state of one type in a session, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// True if the client has sent a request of the type.
    pub asked: bool,
    /// True if the client subscribes to all resources.
    pub wildcard: bool,
    /// The number of names that the client subscribes to.
    pub names: usize,
    /// The number of responses sent.
    pub sent: u64,
    /// The time at which the unacknowledged response was sent; `None`: there is none.
    pub in_flight: Option<SystemTime>,
    /// The number of names and complete responses that are held back while a registry is unread.
    pub held_back: usize,
}

/// A request of either protocol variant.
pub trait DiscoveryRequest: Outlined + 'static {
    /// The protocol variant.
    const PROTOCOL: Protocol;

    /// Splits the request into the parts that the server uses.
    fn take_apart(self) -> Parts;
}

/// The parts of a request.
pub struct Parts {
    /// The client's node. The first request of a stream has it.
    pub node: Option<Node>,
    /// The type of the resources; may be empty on a stream of a single type.
    pub type_url: String,
    /// The remaining fields, in the form that the session accepts.
    pub request: Request,
}

impl DiscoveryRequest for discovery::DeltaDiscoveryRequest {
    const PROTOCOL: Protocol = Protocol::Delta;

    fn take_apart(self) -> Parts {
        let request = Request {
            names: self.resource_names_subscribe,
            unsubscribe: self.resource_names_unsubscribe,
            returns: !self.initial_resource_versions.is_empty(),
            has: self.initial_resource_versions.into_iter().collect(),
            nonce: self.response_nonce,
            error: self.error_detail.map(|status| status.message),
        };
        Parts { node: self.node, type_url: self.type_url, request }
    }
}

impl DiscoveryRequest for discovery::DiscoveryRequest {
    const PROTOCOL: Protocol = Protocol::StateOfTheWorld;

    fn take_apart(self) -> Parts {
        let request = Request {
            names: self.resource_names,
            returns: !self.version_info.is_empty(),
            nonce: self.response_nonce,
            error: self.error_detail.map(|status| status.message),
            ..Request::default()
        };
        Parts { node: self.node, type_url: self.type_url, request }
    }
}
