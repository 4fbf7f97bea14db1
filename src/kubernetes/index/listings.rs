//! Ends listings, and records the objects that cannot be read. At the end of a listing the records that it has not named are
//! removed; an object that exists but cannot be read counts as named.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::kinds::Kind;
use super::super::objects::Meta;
use super::super::records::{Listed, ObjectKey, PodRecord, Uid};
use super::super::watch::WatchId;
use super::{Broken, Index, WatchState};
use isthmus_net::channel::cut;

/// The largest number of unreadable objects that are remembered by name.
const BROKEN_MAX: usize = 1_000;

impl Index {
    /// Removes the records of the watch that its listing has not named.
    pub(super) fn complete(&mut self, watch: WatchId) {
        let WatchState { kind, namespace, listing, .. } = &self.watches[watch];
        let (kind, namespace, listing) = (*kind, namespace.clone(), *listing);
        let is_gone = |key: &ObjectKey, named: u32| {
            named != listing && namespace.as_ref().is_none_or(|namespace| key.namespace == *namespace)
        };
        fn old<T>(
            all: &BTreeMap<ObjectKey, Listed<T>>,
            is_gone: impl Fn(&ObjectKey, u32) -> bool,
        ) -> Vec<ObjectKey> {
            all.iter()
                .filter(|(key, known)| is_gone(key, known.listing))
                .map(|(key, _)| key.clone())
                .collect()
        }
        match kind {
            Kind::Namespace => {
                let gone = self.namespaces.iter().filter(|(_, known)| known.listing != listing);
                let gone: Vec<Arc<str>> = gone.map(|(name, _)| name.clone()).collect();
                gone.iter().for_each(|name| self.remove_namespace(name));
            }
            Kind::Service => old(&self.services, is_gone).iter().for_each(|key| self.remove_service(key)),
            Kind::EndpointSlice => {
                let gone = self.slices.iter().filter(|(key, known)| is_gone(key, known.listing));
                let gone: Vec<Arc<ObjectKey>> = gone.map(|(key, _)| key.clone()).collect();
                gone.iter().for_each(|key| self.remove_slice(key));
            }
            Kind::Pod => {
                let in_scope = |pod: &PodRecord| {
                    namespace.as_ref().is_none_or(|namespace| pod.template.namespace == *namespace)
                };
                let gone = self.pods.iter().filter(|(_, entry)| {
                    entry.is_there && entry.listing != listing && entry.pod.as_ref().is_some_and(in_scope)
                });
                let gone: Vec<Uid> = gone.map(|(uid, _)| *uid).collect();
                gone.into_iter().for_each(|uid| self.remove_pod(uid));
            }
            Kind::Node => {
                let gone = self.nodes.iter().filter(|(_, known)| known.listing != listing);
                let gone: Vec<Arc<str>> = gone.map(|(name, _)| name.clone()).collect();
                gone.iter().for_each(|name| self.remove_node(name));
            }
            Kind::Gateway => {
                for key in old(&self.gateways, is_gone) {
                    self.gateways.remove(&key);
                    self.gateways_dirty = true;
                }
            }
            Kind::ServiceExport => {
                for key in old(&self.exports, is_gone) {
                    self.exports.remove(&key);
                    self.dirty.insert(key);
                }
            }
            Kind::ServiceImport => {
                for key in old(&self.imports, is_gone) {
                    self.imports.remove(&key);
                    self.dirty.insert(key);
                }
            }
            Kind::DestinationRule => {
                for key in old(&self.rules, is_gone) {
                    self.rules.remove(&key);
                    self.is_all_dirty = true;
                }
            }
            Kind::ConfigMap | Kind::Secret => {}
        }
        let is_gone = |broken: &Broken| broken.watch == watch && broken.listing != listing;
        let gone = self.broken.iter().filter(|(_, broken)| is_gone(broken)).map(|(object, _)| object.clone());
        let gone: Vec<Arc<str>> = gone.collect();
        for object in gone {
            self.broken.remove(&object);
            self.broken_dirty.insert(object);
        }
    }

    /// Keeps the last good state of an object that cannot be read.
    pub(super) fn broken(&mut self, watch: WatchId, kind: Kind, meta: &Meta, why: String) {
        let listing = self.watches[watch].listing;
        let key = self.key_of(meta);
        match kind {
            Kind::Service => touch(self.services.get_mut(&key), listing),
            Kind::EndpointSlice => touch(self.slices.get_mut(&key), listing),
            Kind::Pod => {
                if let Some(entry) = Uid::parse(&meta.uid).and_then(|uid| self.pods.get_mut(&uid)) {
                    entry.listing = listing;
                }
            }
            Kind::Node => touch(self.nodes.get_mut(&key.name), listing),
            Kind::Namespace => touch(self.namespaces.get_mut(&key.name), listing),
            Kind::Gateway => touch(self.gateways.get_mut(&key), listing),
            Kind::ServiceExport => touch(self.exports.get_mut(&key), listing),
            Kind::ServiceImport => touch(self.imports.get_mut(&key), listing),
            Kind::DestinationRule => touch(self.rules.get_mut(&key), listing),
            Kind::ConfigMap | Kind::Secret => {}
        }
        let object = object_name(kind, meta);
        if self.broken.len() < BROKEN_MAX || self.broken.contains_key(&object) {
            self.broken_dirty.insert(object.clone());
            self.broken.insert(object, Broken { why, watch, listing });
        }
    }

    /// Forgets that an object could not be read.
    pub(super) fn mended(&mut self, kind: Kind, meta: &Meta) {
        if self.broken.is_empty() {
            return;
        }
        let object = object_name(kind, meta);
        if self.broken.remove(&object).is_some() {
            self.broken_dirty.insert(object);
        }
    }
}

fn touch<T>(known: Option<&mut Listed<T>>, listing: u32) {
    if let Some(known) = known {
        known.listing = listing;
    }
}

fn object_name(kind: Kind, meta: &Meta) -> Arc<str> {
    let name = |text: &str| cut(text);
    match meta.namespace.is_empty() {
        true => format!("{} {}", kind.plural(), name(&meta.name)).into(),
        false => format!("{} {}/{}", kind.plural(), name(&meta.namespace), name(&meta.name)).into(),
    }
}
