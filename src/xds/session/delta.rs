//! The delta variant. Requests add and remove names; a response has the resources that the client lacks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::draft::Draft;
use super::names::Sent;
use super::subscriptions::{Candidate, Subscriptions, held_next};
use super::withhold::{Earlier, Withhold};
use crate::hub::{Clusters, are_same, clusters_of, put_clusters};
use crate::kind::{Kind, Target};
use isthmus_ads::budget::Account;
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::resource::{Resource, Version};
use isthmus_ads::session::{Asked, NAMES_MAX, Refusal};
use isthmus_model::name::HostName;

/// The state of the delta variant, in addition to the subscriptions.
#[derive(Default)]
pub(super) struct Delta {
    types: [DeltaType; Kind::ALL.len()],
}

/// The resources of an earlier stream, and those whose removal is withheld.
#[derive(Default)]
struct DeltaType {
    /// Resources of the wildcard subscription that the client has in another version than that in the list that was sent, or
    /// that the list does not have. They are grouped by service. `None`: the version is unknown.
    kept: BTreeMap<HostName, BTreeMap<Arc<str>, Option<Version>>>,
    /// True if `kept` must be checked although the list has not changed.
    kept_changed: bool,
    /// The client's `initial_resource_versions` for the wildcard subscription, until the list of the type is complete.
    unseeded: Option<BTreeMap<Arc<str>, Option<Version>>>,
    /// Names in `initial_resource_versions` that do not exist any more.
    gone: BTreeSet<Arc<str>>,
}

impl Delta {
    /// Returns the number of resources that the client keeps because their change is withheld.
    pub(super) fn withheld(&self, kind: Kind) -> usize {
        self.types[kind as usize].kept.values().map(BTreeMap::len).sum()
    }

    /// Schedules another check of every change that is withheld.
    pub(super) fn recheck(&mut self) {
        self.types.iter_mut().for_each(|own| own.kept_changed = !own.kept.is_empty());
    }

    /// Applies a request.
    pub(super) fn request(
        &mut self,
        subscriptions: &mut Subscriptions,
        kind: Kind,
        asked: Asked,
        account: &mut Account,
    ) -> Result<(), Refusal> {
        let Asked { is_first, names, unsubscribe, mut has, returns, .. } = asked;
        while has.len() > NAMES_MAX {
            has.pop_last();
        }
        let of = &mut subscriptions.types[kind as usize];
        of.returns |= returns;
        let legacy = is_first && names.is_empty() && unsubscribe.is_empty();
        let star = legacy || names.iter().any(|name| name == "*");
        if star && kind.has_wildcard() {
            of.must_answer = true;
            subscriptions.subscribe_to_all(kind);
        }
        for name in names.into_iter().filter(|name| name != "*") {
            let name: Arc<str> = name.into();
            let had = has.get(&name).map(|version| version.map_or(Sent::Nothing, Sent::Version));
            subscriptions.add(kind, &name, had, account)?;
            let due = &mut subscriptions.types[kind as usize].due;
            match had {
                // A client with the present version needs no response.
                Some(Sent::Version(_)) => due.pending.insert(name),
                Some(Sent::Nothing | Sent::Absence) | None => due.owed.insert(name),
            };
        }
        for name in unsubscribe {
            self.unsubscribe(subscriptions, kind, &name, account);
        }
        if is_first && subscriptions.types[kind as usize].wildcard {
            self.types[kind as usize].unseeded = Some(has);
            self.seed(subscriptions, kind);
        }
        Ok(())
    }

    fn unsubscribe(
        &mut self,
        subscriptions: &mut Subscriptions,
        kind: Kind,
        name: &str,
        account: &mut Account,
    ) {
        if name == "*" {
            subscriptions.unsubscribe_from_all(kind);
            let own = &mut self.types[kind as usize];
            (own.unseeded, own.kept) = Default::default();
        } else if let Some(name) = subscriptions.remove(kind, name, account) {
            let of = &mut subscriptions.types[kind as usize];
            // The client cannot know if its wildcard subscription covers the name, so the name is answered.
            if of.wildcard {
                of.due.owed.insert(name);
            }
        }
    }

    /// Applies the `initial_resource_versions` of a type, unless its list is not complete yet: marks each resource as sent
    /// whose current version the client has.
    pub(super) fn seed(&mut self, subscriptions: &mut Subscriptions, kind: Kind) {
        let own = &mut self.types[kind as usize];
        if subscriptions.waits_for_list(kind) {
            return;
        }
        let Some(mut has) = own.unseeded.take().filter(|has| !has.is_empty()) else { return };
        let of = &mut subscriptions.types[kind as usize];
        let all = of.list.as_ref().map(|_| subscriptions.hub.all_of(kind)).unwrap_or_default();
        let mut sent = Clusters::default();
        for (hostname, resources) in all.iter() {
            let is_sent = |one: &&Arc<Resource>| has.get(&one.name) == Some(&Some(one.version));
            let same: Arc<[Arc<Resource>]> = resources.iter().filter(is_sent).cloned().collect();
            if !same.is_empty() {
                sent.insert(hostname.clone(), same);
            }
        }
        // Names that the client subscribes to by name are answered by name.
        has.retain(|name, _| !of.named.contains(name));
        for (name, version) in has {
            let present = find(&all, kind, &name).map(|resource| resource.version);
            let target = kind.read(&name).filter(|_| of.list.is_some());
            let withholds = |hostname| subscriptions.withhold.withholds(hostname, Earlier::Resource, None);
            match target {
                Some(_) if present.is_some() && present == version => {}
                // The client has another version than the present one, or keeps the resource for the time being. The entry is
                // kept until a response sends or removes the resource, because the resource may change before that response.
                Some(Target { hostname, .. }) if present.is_some() || withholds(&hostname) => {
                    own.kept.entry(hostname).or_default().insert(name, version);
                }
                _ => drop(own.gone.insert(name)),
            }
        }
        own.kept_changed = !own.kept.is_empty();
        if let Some(list) = &mut of.list {
            list.sent = Arc::new(sent);
        }
    }

