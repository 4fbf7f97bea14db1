//! The subscriptions of a client and the resources that are due, in the form that both variants of the protocol share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::NAME_COST;
use super::draft::Draft;
use super::names::{Named, Names, Sent};
use super::withhold::{Earlier, Withhold};
use crate::hub::{All, Clusters, Hub, Mailbox, News, Permit, Subscription, Wide};
use crate::kind::Kind;
use isthmus_ads::budget::Account;
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::resource::Resource;
use isthmus_ads::session::{NAMES_MAX, Refusal};
use isthmus_decisions::view::{ClientKind, Viewer};

/// The subscriptions of one stream.
pub(super) struct Subscriptions {
    pub(super) hub: Arc<Hub>,
    pub(super) mailbox: Arc<Mailbox>,
    viewer: Arc<Viewer>,
    pub(super) types: [Type; Kind::ALL.len()],
    /// Assignments that may have changed with those of many other services.
    pub(super) wide: Wide,
    /// The permission to send some of `wide`.
    pub(super) permit: Option<Permit>,
    /// The permit that a response with assignments of `wide` has used, while that response is in flight.
    pub(super) used_permit: Option<Permit>,
    pub(super) withhold: Withhold,
    /// True if the client accepts listeners on virtual addresses.
    pub(super) takes_listeners: bool,
}

/// The subscriptions of one type.
#[derive(Default)]
pub(super) struct Type {
    /// True if the client had resources of an earlier stream at its first request.
    pub(super) returns: bool,
    pub(super) wildcard: bool,
    /// The list that the wildcard subscription selects; `None`: it selects nothing, or there is no wildcard subscription.
    pub(super) list: Option<List>,
    pub(super) named: Names,
    pub(super) due: Due,
    /// True if a response is due even if nothing changed.
    pub(super) must_answer: bool,
    /// The time of the first change that was not sent yet.
    pub(super) since: Option<Instant>,
}

/// The list of all resources of a type.
pub(super) struct List {
    /// The resources that were sent.
    pub(super) sent: Arc<Clusters>,
    /// True if `sent` may be outdated.
    pub(super) is_changed: bool,
    _subscription: Subscription<Mutex<All>>,
}

/// Names to check for a response.
#[derive(Default)]
pub(super) struct Due {
    /// Names whose resources may have changed.
    pub(super) pending: BTreeSet<Arc<str>>,
    /// Names that must be answered even if their resource was already sent.
    pub(super) owed: BTreeSet<Arc<str>>,
    /// Names whose change is withheld, each with true if the name must be answered.
    withheld: BTreeMap<Arc<str>, bool>,
}

/// A name whose resource may have changed since it was sent.
pub(super) struct Candidate {
    pub(super) name: Arc<str>,
    /// True if the name must be answered even if its resource was already sent.
    pub(super) owed: bool,
    /// The present resource; `None` if it does not exist, or if the client does not subscribe to the name.
    pub(super) resource: Option<Arc<Resource>>,
}

impl Subscriptions {
    pub(super) fn new(hub: Arc<Hub>, viewer: Viewer) -> Self {
        let mailbox = Arc::<Mailbox>::default();
        Self {
            withhold: Withhold::new(&hub, &mailbox),
            hub,
            mailbox,
            viewer: Arc::new(viewer),
            types: Default::default(),
            wide: Wide::default(),
            permit: None,
            used_permit: None,
            takes_listeners: false,
        }
    }

    /// Subscribes to a name. `had` is what the client has of its resource from an earlier stream.
    pub(super) fn add(
        &mut self,
        kind: Kind,
        name: &Arc<str>,
        had: Option<Sent>,
        account: &mut Account,
    ) -> Result<(), Refusal> {
        let of = &mut self.types[kind as usize];
        if of.named.contains(name) {
            return Ok(());
        }
        if of.named.len() >= NAMES_MAX {
            return Err(Refusal::TooManyNames);
        }
        account.take(name.len() + NAME_COST)?;
        // Resources other than assignments and Envoy's clusters do not list endpoints.
        let lists_endpoints =
            kind == Kind::Assignment || kind == Kind::Cluster && self.viewer.client == ClientKind::Envoy;
        let earlier = match had {
            None => Earlier::Nothing,
            Some(_) if lists_endpoints => Earlier::Endpoints,
            Some(_) => Earlier::Resource,
        };
        let subscription = self.hub.subscribe(&self.mailbox, kind, name, &self.viewer);
        of.named.insert(Named::new(subscription, had.unwrap_or(Sent::Nothing), earlier));
        Ok(())
    }

    /// Unsubscribes from a name; returns it if the client subscribed to it.
    pub(super) fn remove(&mut self, kind: Kind, name: &str, account: &mut Account) -> Option<Arc<str>> {
        let named = self.types[kind as usize].named.remove(name)?;
        let name = named.name().clone();
        self.forget(kind, std::slice::from_ref(&name), account);
        Some(name)
    }

    /// Unsubscribes from all names that are not in `names`.
    pub(super) fn retain(&mut self, kind: Kind, names: &BTreeSet<Arc<str>>, account: &mut Account) {
        let of = &mut self.types[kind as usize];
        let gone = of.named.iter().map(Named::name).filter(|name| !names.contains(*name));
        let gone: Vec<Arc<str>> = gone.cloned().collect();
        of.named.retain(|name| names.contains(name));
        self.forget(kind, &gone, account);
    }

