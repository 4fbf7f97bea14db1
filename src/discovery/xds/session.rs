//! One client's stream, as a state machine without sockets: its subscriptions, the versions that it was sent, and those that it has acknowledged.
//!
//! ```text
//!              request                      a change to send
//!   (unknown) ────────▶ idle ────────────────────────────────▶ in flight
//!                        ▲                                        │
//!                        └────────────── ACK or NACK ─────────────┘
//! ```
//!
//! Each type is independent. While a response is in flight, changed names of the type are collected; after the
//! acknowledgement their newest state is sent. There is no timer: a client that never acknowledges costs its set of names.
//!
//! This module has the parts that both variants of the protocol share; the meaning of a request and the content of a response are in
//! `delta` and `world`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use draft::Draft;
use names::Names;

use super::budget::{Account, Exhausted};
use super::hub::{Clusters, Hub, ListEntry, Mailbox, Subscription};
use super::kind::Kind;
use super::resource::{Resource, Version};
use crate::model::name::HostName;
use crate::snapshot::unread::Unread;
use crate::snapshot::view::{ClientKind, Viewer};

mod delta;
mod draft;
mod names;
mod world;

/// Names that a client may subscribe to, per type.
pub const NAMES_MAX: usize = 1 << 17;
/// The longest name in bytes; the longest that can be parsed has about 350.
pub const NAME_BYTES_MAX: usize = 512;
/// The cost of a name beside its text, in bytes: the subscription and the rendering.
const NAME_COST: usize = 512;
/// The longest text of a NACK that is kept, in bytes; it may quote whole resources.
const ERROR_BYTES_MAX: usize = 4096;

/// The variants of the protocol.
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
    /// Delta, first request: `initial_resource_versions`, the resources of an earlier stream by name and
    /// version.
    pub has: Vec<(String, String)>,
    /// First request: true if the client has resources of an earlier stream.
    pub returns: bool,
    /// The nonce of the response that the request answers; empty if none.
    pub nonce: String,
    /// The text of a NACK.
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
    /// Delta: names of resources that do not exist, or not any more.
    pub removed: Vec<Arc<str>>,
    /// State of the world: the same; each name is sent once.
    pub missing: Vec<Arc<str>>,
}

/// The reason why a stream is ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestRefusal {
    /// The client subscribes to more than [`NAMES_MAX`] names of a type.
    #[error("more than {NAMES_MAX} names of one type")]
    TooManyNames,
    /// A name is longer than [`NAME_BYTES_MAX`].
    #[error("a name of more than {NAME_BYTES_MAX} bytes")]
    TooLongName,
    /// The names of the client, or of all clients, cost too much.
    #[error("names: {0}")]
    TooManyBytes(#[from] Exhausted),
}

/// The client's answer to the last response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acknowledgement {
    /// The request answers no response, or an earlier one.
    None,
    /// The response was accepted; with the time of the earliest change in it.
    Ack(Option<Instant>),
    /// The response was refused, with this text.
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
    /// When the response was sent that is not acknowledged yet.
    pub in_flight: Option<SystemTime>,
    /// Names, and complete responses, that are held back while a registry is unread.
    pub held_back: usize,
}

/// The session of one stream.
pub struct Session {
    hub: Arc<Hub>,
    mailbox: Arc<Mailbox>,
    viewer: Arc<Viewer>,
    protocol: Protocol,
    types: [Type; Kind::ALL.len()],
    responses: u64,
    unfinished: bool,
    /// Counts the bytes of the names against the limits of clients; `None`: they are not limited.
    account: Option<Account>,
    /// The unread registries as last read from the hub, and the hub's count at that time.
    unread: Arc<Unread>,
    unread_count: u64,
    /// Wakes this session when the unread registries change, while a change is held back.
    unread_entry: Option<ListEntry>,
    /// True if the client takes listeners on virtual addresses.
    takes_listeners: bool,
}

