//! The services and gateways that one replica of a peer has sent. Services for which there is no place are kept too, so that they
//! get the places that become free.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::reading::Read;
use isthmus_model::name::HostName;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_registry::change::RegistryGateway;
use isthmus_settings::peer::Peer;

/// The largest number of services that wait for a place, besides those that are in use. Without this bound, a peer could fill the
/// memory although the `limit` of its rules is small.
const WAITING_MAX: usize = 1_000;

/// The largest number of services in one answer to a listing. Both sides show the first 100 refusals by name, and an answer must
/// fit into one message.
const ANSWERS_MAX: usize = 1_000;

/// Services by exported name, and gateways by key.
#[derive(Debug, Default)]
pub(super) struct Items {
    pub(super) services: BTreeMap<String, Read>,
    pub(super) gateways: BTreeMap<String, RegistryGateway>,
    /// Services that were refused because the limit of their rule is reached, or because another service has their name here. At
    /// most [`WAITING_MAX`] and those that were in use when they came; others come again only with a new listing.
    waiting: BTreeMap<String, Read>,
    /// True if a place has become free since the services in `waiting` were last considered.
    has_place: bool,
    /// The exported name of each service, by the service's name in this mesh. No two services share a name.
    names: HashMap<HostName, String>,
    /// The number of services that are imported by each rule.
    taken: HashMap<Arc<str>, usize>,
}

impl Items {
    /// Removes a service.
    pub(super) fn remove(&mut self, name: &str) {
        self.waiting.remove(name);
        if let Some(read) = self.services.remove(name) {
            self.has_place = true;
            self.names.remove(&read.service.key.hostname);
            if let Some(taken) = self.taken.get_mut(&read.rule) {
                *taken -= 1;
            }
        }
    }

    /// Adds or replaces a service. If the limit of its import rule is reached, or another service already has the name that this
    /// service would have in this mesh, the service waits for a place, and the result is the reason. With `waits_always`, it waits
    /// also if [`WAITING_MAX`] services wait already.
    pub(super) fn put(
        &mut self,
        peer: &Peer,
        name: &str,
        read: Read,
        waits_always: bool,
    ) -> Result<(), String> {
        self.remove(name);
        if let Some(problem) = self.obstacle(peer, &read) {
            if waits_always || self.waiting.len() < WAITING_MAX {
                self.waiting.insert(name.to_owned(), read);
            }
            return Err(problem);
        }
        *self.taken.entry(read.rule.clone()).or_default() += 1;
        self.names.insert(read.service.key.hostname.clone(), name.to_owned());
        self.services.insert(name.to_owned(), read);
        Ok(())
    }

    /// Returns the reason why there is no place for a service.
    fn obstacle(&self, peer: &Peer, read: &Read) -> Option<String> {
        let hostname = &read.service.key.hostname;
        if let Some(other) = self.names.get(hostname) {
            return Some(format!("another service of the peer, {other}, has the same name here, {hostname}"));
        }
        let rule = peer.imports.iter().find(|rule| rule.rule == read.rule)?;
        let limit =
            rule.limit.filter(|limit| self.taken.get(&read.rule).is_some_and(|taken| taken >= limit))?;
        Some(format!("{} has reached its limit of {limit} services", read.rule))
    }

    /// Gives the places that have become free to services that wait, in order of name; returns the names of these services.
    pub(super) fn fill_places(&mut self, peer: &Peer) -> Vec<String> {
        if !std::mem::take(&mut self.has_place) || self.waiting.is_empty() {
            return Vec::new();
        }
        let mut filled = Vec::new();
        for (name, read) in std::mem::take(&mut self.waiting) {
            // It has waited already, so it may wait on.
            if self.put(peer, &name, read, true).is_ok() {
                filled.push(name);
            }
        }
        filled
    }

    /// Returns the number of services that wait for a place.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Ends a listing, which came in order of name: services that are in use get their places before all others. Returns the
    /// names of the services that were refused before and now have a place, and the refusals of those that have lost theirs: the
    /// first [`ANSWERS_MAX`] of each by name.
    pub(super) fn prefer(&mut self, peer: &Peer, is_in_use: impl Fn(&str, &Read) -> bool) -> proto::Ack {
        let mut ack = proto::Ack::default();
        if !self.waiting.iter().any(|(name, read)| is_in_use(name, read)) {
            return ack;
        }
        let before: BTreeSet<String> = self.services.keys().cloned().collect();
        let all = std::mem::take(&mut self.services).into_iter().chain(std::mem::take(&mut self.waiting));
        let (first, then): (Vec<_>, Vec<_>) = all.partition(|(name, read)| is_in_use(name, read));
        self.names.clear();
        self.taken.clear();
        for (name, read) in first.into_iter().chain(then) {
            match self.put(peer, &name, read, true) {
                Err(problem) if before.contains(&name) => {
                    ack.refused.push(proto::Refusal { item: name, problem });
                }
                Ok(()) if !before.contains(&name) => ack.taken.push(name),
                _ => {}
            }
        }
        ack.refused.sort_by(|one, other| one.item.cmp(&other.item));
        ack.taken.sort();
        ack.refused.truncate(ANSWERS_MAX);
        ack.taken.truncate(ANSWERS_MAX);
        ack
    }
}
