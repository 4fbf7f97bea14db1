//! Registries that have not been read since the process started, and the services that they may have. The list of endpoints of
//! such a service may be incomplete. A client may already have further endpoints of the service from an earlier process
//! (`docs/registries.md, "When a registry cannot be read"`).

use std::sync::Arc;

use isthmus_model::name::{HostName, NamePattern};
use isthmus_registry::name_index::NameMap;

/// The registries that have not been read, and the services that other registries have changed meanwhile.
#[derive(Clone, Debug, Default)]
pub struct Unread {
    registries: Arc<[UnreadRegistry]>,
    /// Services that a registry changed after it was read, while another registry was unread.
    changed: NameMap<()>,
}

/// A registry that has not been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadRegistry {
    /// The name of the registry.
    pub name: Arc<str>,
    /// The services that the registry may have; empty: all.
    pub services: Vec<NamePattern>,
    /// True if this is the registry of a peer, whose services are not services of this mesh.
    pub is_peer: bool,
}

impl Unread {
    /// Returns the same changes with another list of registries. If the list is empty, the changes are dropped.
    #[must_use]
    pub fn with_registries(&self, registries: Vec<UnreadRegistry>) -> Self {
        let changed = if registries.is_empty() { NameMap::default() } else { self.changed.clone() };
        Self { registries: registries.into(), changed }
    }

    /// Records that a service was changed by a registry that had been read.
    pub fn note_change(&mut self, hostname: &HostName) {
        if !self.registries.is_empty() && self.changed.get(hostname.as_str()).is_none() {
            self.changed.insert(hostname.clone(), ());
        }
    }

    /// Returns true if every registry has been read.
    pub fn is_empty(&self) -> bool {
        self.registries.is_empty()
    }

    /// Returns the registries that have not been read.
    pub fn registries(&self) -> &[UnreadRegistry] {
        &self.registries
    }

    /// Returns true if both have the same list of registries.
    pub fn has_registries_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.registries, &other.registries) || self.registries == other.registries
    }

    /// Returns true if an unread registry may have the service.
    pub fn may_have(&self, hostname: &str) -> bool {
        self.that_may_have(hostname).next().is_some()
    }

    /// Returns the unread registries that may have the service.
    pub fn that_may_have<'a>(&'a self, hostname: &'a str) -> impl Iterator<Item = &'a UnreadRegistry> {
        self.registries.iter().filter(move |registry| {
            registry.services.is_empty() || registry.services.iter().any(|pattern| pattern.matches(hostname))
        })
    }

    /// Returns true if an unread registry may have services of this mesh, which peers may know.
    pub fn has_own(&self) -> bool {
        self.registries.iter().any(|registry| !registry.is_peer)
    }

    /// Returns true if an unread registry may have this service, and the service would be one of this mesh.
    pub fn may_have_own(&self, hostname: &str) -> bool {
        self.that_may_have(hostname).any(|registry| !registry.is_peer)
    }

    /// Returns true if the service was changed by a registry that had been read, while another registry was unread.
    pub fn is_changed(&self, hostname: &str) -> bool {
        self.changed.get(hostname).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_may_have_what_its_scope_takes() {
        let pattern = NamePattern::parse("*.west.mesh").expect("legal");
        let west = UnreadRegistry { name: "west".into(), services: vec![pattern], is_peer: false };
        let any = UnreadRegistry { name: "any".into(), services: Vec::new(), is_peer: true };
        let (name, other) = (HostName::parse("a.west.mesh"), HostName::parse("a.east.mesh"));
        let (name, other) = (name.expect("legal"), other.expect("legal"));
        let mut unread = Unread::default().with_registries(vec![west.clone()]);
        assert!(unread.may_have(name.as_str()) && !unread.may_have(other.as_str()));
        unread.note_change(&name);
        assert!(unread.has_own() && unread.may_have_own(name.as_str()));
        let of_peer = unread.with_registries(vec![any.clone()]);
        assert!(!of_peer.has_own() && !of_peer.may_have_own(name.as_str()));
        let both = unread.with_registries(vec![west, any]);
        assert!(both.may_have_own(name.as_str()) && !both.may_have_own(other.as_str()));
        assert!(both.may_have(other.as_str()) && both.is_changed(name.as_str()));
        assert!(!both.is_changed(other.as_str()) && !both.has_registries_of(&unread));
        let mut none = both.with_registries(Vec::new());
        none.note_change(&name);
        assert!(none.is_empty() && !none.is_changed(name.as_str()) && !none.may_have(name.as_str()));
    }
}