/// The state of one type.
#[derive(Default)]
struct Type {
    asked: bool,
    wildcard: bool,
    /// State of the world: true if the client has ever given a name, after which an empty list means no
    /// names, not all.
    ever_named: bool,
    named: Names,
    /// Names that may have changed.
    pending: BTreeSet<Arc<str>>,
    /// Names that must be answered, whatever was sent before.
    owed: BTreeSet<Arc<str>>,
    /// True if the client had resources of an earlier stream at its first request.
    returns: bool,
    /// Names held back while a registry is unread, each with true if it must be answered.
    held_back: BTreeMap<Arc<str>, bool>,
    /// State of the world: true if the complete response is held back.
    waits: bool,
    /// Delta: resources of the wildcard subscription that the client has and that differ from the present
    /// ones, by service.
    kept: BTreeMap<HostName, BTreeMap<Arc<str>, Option<Version>>>,
    /// True if `kept` must be checked because the unread registries changed.
    kept_changed: bool,
    /// True if a response is due even if nothing changed.
    must_answer: bool,
    /// The clusters that were sent for the wildcard subscription.
    all_sent: Arc<Clusters>,
    /// True if `all_sent` may be outdated.
    all_changed: bool,
    /// Wakes this session when the list of the type changes, while the client subscribes to all.
    wants_all: Option<ListEntry>,
    /// The client's `initial_resource_versions` for the wildcard subscription, until the list of all clusters
    /// is complete.
    unseeded: Option<BTreeMap<Arc<str>, Option<Version>>>,
    /// Names in `initial_resource_versions` that do not exist any more.
    gone: BTreeSet<Arc<str>>,
    /// When the first change was made that was not sent yet.
    since: Option<Instant>,
    in_flight: Option<InFlight>,
    /// The nonce of the last response.
    last_nonce: Option<String>,
    sent: u64,
}

/// A response that is not acknowledged yet.
struct InFlight {
    /// When the first change in the response was made.
    since: Option<Instant>,
    sent: SystemTime,
}

/// A name that the client subscribes to.
struct Named {
    subscription: Subscription,
    sent: Sent,
    /// True if the client had the resource before this stream.
    brought: bool,
    /// True if the client may have more endpoints than the present resource, from before this stream.
    lacking: bool,
}

/// The state of a name before the client subscribed to it on this stream.
enum BeforeStream {
    Nothing,
    /// The client had the resource; the present version counts as sent if the client has it.
    Had(Sent),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Nothing,
    /// The client was told that the resource does not exist.
    Absence,
    Version(Version),
}

impl Session {
    /// Makes a session without subscriptions.
    pub fn new(hub: Arc<Hub>, viewer: Viewer, protocol: Protocol) -> Self {
        let (mailbox, types) = (Arc::<Mailbox>::default(), Default::default());
        let mut unread_count = 0;
        let unread = hub.unread(&mut unread_count).unwrap_or_default();
        Self {
            hub,
            mailbox,
            viewer: Arc::new(viewer),
            protocol,
            types,
            responses: 0,
            unfinished: false,
            account: None,
            unread,
            unread_count,
            unread_entry: None,
            takes_listeners: false,
        }
    }

    /// Returns the session of a client that takes listeners on virtual addresses, or takes none.
    #[must_use]
    pub fn with_listeners(mut self, takes_listeners: bool) -> Self {
        self.takes_listeners = takes_listeners;
        self
    }

    /// Returns the session with an account that pays for its names.
    #[must_use]
    pub fn paid_from(mut self, account: Account) -> Self {
        self.account = Some(account);
        self
    }

    /// Returns the cost of the names in bytes.
    pub fn names_cost(&self) -> usize {
        self.account.as_ref().map_or(0, Account::bytes)
    }

    /// Returns the size in bytes that the names add to a later request: in state of the world each request
    /// has all names.
    pub fn names_bytes(&self, kind: Kind) -> usize {
        // The text of each name, with tag and length.
        self.types[kind as usize].named.iter().map(|named| named.name().len() + 4).sum()
    }

    /// Returns true if the client has sent a request of the type.
    pub fn has_asked(&self, kind: Kind) -> bool {
        self.types[kind as usize].asked
    }