    /// Makes the next response of a type.
    pub(super) fn draft(&mut self, subscriptions: &mut Subscriptions, kind: Kind) -> Draft {
        let own = &mut self.types[kind as usize];
        let mut draft = Draft::default();
        draft.removed.append(&mut own.gone);
        own.add_list(subscriptions, kind, &mut draft);
        let mut waiting = Vec::new();
        while let Some(candidate) = subscriptions.next_candidate(kind, &mut draft) {
            let Candidate { name, owed, resource } = candidate;
            let assignments = &subscriptions.types[Kind::Assignment as usize];
            // The check costs time, so only names whose cluster was removed are checked.
            let is_emptied =
                resource.is_some() || owed || kind != Kind::Cluster || assignments.is_emptied(&name);
            let of = &mut subscriptions.types[kind as usize];
            match (of.named.get_mut(&name), resource) {
                (Some(named), Some(resource)) => {
                    if named.send(Sent::Version(resource.version)) || owed {
                        draft.add(resource);
                    }
                }
                (Some(_), None) if !is_emptied => waiting.push(name),
                (Some(named), None) => {
                    if owed || named.version().is_some() {
                        draft.removed.insert(name);
                    }
                    named.send(Sent::Absence);
                }
                // The client unsubscribed from the name. It gets the resource if the wildcard subscription covers the name;
                // otherwise the name is removed.
                (None, _) if owed => match of.list.as_ref().and_then(|list| find(&list.sent, kind, &name)) {
                    Some(resource) => draft.add(resource),
                    None if of.returns && withholds_removal(&subscriptions.withhold, kind, &name) => {}
                    None => drop(draft.removed.insert(name)),
                },
                (None, _) => {}
            }
        }
        subscriptions.types[kind as usize].due.pending.extend(waiting);
        draft
    }
}

impl DeltaType {
    /// Adds the resources of the wildcard subscription that the client lacks.
    fn add_list(&mut self, subscriptions: &mut Subscriptions, kind: Kind, draft: &mut Draft) {
        let types = subscriptions.types.get_disjoint_mut([kind as usize, Kind::Assignment as usize]);
        let Ok([of, assignments]) = types else { return };
        let (returns, withhold) = (of.returns, &subscriptions.withhold);
        let Some(list) = of.list.as_mut().filter(|list| list.is_changed || self.kept_changed) else { return };
        let all = subscriptions.hub.all_of(kind);
        let mut hostnames = all.changed_since(&list.sent, are_same);
        if self.kept_changed {
            let is_released = |hostname: &&HostName| !withhold.withholds(hostname, Earlier::Resource, None);
            hostnames.extend(self.kept.keys().filter(is_released).cloned());
        }
        let mut complete = true;
        for hostname in hostnames {
            if !draft.has_room() {
                complete = false;
                break;
            }
            draft.looked_at += 1;
            let (next, sent) = (clusters_of(&all, &hostname), clusters_of(&list.sent, &hostname));
            let mut kept = self.kept.remove(&hostname).unwrap_or_default();
            for resource in next.iter() {
                let version = match kept.get(&resource.name) {
                    Some(_) if withhold.withholds(&hostname, Earlier::Endpoints, Some(resource)) => continue,
                    Some(version) => *version,
                    None => sent.iter().find(|old| old.name == resource.name).map(|old| old.version),
                };
                kept.remove(&resource.name);
                if version != Some(resource.version) {
                    draft.add(resource.clone());
                }
            }
            let held = if returns && withhold.withholds(&hostname, Earlier::Resource, None) {
                for old in sent.iter().filter(|old| !next.iter().any(|new| new.name == old.name)) {
                    // If `kept` has a version already, that version is not replaced, because it is the one that the client
                    // has. The newer version in `sent` never reached the client.
                    kept.entry(old.name.clone()).or_insert(Some(old.version));
                }
                next
            } else {
                let (held, whole) = held_next(&next, &sent, assignments);
                let gone = sent.iter().filter(|old| !held.iter().any(|new| new.name == old.name));
                draft.removed.extend(gone.map(|old| old.name.clone()));
                kept.retain(|name, _| {
                    let is_emptied = assignments.is_emptied(name);
                    if is_emptied {
                        draft.removed.insert(name.clone());
                    }
                    !is_emptied
                });
                complete &= whole && kept.is_empty();
                held
            };
            if !kept.is_empty() {
                self.kept.insert(hostname.clone(), kept);
            }
            if !are_same(&held, &sent) {
                put_clusters(&mut list.sent, hostname, held);
            }
        }
        if complete {
            // The two lists have equal content. The session refers to the list of the hub, which other sessions share, so that
            // its own copy is freed.
            list.sent = all;
            list.is_changed = false;
            self.kept_changed = false;
        }
    }
}

/// Finds a resource by its name in the list of all clusters.
fn find(all: &Clusters, kind: Kind, name: &str) -> Option<Arc<Resource>> {
    let resources = all.get(kind.read(name)?.hostname.as_str())?;
    resources.iter().find(|resource| &*resource.name == name).cloned()
}

/// Returns true if a client that has the resource of this name from an earlier stream keeps it.
fn withholds_removal(withhold: &Withhold, kind: Kind, name: &str) -> bool {
    kind.read(name).is_some_and(|target| withhold.withholds(&target.hostname, Earlier::Resource, None))
}
