//! Notes of replicas in the annotations of a Lease that they share: which generation of each object a replica serves. The holder of
//! the Lease reads there what the others serve.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

/// The prefix of the annotations.
const PREFIX: &str = "replica.isthmus.dev/";
/// The interval at which a replica renews its note, so that the others know that it runs.
const RENEW_EVERY: Duration = Duration::from_secs(5);
/// The time after the last renewal of its note at which a replica counts as gone.
const GONE_AFTER: Duration = Duration::from_secs(30);
/// The largest number of objects of a note, so that the notes of many replicas have room in one Lease, which may have annotations of
/// 256 KiB.
const OBJECTS_MAX: usize = 200;

/// The annotation of this process. New credentials make a new holder of the Lease, and replace the note of the one before.
static OWN: LazyLock<String> = LazyLock::new(|| format!("{PREFIX}{:016x}", RandomState::new().hash_one(())));

/// The generation that is served of each object, by the object's name.
pub(super) type Served = BTreeMap<String, i64>;

/// The note of a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    /// The name of the replica.
    pub(super) name: String,
    pub(super) serves: Served,
    /// A number that changes with each renewal.
    renewal: u64,
}

impl Note {
    pub(super) fn new(name: &str, serves: Served) -> Self {
        Self { name: name.to_owned(), serves, renewal: RandomState::new().hash_one(()) }
    }
}

/// The notes of a Lease, as one replica knows them.
pub(super) struct Notes {
    annotation: String,
    name: String,
    /// The content of the note of this replica; `None`: it has nothing to note.
    serves: Option<Served>,
    /// The note that was written last, and when.
    written: Option<(Note, Instant)>,
    /// The notes of other replicas by annotation, and since when each is as it is. The clocks of replicas may differ, so their times
    /// are not compared.
    others: BTreeMap<String, (Value, Instant)>,
}

impl Notes {
    pub(super) fn new(name: &str) -> Self {
        let others = BTreeMap::new();
        Self { annotation: OWN.clone(), name: name.to_owned(), serves: None, written: None, others }
    }

    /// Sets what this replica notes. With more than [`OBJECTS_MAX`] objects it notes nothing.
    pub(super) fn set(&mut self, serves: Served) {
        self.serves = Some(serves).filter(|serves| serves.len() <= OBJECTS_MAX);
    }

    /// Returns the notes of the other replicas that run.
    pub(super) fn others(&self, now: Instant) -> Vec<Note> {
        let running = self.others.values().filter(|(_, since)| now - *since < GONE_AFTER);
        running.filter_map(|(note, _)| serde_json::from_str(note.as_str()?).ok()).collect()
    }

    /// Reads the annotations of the Lease.
    pub(super) fn observe(&mut self, annotations: &Value, now: Instant) {
        let all = annotations.as_object().into_iter().flatten();
        let others = all.filter(|(name, _)| name.starts_with(PREFIX) && **name != self.annotation);
        let seen = others.map(|(name, note)| {
            let known = self.others.get(name).filter(|(known, _)| known == note);
            (name.clone(), (note.clone(), known.map_or(now, |(_, since)| *since)))
        });
        self.others = seen.collect();
    }

    /// Returns true if the note of this replica has to be written.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let is_fresh = |(note, at): &(Note, Instant)| {
            Some(&note.serves) == self.serves.as_ref() && now - *at < RENEW_EVERY
        };
        self.serves.is_some() && !self.written.as_ref().is_some_and(is_fresh)
    }

    /// Adds the note of this replica to the annotations, and removes those of replicas that are gone.
    pub(super) fn add(&mut self, annotations: &mut Value, now: Instant) {
        let Some(annotations) = annotations.as_object_mut() else { return };
        let is_running =
            |name: &String| self.others.get(name).is_some_and(|(_, since)| now - *since < GONE_AFTER);
        annotations.retain(|name, _| !name.starts_with(PREFIX) || is_running(name));
        if self.is_due(now) {
            self.written = self.serves.clone().map(|serves| (Note::new(&self.name, serves), now));
        }
        if let Some((note, _)) = self.written.as_ref().filter(|_| self.serves.is_some()) {
            annotations.insert(self.annotation.clone(), json!(note).to_string().into());
        }
    }

    /// Makes the note due again, because it was not written.
    pub(super) fn forget(&mut self) {
        self.written = None;
    }

    /// Removes the note of this replica from the annotations.
    pub(super) fn withdraw(&self, annotations: &mut Value) {
        if let Some(annotations) = annotations.as_object_mut() {
            annotations.remove(&self.annotation);
        }
    }

    /// Returns true if this replica has written a note.
    pub(super) fn is_written(&self) -> bool {
        self.written.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(name: &str, generation: i64) -> Notes {
        let mut notes = Notes { annotation: format!("{PREFIX}{name}"), ..Notes::new(name) };
        notes.set(Served::from([("infra/edge".to_owned(), generation)]));
        notes
    }

    fn serve(notes: &Notes, now: Instant) -> Vec<(String, i64)> {
        let one = |note: Note| (note.name, note.serves["infra/edge"]);
        notes.others(now).into_iter().map(one).collect()
    }

    #[test]
    fn a_replica_that_renews_its_note_is_known_and_one_that_does_not_is_gone() {
        let mut now = Instant::now();
        let (mut one, mut two) = (replica("one", 1), replica("two", 1));
        let mut annotations = json!({"isthmus.dev/clusters": "own"});
        for notes in [&mut one, &mut two] {
            notes.observe(&annotations, now);
            assert!(notes.is_due(now));
            notes.add(&mut annotations, now);
            assert!(!notes.is_due(now));
        }
        one.observe(&annotations, now);
        assert_eq!(serve(&one, now), [("two".to_owned(), 1)]);
        two.set(Served::from([("infra/edge".to_owned(), 2)]));
        assert!(two.is_due(now), "it serves another generation");
        two.add(&mut annotations, now);
        one.observe(&annotations, now);
        assert_eq!(serve(&one, now), [("two".to_owned(), 2)]);
        for _ in 0..10 {
            now += Duration::from_millis(4_999);
            assert!(!two.is_due(now));
            now += Duration::from_millis(1);
            assert!(two.is_due(now), "a renewal");
            two.add(&mut annotations, now);
            one.observe(&annotations, now);
        }
        now += Duration::from_millis(29_999);
        one.observe(&annotations, now);
        assert_eq!(serve(&one, now).len(), 1);
        now += Duration::from_millis(1);
        one.observe(&annotations, now);
        assert_eq!(serve(&one, now), []);
        one.add(&mut annotations, now);
        let left: Vec<&String> = annotations.as_object().expect("a map").keys().collect();
        assert_eq!(left, ["isthmus.dev/clusters", "replica.isthmus.dev/one"]);
        one.withdraw(&mut annotations);
        assert_eq!(annotations, json!({"isthmus.dev/clusters": "own"}));
    }

    #[test]
    fn notes_that_cannot_be_read_and_notes_that_are_too_long_are_none() {
        let (mut one, now) = (replica("one", 1), Instant::now());
        one.observe(&json!({format!("{PREFIX}x"): "[", format!("{PREFIX}y"): 7, "other": "x"}), now);
        assert_eq!(one.others(now), []);
        one.observe(&json!("x"), now);
        one.set((0..=OBJECTS_MAX).map(|number| (format!("a/{number}"), 1)).collect());
        let mut annotations = json!({});
        one.add(&mut annotations, now);
        assert_eq!((annotations, one.is_due(now)), (json!({}), false));
    }
}
