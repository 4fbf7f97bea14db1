//! One client's stream as a state machine without sockets: the delta variant of xDS, as ztunnels speak it.
//!
//! ```text
//!               request                something to send
//!   (unknown) ─────────▶ idle ─────────────────────────▶ in flight
//!                         ▲                                 │
//!                         └────────── ACK or NACK ──────────┘
//! ```
//!
//! Each type is independent; policies go first, because a ztunnel ignores the names of policies that it does not have. A client
//! that refuses a response has applied the good part of it, so that nothing is sent again before it changes.
//!
//! - `held`: what the client has.
//! - `subscription`: what it wants of the type `Address`: everything, or names.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use isthmus_ads::budget::{Account, Exhausted};
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::node::beginning_of;
use isthmus_ads::protocol::{Acknowledgement, NAME_BYTES_MAX, Overview, Protocol, Request, Response};
use isthmus_ads::resource::{Resource, Version};

use self::held::Held;
use self::subscription::Subscription;
use super::table::Table;
use isthmus_ads::ztunnel::Kind;

mod held;
mod subscription;

/// The largest number of names that a client may ask for.
pub const NAMES_MAX: usize = 1 << 17;
/// The cost of a name in addition to its text, in bytes.
const NAME_COST: usize = 256;
/// The largest response in bytes; what is left follows in further responses. Clients accept 200 MiB.
const RESPONSE_BYTES_MAX: usize = 64 << 20;
/// The longest text of a NACK that is kept, in bytes.
const ERROR_BYTES_MAX: usize = 4096;

/// The reason why a stream must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The client asks for more than [`NAMES_MAX`] names.
    TooManyNames,
    /// A name is longer than [`NAME_BYTES_MAX`].
    TooLongName,
    /// The names of the client, or of all clients, exceed their limit.
    TooManyBytes(Exhausted),
    /// The client asks for policies by name.
    NamedPolicies,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooManyNames => write!(f, "the client asks for more than {NAMES_MAX} names"),
            Self::TooLongName => write!(f, "the client asks for a name of more than {NAME_BYTES_MAX} bytes"),
            Self::TooManyBytes(why) => write!(f, "cannot store the names of the client: {why}"),
            Self::NamedPolicies => f.write_str("policies are served all together, and not by name"),
        }
    }
}

/// The changes of one type that are to be sent.
#[derive(Default)]
struct Draft {
    resources: Vec<Arc<Resource>>,
    removed: Vec<Arc<str>>,
    /// Services that follow in a response of their own, although they were sent. A ztunnel that removes a service or takes an address
    /// from it forgets the address for all services of the namespace.
    again: Vec<Arc<Resource>>,
    /// True if the client waits for a response, even an empty one.
    must_answer: bool,
}

impl Draft {
    fn is_empty(&self) -> bool {
        self.resources.is_empty() && self.removed.is_empty() && self.again.is_empty() && !self.must_answer
    }

    /// Keeps each resource and each removed name once.
    fn keep_once(&mut self) {
        let (mut resources, mut removed) = (HashSet::new(), HashSet::new());
        self.resources.retain(|resource| resources.insert(resource.name.clone()));
        self.removed.retain(|name| removed.insert(name.clone()));
    }

    /// Takes out what fits into one response.
    fn take(&mut self, bytes_max: usize) -> Self {
        let mut bytes = 0;
        let fits = self.resources.iter().position(|resource| {
            bytes += resource.message().len();
            bytes > bytes_max
        });
        // A resource that is larger than a response goes alone.
        let rest = match fits {
            Some(at) => self.resources.split_off(at.max(1)),
            None => Vec::new(),
        };
        let taken = Self { resources: std::mem::replace(&mut self.resources, rest), ..Self::default() };
        // Removals follow the last resources: clients apply them in this order.
        let mut removed = Vec::new();
        if self.resources.is_empty() {
            removed = std::mem::take(&mut self.removed);
            self.resources = std::mem::take(&mut self.again);
        }
        Self { removed, must_answer: std::mem::take(&mut self.must_answer), ..taken }
    }
}

/// The state of one type.
#[derive(Default)]
struct Type {
    asked: bool,
    /// The part of the last draft that is left.
    draft: Draft,
    in_flight: Option<SystemTime>,
    last_nonce: String,
    sent: u64,
}

/// The session of one stream.
pub struct Session {
    types: [Type; Kind::ALL.len()],
    subscription: Subscription,
    policies: Held,
    account: Account,
    responses: u64,
}

