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
//! This module has the parts that both protocol variants share. `delta` and `world` have the meaning of a request and the
//! content of a response.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use draft::Draft;
use names::Names;

use super::budget::{Account, Exhausted};
use super::hub::{Clusters, Hub, ListEntry, Mailbox, News, Permit, Subscription, Wide};
use super::kind::Kind;
use super::resource::{Resource, Version};
use isthmus_model::name::HostName;
use isthmus_snapshot::unread::Unread;
use isthmus_snapshot::view::{ClientKind, Viewer};

mod delta;
mod draft;
mod names;
mod world;

/// The largest number of names that a client may subscribe to, per type.
pub const NAMES_MAX: usize = 1 << 17;
/// The largest length of a name in bytes; a request with a longer name ends the stream. Every name that can be parsed is
/// shorter: it has at most about 350 bytes.
pub const NAME_BYTES_MAX: usize = 512;
/// The cost of a name in addition to its text, in bytes: the subscription and the rendering.
const NAME_COST: usize = 512;
/// The longest text of a NACK that is kept, in bytes. A client may quote whole resources.
const ERROR_BYTES_MAX: usize = 4096;

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
    /// The names of requested resources that do not exist, for a stream in the state-of-the-world variant; each name once.
    pub missing: Vec<Arc<str>>,
}

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

/// The session of one stream.
pub struct Session {
    hub: Arc<Hub>,
    mailbox: Arc<Mailbox>,
    viewer: Arc<Viewer>,
    protocol: Protocol,
    types: [Type; Kind::ALL.len()],
    /// Assignments that may have changed with those of many other services.
    wide: Wide,
    /// The permission to send some of `wide`.
    permit: Option<Permit>,
    /// The permit that a response with assignments of `wide` has used, while that response is in flight.
    used_permit: Option<Permit>,
    responses: u64,
    unfinished: bool,
    /// Counts the bytes of the names against the limits; `None`: the names are not limited.
    account: Option<Account>,
    /// A copy of the hub's unread registries, and the hub's change counter when the copy was made.
    unread: Arc<Unread>,
    unread_count: u64,
    /// The entry by which the hub wakes this session when the unread registries change. It exists while a change is held back.
    unread_entry: Option<ListEntry>,
    /// True if the client accepts listeners on virtual addresses.
    takes_listeners: bool,
}

/// The state of one type.
#[derive(Default)]
struct Type {
    asked: bool,
    wildcard: bool,
    /// State of the world: true if the client has ever sent a name. After that, an empty list of names means no names; before
    /// that, it means all resources.
    ever_named: bool,
    named: Names,
    /// Names whose resources may have changed.
    pending: BTreeSet<Arc<str>>,
    /// Names that must be answered even if their resource was already sent.
    owed: BTreeSet<Arc<str>>,
    /// True if the client had resources of an earlier stream at its first request.
    returns: bool,
    /// Names held back while a registry is unread, each with a flag that is true if the name must be answered.
    held_back: BTreeMap<Arc<str>, bool>,
    /// State of the world: true if the complete response is held back.
    waits: bool,
    /// Delta: resources of the wildcard subscription that the client may keep although they do not exist at present, or exist
    /// in another version. The client keeps them while an unread registry may have the service. The resources are grouped by
    /// service.
    kept: BTreeMap<HostName, BTreeMap<Arc<str>, Option<Version>>>,
    /// True if `kept` must be checked because the unread registries changed.
    kept_changed: bool,
    /// True if a response is due even if nothing changed.
    must_answer: bool,
    /// The clusters that were sent for the wildcard subscription.
    all_sent: Arc<Clusters>,
    /// True if `all_sent` may be outdated.
    all_changed: bool,
    /// The entry by which the hub wakes this session when the list of the type changes. It exists with a wildcard subscription.
    wants_all: Option<ListEntry>,
    /// The client's `initial_resource_versions` for the wildcard subscription, until the list of the type is complete.
    unseeded: Option<BTreeMap<Arc<str>, Option<Version>>>,
    /// Names in `initial_resource_versions` that do not exist any more.
    gone: BTreeSet<Arc<str>>,
    /// The time of the first change that was not sent yet.
    since: Option<Instant>,
    in_flight: Option<InFlight>,
    /// The nonce of the last response.
    last_nonce: Option<String>,
    sent: u64,
}

