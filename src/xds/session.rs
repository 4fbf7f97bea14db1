//! One client's stream, as a state machine without sockets: its subscriptions, and the versions that were sent and
//! acknowledged.
//!
//! ```text
//!              request              change to send
//!   (unknown) ────────▶ idle ────────────────────▶ in flight
//!                        ▲                            │
//!                        └─────── ACK or NACK ────────┘
//! ```
//!
//! Assignments of a wide change are sent behind all others, in bounded responses, and only with a permit.
//!
//! Each type is independent. While a response is in flight, changed names of the type are collected; after the acknowledgement
//! the newest state of these names is sent. There is no timer: a client that never acknowledges costs a set of names.
//!
//! - `subscriptions`: what the client subscribes to and which of it is due, in both variants of the protocol.
//! - `names`: the names of one type, with the content that the client has.
//! - `withhold`: the filter for changes that wait until every registry is read.
//! - `delta`, `world`: the meaning of a request and the content of a response in each variant.
//! - `draft`: a response under construction.

use std::sync::Arc;
use std::time::SystemTime;

use self::delta::Delta;
use self::draft::Draft;
use self::subscriptions::{InFlight, Subscriptions};
use self::world::World;
use super::hub::Hub;
use super::kind::Kind;
use isthmus_ads::budget::{Account, Exhausted};
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::protocol::{Acknowledgement, NAME_BYTES_MAX, Overview, Protocol, Request, Response};
use isthmus_ads::resource::Version;
use isthmus_snapshot::view::Viewer;

mod delta;
mod draft;
mod names;
mod subscriptions;
mod withhold;
mod world;

/// The largest number of names that a client may subscribe to, per type.
pub const NAMES_MAX: usize = 1 << 17;
/// The cost of a name in addition to its text, in bytes: the subscription and the rendering.
const NAME_COST: usize = 512;
/// The longest text of a NACK that is kept, in bytes. A client may quote whole resources.
const ERROR_BYTES_MAX: usize = 4096;

/// The reason why a stream must end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestRefusal {
    /// The client subscribes to more than [`NAMES_MAX`] names of a type.
    #[error("the client subscribes to more than {NAMES_MAX} names of one type")]
    TooManyNames,
    /// A name is longer than [`NAME_BYTES_MAX`].
    #[error("the client subscribes to a name of more than {NAME_BYTES_MAX} bytes")]
    TooLongName,
    /// The names of the client, or of all clients, exceed their limit.
    #[error("cannot store the names of the client: {0}")]
    TooManyBytes(#[from] Exhausted),
}

/// The session of one stream.
pub struct Session {
    subscriptions: Subscriptions,
    state: State,
    responses: u64,
    unfinished: bool,
}

/// The state that only one variant of the protocol has.
enum State {
    Delta(Box<Delta>),
    World(World),
}

impl Session {
    /// Makes a session without subscriptions.
    pub fn new(hub: Arc<Hub>, viewer: Viewer, protocol: Protocol) -> Self {
        let state = match protocol {
            Protocol::Delta => State::Delta(Box::default()),
            Protocol::StateOfTheWorld => State::World(World::default()),
        };
        Self { subscriptions: Subscriptions::new(hub, viewer), state, responses: 0, unfinished: false }
    }

    /// Sets whether the client accepts listeners on virtual addresses.
    #[must_use]
    pub fn with_listeners(mut self, takes_listeners: bool) -> Self {
        self.subscriptions.takes_listeners = takes_listeners;
        self
    }

    /// Sets the account that counts the bytes of the names.
    #[must_use]
    pub fn paid_from(mut self, account: Account) -> Self {
        self.subscriptions.account = Some(account);
        self
    }

    /// Returns the variant of the protocol.
    pub fn protocol(&self) -> Protocol {
        match &self.state {
            State::Delta(_) => Protocol::Delta,
            State::World(_) => Protocol::StateOfTheWorld,
        }
    }

    /// Returns the cost of the client's names in bytes.
    pub fn names_cost(&self) -> usize {
        self.subscriptions.account.as_ref().map_or(0, Account::bytes)
    }

    /// Returns the number of bytes that the names may add to a later request: in state of the world each request has all names.
    pub fn names_bytes(&self, kind: Kind) -> usize {
        // In a request, a name occupies the bytes of its text, its tag and its length.
        self.subscriptions.types[kind as usize].named.iter().map(|named| named.name().len() + 4).sum()
    }

    /// Returns true if the client has sent a request of the type.
    pub fn has_asked(&self, kind: Kind) -> bool {
        self.subscriptions.types[kind as usize].asked
    }