impl Session {
    /// Makes a session without subscriptions. `node` is the client's node in the form of [`super::render::node_key`]; the account
    /// counts the bytes of its names.
    pub fn new(node: Arc<str>, account: Account) -> Self {
        Self {
            types: Default::default(),
            subscription: Subscription::new(node),
            policies: Held::default(),
            account,
            responses: 0,
        }
    }

    /// Returns true if the client has sent a request of the type.
    pub fn has_asked(&self, kind: Kind) -> bool {
        self.types[kind as usize].asked
    }

    /// Returns true if the client waits for a response that no table is needed for but the first one.
    pub fn waits(&self) -> bool {
        self.types.iter().any(|of| of.asked && (of.sent == 0 || !of.draft.is_empty()))
    }

    /// Returns the state of a type.
    pub fn overview(&self, kind: Kind) -> Overview {
        let of = &self.types[kind as usize];
        let (wildcard, names, held_back) = match kind {
            Kind::Address => self.subscription.overview(),
            Kind::Authorization => (true, 0, 0),
        };
        Overview { asked: of.asked, wildcard, names, sent: of.sent, in_flight: of.in_flight, held_back }
    }

    /// Applies a request. Returns how it answers the last response.
    pub fn request(&mut self, kind: Kind, request: Request) -> Result<Acknowledgement, Refusal> {
        let names = request.names.iter().chain(request.has.iter().map(|(name, _)| name));
        if names.into_iter().any(|name| name.len() > NAME_BYTES_MAX) {
            return Err(Refusal::TooLongName);
        }
        let of = &mut self.types[kind as usize];
        let answer = if of.in_flight.is_some() && !request.nonce.is_empty() && request.nonce == of.last_nonce
        {
            of.in_flight = None;
            match request.error {
                Some(text) => Acknowledgement::Nack(beginning_of(&text, ERROR_BYTES_MAX)),
                None => Acknowledgement::Ack(None),
            }
        } else {
            Acknowledgement::None
        };
        let is_first = !std::mem::replace(&mut of.asked, true);
        let has = |has: Vec<(String, String)>| -> BTreeMap<Arc<str>, Option<Version>> {
            has.into_iter().map(|(name, version)| (name.into(), Version::parse(&version))).collect()
        };
        match kind {
            Kind::Authorization => {
                if request.names.iter().any(|name| name != "*") {
                    return Err(Refusal::NamedPolicies);
                }
                if is_first {
                    of.draft.must_answer = true;
                    self.policies = Held::of(has(request.has));
                }
            }
            Kind::Address if is_first => {
                of.draft.must_answer = true;
                let account = &mut self.account;
                self.subscription.begin(&request.names, &request.unsubscribe, has(request.has), account)?;
            }
            Kind::Address => {
                self.subscription.change(&request.names, &request.unsubscribe, &mut self.account)?
            }
        }
        Ok(answer)
    }

    /// Returns a nonce that no other response of this stream has.
    pub fn next_nonce(&mut self) -> String {
        self.responses += 1;
        format!("{:x}", self.responses)
    }

    /// Returns the next response if there is one to send. Nothing is sent while the policies of the client's cluster are unknown:
    /// without them, the client would admit what they deny.
    pub fn response(&mut self, table: &Arc<Table>) -> Option<Response> {
        let policies = table.policies.as_ref()?;
        for kind in [Kind::Authorization, Kind::Address] {
            let of = &mut self.types[kind as usize];
            if !of.asked || of.in_flight.is_some() {
                // A workload is not sent before the policies that it names have arrived.
                if kind == Kind::Authorization && of.in_flight.is_some() {
                    return None;
                }
                continue;
            }
            if of.draft.is_empty() || of.draft.must_answer {
                match kind {
                    Kind::Authorization => self.policies.draft(policies, &mut of.draft, |_| false),
                    Kind::Address => self.subscription.draft(table, &mut of.draft, &mut self.account),
                }
            }
            if of.draft.is_empty() {
                continue;
            }
            let draft = of.draft.take(RESPONSE_BYTES_MAX);
            let nonce = self.next_nonce();
            let of = &mut self.types[kind as usize];
            (of.in_flight, of.last_nonce) = (Some(SystemTime::now()), nonce.clone());
            of.sent += 1;
            return Some(Response {
                protocol: Protocol::Delta,
                type_url: kind.type_url().into(),
                nonce,
                version: Version::of_all(draft.resources.iter().map(|resource| resource.version)),
                resources: draft.resources,
                removed: draft.removed,
                missing: Vec::new(),
                is_served: true,
            });
        }
        None
    }
}

#[cfg(test)]
mod tests;
