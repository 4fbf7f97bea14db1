//! The resources that a client has: those of an earlier stream that were not compared yet, and those that were sent to a client that
//! wants everything.

use std::sync::Arc;

use isthmus_ads::resource::{Resource, Version};
use isthmus_ads::session::Earlier;

use super::Draft;
use crate::table::Resources;

/// The fate of a resource of an earlier stream.
enum Verdict {
    /// The client has it as it is.
    Same,
    /// Its change waits, because a registry that was not read yet may have it.
    Withheld,
    Changed(Arc<Resource>),
    Gone,
}

/// Compares the resources of an earlier stream with the present ones. Those whose change is withheld stay in `earlier`. Returns the
/// names and versions that the client has then.
pub(super) fn compare(
    earlier: &mut Earlier,
    all: &Resources,
    draft: &mut Draft,
    withholds: impl Fn(&str) -> bool,
) -> Vec<(Arc<str>, Version)> {
    let mut has = Vec::new();
    earlier.retain(|name, version| {
        let found = all.get(&**name);
        let verdict = match found {
            Some(found) if Some(found.version) == *version => Verdict::Same,
            _ if withholds(name) => Verdict::Withheld,
            Some(found) => Verdict::Changed(found.clone()),
            None => Verdict::Gone,
        };
        has.extend(found.map(|found| (found.name.clone(), found.version)));
        match verdict {
            Verdict::Withheld => {
                has.pop_if(|(last, _)| **last == **name);
                return true;
            }
            Verdict::Same => {}
            Verdict::Changed(resource) => draft.resources.push(resource),
            Verdict::Gone => draft.removed.push(name.clone()),
        }
        false
    });
    has
}

/// The resources of a client that wants everything.
#[derive(Default)]
pub(super) struct Held {
    /// The resources that were sent last; `None`: nothing was sent yet.
    sent: Option<Resources>,
    earlier: Earlier,
}

impl Held {
    /// Returns what a client has that was not sent anything yet.
    pub(super) fn of(earlier: Earlier) -> Self {
        Self { sent: None, earlier }
    }

    /// Returns the number of resources whose change is withheld.
    pub(super) fn withheld(&self) -> usize {
        self.earlier.len()
    }

    /// Adds what the client lacks of `all`.
    pub(super) fn draft(&mut self, all: &Resources, draft: &mut Draft, withholds: impl Fn(&str) -> bool) {
        let none = Resources::default();
        let sent = self.sent.as_ref().unwrap_or(&none);
        let changed = all.changed_since(sent, |one, other| one.version == other.version);
        let is_earlier = |name: &Arc<str>| self.earlier.contains_key(&**name);
        for name in changed.into_iter().filter(|name| !is_earlier(name)) {
            match all.get(&*name) {
                Some(resource) => draft.resources.push(resource.clone()),
                None => draft.removed.push(name),
            }
        }
        compare(&mut self.earlier, all, draft, withholds);
        self.sent = Some(all.clone());
    }
}
