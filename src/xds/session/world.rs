//! The state-of-the-world variant. Each request contains all names that the client subscribes to. A response contains all
//! listeners or all clusters; a response of another type contains only the changed resources.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::draft::Draft;
use super::{Acknowledgement, BeforeStream, Named, Request, RequestRefusal, Sent, Session, Type, held_next};
use crate::hub::{Clusters, Wide, are_same, clusters_of, put_clusters};
use crate::kind::Kind;
use isthmus_snapshot::unread::Unread;
use isthmus_snapshot::view::ClientKind;

impl Session {
    pub(super) fn world_request(
        &mut self,
        kind: Kind,
        request: Request,
    ) -> Result<Acknowledgement, RequestRefusal> {
        let of = &self.types[kind as usize];
        // The client sent a stale request before it saw the last response. Another request will answer that response.
        if of.last_nonce.as_ref().is_some_and(|last| *last != request.nonce) {
            return Ok(Acknowledgement::None);
        }
        let answer = self.answer(kind, &request);
        let first = !std::mem::replace(&mut self.types[kind as usize].asked, true);
        let ever_named = self.types[kind as usize].ever_named;
        let star = request.names.iter().any(|name| name == "*") || request.names.is_empty() && !ever_named;
        self.types[kind as usize].ever_named |= !request.names.is_empty();
        // Only the first request of a type can show that the client has resources from an earlier stream.
        let brought = first && request.returns;
        self.types[kind as usize].returns |= brought;
        let names: BTreeSet<Arc<str>> =
            request.names.into_iter().filter(|name| name != "*").map(Into::into).collect();
        let wanted_all = self.types[kind as usize].wildcard;
        match star {
            true if kind.has_wildcard() => self.subscribe_to_all(kind),
            false if kind.has_wildcard() => self.unsubscribe_from_all(kind),
            _ => {}
        }
        let of = &mut self.types[kind as usize];
        let all = of.named.iter().map(Named::name);
        Self::release(&mut self.account, all.filter(|name| !names.contains(*name)));
        of.named.retain(|name| names.contains(name));
        of.pending.retain(|name| names.contains(name));
        of.owed.retain(|name| names.contains(name));
        of.held_back.retain(|name, _| names.contains(name));
        if kind == Kind::Assignment {
            self.wide.retain(|name| names.contains(name));
        }
        of.must_answer |= kind.has_wildcard() && (first || !wanted_all && star);
        for name in names {
            if !self.types[kind as usize].named.contains(&name) {
                let before = if brought { BeforeStream::Had(Sent::Nothing) } else { BeforeStream::Nothing };
                self.add(kind, &name, before)?;
                self.types[kind as usize].owed.insert(name);
            }
        }
        Ok(answer)
    }

    /// Makes the next response of a type.
    pub(super) fn draft_world(&mut self, kind: Kind) -> Draft {
        let mut draft = Draft::default();
        if kind.has_wildcard() {
            self.add_whole_world(kind, &mut draft);
        } else {
            let (client, unread) = (self.viewer.client, &*self.unread);
            let is_permitted = kind == Kind::Assignment && self.permit.is_some();
            let wide = is_permitted.then_some(&mut self.wide);
            self.types[kind as usize].add_some_of_world(kind, (client, unread), wide, &mut draft);
        }
        draft
    }

    /// Adds all listeners or clusters. A client removes the resources that the response lacks, so a response is due even if no
    /// resource is left.
    fn add_whole_world(&mut self, kind: Kind, draft: &mut Draft) {
        let all = self.all_of_world(kind);
        let of = &mut self.types[kind as usize];
        let version = |named: &Named| named.subscription.current().map(|resource| resource.version);
        let looked = std::mem::take(&mut of.pending);
        of.must_answer |= !of.owed.is_empty()
            || all.is_some()
            || looked
                .iter()
                .filter_map(|name| of.named.get(name))
                .any(|named| version(named) != named.version());
        if !of.must_answer {
            return;
        }
        of.owed.clear();
        for named in of.named.sorted_mut() {
            match named.subscription.current() {
                Some(resource) => {
                    match named.sent == Sent::Version(resource.version) {
                        true => draft.add_known(resource.clone()),
                        false => draft.add(resource.clone()),
                    }
                    named.set_sent(Sent::Version(resource.version));
                }
                None => {
                    if named.sent != Sent::Absence {
                        draft.missing.insert(named.name().clone());
                    }
                    named.set_sent(Sent::Absence);
                }
            }
        }
        let all = all.unwrap_or_else(|| of.all_sent.clone());
        for (hostname, resources) in all.sorted() {
            let sent = of.all_sent.get(hostname.as_str());
            for resource in resources.iter().filter(|resource| !of.named.contains(&resource.name)) {
                match sent.is_some_and(|sent| sent.iter().any(|old| old.version == resource.version)) {
                    true => draft.add_known(resource.clone()),
                    false => draft.add(resource.clone()),
                }
            }
        }
        of.all_sent = all;
    }

    /// Returns the next list for the wildcard subscription if it differs from the list that was sent.
    fn all_of_world(&mut self, kind: Kind) -> Option<Arc<Clusters>> {
        let has_list = self.has_list(kind);
        let types = self.types.get_disjoint_mut([kind as usize, Kind::Assignment as usize]);
        let [clusters, assignments] = types.ok().filter(|_| has_list)?;
        if !clusters.all_changed {
            return None;
        }
        let mut all = self.hub.all_of(kind);
        let (mut complete, mut differs) = (true, false);
        for hostname in all.changed_since(&clusters.all_sent, are_same) {
            let sent = clusters_of(&clusters.all_sent, &hostname);
            let (held, whole) = held_next(&clusters_of(&all, &hostname), &sent, assignments);
            differs |= !are_same(&held, &sent);
            if !whole {
                complete = false;
                put_clusters(&mut all, hostname, held);
            }
        }
        clusters.all_changed = !complete;
        differs.then_some(all)
    }
}

impl Type {
    /// Adds the changed resources of a type without wildcard, as far as the response has room.
    fn add_some_of_world(
        &mut self,
        kind: Kind,
        (client, unread): (ClientKind, &Unread),
        mut wide: Option<&mut Wide>,
        draft: &mut Draft,
    ) {
        while let Some((name, owed)) = self.next_name(draft, wide.as_deref_mut()) {
            draft.looked_at += 1;
            let owed = owed | self.take_held_back(&name);
            let Some(named) = self.named.get_mut(&name) else { continue };
            let current = named.subscription.current();
            if named.is_held_back(kind, client, unread, current.as_deref()) {
                self.held_back.insert(name, owed);
                continue;
            }
            match current {
                Some(resource) => {
                    if owed || named.sent != Sent::Version(resource.version) {
                        draft.add(resource.clone());
                    }
                    named.set_sent(Sent::Version(resource.version));
                }
                None => {
                    if named.sent != Sent::Absence {
                        draft.missing.insert(name);
                    }
                    named.set_sent(Sent::Absence);
                }
            }
        }
    }
}
