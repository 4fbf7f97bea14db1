//! The delta variant. Requests add and remove names; a response has the resources that the client lacks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::draft::Draft;
use super::{
    Acknowledgement, BeforeStream, NAMES_MAX, Request, RequestRefusal, Sent, Session, Type, held_next,
};
use crate::hub::{Clusters, are_same, clusters_of, put_clusters};
use crate::kind::{Kind, Target};
use crate::resource::{Resource, Version};
use isthmus_snapshot::unread::Unread;

impl Session {
    pub(super) fn delta_request(
        &mut self,
        kind: Kind,
        request: Request,
    ) -> Result<Acknowledgement, RequestRefusal> {
        let answer = self.answer(kind, &request);
        let first = !std::mem::replace(&mut self.types[kind as usize].asked, true);
        let mut has: BTreeMap<Arc<str>, Option<Version>> = BTreeMap::new();
        if first {
            let all = request.has.into_iter().take(NAMES_MAX);
            has.extend(all.map(|(name, version)| (name.into(), Version::parse(&version))));
            self.types[kind as usize].returns = request.returns;
        }
        let legacy = first && request.names.is_empty() && request.unsubscribe.is_empty();
        let star = legacy || request.names.iter().any(|name| name == "*");
        if star && kind.has_wildcard() {
            self.subscribe_to_all(kind);
            self.types[kind as usize].must_answer = true;
        }
        for name in request.names.into_iter().filter(|name| name != "*") {
            let name: Arc<str> = name.into();
            // A client with the present version needs no response.
            let had = has.get(&name).copied().flatten();
            let before = match has.contains_key(&name) {
                true => BeforeStream::Had(had.map_or(Sent::Nothing, Sent::Version)),
                false => BeforeStream::Nothing,
            };
            self.add(kind, &name, before)?;
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
            match self.waits_for(kind) {
                true => self.types[kind as usize].unseeded = Some(has),
                false => self.seed(kind, has),
            }
        }
        Ok(answer)
    }

    fn unsubscribe(&mut self, kind: Kind, name: &str) {
        if name == "*" {
            self.unsubscribe_from_all(kind);
            return;
        }
        let of = &mut self.types[kind as usize];
        if let Some(named) = of.named.remove(name) {
            let name = named.name().clone();
            Self::release(&mut self.account, std::iter::once(&name));
            of.pending.remove(&name);
            of.owed.remove(&name);
            if kind == Kind::Assignment {
                self.wide.remove(&name);
            }
            of.held_back.remove(&name);
            // The client cannot know if its wildcard subscription covers the name, so the name is answered.
            if of.wildcard {
                of.owed.insert(name);
            }
        }
    }

    /// Applies `initial_resource_versions` of types whose list is complete. Versions of a type whose list is not complete yet
    /// stay stored for a later call.
    pub(super) fn seed_late(&mut self) {
        for kind in Kind::ALL {
            if !self.waits_for(kind)
                && let Some(has) = self.types[kind as usize].unseeded.take()
            {
                self.seed(kind, has);
            }
        }
    }

    /// Marks a resource of `initial_resource_versions` as sent if the client has its current version.
    fn seed(&mut self, kind: Kind, mut has: BTreeMap<Arc<str>, Option<Version>>) {
        if has.is_empty() {
            return;
        }
        let has_list = self.has_list(kind);
        let all = if has_list { self.hub.all_of(kind) } else { Arc::default() };
        let mut sent = Clusters::default();
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
        // Names that the client subscribes to by name are answered by name.
        has.retain(|name, _| !of.named.contains(name));
        for (name, version) in has {
            let is_known = known.contains(&name);
            match kind.read(&name).filter(|_| has_list) {
                // The client has another version than the present one, or an unread registry may have the resource. The entry
                // is kept until a response sends or removes the resource, because the resource may change before that response.
                Some(Target { hostname, .. }) if is_known || self.unread.may_have(hostname.as_str()) => {
                    let set_sent = clusters_of(&sent, &hostname).iter().any(|sent| sent.name == name);
                    if !set_sent {
                        of.kept.entry(hostname).or_default().insert(name, version);
                    }
                }
                _ if is_known => {}
                _ => drop(of.gone.insert(name)),
            }
        }
        of.kept_changed = !of.kept.is_empty();
        of.all_sent = Arc::new(sent);
    }

    /// Makes the next response of a type.
    pub(super) fn draft_delta(&mut self, kind: Kind) -> Draft {
        let mut draft = Draft::default();
        draft.removed.append(&mut self.types[kind as usize].gone);
        self.add_all_delta(kind, &mut draft);
        let [clusters, others @ ..] = &mut self.types;
        let (of, assignments) = match kind {
            Kind::Cluster => (clusters, others.first()),
            Kind::Assignment | Kind::Listener | Kind::Route => (&mut others[kind as usize - 1], None),
        };
        let (client, unread) = (self.viewer.client, &*self.unread);
        let is_permitted = kind == Kind::Assignment && self.permit.is_some();
        let mut wide = is_permitted.then_some(&mut self.wide);
        let mut waiting = Vec::new();
        while let Some((name, owed)) = of.next_name(&mut draft, wide.as_deref_mut()) {
            draft.looked_at += 1;
            let owed = owed | of.take_held_back(&name);
            match of.named.get_mut(&name) {
                Some(named) => match named.subscription.current() {
                    current if named.is_held_back(kind, client, unread, current.as_deref()) => {
                        of.held_back.insert(name, owed);
                    }
                    Some(resource) if owed || named.sent != Sent::Version(resource.version) => {
                        named.set_sent(Sent::Version(resource.version));
                        draft.add(resource);
                    }
                    Some(_) => named.lacking = false,
                    None if !owed && assignments.is_some_and(|of| !of.is_emptied(&name)) => {
                        waiting.push(name);
                    }
                    None => {
                        if owed || matches!(named.sent, Sent::Version(_)) {
                            draft.removed.insert(name);
                        }
                        named.set_sent(Sent::Absence);
                    }
                },
                // The client unsubscribed from the name. It gets the resource if the wildcard subscription covers the name;
                // otherwise the name is removed.
                None if owed => match find(&of.all_sent, kind, &name) {
                    Some(resource) => draft.add(resource),
                    None if of.is_kept(kind, &name, unread) => {}
                    None => drop(draft.removed.insert(name)),
                },
                None => {}
            }
        }
        of.pending.extend(waiting);
        draft
    }