    /// Drops what is due for names, and releases their cost.
    fn forget(&mut self, kind: Kind, names: &[Arc<str>], account: &mut Account) {
        let due = &mut self.types[kind as usize].due;
        for name in names {
            due.pending.remove(name);
            due.owed.remove(name);
            due.withheld.remove(name);
            if kind == Kind::Assignment {
                self.wide.remove(name);
            }
        }
        account.release(names.iter().map(|name| name.len() + NAME_COST).sum());
    }

    /// Subscribes to all resources of a type. They are a list for clusters and, if the client accepts listeners on virtual
    /// addresses, for listeners; gRPC clients ask for listeners by name.
    pub(super) fn subscribe_to_all(&mut self, kind: Kind) {
        let has_list = kind == Kind::Cluster || kind == Kind::Listener && self.takes_listeners;
        let of = &mut self.types[kind as usize];
        if !std::mem::replace(&mut of.wildcard, true) && has_list {
            let subscription = self.hub.subscribe_all(&self.mailbox, kind);
            of.list = Some(List { sent: Arc::default(), is_changed: true, _subscription: subscription });
        }
    }

    pub(super) fn unsubscribe_from_all(&mut self, kind: Kind) {
        let of = &mut self.types[kind as usize];
        (of.wildcard, of.list) = (false, None);
    }

    /// Returns true while the list of a type is being made for this client.
    pub(super) fn waits_for_list(&self, kind: Kind) -> bool {
        self.types[kind as usize].list.is_some() && !self.hub.is_listed(kind)
    }

    /// Moves the changes that the hub has recorded in the mailbox to the due names. Returns true if the set of unread
    /// registries changed, so that withheld changes must be checked again.
    pub(super) fn collect_marks(&mut self) -> bool {
        let News { marks, wide, permit } = self.mailbox.take();
        for (of, marks) in self.types.iter_mut().zip(marks).filter(|(_, marks)| marks.since.is_some()) {
            of.due.pending.extend(marks.names.into_iter().filter(|name| of.named.contains(name)));
            if let Some(list) = &mut of.list {
                list.is_changed |= marks.all;
            }
            of.since = of.since.or(marks.since);
        }
        let assignments = &self.types[Kind::Assignment as usize];
        self.wide.append(wide, |name| assignments.named.contains(name));
        self.permit = permit.or_else(|| self.permit.take());
        let differs = self.withhold.refresh();
        if differs {
            self.types.iter_mut().for_each(|of| of.due.recheck());
        }
        differs
    }

    /// Asks the hub for a permit if assignments of a wide change wait to be sent. Does nothing while the session has a permit,
    /// or while the response that used its last permit is not answered.
    pub(super) fn ask_for_permit(&mut self) {
        if !self.wide.is_empty() && self.permit.is_none() && self.used_permit.is_none() {
            self.permit = self.hub.permit(&self.mailbox);
        }
    }

    /// Gives back the permit if there are no names to send with it. A permit that the session gets while a response is in flight
    /// is kept for the next response: under urgent changes without end, a response is always in flight when a permit comes.
    pub(super) fn return_permit(&mut self) {
        if self.wide.is_empty() {
            (self.wide.since, self.permit) = (None, None);
        }
    }

    /// Returns the next name to check for a response, as long as the draft has room. A name whose change is withheld is not
    /// returned. Names of a wide change come last and have room of their own, so that urgent names without end do not hold
    /// them up.
    pub(super) fn next_candidate(&mut self, kind: Kind, draft: &mut Draft) -> Option<Candidate> {
        let of = &mut self.types[kind as usize];
        let is_permitted = kind == Kind::Assignment && self.permit.is_some();
        loop {
            let due = if draft.has_room() { of.due.pop() } else { None };
            let (name, owed) = match due {
                Some(due) => due,
                None if is_permitted && draft.has_wide_room() => {
                    let name = self.wide.pop()?;
                    draft.begin_wide();
                    (name, false)
                }
                None => return None,
            };
            draft.looked_at += 1;
            let owed = owed | of.due.withheld.remove(&name).unwrap_or(false);
            let Some(named) = of.named.get(&name) else {
                return Some(Candidate { name, owed, resource: None });
            };
            let resource = named.subscription.current();
            if !named.is_withheld(&self.withhold, resource.as_deref()) {
                return Some(Candidate { name, owed, resource });
            }
            of.due.withheld.insert(name, owed);
        }
    }
}

impl Due {
    fn pop(&mut self) -> Option<(Arc<str>, bool)> {
        let owed = self.owed.pop_first().map(|name| (name, true));
        owed.or_else(|| self.pending.pop_first().map(|name| (name, false)))
    }

    /// Returns the number of names whose change is withheld.
    pub(super) fn withheld(&self) -> usize {
        self.withheld.len()
    }

    /// Schedules another check of every name whose change is withheld.
    fn recheck(&mut self) {
        for (name, owed) in std::mem::take(&mut self.withheld) {
            match owed {
                true => self.owed.insert(name),
                false => self.pending.insert(name),
            };
        }
    }
}

impl Type {
    /// Returns true if the client holds no endpoints of a removed name: the assignment that was sent last is the current, empty
    /// one, or no assignment was sent, or the client does not subscribe to the name.
    pub(super) fn is_emptied(&self, name: &Arc<str>) -> bool {
        self.named.get(name).is_none_or(|named| named.sent() == Sent::Nothing || named.is_current())
    }
}

/// Returns the clusters of a service that the client is to have next: the present clusters, and the removed ones whose
/// assignment is not empty yet (make before break). The returned flag is true if there are no such removed clusters.
pub(super) fn held_next(
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
