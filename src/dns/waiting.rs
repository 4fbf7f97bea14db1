//! The questions of clients that wait for answers of other servers. Their number is bounded, and shared among sources: if one
//! question too many arrives, the source that has the most gives way with its oldest question. A name that no server answers
//! holds its place for seconds, and one that is answered for milliseconds, so a source that asks for many dead names loses
//! these and nobody else loses anything.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use isthmus_model::limits::SourcePrefix;

/// The questions that wait.
pub(super) struct Waiting {
    limit: usize,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    /// The number of places that have ever been taken.
    taken: u64,
    used: usize,
    /// The waiting questions of each source, oldest first; never empty.
    sources: BTreeMap<IpAddr, VecDeque<Held>>,
}

struct Held {
    /// The value of `taken` with this place.
    number: u64,
    /// Dropped when the question must give way.
    _keep: oneshot::Sender<()>,
}

/// The place of a waiting question, given back when it is dropped.
pub(super) struct Place<'a> {
    waiting: &'a Waiting,
    source: IpAddr,
    number: u64,
    kept: oneshot::Receiver<()>,
}

impl Waiting {
    /// Makes places for this many questions.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), places: Mutex::default() }
    }

    /// Takes a place for a question of a client.
    pub(super) fn enter(&self, client: IpAddr) -> Place<'_> {
        let source = SourcePrefix::default().block(client);
        let (keep, kept) = oneshot::channel();
        let mut places = self.places();
        places.taken += 1;
        let number = places.taken;
        places.sources.entry(source).or_default().push_back(Held { number, _keep: keep });
        places.used += 1;
        if places.used > self.limit {
            places.make_room();
        }
        debug_assert!(places.used <= self.limit, "one question has given way to the new one");
        Place { waiting: self, source, number, kept }
    }

    /// Returns true if more than half of the places are taken.
    pub(super) fn is_crowded(&self) -> bool {
        self.places().used > self.limit / 2
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Places {
    /// Removes the oldest question of the source that has the most; of several such sources, the oldest question of all.
    fn make_room(&mut self) {
        // There are at most as many sources as places, so this costs less than the query that the new question leads to.
        let most = self.sources.iter().max_by_key(|(_, held)| {
            let oldest = held.front().map_or(u64::MAX, |held| held.number);
            (held.len(), std::cmp::Reverse(oldest))
        });
        if let Some((source, number)) = most.and_then(|(source, held)| Some((*source, held.front()?.number)))
        {
            self.remove(source, number);
        }
    }

    fn remove(&mut self, source: IpAddr, number: u64) {
        let Some(held) = self.sources.get_mut(&source) else { return };
        if let Ok(at) = held.binary_search_by_key(&number, |held| held.number) {
            held.remove(at);
            self.used -= 1;
        }
        if held.is_empty() {
            self.sources.remove(&source);
        }
    }
}

impl Place<'_> {
    /// Waits until the question must give way. Cancel safe.
    pub(super) async fn lost(&mut self) {
        // The sender sends nothing; it is dropped.
        let _ = (&mut self.kept).await;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.waiting.places().remove(self.source, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn is_lost(place: &mut Place<'_>) -> bool {
        place.kept.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn the_source_with_the_most_questions_gives_way_with_its_oldest() {
        let waiting = Waiting::new(4);
        let mut many: Vec<Place<'_>> = (0..3).map(|_| waiting.enter(ip(1))).collect();
        let mut one = waiting.enter(ip(2));
        many.push(waiting.enter(ip(1)));
        assert_eq!(many.iter_mut().map(is_lost).collect::<Vec<_>>(), [true, false, false, false]);
        let mut other = waiting.enter(ip(3));
        assert_eq!(many.iter_mut().map(is_lost).collect::<Vec<_>>(), [true, true, false, false]);
        assert!(!is_lost(&mut one) && !is_lost(&mut other));
        // A place is given back once, whether or not its question gave way.
        many.clear();
        assert_eq!(waiting.places().used, 2);
        drop((one, other));
        let places = waiting.places();
        assert_eq!((places.used, places.sources.len()), (0, 0));
    }

    #[test]
    fn among_sources_with_equally_many_the_oldest_question_gives_way() {
        let waiting = Waiting::new(3);
        let mut places: Vec<Place<'_>> = (1..=3).map(|last| waiting.enter(ip(last))).collect();
        assert!(waiting.is_crowded());
        places.push(waiting.enter(ip(4)));
        assert_eq!(places.iter_mut().map(is_lost).collect::<Vec<_>>(), [true, false, false, false]);
        places.drain(..3);
        assert!(!waiting.is_crowded());
    }
}