    /// Adds the resources of the wildcard subscription that the client lacks.
    fn add_all_delta(&mut self, kind: Kind, draft: &mut Draft) {
        let has_list = self.has_list(kind);
        let types = self.types.get_disjoint_mut([kind as usize, Kind::Assignment as usize]);
        let Some([clusters, assignments]) = types.ok().filter(|_| has_list) else { return };
        if !clusters.all_changed && !clusters.kept_changed {
            return;
        }
        let (all, unread) = (self.hub.all_of(kind), &*self.unread);
        let mut complete = true;
        for hostname in all.changed_since(&clusters.all_sent, are_same) {
            if !draft.has_room() {
                complete = false;
                break;
            }
            draft.looked_at += 1;
            let sent = clusters_of(&clusters.all_sent, &hostname);
            let next = clusters_of(&all, &hostname);
            let keeps = clusters.returns && unread.may_have(hostname.as_str());
            let (held, whole) =
                if keeps { (next.clone(), true) } else { held_next(&next, &sent, assignments) };
            complete &= whole;
            let kept = clusters.kept.entry(hostname.clone()).or_default();
            let waits = keeps && !unread.is_changed(hostname.as_str());
            for resource in next.iter() {
                let has = match kept.get(&resource.name) {
                    Some(_) if waits => continue,
                    Some(version) => *version == Some(resource.version),
                    None => {
                        sent.iter().any(|old| old.name == resource.name && old.version == resource.version)
                    }
                };
                kept.remove(&resource.name);
                if !has {
                    draft.add(resource.clone());
                }
            }
            let gone = sent.iter().filter(|old| !held.iter().any(|new| new.name == old.name));
            match keeps {
                // If `kept` has a version already, that version is not replaced, because it is the one that the client has. The
                // newer version in `sent` never reached the client.
                true => gone.for_each(|old| {
                    kept.entry(old.name.clone()).or_insert(Some(old.version));
                }),
                false => draft.removed.extend(gone.map(|old| {
                    kept.remove(&old.name);
                    old.name.clone()
                })),
            }
            if kept.is_empty() {
                clusters.kept.remove(&hostname);
            }
            put_clusters(&mut clusters.all_sent, hostname, held);
        }
        if complete && clusters.kept_changed {
            complete = clusters.add_kept(&all, assignments, unread, draft);
            clusters.kept_changed = !complete;
        }
        if complete {
            // The two lists have equal content. The session refers to the list of the hub, which other sessions share, so that
            // its own copy is freed.
            clusters.all_sent = all;
            clusters.all_changed = false;
        }
    }
}

impl Type {
    /// Returns true if the client keeps a cluster because an unread registry may have it.
    fn is_kept(&self, kind: Kind, name: &str, unread: &Unread) -> bool {
        let target = || kind.read(name).is_some_and(|target| unread.may_have(target.hostname.as_str()));
        self.returns && !unread.is_empty() && target()
    }

    /// Adds the current version, or the removal, of each kept cluster to the draft if no unread registry can have the cluster
    /// any more. Returns true if this was possible for all such clusters.
    fn add_kept(&mut self, all: &Clusters, assignments: &Self, unread: &Unread, draft: &mut Draft) -> bool {
        let mut complete = true;
        let mut stays = BTreeMap::new();
        while let Some((hostname, kept)) = self.kept.pop_first() {
            if unread.may_have(hostname.as_str()) {
                stays.insert(hostname, kept);
                continue;
            }
            if !draft.has_room() {
                stays.insert(hostname, kept);
                complete = false;
                break;
            }
            draft.looked_at += 1;
            let current = clusters_of(all, &hostname);
            for (name, version) in kept {
                match current.iter().find(|resource| resource.name == name) {
                    Some(resource) if version == Some(resource.version) => {}
                    Some(resource) => draft.add(resource.clone()),
                    None if assignments.is_emptied(&name) => drop(draft.removed.insert(name)),
                    None => {
                        complete = false;
                        stays.entry(hostname.clone()).or_default().insert(name, version);
                    }
                }
            }
        }
        self.kept.append(&mut stays);
        complete
    }
}

/// Finds a resource by its name in the list of all clusters.
fn find(all: &Clusters, kind: Kind, name: &str) -> Option<Arc<Resource>> {
    let resources = all.get(kind.read(name)?.hostname.as_str())?;
    resources.iter().find(|resource| &*resource.name == name).cloned()
}
