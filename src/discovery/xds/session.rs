//! One client's stream, as a state machine without sockets: what it wants, what it was sent, what it has acknowledged.
//!
//! ```text
//!              request                      something to say
//!   (unknown) ────────▶ idle ────────────────────────────────▶ in flight
//!                        ▲                                        │
//!                        └────────────── ACK or NACK ─────────────┘
//! ```
//!
//! Each type is on its own. While a response is in flight its type only gathers names; the acknowledgement sends what has
//! gathered, in its newest state. There is no timer: a client that never acknowledges costs its set of names.
//!
//! Here is what both forms of the protocol have in common; what a request means and what a response holds in each is in
//! `delta` and `world`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use draft::Draft;
use names::Names;

use super::budget::{Account, Exhausted};
use super::hub::{Clusters, Hub, Listed, Mailbox, Subscription};
use super::kind::Kind;
use super::resource::{Resource, Version};
use crate::model::name::HostName;
use crate::snapshot::unread::Unread;
use crate::snapshot::view::{ClientKind, Viewer};

mod delta;
mod draft;
mod names;
mod world;

/// Names that a client may subscribe to, of one type.
pub const NAMES_MAX: usize = 1 << 17;
/// Bytes of a name; the longest that means something has some 350.
pub const NAME_BYTES_MAX: usize = 512;
/// What a name costs beside its text: that a client wants it, and what is rendered for it.
const NAME_COST: usize = 512;
/// Of the text of a NACK, which may hold whole resources.
const ERROR_BYTES_MAX: usize = 4096;

/// The two forms of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    StateOfTheWorld,
    Delta,
}

/// A request of a known type, of either form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Delta: names subscribed to. State of the world: all names.
    pub names: Vec<String>,
    pub unsubscribe: Vec<String>,
    /// Delta, first request: what the client has from an earlier stream.
    pub has: Vec<(String, String)>,
    /// First request: whether the client has something from an earlier stream.
    pub returns: bool,
    pub nonce: String,
    /// A NACK's text.
    pub error: Option<String>,
}

/// What goes to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub protocol: Protocol,
    pub type_url: Cow<'static, str>,
    pub nonce: String,
    pub version: Version,
    pub resources: Vec<Arc<Resource>>,
    /// Delta: names that there is nothing of, or nothing any more.
    pub removed: Vec<Arc<str>>,
    /// State of the world: the same, said once.
    pub missing: Vec<Arc<str>>,
}

/// Why a stream is ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("more than {NAMES_MAX} names of one type")]
    TooManyNames,
    #[error("a name of more than {NAME_BYTES_MAX} bytes")]
    TooLongName,
    #[error("names: {0}")]
    TooManyBytes(#[from] Exhausted),
}

/// What became of the response before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It says nothing of a response, or of an old one.
    None,
    /// With when the change came that the response told of.
    Ack(Option<Instant>),
    Nack(String),
}

/// What a session has of one type, for those who look on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// Whether the client has asked for anything of the type.
    pub asked: bool,
    pub wildcard: bool,
    pub names: usize,
    pub sent: u64,
    /// When the response was sent that is not acknowledged yet.
    pub in_flight: Option<SystemTime>,
    /// Names, and responses that have to hold all, that are held back while a registry has not been read.
    pub held_back: usize,
}

/// A client's stream.
pub struct Session {
    hub: Arc<Hub>,
    mailbox: Arc<Mailbox>,
    viewer: Arc<Viewer>,
    protocol: Protocol,
    types: [Type; Kind::ALL.len()],
    responses: u64,
    unfinished: bool,
    /// What the names may cost; absent: anything.
    account: Option<Account>,
    /// Registries that have not been read, as of the last look, and how often the hub had set them by then.
    unread: Arc<Unread>,
    unread_count: u64,
    /// Has the hub wake this session when registries have been read, as long as something is held back.
    holds_back: Option<Listed>,
    /// Has the hub wake this session when the list of all clusters changes, as long as the client wants all.
    wants_all: Option<Listed>,
}

/// A type of which the client may have asked.
#[derive(Default)]
struct Type {
    asked: bool,
    wildcard: bool,
    /// State of the world: whether it has ever given a name, after which no names are none and not all.
    ever_named: bool,
    named: Names,
    /// Names to look at, as they may have changed.
    pending: BTreeSet<Arc<str>>,
    /// Names to be answered, whatever was sent before.
    owed: BTreeSet<Arc<str>>,
    /// Whether the client had something from an earlier stream when it first asked.
    returns: bool,
    /// Names held back while a registry has not been read, each with whether it is owed.
    held_back: BTreeMap<Arc<str>, bool>,
    /// State of the world: whether the response that has to hold all is held back.
    waits: bool,
    /// Delta: what the client has besides names that it gave, by the service, where that is not what there is.
    kept: BTreeMap<HostName, BTreeMap<Arc<str>, Option<Version>>>,
    /// Whether what is kept has to be looked at, as other registries have not been read than before.
    kept_changed: bool,
    /// Whether a response is owed even where there is nothing to tell.
    must_answer: bool,
    /// What was sent to those who want all.
    all_sent: Arc<Clusters>,
    /// Whether `all_sent` may be behind.
    all_changed: bool,
    /// What a client that wants all said it has, until the list of all is whole.
    unseeded: Option<BTreeMap<Arc<str>, Option<Version>>>,
    /// What the client said it has, and there is not.
    gone: BTreeSet<Arc<str>>,
    /// When the first of the changes came that are not told of yet.
    since: Option<Instant>,
    in_flight: Option<InFlight>,
    /// Of the last response.
    last_nonce: Option<String>,
    sent: u64,
}

