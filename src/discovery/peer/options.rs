//! How a link with a peer comes about, as data of the config.

use std::path::PathBuf;
use std::sync::Arc;

use crate::model::address::Host;
use crate::model::identity::TrustDomain;
use crate::snapshot::peer::Peer;

/// The settings of the link with one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// The peer.
    pub peer: Arc<Peer>,
    /// True if the peer connects to one of our listeners.
    pub accept: bool,
    /// The gateway of the peer to which we connect.
    pub dial: Option<(Host, u16)>,
    /// The trust domain that the peer must have, if the config names one.
    pub trust_domain: Option<TrustDomain>,
    /// Our name for the peer's trust domain, if the config names one.
    pub alias: Option<TrustDomain>,
    /// The PEM file of the peer's roots; `None`: it is not enrolled.
    pub trust: Option<PathBuf>,
    /// True if it was an enrolment that said who the peer is, and not the config.
    pub is_enrolled: bool,
}