    /// Waits until there may be a change to send.
    pub async fn changed(&self) {
        self.mailbox.changed().await;
    }

    /// Returns the state of a type.
    pub fn overview(&self, kind: Kind) -> Overview {
        let of = &self.types[kind as usize];
        Overview {
            asked: of.asked,
            wildcard: of.wildcard,
            names: of.named.len(),
            sent: of.sent,
            in_flight: of.in_flight.as_ref().map(|flight| flight.sent),
            held_back: of.held_back(),
        }
    }

    /// Returns the number of names and complete responses that are held back.
    pub fn held_back(&self) -> usize {
        self.types.iter().filter(|of| of.asked).map(Type::held_back).sum()
    }

    /// Applies a request.
    pub fn request(&mut self, kind: Kind, request: Request) -> Result<Acknowledgement, RequestRefusal> {
        let names = request.names.iter().chain(request.has.iter().map(|(name, _)| name));
        if names.into_iter().any(|name| name.len() > NAME_BYTES_MAX) {
            return Err(RequestRefusal::TooLongName);
        }
        match self.protocol {
            Protocol::Delta => self.delta_request(kind, request),
            Protocol::StateOfTheWorld => self.world_request(kind, request),
        }
    }

    /// Returns a nonce that no other response of this stream has.
    pub fn next_nonce(&mut self) -> String {
        self.responses += 1;
        format!("{:x}", self.responses)
    }

    /// Returns the next response, if there is one to send.
    pub fn response(&mut self) -> Option<Response> {
        self.collect_marks();
        let response = self.next_response();
        self.note_held_back();
        response
    }

    fn next_response(&mut self) -> Option<Response> {
        self.unfinished = false;
        self.seed_late();
        // Clusters come before assignments, listeners and routes.
        for kind in Kind::ALL {
            let waits_for_list = self.waits_for(kind);
            let of = &self.types[kind as usize];
            if !of.asked || of.in_flight.is_some() || waits_for_list || self.waits(kind) {
                continue;
            }
            let draft = match self.protocol {
                Protocol::Delta => self.draft_delta(kind),
                Protocol::StateOfTheWorld => self.draft_world(kind),
            };
            let of = &mut self.types[kind as usize];
            if !draft.is_empty() || of.must_answer {
                return Some(self.send(kind, draft));
            }
            if of.pending.is_empty() {
                of.since = None;
            }
            if !draft.has_room() {
                self.unfinished = true;
                return None;
            }
        }
        None
    }

    /// Returns true if there was no response only because there is more work than one turn allows.
    pub fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Takes the marks from the mailbox.
    fn collect_marks(&mut self) {
        let news = self.mailbox.take();
        for (of, marks) in self.types.iter_mut().zip(news).filter(|(_, marks)| marks.since.is_some()) {
            of.pending.extend(marks.names.into_iter().filter(|name| of.named.contains(name)));
            of.all_changed |= marks.all && of.wildcard;
            of.since = of.since.or(marks.since);
        }
        // Read after the marks: the marked resources are rendered without the registries that are unread at
        // this point.
        if let Some(unread) = self.hub.unread(&mut self.unread_count) {
            if !unread.has_registries_of(&self.unread) {
                self.types.iter_mut().for_each(Type::recheck_held_back);
            }
            self.unread = unread;
        }
    }

    /// Returns true while a list is being made for this client.
    pub fn waits_for_list(&self) -> bool {
        Kind::ALL.into_iter().any(|kind| self.waits_for(kind))
    }

    /// Returns true while the list of a type is being made for this client.
    fn waits_for(&self, kind: Kind) -> bool {
        self.types[kind as usize].wildcard && self.has_list(kind) && !self.hub.is_listed(kind)
    }

    /// Returns true if a wildcard subscription of the client to a type means a list of resources. Other clients than those that
    /// take listeners on virtual addresses have no listeners without a name to ask for.
    fn has_list(&self, kind: Kind) -> bool {
        kind == Kind::Cluster || kind == Kind::Listener && self.takes_listeners
    }