    /// Waits until there may be a change to send.
    pub async fn changed(&self) {
        self.subscriptions.mailbox.changed().await;
    }

    /// Returns the state of a type.
    pub fn overview(&self, kind: Kind) -> Overview {
        let of = &self.subscriptions.types[kind as usize];
        let own = match &self.state {
            State::Delta(delta) => delta.withheld(kind),
            State::World(world) => world.withheld(kind),
        };
        Overview {
            asked: of.asked,
            wildcard: of.wildcard,
            names: of.named.len(),
            sent: of.sent,
            in_flight: of.in_flight.as_ref().map(|flight| flight.sent),
            held_back: of.due.withheld() + own,
        }
    }

    /// Returns the number of names and complete responses that are held back.
    pub fn held_back(&self) -> usize {
        Kind::ALL.iter().map(|&kind| self.overview(kind)).filter(|of| of.asked).map(|of| of.held_back).sum()
    }

    /// Returns true while the list of any type is being made for a wildcard subscription of this client.
    pub fn waits_for_list(&self) -> bool {
        Kind::ALL.iter().any(|&kind| self.subscriptions.waits_for_list(kind))
    }

    /// Applies a client's request to its subscriptions. Returns how the request answers the last response.
    pub fn request(&mut self, kind: Kind, request: Request) -> Result<Acknowledgement, RequestRefusal> {
        let names = request.names.iter().chain(request.has.iter().map(|(name, _)| name));
        if names.into_iter().any(|name| name.len() > NAME_BYTES_MAX) {
            return Err(RequestRefusal::TooLongName);
        }
        match &mut self.state {
            State::Delta(delta) => delta.request(&mut self.subscriptions, kind, request),
            State::World(world) => world.request(&mut self.subscriptions, kind, request),
        }
    }

    /// Returns a nonce that no other response of this stream has.
    pub fn next_nonce(&mut self) -> String {
        self.responses += 1;
        format!("{:x}", self.responses)
    }

    /// Returns the next response if there is one to send.
    pub fn response(&mut self) -> Option<Response> {
        let differs = self.subscriptions.collect_marks();
        if let State::Delta(delta) = &mut self.state {
            if differs {
                delta.recheck();
            }
            Kind::ALL.iter().for_each(|&kind| delta.seed(&mut self.subscriptions, kind));
        }
        self.subscriptions.ask_for_permit();
        let response = self.next_response();
        self.subscriptions.return_permit();
        response
    }

    fn next_response(&mut self) -> Option<Response> {
        self.unfinished = false;
        // Clusters come before assignments, listeners and routes.
        for &kind in Kind::ALL {
            if !self.subscriptions.is_ready(kind) {
                continue;
            }
            let draft = match &mut self.state {
                State::Delta(delta) => Some(delta.draft(&mut self.subscriptions, kind)),
                State::World(world) => world.draft(&mut self.subscriptions, kind),
            };
            let Some(draft) = draft else { continue };
            let of = &mut self.subscriptions.types[kind as usize];
            if !draft.is_empty() || of.must_answer {
                return Some(self.send(kind, draft));
            }
            if of.due.pending.is_empty() {
                of.since = None;
            }
            if !draft.has_room() {
                self.unfinished = true;
                return None;
            }
        }
        None
    }

    /// Returns true if [`Self::response`] returned `None` only because making the response takes further calls.
    pub fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Makes the response and records that it is in flight.
    fn send(&mut self, kind: Kind, draft: Draft) -> Response {
        let (protocol, nonce) = (self.protocol(), self.next_nonce());
        let subscriptions = &mut self.subscriptions;
        if kind == Kind::Cluster {
            // Envoy warms a changed cluster until it receives the assignment again, even if it has the assignment.
            let assignments = &mut subscriptions.types[Kind::Assignment as usize];
            let named = draft.new.iter().filter(|name| assignments.named.contains(name));
            assignments.due.owed.extend(named.cloned());
        }
        let of = &mut subscriptions.types[kind as usize];
        of.must_answer = false;
        of.sent += 1;
        let mut since = of.since.take();
        if draft.has_wide() {
            since = since.into_iter().chain(subscriptions.wide.since).min();
            subscriptions.used_permit = subscriptions.permit.take();
        }
        of.in_flight = Some(InFlight { since, sent: SystemTime::now() });
        of.last_nonce = Some(nonce.clone());
        Response {
            protocol,
            type_url: kind.type_url().into(),
            nonce,
            version: Version::of_all(draft.resources.iter().map(|resource| resource.version)),
            resources: draft.resources,
            removed: draft.removed.into_iter().collect(),
            missing: draft.missing.into_iter().collect(),
            is_served: true,
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
