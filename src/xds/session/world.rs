//! The state-of-the-world variant. Each request contains all names that the client subscribes to. A response contains all
//! listeners or all clusters; a response of another type contains only the changed resources.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::draft::Draft;
use super::names::{Named, Sent};
use super::subscriptions::{Candidate, Subscriptions, held_next};
use crate::hub::{Clusters, are_same, clusters_of, put_clusters};
use crate::kind::Kind;
use isthmus_ads::budget::Account;
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::session::{Asked, Refusal};

/// The state of the state-of-the-world variant, in addition to the subscriptions.
#[derive(Default)]
pub(super) struct World {
    types: [WorldType; Kind::ALL.len()],
}

#[derive(Default)]
struct WorldType {
    /// True if the client has ever sent a name. After that, an empty list of names means no names; before that, it means all
    /// resources.
    ever_named: bool,
    /// True if the complete response is withheld.
    is_withheld: bool,
}

impl World {
    /// Returns the number of complete responses that are withheld: 0 or 1.
    pub(super) fn withheld(&self, kind: Kind) -> usize {
        usize::from(self.types[kind as usize].is_withheld)
    }

    /// Applies a request.
    pub(super) fn request(
        &mut self,
        subscriptions: &mut Subscriptions,
        kind: Kind,
        asked: Asked,
        account: &mut Account,
    ) -> Result<(), Refusal> {
        let Asked { is_first, names, returns, .. } = asked;
        let ever_named = &mut self.types[kind as usize].ever_named;
        let star = names.iter().any(|name| name == "*") || names.is_empty() && !*ever_named;
        *ever_named |= !names.is_empty();
        let of = &mut subscriptions.types[kind as usize];
        of.returns |= returns;
        if kind.has_wildcard() {
            of.must_answer |= is_first || star && !of.wildcard;
            match star {
                true => subscriptions.subscribe_to_all(kind),
                false => subscriptions.unsubscribe_from_all(kind),
            }
        }
        let names = names.into_iter().filter(|name| name != "*");
        let names: BTreeSet<Arc<str>> = names.map(Into::into).collect();
        subscriptions.retain(kind, &names, account);
        for name in names {
            if !subscriptions.types[kind as usize].named.contains(&name) {
                subscriptions.add(kind, &name, returns.then_some(Sent::Nothing), account)?;
                subscriptions.types[kind as usize].due.owed.insert(name);
            }
        }
        Ok(())
    }

    /// Makes the next response of a type; `None` while it is withheld.
    pub(super) fn draft(&mut self, subscriptions: &mut Subscriptions, kind: Kind) -> Option<Draft> {
        if !kind.has_wildcard() {
            return Some(draft_some(subscriptions, kind));
        }
        let is_withheld = is_withheld(subscriptions, kind);
        self.types[kind as usize].is_withheld = is_withheld;
        (!is_withheld).then(|| draft_all(subscriptions, kind))
    }
}

/// Returns true while the complete response of a type would remove a resource that an unread registry may have.
fn is_withheld(subscriptions: &Subscriptions, kind: Kind) -> bool {
    let (of, withhold) = (&subscriptions.types[kind as usize], &subscriptions.withhold);
    let is_withheld = |named: &Named| named.is_withheld(withhold, named.subscription.current().as_deref());
    of.returns && withhold.withholds_lists() && (of.list.is_some() || of.named.iter().any(is_withheld))
}

/// Makes a response with the changed resources of a type without wildcard, as far as the response has room.
fn draft_some(subscriptions: &mut Subscriptions, kind: Kind) -> Draft {
    let mut draft = Draft::default();
    while let Some(candidate) = subscriptions.next_candidate(kind, &mut draft) {
        let Candidate { name, owed, resource } = candidate;
        let Some(named) = subscriptions.types[kind as usize].named.get_mut(&name) else { continue };
        match resource {
            Some(resource) => {
                if named.send(Sent::Version(resource.version)) || owed {
                    draft.add(resource);
                }
            }
            None => {
                if named.send(Sent::Absence) {
                    draft.missing.insert(name);
                }
            }
        }
    }
    draft
}

/// Makes a response with all listeners or clusters. A client removes the resources that the response lacks, so a response is due
/// even if no resource is left.
fn draft_all(subscriptions: &mut Subscriptions, kind: Kind) -> Draft {
    let mut draft = Draft::default();
    let next = next_list(subscriptions, kind);
    let of = &mut subscriptions.types[kind as usize];
    let pending = std::mem::take(&mut of.due.pending);
    let mut named = pending.iter().filter_map(|name| of.named.get(name));
    of.must_answer |= next.is_some() || !of.due.owed.is_empty() || named.any(|named| !named.is_current());
    if !of.must_answer {
        return draft;
    }
    of.due.owed.clear();
    for named in of.named.sorted_mut() {
        match named.subscription.current() {
            Some(resource) => match named.send(Sent::Version(resource.version)) {
                true => draft.add(resource),
                false => draft.add_known(resource),
            },
            None => {
                if named.send(Sent::Absence) {
                    draft.missing.insert(named.name().clone());
                }
            }
        }
    }
    let Some(list) = &mut of.list else { return draft };
    let all = next.unwrap_or_else(|| list.sent.clone());
    for (hostname, resources) in all.sorted() {
        let sent = list.sent.get(hostname.as_str());
        for resource in resources.iter().filter(|resource| !of.named.contains(&resource.name)) {
            match sent.is_some_and(|sent| sent.iter().any(|old| old.version == resource.version)) {
                true => draft.add_known(resource.clone()),
                false => draft.add(resource.clone()),
            }
        }
    }
    list.sent = all;
    draft
}

/// Returns the next list for the wildcard subscription if it differs from the list that was sent.
fn next_list(subscriptions: &mut Subscriptions, kind: Kind) -> Option<Arc<Clusters>> {
    let types = subscriptions.types.get_disjoint_mut([kind as usize, Kind::Assignment as usize]);
    let [of, assignments] = types.ok()?;
    let list = of.list.as_mut().filter(|list| list.is_changed)?;
    let mut all = subscriptions.hub.all_of(kind);
    list.is_changed = false;
    for hostname in all.changed_since(&list.sent, are_same) {
        let sent = clusters_of(&list.sent, &hostname);
        let (held, whole) = held_next(&clusters_of(&all, &hostname), &sent, assignments);
        if !whole {
            list.is_changed = true;
            put_clusters(&mut all, hostname, held);
        }
    }
    (!all.changed_since(&list.sent, are_same).is_empty()).then_some(all)
}