/// The last response is not answered yet.
struct InFlight {
    /// When the first of the changes came that it tells of.
    since: Option<Instant>,
    sent: SystemTime,
}

/// A name that the client has given.
struct Named {
    subscription: Subscription,
    sent: Sent,
    /// Whether the client had it before this stream.
    brought: bool,
    /// Whether the client may have more of it than there is, as it has it from before this stream.
    lacking: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Nothing,
    /// That there is none.
    Absence,
    Version(Version),
}

impl Session {
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
            holds_back: None,
            wants_all: None,
        }
    }

    /// The same, whose names are paid for from an account.
    #[must_use]
    pub fn paid_from(mut self, account: Account) -> Self {
        self.account = Some(account);
        self
    }

    /// Bytes that the names cost.
    pub fn names_cost(&self) -> usize {
        self.account.as_ref().map_or(0, Account::bytes)
    }

    /// Bytes of the largest sensible request of a type that the client has asked for before: in state of the world each one
    /// gives all names.
    pub fn names_bytes(&self, kind: Kind) -> usize {
        // Tag and length of each.
        self.types[kind as usize].named.iter().map(|named| named.name().len() + 4).sum()
    }

    /// Whether the client has asked for something of a type.
    pub fn has_asked(&self, kind: Kind) -> bool {
        self.types[kind as usize].asked
    }

    /// Waits until something changes, or has.
    pub async fn changed(&self) {
        self.mailbox.changed().await;
    }

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

    /// How much of all types is held back.
    pub fn held_back(&self) -> usize {
        self.types.iter().filter(|of| of.asked).map(Type::held_back).sum()
    }

    /// Takes in a request.
    pub fn request(&mut self, kind: Kind, request: Request) -> Result<Answer, Refusal> {
        let names = request.names.iter().chain(request.has.iter().map(|(name, _)| name));
        if names.into_iter().any(|name| name.len() > NAME_BYTES_MAX) {
            return Err(Refusal::TooLongName);
        }
        match self.protocol {
            Protocol::Delta => self.delta_request(kind, request),
            Protocol::StateOfTheWorld => self.world_request(kind, request),
        }
    }

    /// An identification that no other response of this stream has.
    pub fn next_nonce(&mut self) -> String {
        self.responses += 1;
        format!("{:x}", self.responses)
    }

    /// The next thing to say, if there is any.
    pub fn response(&mut self) -> Option<Response> {
        self.gather();
        let response = self.next_response();
        self.note_held_back();
        response
    }

    fn next_response(&mut self) -> Option<Response> {
        self.unfinished = false;
        self.seed_late();
        // Clusters before assignments before listeners before routes.
        for kind in Kind::ALL {
            let of = &self.types[kind as usize];
            let waits_for_list = kind == Kind::Cluster && self.waits_for_list();
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

    /// Whether there was no response because there is more to look at than one turn allows.
    pub fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    /// Takes the marks out of the mailbox.
    fn gather(&mut self) {
        let news = self.mailbox.take();
        for (of, marks) in self.types.iter_mut().zip(news).filter(|(_, marks)| marks.since.is_some()) {
            of.pending.extend(marks.names.into_iter().filter(|name| of.named.contains(name)));
            of.all_changed |= marks.all && of.wildcard;
            of.since = of.since.or(marks.since);
        }
        // Only after the marks were taken: what they tell of is rendered without the registries that are unread then.
        if let Some(unread) = self.hub.unread(&mut self.unread_count) {
            if !unread.has_registries_of(&self.unread) {
                self.types.iter_mut().for_each(Type::look_at_held_back);
            }
            self.unread = unread;
        }
    }

    /// Returns true while the list of all clusters is made for a client that wants all.
    pub fn waits_for_list(&self) -> bool {
        self.types[Kind::Cluster as usize].wildcard && !self.hub.is_listed()
    }

    /// Returns true while the response of a type that has to hold all would take something from the client that a registry
    /// which has not been read may have.
    fn waits(&mut self, kind: Kind) -> bool {
        let of = &mut self.types[kind as usize];
        let may_wait = self.protocol == Protocol::StateOfTheWorld && kind.has_wildcard();
        let unread = &*self.unread;
        of.waits = may_wait && of.returns && !unread.is_empty() && {
            let client = self.viewer.client;
            let mut named = of.named.iter();
            of.wildcard && kind == Kind::Cluster
                || named.any(|named| {
                    named.is_held_back(kind, client, unread, named.subscription.current().as_deref())
                })
        };
        of.waits
    }

    /// Has the hub wake this session when registries have been read, as long as something is held back.
    fn note_held_back(&mut self) {
        match !self.unread.is_empty() && self.held_back() > 0 {
            true if self.holds_back.is_some() => {}
            true => self.holds_back = Some(self.hub.holds_back(&self.mailbox, &self.unread)),
            false => self.holds_back = None,
        }
    }

    fn add(&mut self, kind: Kind, name: &Arc<str>, sent: Sent, brought: bool) -> Result<(), Refusal> {
        let of = &mut self.types[kind as usize];
        if of.named.contains(name) {
            return Ok(());
        }
        if of.named.len() >= NAMES_MAX {
            return Err(Refusal::TooManyNames);
        }
        if let Some(account) = &mut self.account {
            account.take(name.len() + NAME_COST)?;
        }
        let subscription = self.hub.subscribe(&self.mailbox, kind, name, &self.viewer);
        of.named.insert(Named { subscription, sent, brought, lacking: brought });
        Ok(())
    }

    fn want_all(&mut self, kind: Kind, wants: bool) {
        let of = &mut self.types[kind as usize];
        if of.wildcard == wants {
            return;
        }
        of.wildcard = wants;
        of.all_sent = Arc::default();
        of.kept.clear();
        // Of listeners there is none that anybody could ask for without its name.
        if kind == Kind::Cluster {
            of.all_changed = wants;
            of.unseeded = None;
            self.wants_all = wants.then(|| self.hub.subscribe_all(&self.mailbox));
        }
    }

    /// Gives back what these names cost.
    fn give_back<'a>(account: &mut Option<Account>, names: impl Iterator<Item = &'a Arc<str>>) {
        if let Some(account) = account {
            account.give_back(names.map(|name| name.len() + NAME_COST).sum());
        }
    }

    /// What the request says of the response before, and the end of that one's flight.
    fn answer(&mut self, kind: Kind, request: &Request) -> Answer {
        let of = &mut self.types[kind as usize];
        if of.last_nonce.as_ref() != Some(&request.nonce) {
            return Answer::None;
        }
        match (of.in_flight.take(), &request.error) {
            (None, _) => Answer::None,
            (Some(flight), None) => Answer::Ack(flight.since),
            (Some(_), Some(error)) => Answer::Nack(shortened(error).to_owned()),
        }
    }

    /// Makes the response, and notes that it is in flight.
    fn send(&mut self, kind: Kind, draft: Draft) -> Response {
        if kind == Kind::Cluster {
            // Envoy warms a cluster until an assignment comes after it, be it the one that it has.
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
    /// How much is held back.
    fn held_back(&self) -> usize {
        self.held_back.len() + self.kept.values().map(BTreeMap::len).sum::<usize>() + usize::from(self.waits)
    }

    /// Looks again at all that is held back.
    fn look_at_held_back(&mut self) {
        for (name, owed) in std::mem::take(&mut self.held_back) {
            match owed {
                true => self.owed.insert(name),
                false => self.pending.insert(name),
            };
        }
        self.kept_changed = !self.kept.is_empty();
    }

    /// Takes a name from those that are held back; whether it is owed.
    fn take_held_back(&mut self, name: &Arc<str>) -> bool {
        self.held_back.remove(name).unwrap_or(false)
    }

    /// The next name to look at, and whether it has to be answered.
    fn next_name(&mut self) -> Option<(Arc<str>, bool)> {
        let owed = self.owed.pop_first().map(|name| (name, true));
        owed.or_else(|| Some((self.pending.pop_first()?, false)))
    }

    /// Whether the client is sent no endpoints of a name any more, so far as it asked for any.
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

    /// Returns true if the client keeps what it has, as a registry that was not read may have more of it: what it has is
    /// neither removed nor emptied, and is changed only where a registry in use has changed the service.
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
        // Other resources are the same whichever endpoints there are.
        let lists_endpoints =
            kind == Kind::Assignment || kind == Kind::Cluster && client == ClientKind::Envoy;
        let lacks = self.lacking && lists_endpoints && !unread.is_changed(hostname);
        unread.may_have(hostname) && (lacks || current.is_none_or(|resource| resource.is_empty))
    }

    /// Notes what the client is sent, or has: no more than there is.
    fn is_sent(&mut self, sent: Sent) {
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

/// The clusters of a service that a client holds next: those that there are, and of those that are no more the ones for
/// which it is still sent endpoints. One that is sent none any more first has nothing to lose with the cluster. And
/// whether none had to stay.
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
