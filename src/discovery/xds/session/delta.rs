//! Delta: names are added and taken back, and a response holds what the client does not have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::draft::Draft;
use super::{Answer, NAMES_MAX, Refusal, Request, Sent, Session, Type, held_next};
use crate::discovery::xds::hub::{Clusters, are_same, clusters_of, put_clusters};
use crate::discovery::xds::kind::{Kind, Target};
use crate::discovery::xds::resource::{Resource, Version};
use crate::snapshot::unread::Unread;

impl Session {
    pub(super) fn delta_request(&mut self, kind: Kind, request: Request) -> Result<Answer, Refusal> {
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
            self.want_all(kind, true);
            self.types[kind as usize].must_answer = true;
        }
        for name in request.names.into_iter().filter(|name| name != "*") {
            let name: Arc<str> = name.into();
            // An equal version is an answer that the client has already.
            let had = has.get(&name).copied().flatten();
            let brought = has.contains_key(&name);
            self.add(kind, &name, had.map_or(Sent::Nothing, Sent::Version), brought)?;
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
            match kind == Kind::Cluster && self.waits_for_list() {
                true => self.types[kind as usize].unseeded = Some(has),
                false => self.seed(kind, has),
            }
        }
        Ok(answer)
    }

    fn unsubscribe(&mut self, kind: Kind, name: &str) {
        if name == "*" {
            self.want_all(kind, false);
            return;
        }
        let of = &mut self.types[kind as usize];
        if let Some(named) = of.named.remove(name) {
            let name = named.name().clone();
            Self::give_back(&mut self.account, std::iter::once(&name));
            of.pending.remove(&name);
            of.owed.remove(&name);
            of.held_back.remove(&name);
            // Whether it is covered by the wildcard still, the client cannot know.
            if of.wildcard {
                of.owed.insert(name);
            }
        }
    }

    /// Takes what the client said it has as sent, once it can be held against the list of all.
    pub(super) fn seed_late(&mut self) {
        if !self.waits_for_list()
            && let Some(has) = self.types[Kind::Cluster as usize].unseeded.take()
        {
            self.seed(Kind::Cluster, has);
        }
    }

    /// Takes what the client says it has as sent, where it is what there is.
    fn seed(&mut self, kind: Kind, mut has: BTreeMap<Arc<str>, Option<Version>>) {
        if has.is_empty() {
            return;
        }
        let all = if kind == Kind::Cluster { self.hub.all_clusters() } else { Arc::default() };
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
        // Names it asks for are answered as such.
        has.retain(|name, _| !of.named.contains(name));
        for (name, version) in has {
            let is_known = known.contains(&name);
            match kind.read(&name).filter(|_| kind == Kind::Cluster) {
                // It may change or go before the client is told of it.
                Some(Target { hostname, .. }) if is_known || self.unread.may_have(hostname.as_str()) => {
                    let is_sent = clusters_of(&sent, &hostname).iter().any(|sent| sent.name == name);
                    if !is_sent {
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

    /// What there is to say of a type.
    pub(super) fn draft_delta(&mut self, kind: Kind) -> Draft {
        let mut draft = Draft::default();
        draft.removed.append(&mut self.types[kind as usize].gone);
        self.tell_all_delta(kind, &mut draft);
        let [clusters, others @ ..] = &mut self.types;
        let (of, assignments) = match kind {
            Kind::Cluster => (clusters, others.first()),
            Kind::Assignment | Kind::Listener | Kind::Route => (&mut others[kind as usize - 1], None),
        };
        let (client, unread) = (self.viewer.client, &*self.unread);
        let mut waiting = Vec::new();
        while draft.has_room() {
            let Some((name, owed)) = of.next_name() else { break };
            draft.looked_at += 1;
            let owed = owed | of.take_held_back(&name);
            match of.named.get_mut(&name) {
                Some(named) => match named.subscription.current() {
                    current if named.is_held_back(kind, client, unread, current.as_deref()) => {
                        of.held_back.insert(name, owed);
                    }
                    Some(resource) if owed || named.sent != Sent::Version(resource.version) => {
                        named.is_sent(Sent::Version(resource.version));
                        draft.tell(resource);
                    }
                    Some(_) => named.lacking = false,
                    None if !owed && assignments.is_some_and(|of| !of.is_emptied(&name)) => {
                        waiting.push(name);
                    }
                    None => {
                        if owed || matches!(named.sent, Sent::Version(_)) {
                            draft.removed.insert(name);
                        }
                        named.is_sent(Sent::Absence);
                    }
                },
                // Given up as a name: the wildcard covers it, or there is none.
                None if owed => match find(&of.all_sent, kind, &name) {
                    Some(resource) => draft.tell(resource),
                    None if of.is_kept(kind, &name, unread) => {}
                    None => drop(draft.removed.insert(name)),
                },
                None => {}
            }
        }
        of.pending.extend(waiting);
        draft
    }

    /// Adds what those who want all do not have yet.
    fn tell_all_delta(&mut self, kind: Kind, draft: &mut Draft) {
        let [clusters, assignments, ..] = &mut self.types;
        if kind != Kind::Cluster || !clusters.all_changed && !clusters.kept_changed {
            return;
        }
        let (all, unread) = (self.hub.all_clusters(), &*self.unread);
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
                    draft.tell(resource.clone());
                }
            }
            let gone = sent.iter().filter(|old| !held.iter().any(|new| new.name == old.name));
            match keeps {
                // Of a cluster that is kept already the client has an older version than it was noted to be sent.
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
            complete = clusters.tell_kept(&all, assignments, unread, draft);
            clusters.kept_changed = !complete;
        }
        if complete {
            // The same content in fewer bytes: shared with all who have it.
            clusters.all_sent = all;
            clusters.all_changed = false;
        }
    }
}

impl Type {
    /// Returns true if the client keeps a cluster that it had, as a registry which was not read may have it.
    fn is_kept(&self, kind: Kind, name: &str, unread: &Unread) -> bool {
        let target = || kind.read(name).is_some_and(|target| unread.may_have(target.hostname.as_str()));
        self.returns && !unread.is_empty() && target()
    }

    /// Tells of what was kept and is kept no longer; returns true if there is no more to tell of it now.
    fn tell_kept(&mut self, all: &Clusters, assignments: &Self, unread: &Unread, draft: &mut Draft) -> bool {
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
                    Some(resource) => draft.tell(resource.clone()),
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

/// The resource of a name among all.
fn find(all: &Clusters, kind: Kind, name: &str) -> Option<Arc<Resource>> {
    let resources = all.get(kind.read(name)?.hostname.as_str())?;
    resources.iter().find(|resource| &*resource.name == name).cloned()
}
