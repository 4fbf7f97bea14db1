//! The status of objects of the Gateway API, as far as Isthmus writes it. A record keeps a digest of what the object has, so that a
//! writer knows without another request whether the status has to be written.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use crate::objects::{Meta, objects};

objects! {
    /// `metav1.Condition`.
    Condition {
        #[serde(rename = "type")]
        kind: String,
        status: String,
        reason: String,
        message: String,
        observed_generation: i64,
    }
}

/// The conditions of an object, a listener or a parent.
pub(crate) type Conditions = Vec<Condition>;

/// Returns true if conditions of this type are those of Isthmus.
pub(crate) fn is_own(kind: &str) -> bool {
    matches!(kind, "Accepted" | "Programmed" | "ResolvedRefs" | "Conflicted")
}

/// The version of an object, and what its status has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// The UID, by which an object that was deleted and created again differs from the one before.
    pub(crate) uid: Arc<str>,
    pub(crate) generation: i64,
    pub(crate) resource_version: Arc<str>,
    /// The digest of the parts of the status that Isthmus writes.
    pub(crate) digest: u64,
}

impl Stamp {
    /// Returns the stamp of an object whose status `add` adds to a digest.
    pub(crate) fn of(metadata: &Meta, add: impl FnOnce(&mut Digest)) -> Self {
        let mut digest = Digest::default();
        add(&mut digest);
        Self {
            uid: metadata.uid.as_str().into(),
            generation: metadata.generation,
            resource_version: metadata.resource_version.as_str().into(),
            digest: digest.finish(),
        }
    }
}

/// Computes the digest of a status. The order of its parts, and the times of its conditions, do not matter.
#[derive(Debug, Default)]
pub(crate) struct Digest(Vec<u64>);

impl Digest {
    /// Adds a part of the status that these texts describe.
    pub(crate) fn part(&mut self, texts: &[&str]) {
        let mut hasher = DefaultHasher::new();
        texts.hash(&mut hasher);
        self.0.push(hasher.finish());
    }

    /// Adds the conditions of the part of the status that `place` names. Conditions of other controllers are left out.
    pub(crate) fn conditions(&mut self, place: &str, conditions: &[Condition]) {
        let own = conditions.iter().filter(|condition| is_own(&condition.kind));
        for Condition { kind, status, reason, message, observed_generation } in own {
            self.part(&[place, kind, status, reason, message, &observed_generation.to_string()]);
        }
    }

    /// Adds an entry of a route's status, of which this is the digest.
    pub(crate) fn entry(&mut self, digest: u64) {
        self.0.push(digest);
    }

    pub(crate) fn finish(mut self) -> u64 {
        self.0.sort_unstable();
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }
}
