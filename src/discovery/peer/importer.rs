//! The interface of the part of the program that takes what peers give.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;

use crate::proto::isthmus::peer::v1 as proto;

/// What a peer's session hands to the part of the program that takes the services.
#[derive(Debug)]
pub enum Received {
    /// Items of a listing, or changes after it.
    Delta(Box<proto::Delta>),
    /// The end of a listing.
    Listed,
}

/// A future that completes when the importer has accepted the call.
pub type Done<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
/// A future of items that are refused.
pub type Refusals<'a> = Pin<Box<dyn Future<Output = Vec<proto::Refusal>> + Send + 'a>>;

/// Takes what peers give. The calls of one link come in order.
pub trait Importer: Send + Sync {
    /// A link has come about with this instance of a peer; a full listing follows.
    fn up<'a>(&'a self, peer: &'a Arc<str>, instance: &'a Arc<str>) -> Done<'a>;
    /// Takes items; returns those that are refused.
    fn deliver<'a>(&'a self, peer: &'a Arc<str>, instance: &'a Arc<str>, what: Received) -> Refusals<'a>;
    /// The link has ended. If `forget`, the peer has said that its services shall be forgotten.
    fn down(&self, peer: &Arc<str>, instance: &Arc<str>, why: &str, forget: bool);
    /// Returns a counter that changes when whoever takes the peer's services has begun anew and needs a full listing.
    fn renewals(&self, peer: &Arc<str>) -> watch::Receiver<u64>;
}
