//! Turns of clients at limited work, such as questions to another server: few turns are in progress at the same time, and further
//! clients wait. The next turn goes to the source with the fewest turns in progress; of several such sources, to the one whose last
//! turn is the longest ago. The last fifth of the turns goes only to sources without a turn in progress, so that a client of another
//! source need not wait for the slow work of one source.
//!
//! If too many clients wait, one of the source with the most gives way (see [`Ranking`]).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::admission::RESERVED_PART;
use super::ranking::Ranking;
use isthmus_model::limits::SourcePrefix;

/// The turns at one kind of work.
#[derive(Debug)]
pub struct Turns {
    /// The largest number of turns in progress.
    limit: usize,
    /// The largest number of clients that wait.
    waiting_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of turns that were ever requested.
    requested: u64,
    /// The turns in progress, by source and number.
    running: BTreeSet<(IpAddr, u64)>,
    /// The clients that wait; a sender is dropped if its client must give way.
    waiting: Ranking<oneshot::Sender<()>>,
    /// The number of the last turn of each source that had clients waiting then, and has since.
    last: BTreeMap<IpAddr, u64>,
    /// The number of turns that ever began.
    begun: u64,
}

/// The turn of a client, which ends when it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    source: IpAddr,
    number: u64,
    begins: oneshot::Receiver<()>,
}

/// Too many clients wait, most of them of this client's source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many requests of this client's address wait already")]
pub struct Crowded;

impl Turns {
    /// Allows `limit` turns in progress, and `waiting_max` clients that wait.
    pub fn new(limit: usize, waiting_max: usize) -> Self {
        Self { limit: limit.max(1), waiting_max, state: Mutex::default() }
    }

    /// Waits for the turn of a client at this address. The future can be dropped.
    pub async fn turn(&self, client: IpAddr) -> Result<Turn<'_>, Crowded> {
        let source = SourcePrefix::default().block(client);
        let (begin, begins) = oneshot::channel();
        let mut turn = {
            let mut state = self.state();
            state.requested += 1;
            let number = state.requested;
            let given_way = state.waiting.insert(source, number, begin, self.waiting_max);
            state.begin(self.limit);
            drop((state, given_way));
            Turn { turns: self, source, number, begins }
        };
        (&mut turn.begins).await.map(|()| turn).map_err(|_| Crowded)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Begins all turns that may begin.
    fn begin(&mut self, limit: usize) {
        while let Some((running, _, number, source)) = self.next() {
            let open = if running == 0 { limit } else { limit - limit / RESERVED_PART };
            if self.running.len() >= open {
                return;
            }
            let begin = self.waiting.remove(source, number);
            self.running.insert((source, number));
            self.begun += 1;
            match self.waiting.oldest_of(source) {
                Some(_) => self.last.insert(source, self.begun),
                None => self.last.remove(&source),
            };
            // A receiver that is gone has a turn that will be dropped once the lock is free.
            let _ = begin.map(|begin| begin.send(()));
        }
    }

    /// Returns the client whose turn is next: the turns in progress of its source, the last turn of the source, its own number, and
    /// the source. There are at most as many sources as connections, and what a turn is for costs more than this search.
    fn next(&self) -> Option<(usize, u64, u64, IpAddr)> {
        let ranks = self.waiting.sources().map(|(source, oldest)| {
            let running = self.running.range((source, 0)..=(source, u64::MAX)).count();
            (running, self.last.get(&source).copied().unwrap_or(0), oldest, source)
        });
        ranks.min()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        let waited = state.waiting.remove(self.source, self.number);
        state.running.remove(&(self.source, self.number));
        if state.waiting.oldest_of(self.source).is_none() {
            state.last.remove(&self.source);
        }
        state.begin(self.turns.limit);
        drop((state, waited));
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    type Asking<'a> = Pin<Box<dyn Future<Output = Result<Turn<'a>, Crowded>> + 'a>>;

    /// Requests a turn, and returns it if it has begun, else the future that waits for it.
    fn ask(turns: &Turns, last: u8) -> Result<Turn<'_>, Asking<'_>> {
        let mut asking: Asking<'_> = Box::pin(turns.turn([10, 0, 0, last].into()));
        match poll(&mut asking) {
            Poll::Ready(turn) => Ok(turn.expect("few wait")),
            Poll::Pending => Err(asking),
        }
    }

    fn poll<'a>(asking: &mut Asking<'a>) -> Poll<Result<Turn<'a>, Crowded>> {
        asking.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn the_last_fifth_of_the_turns_is_for_sources_without_one() {
        let turns = Turns::new(10, 100);
        let held: Vec<_> = (0..20).map(|_| ask(&turns, 1)).collect();
        assert_eq!(held.iter().filter(|turn| turn.is_ok()).count(), 8);
        let others = [ask(&turns, 2), ask(&turns, 2), ask(&turns, 3)];
        assert_eq!(others.each_ref().map(Result::is_ok), [true, false, true]);
        drop((held, others));
        let state = turns.state();
        assert!(state.running.is_empty() && state.waiting.is_empty() && state.last.is_empty());
    }

    #[test]
    fn sources_that_wait_take_turns() {
        let turns = Turns::new(1, 100);
        let first = ask(&turns, 1).ok().expect("free");
        let mut waiting: Vec<_> = [1, 1, 2, 2, 3].map(|last| ask(&turns, last).expect_err("taken")).into();
        let (mut order, mut turn) = (Vec::new(), first);
        while !waiting.is_empty() {
            drop(turn);
            let mut begun = waiting.iter_mut().enumerate().filter_map(|(at, asking)| match poll(asking) {
                Poll::Ready(turn) => Some((at, turn.expect("few wait"))),
                Poll::Pending => None,
            });
            let (at, next) = begun.next().expect("one turn begins");
            assert!(begun.next().is_none(), "only one");
            drop(begun);
            drop(waiting.remove(at));
            order.push(next.source.to_string());
            turn = next;
        }
        assert_eq!(order, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1", "10.0.0.2"]);
    }

    #[test]
    fn a_client_that_leaves_takes_no_turn_and_the_source_that_waits_most_gives_way() {
        let turns = Turns::new(1, 3);
        let first = ask(&turns, 9).ok().expect("free");
        let mut waiting = [1, 1, 2].map(|last| ask(&turns, last).expect_err("taken"));
        let mut last = ask(&turns, 3).expect_err("taken");
        assert!(matches!(poll(&mut waiting[0]), Poll::Ready(Err(Crowded))));
        let [_, left, third] = waiting;
        drop(left);
        drop(first);
        // The turn of the third begins, and it leaves before it knows.
        drop(third);
        assert!(poll(&mut last).is_ready());
        drop(last);
        assert!(ask(&turns, 1).is_ok());
    }
}
