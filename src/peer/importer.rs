//! The interface of the part of the program that imports the services of peers.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;

use isthmus_aggregator::reported::Report;
use isthmus_model::link::{Extent, LinkKey};
use isthmus_proto::isthmus::peer::v1 as proto;

/// An event of a peer's link, for the [`Importer`].
#[derive(Debug)]
pub enum Received {
    /// Items of a full listing, or changes after it.
    Delta(Box<proto::Delta>),
    /// All items of a full listing were delivered.
    Listed(Extent),
}

/// A future that completes when the importer has accepted the call.
pub type Done<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
/// A future of the items that the importer refuses, and of those that it takes although it refused them before. The message
/// has no sequence number.
pub type Answer<'a> = Pin<Box<dyn Future<Output = proto::Ack> + Send + 'a>>;

/// Imports the services of peers. The calls for one link come in order.
pub trait Importer: Send + Sync {
    /// Notifies the importer that a link was opened, which replaces an older link with the same instance. A full listing
    /// follows.
    fn up<'a>(&'a self, peer: &'a Arc<str>, link: &'a LinkKey) -> Done<'a>;
    /// Delivers items to the importer; returns its answer.
    fn deliver<'a>(&'a self, peer: &'a Arc<str>, link: &'a LinkKey, what: Received) -> Answer<'a>;
    /// Notifies the importer that the link has ended. If `forget` is true, the peer's operator has removed this gateway, and
    /// the peer's services are to be removed.
    fn down(&self, peer: &Arc<str>, link: &LinkKey, why: &str, forget: bool);
    /// Notifies the importer that the process of the peer's gateways at these addresses stops, or that it takes calls.
    fn stops(&self, peer: &Arc<str>, gateways: &[SocketAddr], stops: bool);
    /// Notifies the importer that the link with the process of the peer's gateways at these addresses has lost its heartbeats, or has
    /// them again.
    fn heartbeats(&self, peer: &Arc<str>, gateways: &[SocketAddr], are_lost: bool);
    /// Delivers the round-trip times that the peer has measured.
    fn measured(&self, peer: &Arc<str>, reports: &[Report]);
    /// Returns a counter that changes when the task that keeps the peer's services was restarted and needs a full listing.
    fn renewals(&self, peer: &Arc<str>) -> watch::Receiver<u64>;
}
