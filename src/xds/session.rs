//! The resources of one client: its subscriptions, and which of them are due. [`isthmus_ads::session`] drives them.
//!
//! Assignments of a wide change are sent behind all others, in bounded responses, and only with a permit.
//!
//! - `subscriptions`: what the client subscribes to and which of it is due, in both variants of the protocol.
//! - `names`: the names of one type, with the content that the client has.
//! - `withhold`: the filter for changes that wait until every registry is read.
//! - `delta`, `world`: the meaning of a request and the content of a response in each variant.
//! - `draft`: a response under construction.

use std::sync::Arc;

use tonic::Status;

use self::delta::Delta;
use self::draft::Draft;
use self::subscriptions::Subscriptions;
use self::world::World;
use super::hub::Hub;
use super::kind::Kind;
use isthmus_ads::budget::Account;
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::protocol::{Overview, Protocol};
use isthmus_ads::session::{Asked, Content, Flight, Next, Refusal, Resources};
use isthmus_decisions::view::Viewer;

mod delta;
mod draft;
mod names;
mod subscriptions;
mod withhold;
mod world;

/// The cost of a name in addition to its text, in bytes: the subscription and the rendering.
const NAME_COST: usize = 512;

/// The session of one stream.
pub type Session = isthmus_ads::session::Session<ClientResources>;

/// The resources of one client.
pub struct ClientResources {
    subscriptions: Subscriptions,
    state: State,
}

/// The state that only one variant of the protocol has.
enum State {
    Delta(Box<Delta>),
    World(World),
}

impl ClientResources {
    /// Returns the resources of a client without subscriptions.
    pub fn new(hub: Arc<Hub>, viewer: Viewer, protocol: Protocol) -> Self {
        let state = match protocol {
            Protocol::Delta => State::Delta(Box::default()),
            Protocol::StateOfTheWorld => State::World(World::default()),
        };
        Self { subscriptions: Subscriptions::new(hub, viewer), state }
    }

    /// Sets whether the client accepts listeners on virtual addresses.
    #[must_use]
    pub fn with_listeners(mut self, takes_listeners: bool) -> Self {
        self.subscriptions.takes_listeners = takes_listeners;
        self
    }

    /// Completes a response that is about to be sent.
    fn content(&mut self, kind: Kind, draft: Draft) -> Content {
        let subscriptions = &mut self.subscriptions;
        if kind == Kind::Cluster {
            // Envoy warms a changed cluster until it receives the assignment again, even if it has the assignment.
            let assignments = &mut subscriptions.types[Kind::Assignment as usize];
            let named = draft.new.iter().filter(|name| assignments.named.contains(name));
            assignments.due.owed.extend(named.cloned());
        }
        let of = &mut subscriptions.types[kind as usize];
        of.must_answer = false;
        let mut since = of.since.take();
        if draft.has_wide() {
            since = since.into_iter().chain(subscriptions.wide.since).min();
            subscriptions.used_permit = subscriptions.permit.take();
        }
        let (removed, missing) = (draft.removed.into_iter().collect(), draft.missing.into_iter().collect());
        Content { resources: draft.resources, removed, missing, since }
    }
}

impl Resources for ClientResources {
    type Kind = Kind;
    type Flights = [Flight; Kind::ALL.len()];

    fn request(&mut self, kind: Kind, asked: Asked, account: &mut Account) -> Result<(), Refusal> {
        if asked.is_answer && kind == Kind::Assignment {
            self.subscriptions.used_permit = None;
        }
        match &mut self.state {
            State::Delta(delta) => delta.request(&mut self.subscriptions, kind, asked, account),
            State::World(world) => world.request(&mut self.subscriptions, kind, asked, account),
        }
    }

    fn refresh(&mut self) {
        let differs = self.subscriptions.collect_marks();
        if let State::Delta(delta) = &mut self.state {
            if differs {
                delta.recheck();
            }
            Kind::ALL.iter().for_each(|&kind| delta.seed(&mut self.subscriptions, kind));
        }
        self.subscriptions.ask_for_permit();
    }

    fn next(&mut self, kind: Kind, _: &mut Account) -> Next {
        if self.subscriptions.waits_for_list(kind) {
            return Next::Nothing;
        }
        let draft = match &mut self.state {
            State::Delta(delta) => Some(delta.draft(&mut self.subscriptions, kind)),
            State::World(world) => world.draft(&mut self.subscriptions, kind),
        };
        let Some(draft) = draft else { return Next::Nothing };
        let of = &mut self.subscriptions.types[kind as usize];
        if !draft.is_empty() || of.must_answer {
            return Next::Content(self.content(kind, draft));
        }
        if of.due.pending.is_empty() {
            of.since = None;
        }
        if draft.has_room() { Next::Nothing } else { Next::Unfinished }
    }

    fn settle(&mut self) {
        self.subscriptions.return_permit();
    }

    async fn changed(&mut self) -> Result<(), Status> {
        self.subscriptions.mailbox.changed().await;
        Ok(())
    }

    fn waits(&self, kind: Kind, _sent: u64) -> bool {
        self.subscriptions.waits_for_list(kind)
    }

    /// In state of the world, each request has all names.
    fn names_bytes(&self, kind: Kind) -> usize {
        // In a request, a name occupies the bytes of its text, its tag and its length.
        self.subscriptions.types[kind as usize].named.iter().map(|named| named.name().len() + 4).sum()
    }

    fn overview(&self, kind: Kind) -> Overview {
        let of = &self.subscriptions.types[kind as usize];
        let own = match &self.state {
            State::Delta(delta) => delta.withheld(kind),
            State::World(world) => world.withheld(kind),
        };
        let (names, held_back) = (of.named.len(), of.due.withheld() + own);
        Overview { wildcard: of.wildcard, names, held_back, ..Overview::default() }
    }
}

#[cfg(test)]
pub(super) mod tests;