    /// Returns true while the complete response of a type would remove something that an unread registry may
    /// have.
    fn waits(&mut self, kind: Kind) -> bool {
        let has_list = self.has_list(kind);
        let of = &mut self.types[kind as usize];
        let may_wait = self.protocol == Protocol::StateOfTheWorld && kind.has_wildcard();
        let unread = &*self.unread;
        of.waits = may_wait && of.returns && !unread.is_empty() && {
            let client = self.viewer.client;
            let mut named = of.named.iter();
            of.wildcard && has_list
                || named.any(|named| {
                    named.is_held_back(kind, client, unread, named.subscription.current().as_deref())
                })
        };
        of.waits
    }

    /// Subscribes to changes of the unread registries while a change is held back.
    fn note_held_back(&mut self) {
        match !self.unread.is_empty() && self.held_back() > 0 {
            true if self.unread_entry.is_some() => {}
            true => self.unread_entry = Some(self.hub.subscribe_unread(&self.mailbox, &self.unread)),
            false => self.unread_entry = None,
        }
    }

    fn add(&mut self, kind: Kind, name: &Arc<str>, before: BeforeStream) -> Result<(), RequestRefusal> {
        let (sent, brought) = match before {
            BeforeStream::Nothing => (Sent::Nothing, false),
            BeforeStream::Had(sent) => (sent, true),
        };
        let of = &mut self.types[kind as usize];
        if of.named.contains(name) {
            return Ok(());
        }
        if of.named.len() >= NAMES_MAX {
            return Err(RequestRefusal::TooManyNames);
        }
        if let Some(account) = &mut self.account {
            account.take(name.len() + NAME_COST)?;
        }
        let subscription = self.hub.subscribe(&self.mailbox, kind, name, &self.viewer);
        of.named.insert(Named { subscription, sent, brought, lacking: brought });
        Ok(())
    }

    fn subscribe_to_all(&mut self, kind: Kind) {
        let has_list = self.has_list(kind);
        let of = &mut self.types[kind as usize];
        if of.wildcard {
            return;
        }
        of.wildcard = true;
        of.forget_all();
        if has_list {
            of.all_changed = true;
            of.wants_all = Some(self.hub.subscribe_all(&self.mailbox, kind));
        }
    }

    fn unsubscribe_from_all(&mut self, kind: Kind) {
        let of = &mut self.types[kind as usize];
        if !of.wildcard {
            return;
        }
        of.wildcard = false;
        of.forget_all();
        of.all_changed = false;
        of.wants_all = None;
    }

    /// Releases the cost of these names.
    fn release<'a>(account: &mut Option<Account>, names: impl Iterator<Item = &'a Arc<str>>) {
        if let Some(account) = account {
            account.release(names.map(|name| name.len() + NAME_COST).sum());
        }
    }

    /// Takes the request's answer to the last response, which is then not in flight any more.
    fn answer(&mut self, kind: Kind, request: &Request) -> Acknowledgement {
        let of = &mut self.types[kind as usize];
        if of.last_nonce.as_ref() != Some(&request.nonce) {
            return Acknowledgement::None;
        }
        match (of.in_flight.take(), &request.error) {
            (None, _) => Acknowledgement::None,
            (Some(flight), None) => Acknowledgement::Ack(flight.since),
            (Some(_), Some(error)) => Acknowledgement::Nack(shortened(error).to_owned()),
        }
    }

    /// Makes the response and notes that it is in flight.
    fn send(&mut self, kind: Kind, draft: Draft) -> Response {
        if kind == Kind::Cluster {
            // Envoy warms a cluster until an assignment follows it, even one that it has.
            let assignments = &mut self.types[Kind::Assignment as usize];
            for name in &draft.new {
                if assignments.named.contains(name) {
                    assignments.owed.insert(name.clone());
                }
            }
        }
        let nonce = self.next_nonce();
        let of = &mut self.types[kind as usize];
        of.must_answer = false;
        of.sent += 1;
        of.in_flight = Some(InFlight { since: of.since.take(), sent: SystemTime::now() });
        of.last_nonce = Some(nonce.clone());
        Response {
            protocol: self.protocol,
            type_url: kind.type_url().into(),
            nonce,
            version: Version::of_all(draft.resources.iter().map(|resource| resource.version)),
            resources: draft.resources,
            removed: draft.removed.into_iter().collect(),
            missing: draft.missing.into_iter().collect(),
        }
    }
}

