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
//! Rules by number are those of the xDS protocol documentation, `xds_protocol`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::hub::{Clusters, Hub, Mailbox, Subscription};
use super::kind::Kind;
use super::resource::{Resource, Version};
use crate::model::name::HostName;
use crate::snapshot::view::Viewer;

/// Names that a client may subscribe to, of one type.
pub const NAMES_MAX: usize = 1 << 17;
/// Bytes of resources after which a response is closed that need not hold all: clients refuse messages of over 4 MiB.
const RESPONSE_BYTES: usize = 1 << 20;
/// Names looked at for one such response.
const RESPONSE_NAMES: usize = 10_000;
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
    pub nonce: String,
    /// A NACK's text.
    pub error: Option<String>,
}

/// What goes to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub protocol: Protocol,
    pub type_url: Arc<str>,
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
    pub wildcard: bool,
    pub names: usize,
    pub sent: u64,
    pub in_flight: bool,
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
}

/// A type of which the client may have asked.
#[derive(Default)]
struct Type {
    asked: bool,
    wildcard: bool,
    ever_named: bool,
    named: BTreeMap<Arc<str>, Named>,
    /// Names to look at, as they may have changed.
    pending: BTreeSet<Arc<str>>,
    /// Names to be answered, whatever was sent before.
    owed: BTreeSet<Arc<str>>,
    /// Whether a response is owed even where there is nothing to tell.
    must_answer: bool,
    /// What was sent to those who want all.
    all_sent: Arc<Clusters>,
    /// Whether `all_sent` may be behind.
    all_changed: bool,
    /// What the client said it has, and there is not.
    gone: BTreeSet<Arc<str>>,
    since: Option<Instant>,
    in_flight: Option<InFlight>,
    last_nonce: Option<String>,
    sent: u64,
}

struct InFlight {
    nonce: String,
    since: Option<Instant>,
}

