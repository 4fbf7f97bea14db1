//! The settings of the link with a peer, as the config gives them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::enrolled::GatewayAddress;
use isthmus_model::identity::TrustDomain;
use isthmus_settings::peer::Peer;
use isthmus_settings::scope::AddressScope;

/// The largest number of addresses of one peer to which this gateway connects.
pub const DIAL_MAX: usize = 16;

/// The settings of the link with one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// The peer.
    pub peer: Arc<Peer>,
    /// True if the peer connects to one of our listeners.
    pub accept: bool,
    /// The addresses of the peer's gateways to which we connect, at most [`DIAL_MAX`]; empty: we do not connect.
    pub dial: Vec<GatewayAddress>,
    /// The addresses that the peer may announce as those of its gateways.
    pub scope: AddressScope,
    /// The time without a link after which roots that the peer has announced do not verify its workloads any more.
    pub expire_after: Duration,
    /// The trust domain that the peer must have, if the config names one.
    pub trust_domain: Option<TrustDomain>,
    /// Our name for the peer's trust domain, if the config names one.
    pub alias: Option<TrustDomain>,
    /// The PEM file of the peer's roots; `None`: the peer is not enrolled.
    pub trust: Option<PathBuf>,
    /// The state of the link that an enrolment has stored for the peer; [`Stored::Nothing`] if the config itself names the
    /// peer's identity.
    pub stored: Stored,
}

/// The state of the link that an enrolment has stored for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// No link, or the config itself names the peer's identity.
    Nothing,
    /// A file that cannot be used.
    Unusable,
    /// A link that is in use.
    InUse,
}
