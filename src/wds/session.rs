//! The resources of one client: its subscriptions, and the differences between the table of its viewer and what it has.
//! [`isthmus_ads::session`] drives them.
//!
//! - `held`: what the client has.
//! - `subscription`: what it wants of the type `Address`: everything, or names.

use std::collections::HashSet;
use std::sync::Arc;

use tonic::Status;

use self::held::Held;
use self::subscription::Subscription;
use super::hub::{Hub, Tables};
use super::table::Table;
use isthmus_ads::budget::Account;
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::protocol::Overview;
use isthmus_ads::resource::Resource;
use isthmus_ads::session::{self, Asked, Content, Flight, Next, Refusal, Resources};
use isthmus_ads::ztunnel::Kind;
use isthmus_model::place::ClusterId;

mod held;
mod subscription;

/// The cost of a name in addition to its text, in bytes.
const NAME_COST: usize = 256;
/// The largest response in bytes; what is left follows in further responses. Clients accept 200 MiB.
const RESPONSE_BYTES_MAX: usize = 64 << 20;

/// The session of one stream.
pub type Session = session::Session<ClientResources>;

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

/// The resources of one client.
pub struct ClientResources {
    hub: Arc<Hub>,
    cluster: ClusterId,
    tables: Tables,
    /// The newest table, while a response is made.
    newest: Option<Arc<Table>>,
    subscription: Subscription,
    policies: Held,
    /// The parts of the last drafts that are left.
    drafts: [Draft; Kind::ALL.len()],
}

impl ClientResources {
    /// Returns the resources of a client without subscriptions. `node` is the client's node in the form of
    /// [`super::render::node_key`].
    pub fn new(hub: Arc<Hub>, cluster: ClusterId, node: Arc<str>, tables: Tables) -> Self {
        let (subscription, policies) = (Subscription::new(node), Held::default());
        Self { hub, cluster, tables, newest: None, subscription, policies, drafts: Default::default() }
    }
}

impl Resources for ClientResources {
    type Kind = Kind;
    type Flights = [Flight; Kind::ALL.len()];

    fn request(&mut self, kind: Kind, asked: Asked, account: &mut Account) -> Result<(), Refusal> {
        let Asked { is_first, names, unsubscribe, has, .. } = asked;
        self.drafts[kind as usize].must_answer |= is_first;
        match kind {
            Kind::Authorization => {
                if names.iter().any(|name| name != "*") {
                    return Err(Refusal::Named("policies"));
                }
                if is_first {
                    self.policies = Held::of(has);
                }
                Ok(())
            }
            Kind::Address if is_first => self.subscription.begin(&names, &unsubscribe, has, account),
            Kind::Address => self.subscription.change(&names, &unsubscribe, account),
        }
    }

    fn refresh(&mut self) {
        self.newest.clone_from(&self.tables.borrow_and_update());
    }

    /// Nothing is sent while the policies of the client's cluster are unknown: without them, the client would admit what they deny.
    fn next(&mut self, kind: Kind, account: &mut Account) -> Next {
        let newest = self.newest.as_ref();
        let Some((table, policies)) = newest.and_then(|table| Some((table, table.policies.as_ref()?))) else {
            return Next::Nothing;
        };
        let draft = &mut self.drafts[kind as usize];
        if draft.is_empty() || draft.must_answer {
            match kind {
                Kind::Authorization => self.policies.draft(policies, draft, |_| false),
                Kind::Address => self.subscription.draft(table, draft, account),
            }
        }
        if draft.is_empty() {
            return Next::Nothing;
        }
        let Draft { resources, removed, .. } = draft.take(RESPONSE_BYTES_MAX);
        Next::Content(Content { resources, removed, ..Content::default() })
    }

    /// An idle client does not pin a table that nobody else needs.
    fn settle(&mut self) {
        self.newest = None;
    }

    async fn changed(&mut self) -> Result<(), Status> {
        self.tables.changed().await.map_err(|_| {
            Status::unavailable("internal error: the resources of the client are made again; connect again")
        })
    }

    fn fault(&self) -> Option<Status> {
        // If the policies are known by now, a newer table follows.
        let lacks_policies = self.tables.borrow().as_ref().is_some_and(|table| table.policies.is_none());
        if lacks_policies { self.hub.check_policies(&self.cluster).err() } else { None }
    }

    fn waits(&self, kind: Kind, sent: u64) -> bool {
        sent == 0 || !self.drafts[kind as usize].is_empty()
    }

    fn overview(&self, kind: Kind) -> Overview {
        match kind {
            Kind::Authorization => Overview { wildcard: true, ..Overview::default() },
            Kind::Address => self.subscription.overview(),
        }
    }
}

#[cfg(test)]
mod tests;