/// A name that the client has given.
struct Named {
    subscription: Subscription,
    sent: Sent,
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
        let (mailbox, types) = (Mailbox::new(), Default::default());
        Self { hub, mailbox, viewer: Arc::new(viewer), protocol, types, responses: 0, unfinished: false }
    }

    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Where it is told of changes.
    pub fn mailbox(&self) -> Arc<Mailbox> {
        self.mailbox.clone()
    }

    pub fn overview(&self, kind: Kind) -> Overview {
        let of = &self.types[kind as usize];
        Overview {
            wildcard: of.wildcard,
            names: of.named.len(),
            sent: of.sent,
            in_flight: of.in_flight.is_some(),
        }
    }

    /// Takes in a request.
    pub fn request(&mut self, kind: Kind, request: Request) -> Result<Answer, Refusal> {
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
        self.unfinished = false;
        // Clusters before assignments before listeners before routes.
        for kind in Kind::ALL {
            if self.types[kind as usize].in_flight.is_some() {
                continue;
            }
            let response = match self.protocol {
                Protocol::Delta => self.delta_response(kind),
                Protocol::StateOfTheWorld => self.world_response(kind),
            };
            if response.is_some() || self.unfinished {
                return response;
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
        for (of, marks) in self.types.iter_mut().zip(self.mailbox.take()) {
            of.pending.extend(marks.names.into_iter().filter(|name| of.named.contains_key(name)));
            of.all_changed |= marks.all && of.wildcard;
            of.since = of.since.or(marks.since);
        }
    }

    fn add(&mut self, kind: Kind, name: Arc<str>, sent: Sent) -> Result<(), Refusal> {
        let of = &mut self.types[kind as usize];
        of.ever_named = true;
        if of.named.contains_key(&name) {
            return Ok(());
        }
        if of.named.len() >= NAMES_MAX {
            return Err(Refusal::TooManyNames);
        }
        let subscription = self.hub.subscribe(&self.mailbox, kind, &name, &self.viewer);
        of.named.insert(name, Named { subscription, sent });
        Ok(())
    }

    fn want_all(&mut self, kind: Kind, wants: bool) {
        let of = &mut self.types[kind as usize];
        if of.wildcard == wants {
            return;
        }
        of.wildcard = wants;
        of.all_sent = Arc::default();
        // Of listeners there is none that anybody could ask for without its name.
        if kind == Kind::Cluster {
            of.all_changed = wants;
            match wants {
                true => self.hub.subscribe_all(&self.mailbox),
                false => self.hub.unsubscribe_all(&self.mailbox),
            }
        }
    }

    fn delta_request(&mut self, kind: Kind, request: Request) -> Result<Answer, Refusal> {
        let answer = self.answer(kind, &request);
        let first = !std::mem::replace(&mut self.types[kind as usize].asked, true);
        let mut has: BTreeMap<Arc<str>, Option<Version>> = BTreeMap::new();
        if first {
            let all = request.has.into_iter().take(NAMES_MAX);
            has.extend(all.map(|(name, version)| (name.into(), Version::parse(&version))));
        }
        let legacy = first && request.names.is_empty() && request.unsubscribe.is_empty();
        let star = legacy || request.names.iter().any(|name| name == "*");
        if star && kind.has_wildcard() {
            self.want_all(kind, true);
            self.types[kind as usize].must_answer = true;
        }
        for name in request.names.into_iter().filter(|name| name != "*") {
            let name: Arc<str> = name.into();
            // An equal version is an answer that the client has already.
            let had = has.get(&name).copied().flatten();
            self.add(kind, name.clone(), had.map_or(Sent::Nothing, Sent::Version))?;
            let of = &mut self.types[kind as usize];
            match had {
                Some(_) => of.pending.insert(name),
                None => of.owed.insert(name),
            };
        }
        for name in request.unsubscribe {
            self.unsubscribe(kind, &name);
        }
        if first && self.types[kind as usize].wildcard {
            self.seed(kind, has);
        }
        Ok(answer)
    }

    fn unsubscribe(&mut self, kind: Kind, name: &str) {
        if name == "*" {
            self.want_all(kind, false);
            return;
        }
        let of = &mut self.types[kind as usize];
        if let Some((name, _)) = of.named.remove_entry(name) {
            of.pending.remove(&name);
            of.owed.remove(&name);
            // Whether it is covered by the wildcard still, the client cannot know.
            if of.wildcard {
                of.owed.insert(name);
            }
        }
    }

    /// Takes what the client says it has as sent, where it is what there is.
    fn seed(&mut self, kind: Kind, has: BTreeMap<Arc<str>, Option<Version>>) {
        if has.is_empty() {
            return;
        }
        let all = if kind == Kind::Cluster { self.hub.all_clusters() } else { Arc::default() };
        let mut sent = Clusters::new();
        let mut known: BTreeSet<&Arc<str>> = BTreeSet::new();
        for (hostname, resources) in all.iter() {
            let same: Arc<[Arc<Resource>]> = resources
                .iter()
                .filter(|resource| has.get(&resource.name) == Some(&Some(resource.version)))
                .cloned()
                .collect();
            known.extend(resources.iter().map(|resource| &resource.name));
            if !same.is_empty() {
                sent.insert(hostname.clone(), same);
            }
        }
        let of = &mut self.types[kind as usize];
        // Names it asks for are answered as such.
        let is_gone = |name: &Arc<str>| !known.contains(name) && !of.named.contains_key(name);
        of.gone = has.into_keys().filter(is_gone).collect();
        of.all_sent = Arc::new(sent);
    }

    /// What the request says of the response before, and the end of that one's flight.
    fn answer(&mut self, kind: Kind, request: &Request) -> Answer {
        let of = &mut self.types[kind as usize];
        match of.in_flight.take_if(|flight| flight.nonce == request.nonce) {
            None => Answer::None,
            Some(flight) => match &request.error {
                None => Answer::Ack(flight.since),
                Some(error) => Answer::Nack(shortened(error).to_owned()),
            },
        }
    }

    fn world_request(&mut self, kind: Kind, request: Request) -> Result<Answer, Refusal> {
        let of = &self.types[kind as usize];
        // A stale request was sent before the client had seen our last response: the one that answers it follows.
        if of.last_nonce.as_ref().is_some_and(|last| *last != request.nonce) {
            return Ok(Answer::None);
        }
        let answer = self.answer(kind, &request);
        let first = !std::mem::replace(&mut self.types[kind as usize].asked, true);
        let ever_named = self.types[kind as usize].ever_named;
        let star = request.names.iter().any(|name| name == "*") || request.names.is_empty() && !ever_named;
        self.types[kind as usize].ever_named |= !request.names.is_empty();
        let names: BTreeSet<Arc<str>> =
            request.names.into_iter().filter(|name| name != "*").map(Into::into).collect();
        let wanted_all = self.types[kind as usize].wildcard;
        if kind.has_wildcard() {
            self.want_all(kind, star);
        }
        let of = &mut self.types[kind as usize];
        of.named.retain(|name, _| names.contains(name));
        of.pending.retain(|name| names.contains(name));
        of.owed.retain(|name| names.contains(name));
        of.must_answer |= kind.has_wildcard() && (first || !wanted_all && star);
        for name in names {
            if !self.types[kind as usize].named.contains_key(&name) {
                self.add(kind, name.clone(), Sent::Nothing)?;
                self.types[kind as usize].owed.insert(name);
            }
        }
        Ok(answer)
    }

    fn delta_response(&mut self, kind: Kind) -> Option<Response> {
        let mut told = Told::default();
        told.removed.append(&mut self.types[kind as usize].gone);
        self.tell_all_delta(kind, &mut told);
        let [clusters, others @ ..] = &mut self.types;
        let (of, assignments) = match kind {
            Kind::Cluster => (clusters, others.first()),
            Kind::Assignment | Kind::Listener | Kind::Route => (&mut others[kind as usize - 1], None),
        };
        let mut waiting = Vec::new();
        while told.has_room() {
            let Some((name, owed)) = of.next_name() else { break };
            told.looked_at += 1;
            match of.named.get_mut(&name) {
                Some(named) => match named.subscription.current() {
                    Some(resource) if owed || named.sent != Sent::Version(resource.version) => {
                        named.sent = Sent::Version(resource.version);
                        told.tell(resource);
                    }
                    Some(_) => {}
                    None if !owed && assignments.is_some_and(|of| !of.is_emptied(&name)) => {
                        waiting.push(name);
                    }
                    None => {
                        if owed || matches!(named.sent, Sent::Version(_)) {
                            told.removed.insert(name);
                        }
                        named.sent = Sent::Absence;
                    }
                },
                // Given up as a name: the wildcard covers it, or there is none.
                None if owed => match find(&of.all_sent, kind, &name) {
                    Some(resource) => told.tell(resource),
                    None => drop(told.removed.insert(name)),
                },
                None => {}
            }
        }
        of.pending.extend(waiting);
        if told.is_empty() && !of.must_answer {
            self.unfinished = !told.has_room();
            of.since = if of.pending.is_empty() { None } else { of.since };
            return None;
        }
        Some(self.send(kind, told))
    }

    /// Adds what those who want all do not have yet.
    fn tell_all_delta(&mut self, kind: Kind, told: &mut Told) {
        let [clusters, assignments, ..] = &mut self.types;
        if kind != Kind::Cluster || !clusters.wildcard || !clusters.all_changed {
            return;
        }
        let all = self.hub.all_clusters();
        let mut complete = true;
        for hostname in all.changed_since(&clusters.all_sent, same) {
            if !told.has_room() {
                complete = false;
                break;
            }
            told.looked_at += 1;
            let next = all.get(hostname.as_str()).cloned().unwrap_or_default();
            let sent = clusters.all_sent.get(hostname.as_str()).cloned().unwrap_or_default();
            for resource in next.iter() {
                if !sent.iter().any(|old| old.name == resource.name && old.version == resource.version) {
                    told.tell(resource.clone());
                }
            }
            let kept = kept(&sent, &next, assignments);
            let gone = sent.iter().filter(|old| !next.iter().chain(&kept).any(|new| new.name == old.name));
            told.removed.extend(gone.map(|old| old.name.clone()));
            complete &= kept.is_empty();
            note_sent(&mut clusters.all_sent, hostname, next.iter().cloned().chain(kept).collect());
        }
        if complete {
            // The same content in fewer bytes: shared with all who have it.
            clusters.all_sent = all;
            clusters.all_changed = false;
        }
    }

    fn world_response(&mut self, kind: Kind) -> Option<Response> {
        if !self.types[kind as usize].asked {
            return None;
        }
        let mut told = Told::default();
        let tells = if kind.has_wildcard() {
            self.tell_whole_world(kind, &mut told)
        } else {
            self.types[kind as usize].tell_some_of_world(&mut told);
            !told.is_empty()
        };
        if !tells {
            self.unfinished = !told.has_room();
            let of = &mut self.types[kind as usize];
            of.since = if of.pending.is_empty() { None } else { of.since };
            return None;
        }
        Some(self.send(kind, told))
    }

    /// Listeners and clusters are told of all together: what is left out is gone. Whether there is any news.
    fn tell_whole_world(&mut self, kind: Kind, told: &mut Told) -> bool {
        let all = self.all_of_world(kind);
        let of = &mut self.types[kind as usize];
        let version = |named: &Named| named.subscription.current().map(|resource| resource.version);
        let looked = std::mem::take(&mut of.pending);
        let changed = of.must_answer
            || !of.owed.is_empty()
            || all.is_some()
            || looked
                .iter()
                .filter_map(|name| of.named.get(name))
                .any(|named| version(named) != named.version());
        if !changed {
            return false;
        }
        of.owed.clear();
        for (name, named) in &mut of.named {
            match named.subscription.current() {
                Some(resource) => {
                    told.tell_as(resource.clone(), named.sent != Sent::Version(resource.version));
                    named.sent = Sent::Version(resource.version);
                }
                None => {
                    if named.sent != Sent::Absence {
                        told.missing.insert(name.clone());
                    }
                    named.sent = Sent::Absence;
                }
            }
        }
        let all = all.unwrap_or_else(|| of.all_sent.clone());
        for (hostname, resources) in all.sorted() {
            let sent = of.all_sent.get(hostname.as_str());
            for resource in resources.iter().filter(|resource| !of.named.contains_key(&resource.name)) {
                let new = !sent.is_some_and(|sent| sent.iter().any(|old| old.version == resource.version));
                told.tell_as(resource.clone(), new);
            }
        }
        of.all_sent = all;
        true
    }

    /// What those who want all have next, if it is not what they have.
    fn all_of_world(&mut self, kind: Kind) -> Option<Arc<Clusters>> {
        let [clusters, assignments, ..] = &mut self.types;
        if kind != Kind::Cluster || !clusters.all_changed {
            return None;
        }
        let mut all = self.hub.all_clusters();
        let mut complete = true;
        for hostname in all.changed_since(&clusters.all_sent, same) {
            let next = all.get(hostname.as_str()).cloned().unwrap_or_default();
            let sent = clusters.all_sent.get(hostname.as_str()).cloned().unwrap_or_default();
            let kept = kept(&sent, &next, assignments);
            if !kept.is_empty() {
                complete = false;
                note_sent(&mut all, hostname, next.iter().cloned().chain(kept).collect());
            }
        }
        clusters.all_changed = !complete;
        (!all.changed_since(&clusters.all_sent, same).is_empty()).then_some(all)
    }

    /// Makes the response, and notes that it is in flight.
    fn send(&mut self, kind: Kind, told: Told) -> Response {
        if kind == Kind::Cluster {
            // Envoy warms a cluster until an assignment comes after it, be it the one that it has.
            let assignments = &mut self.types[Kind::Assignment as usize];
            for name in &told.new {
                if assignments.named.contains_key(name) {
                    assignments.owed.insert(name.clone());
                }
            }
        }
        let nonce = self.next_nonce();
        let of = &mut self.types[kind as usize];
        of.must_answer = false;
        of.sent += 1;
        of.in_flight = Some(InFlight { nonce: nonce.clone(), since: of.since.take() });
        of.last_nonce = Some(nonce.clone());
        Response {
            protocol: self.protocol,
            type_url: kind.type_url().into(),
            nonce,
            version: Version::of_all(told.resources.iter().map(|resource| resource.version)),
            resources: told.resources,
            removed: told.removed.into_iter().collect(),
            missing: told.missing.into_iter().collect(),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.hub.unsubscribe_all(&self.mailbox);
    }
}

impl Type {
    /// Of the other types, what has changed is told, as much as one response may hold.
    fn tell_some_of_world(&mut self, told: &mut Told) {
        while told.has_room() {
            let Some((name, owed)) = self.next_name() else { break };
            told.looked_at += 1;
            let Some(named) = self.named.get_mut(&name) else { continue };
            match named.subscription.current() {
                Some(resource) => {
                    if owed || named.sent != Sent::Version(resource.version) {
                        told.tell(resource.clone());
                    }
                    named.sent = Sent::Version(resource.version);
                }
                None => {
                    if named.sent != Sent::Absence {
                        told.missing.insert(name);
                    }
                    named.sent = Sent::Absence;
                }
            }
        }
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
    fn version(&self) -> Option<Version> {
        match self.sent {
            Sent::Version(version) => Some(version),
            Sent::Nothing | Sent::Absence => None,
        }
    }
}

/// What a response will hold.
#[derive(Default)]
struct Told {
    resources: Vec<Arc<Resource>>,
    /// Names of those that the client does not have in this version.
    new: Vec<Arc<str>>,
    names: BTreeSet<Arc<str>>,
    removed: BTreeSet<Arc<str>>,
    missing: BTreeSet<Arc<str>>,
    bytes: usize,
    looked_at: usize,
}

impl Told {
    fn has_room(&self) -> bool {
        self.bytes < RESPONSE_BYTES && self.looked_at < RESPONSE_NAMES
    }

    fn is_empty(&self) -> bool {
        self.resources.is_empty() && self.removed.is_empty() && self.missing.is_empty()
    }

    fn tell(&mut self, resource: Arc<Resource>) {
        self.tell_as(resource, true);
    }

    /// A name is told of once, and not as removed too.
    fn tell_as(&mut self, resource: Arc<Resource>, new: bool) {
        if !self.names.insert(resource.name.clone()) {
            return;
        }
        self.removed.remove(&resource.name);
        self.bytes += resource.message().len();
        if new {
            self.new.push(resource.name.clone());
        }
        self.resources.push(resource);
    }
}

/// Of the clusters that are no more those that stay for now: a client that is sent no endpoints any more first has
/// nothing to lose with the cluster.
fn kept(sent: &[Arc<Resource>], next: &[Arc<Resource>], assignments: &Type) -> Vec<Arc<Resource>> {
    let gone = sent.iter().filter(|old| !next.iter().any(|new| new.name == old.name));
    gone.filter(|old| !assignments.is_emptied(&old.name)).cloned().collect()
}

fn same(one: &Arc<[Arc<Resource>]>, other: &Arc<[Arc<Resource>]>) -> bool {
    Arc::ptr_eq(one, other)
        || one.len() == other.len() && one.iter().zip(&**other).all(|(a, b)| Arc::ptr_eq(a, b))
}

/// The resource of a name among all.
fn find(all: &Clusters, kind: Kind, name: &str) -> Option<Arc<Resource>> {
    let resources = all.get(kind.read(name)?.hostname.as_str())?;
    resources.iter().find(|resource| &*resource.name == name).cloned()
}

fn note_sent(sent: &mut Arc<Clusters>, hostname: HostName, resources: Arc<[Arc<Resource>]>) {
    let sent = Arc::make_mut(sent);
    if resources.is_empty() {
        sent.remove(hostname.as_str());
    } else {
        sent.insert(hostname, resources);
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
mod tests;
