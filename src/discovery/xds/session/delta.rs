//! Delta: names are added and taken back, and a response holds what the client does not have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::draft::Draft;
use super::{Answer, NAMES_MAX, Refusal, Request, Sent, Session, held_next};
use crate::discovery::xds::hub::{Clusters, are_same, clusters_of, put_clusters};
use crate::discovery::xds::kind::Kind;
use crate::discovery::xds::resource::{Resource, Version};

impl Session {
    pub(super) fn delta_request(&mut self, kind: Kind, request: Request) -> Result<Answer, Refusal> {
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
        let is_gone = |name: &Arc<str>| !known.contains(name) && !of.named.contains_key(name);
        of.gone = has.into_keys().filter(is_gone).collect();
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
        let mut waiting = Vec::new();
        while draft.has_room() {
            let Some((name, owed)) = of.next_name() else { break };
            draft.looked_at += 1;
            match of.named.get_mut(&name) {
                Some(named) => match named.subscription.current() {
                    Some(resource) if owed || named.sent != Sent::Version(resource.version) => {
                        named.sent = Sent::Version(resource.version);
                        draft.tell(resource);
                    }
                    Some(_) => {}
                    None if !owed && assignments.is_some_and(|of| !of.is_emptied(&name)) => {
                        waiting.push(name);
                    }
                    None => {
                        if owed || matches!(named.sent, Sent::Version(_)) {
                            draft.removed.insert(name);
                        }
                        named.sent = Sent::Absence;
                    }
                },
                // Given up as a name: the wildcard covers it, or there is none.
                None if owed => match find(&of.all_sent, kind, &name) {
                    Some(resource) => draft.tell(resource),
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
        if kind != Kind::Cluster || !clusters.all_changed {
            return;
        }
        let all = self.hub.all_clusters();
        let mut complete = true;
        for hostname in all.changed_since(&clusters.all_sent, are_same) {
            if !draft.has_room() {
                complete = false;
                break;
            }
            draft.looked_at += 1;
            let sent = clusters_of(&clusters.all_sent, &hostname);
            let (held, whole) = held_next(&clusters_of(&all, &hostname), &sent, assignments);
            complete &= whole;
            for resource in held.iter() {
                if !sent.iter().any(|old| old.name == resource.name && old.version == resource.version) {
                    draft.tell(resource.clone());
                }
            }
            let gone = sent.iter().filter(|old| !held.iter().any(|new| new.name == old.name));
            draft.removed.extend(gone.map(|old| old.name.clone()));
            put_clusters(&mut clusters.all_sent, hostname, held);
        }
        if complete {
            // The same content in fewer bytes: shared with all who have it.
            clusters.all_sent = all;
            clusters.all_changed = false;
        }
    }
}

/// The resource of a name among all.
fn find(all: &Clusters, kind: Kind, name: &str) -> Option<Arc<Resource>> {
    let resources = all.get(kind.read(name)?.hostname.as_str())?;
    resources.iter().find(|resource| &*resource.name == name).cloned()
}