impl Type {
    /// Returns the number of names and complete responses that are held back.
    fn held_back(&self) -> usize {
        self.held_back.len() + self.kept.values().map(BTreeMap::len).sum::<usize>() + usize::from(self.waits)
    }

    /// Checks all that is held back again.
    fn recheck_held_back(&mut self) {
        for (name, owed) in std::mem::take(&mut self.held_back) {
            match owed {
                true => self.owed.insert(name),
                false => self.pending.insert(name),
            };
        }
        self.kept_changed = !self.kept.is_empty();
    }

    /// Removes a name from those held back; returns true if it must be answered.
    fn take_held_back(&mut self, name: &Arc<str>) -> bool {
        self.held_back.remove(name).unwrap_or(false)
    }

    /// Resets the state of the wildcard subscription.
    fn forget_all(&mut self) {
        self.all_sent = Arc::default();
        self.kept.clear();
        self.unseeded = None;
    }

    /// Returns the next name to check, with true if it must be answered.
    fn next_name(&mut self) -> Option<(Arc<str>, bool)> {
        let owed = self.owed.pop_first().map(|name| (name, true));
        owed.or_else(|| Some((self.pending.pop_first()?, false)))
    }

    /// Returns true if the client holds no endpoints of a removed name: it was sent the present, empty
    /// assignment, or none, or it does not subscribe to the name.
    fn is_emptied(&self, name: &Arc<str>) -> bool {
        self.named.get(name).is_none_or(|named| {
            let current = named.subscription.current().map(|resource| resource.version);
            named.version() == current || named.sent == Sent::Nothing
        })
    }
}

impl Named {
    fn name(&self) -> &Arc<str> {
        self.subscription.name()
    }

    /// Returns true if the client keeps its resource because an unread registry may have more: the resource
    /// is neither removed nor emptied, and it changes only if a registry in use has changed the service.
    fn is_held_back(
        &self,
        kind: Kind,
        client: ClientKind,
        unread: &Unread,
        current: Option<&Resource>,
    ) -> bool {
        if !self.brought
            || unread.is_empty()
            || self.version() == current.map(|resource| resource.version) && current.is_some()
        {
            return false;
        }
        let Some(hostname) = self.subscription.hostname().map(HostName::as_str) else { return false };
        // Other resources do not depend on the endpoints.
        let lists_endpoints =
            kind == Kind::Assignment || kind == Kind::Cluster && client == ClientKind::Envoy;
        let lacks = self.lacking && lists_endpoints && !unread.is_changed(hostname);
        unread.may_have(hostname) && (lacks || current.is_none_or(|resource| resource.is_empty))
    }

    /// Notes the version that was sent; the client then has no more than the present resource.
    fn set_sent(&mut self, sent: Sent) {
        self.sent = sent;
        self.lacking = false;
    }

    fn version(&self) -> Option<Version> {
        match self.sent {
            Sent::Version(version) => Some(version),
            Sent::Nothing | Sent::Absence => None,
        }
    }
}

/// Returns the clusters of a service to send next: the present ones, and removed ones whose assignment is not
/// empty yet (make before break). The flag is true if no removed cluster had to stay.
fn held_next(
    next: &Arc<[Arc<Resource>]>,
    sent: &[Arc<Resource>],
    assignments: &Type,
) -> (Arc<[Arc<Resource>]>, bool) {
    let gone = sent.iter().filter(|old| !next.iter().any(|new| new.name == old.name));
    let mut kept = gone.filter(|old| !assignments.is_emptied(&old.name)).peekable();
    match kept.peek() {
        None => (next.clone(), true),
        Some(_) => (next.iter().chain(kept).cloned().collect(), false),
    }
}

fn shortened(text: &str) -> &str {
    let mut end = text.len().min(ERROR_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
pub(super) mod tests;