/// A response that is not acknowledged yet.
struct InFlight {
    /// The time of the first change in the response.
    since: Option<Instant>,
    sent: SystemTime,
}

/// A name that the client subscribes to.
struct Named {
    subscription: Subscription,
    sent: Sent,
    /// True if the client had the resource before this stream.
    brought: bool,
    /// True if the client may have endpoints that the present resource lacks. The client received them before this stream.
    lacking: bool,
}

/// The state of a name before the client subscribed to it on this stream.
enum BeforeStream {
    Nothing,
    /// The client had the resource, in this version if the client named one.
    Had(Sent),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Nothing,
    /// The resource does not exist, and the client was notified of that.
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
            wide: Wide::default(),
            permit: None,
            used_permit: None,
            responses: 0,
            unfinished: false,
            account: None,
            unread,
            unread_count,
            unread_entry: None,
            takes_listeners: false,
        }
    }

    /// Sets whether the client accepts listeners on virtual addresses.
    #[must_use]
    pub fn with_listeners(mut self, takes_listeners: bool) -> Self {
        self.takes_listeners = takes_listeners;
        self
    }

    /// Sets the account that counts the bytes of the names.
    #[must_use]
    pub fn paid_from(mut self, account: Account) -> Self {
        self.account = Some(account);
        self
    }

    /// Returns the cost of the client's names in bytes.
    pub fn names_cost(&self) -> usize {
        self.account.as_ref().map_or(0, Account::bytes)
    }

    /// Returns the number of bytes that the names may add to a later request: in state of the world each request has all names.
    pub fn names_bytes(&self, kind: Kind) -> usize {
        // In a request, a name occupies the bytes of its text, its tag and its length.
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

    /// Applies a client's request to its subscriptions. Returns how the request answers the last response.
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

    /// Returns the next response if there is one to send.
    pub fn response(&mut self) -> Option<Response> {
        self.collect_marks();
        self.ask_for_permit();
        let response = self.next_response();
        self.note_held_back();
        self.return_permit();
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

    /// Returns true if [`Self::response`] returned `None` only because making the response takes further calls.
    pub fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Asks the hub for a permit if assignments of a wide change wait to be sent. Does nothing while the session has a permit, or
    /// while the response of its last permit is not answered.
    fn ask_for_permit(&mut self) {
        if !self.wide.is_empty() && self.permit.is_none() && self.used_permit.is_none() {
            self.permit = self.hub.permit(&self.mailbox);
        }
    }

    /// Gives back the permit if there are no names to send in it. A permit that the session gets while a response is in flight is
    /// kept for the next response: under urgent changes without end, a response is always in flight when a permit comes.
    fn return_permit(&mut self) {
        if self.wide.is_empty() {
            (self.wide.since, self.permit) = (None, None);
        }
    }

    /// Moves the changes that the hub has recorded in the mailbox to the pending changes.
    fn collect_marks(&mut self) {
        let News { marks, wide, permit } = self.mailbox.take();
        for (of, marks) in self.types.iter_mut().zip(marks).filter(|(_, marks)| marks.since.is_some()) {
            of.pending.extend(marks.names.into_iter().filter(|name| of.named.contains(name)));
            of.all_changed |= marks.all && of.wildcard;
            of.since = of.since.or(marks.since);
        }
        let assignments = &self.types[Kind::Assignment as usize];
        self.wide.append(wide, |name| assignments.named.contains(name));
        self.permit = permit.or_else(|| self.permit.take());
        // The hub adds a registry to the unread ones before it renders resources without that registry. Therefore the changes
        // are taken from the mailbox first, and the list of unread registries is read afterwards: it then includes every
        // registry that the changed resources lack.
        if let Some(unread) = self.hub.unread(&mut self.unread_count) {
            if !unread.has_registries_of(&self.unread) {
                self.types.iter_mut().for_each(Type::recheck_held_back);
            }
            self.unread = unread;
        }
    }

    /// Returns true while the list of any type is being made for a wildcard subscription of this client.
    pub fn waits_for_list(&self) -> bool {
        Kind::ALL.into_iter().any(|kind| self.waits_for(kind))
    }

    /// Returns true while the list of a type is being made for this client.
    fn waits_for(&self, kind: Kind) -> bool {
        self.types[kind as usize].wildcard && self.has_list(kind) && !self.hub.is_listed(kind)
    }

    /// Returns true if a wildcard subscription to a type selects a list of resources. A list of listeners exists only for
    /// clients that accept listeners on virtual addresses; gRPC clients ask for listeners by name.
    fn has_list(&self, kind: Kind) -> bool {
        kind == Kind::Cluster || kind == Kind::Listener && self.takes_listeners
    }

    /// Returns true while the complete response of a type would remove a resource that an unread registry may have.
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

    /// Releases the cost of these names from the account.
    fn release<'a>(account: &mut Option<Account>, names: impl Iterator<Item = &'a Arc<str>>) {
        if let Some(account) = account {
            account.release(names.map(|name| name.len() + NAME_COST).sum());
        }
    }

    /// Checks whether the request answers the last response. If it does, the response is not in flight any more.
    fn answer(&mut self, kind: Kind, request: &Request) -> Acknowledgement {
        let of = &mut self.types[kind as usize];
        if of.last_nonce.as_ref() != Some(&request.nonce) {
            return Acknowledgement::None;
        }
        if kind == Kind::Assignment {
            self.used_permit = None;
        }
        match (of.in_flight.take(), &request.error) {
            (None, _) => Acknowledgement::None,
            (Some(flight), None) => Acknowledgement::Ack(flight.since),
            (Some(_), Some(error)) => Acknowledgement::Nack(shortened(error).to_owned()),
        }
    }

    /// Makes the response and records that it is in flight.
    fn send(&mut self, kind: Kind, draft: Draft) -> Response {
        if kind == Kind::Cluster {
            // Envoy warms a changed cluster until it receives the assignment again, even if it has the assignment.
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
        let mut since = of.since.take();
        if draft.has_wide() {
            since = since.into_iter().chain(self.wide.since).min();
            self.used_permit = self.permit.take();
        }
        of.in_flight = Some(InFlight { since, sent: SystemTime::now() });
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

    /// Schedules another check of every name that is held back.
    fn recheck_held_back(&mut self) {
        for (name, owed) in std::mem::take(&mut self.held_back) {
            match owed {
                true => self.owed.insert(name),
                false => self.pending.insert(name),
            };
        }
        self.kept_changed = !self.kept.is_empty();
    }

    /// Removes a name from the names held back; returns true if the name must be answered.
    fn take_held_back(&mut self, name: &Arc<str>) -> bool {
        self.held_back.remove(name).unwrap_or(false)
    }

    /// Resets the state of the wildcard subscription.
    fn forget_all(&mut self) {
        self.all_sent = Arc::default();
        self.kept.clear();
        self.unseeded = None;
    }

    /// Returns the next name to check for a response, with true if it must be answered. Names of a wide change come last and
    /// have room of their own, so that urgent names without end do not hold them up.
    fn next_name(&mut self, draft: &mut Draft, wide: Option<&mut Wide>) -> Option<(Arc<str>, bool)> {
        let owed = if draft.has_room() { self.owed.pop_first().map(|name| (name, true)) } else { None };
        let urgent =
            || draft.has_room().then(|| self.pending.pop_first()).flatten().map(|name| (name, false));
        let next = owed.or_else(urgent);
        next.or_else(|| {
            let name = wide.filter(|_| draft.has_wide_room())?.pop()?;
            draft.begin_wide();
            Some((name, false))
        })
    }

    /// Returns true if the client holds no endpoints of a removed name: the assignment that was sent last is the current, empty
    /// one, or no assignment was sent, or the client does not subscribe to the name.
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

    /// Returns true if the client keeps its resource because an unread registry may have more endpoints. The resource is then
    /// neither removed nor emptied, and it changes only if a registry in use has changed the service.
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
        // Resources other than assignments and Envoy's clusters do not list endpoints.
        let lists_endpoints =
            kind == Kind::Assignment || kind == Kind::Cluster && client == ClientKind::Envoy;
        let lacks = self.lacking && lists_endpoints && !unread.is_changed(hostname);
        unread.may_have(hostname) && (lacks || current.is_none_or(|resource| resource.is_empty))
    }

    /// Records the last content that the client was sent. It replaces everything that the client had received before this
    /// stream, so `lacking` becomes false.
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

/// Returns the clusters of a service that the client is to have next: the present clusters, and the removed ones whose
/// assignment is not empty yet (make before break). The returned flag is true if there are no such removed clusters.
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
