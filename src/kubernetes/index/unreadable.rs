//! The objects of a cluster that cannot be read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::super::kinds::Kind;
use super::super::objects::Meta;
use super::super::watch::WatchId;
use super::watches::WatchState;
use isthmus_net::channel::cut;
use isthmus_registry::change::Change;

/// The largest number of unreadable objects that are remembered by name.
const BROKEN_MAX: usize = 1_000;

/// The objects that cannot be read.
#[derive(Debug, Default)]
pub(super) struct Unreadable {
    objects: BTreeMap<Arc<str>, Broken>,
    /// Objects that became unreadable, or readable again, since the last report.
    dirty: BTreeSet<Arc<str>>,
}

/// An object that cannot be read.
#[derive(Debug)]
struct Broken {
    why: String,
    /// The watch that has reported the object, and the last listing that has named it.
    watch: WatchId,
    listing: u32,
}

impl Unreadable {
    /// Adds an object.
    pub(super) fn add(&mut self, kind: Kind, meta: &Meta, why: String, (watch, listing): (WatchId, u32)) {
        let object = object_name(kind, meta);
        if self.objects.len() < BROKEN_MAX || self.objects.contains_key(&object) {
            self.dirty.insert(object.clone());
            self.objects.insert(object, Broken { why, watch, listing });
        }
    }

    /// Removes an object that can be read, or is gone.
    pub(super) fn remove(&mut self, kind: Kind, meta: &Meta) {
        if self.objects.is_empty() {
            return;
        }
        let object = object_name(kind, meta);
        if self.objects.remove(&object).is_some() {
            self.dirty.insert(object);
        }
    }

    /// Removes the objects of a watch that its listing has not named.
    pub(super) fn complete(&mut self, watch: WatchId, listing: u32) {
        self.objects.retain(|object, broken| {
            let is_named = broken.watch != watch || broken.listing == listing;
            if !is_named {
                self.dirty.insert(object.clone());
            }
            is_named
        });
    }

    /// Returns the first object of a kind that cannot be read, and why; or that there are too many unreadable objects to know.
    pub(super) fn first(&self, kind: Kind) -> Option<String> {
        let beginning = format!("{} ", kind.plural());
        let mut of_kind = self.objects.iter().filter(|(object, _)| object.starts_with(&beginning));
        let first = of_kind.next().map(|(object, broken)| format!("{object}: {}", broken.why));
        first.or_else(|| {
            (self.objects.len() == BROKEN_MAX)
                .then(|| "too many objects of the cluster cannot be read".into())
        })
    }

    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Makes the next changes those of all objects.
    pub(super) fn begin_listing(&mut self) {
        self.dirty = self.objects.keys().cloned().collect();
    }

    /// Returns why the objects of a watch are not known; `None` if they are.
    pub(super) fn unknown(&self, watch: &WatchState) -> Option<String> {
        let kind = watch.kind;
        if watch.too_many > 0 {
            return Some(format!("there are too many {}", kind.plural()));
        }
        if !watch.is_synced && watch.absent.is_none() {
            let why = watch.failure();
            return Some(why.unwrap_or_else(|| format!("{} were not listed yet", kind.plural())));
        }
        self.first(kind)
    }

    /// Returns the changes since the last call.
    pub(super) fn changes(&mut self) -> impl Iterator<Item = Change> {
        let dirty = std::mem::take(&mut self.dirty);
        dirty.into_iter().map(|object| {
            let problems = self.objects.get(&object).map(|broken| format!("{object}: {}", broken.why));
            Change::Flawed { object, problems: problems.into_iter().collect() }
        })
    }
}

fn object_name(kind: Kind, meta: &Meta) -> Arc<str> {
    let name = |text: &str| cut(text);
    match meta.namespace.is_empty() {
        true => format!("{} {}", kind.plural(), name(&meta.name)).into(),
        false => format!("{} {}/{}", kind.plural(), name(&meta.namespace), name(&meta.name)).into(),
    }
}
