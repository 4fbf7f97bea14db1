//! Limits TLS handshakes to one step per turn of the event loop. A step costs a few hundred microseconds of public-key
//! arithmetic; a hundred of them in a row would delay every connection that is being relayed. Sources take turns: a source that
//! begins thousands of handshakes runs only one step before each step of another source.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

use isthmus_model::limits::SourcePrefix;
use isthmus_tasks::scope::LocalScope;

/// Decides which handshake of one worker makes the next step.
#[derive(Clone, Default)]
pub(crate) struct HandshakePacer(Rc<RefCell<Waiting>>);

/// The handshake steps that wait for their turn.
#[derive(Default)]
struct Waiting {
    /// True while a step is allowed to run, so that all others wait.
    taken: bool,
    /// The sources that have a waiting step, in the order in which they get turns.
    sources: VecDeque<IpAddr>,
    of_source: BTreeMap<IpAddr, VecDeque<Rc<Step>>>,
}

/// A handshake step that waits for its turn.
#[derive(Default)]
struct Step {
    state: Cell<StepState>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StepState {
    #[default]
    Waits,
    /// The step may run.
    Granted,
    /// The handshake was abandoned.
    Gone,
}

/// The permission for one handshake step to run. Dropping it lets the next step run.
struct Turn<'a>(&'a HandshakePacer);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.pass_on();
    }
}

impl HandshakePacer {
    /// Runs the TLS handshake of a client at `source`, so that each step of the handshake waits for its turn.
    pub(crate) async fn paced<F: Future>(&self, scope: &LocalScope, source: IpAddr, future: F) -> F::Output {
        let mut future = pin!(future);
        let source = SourcePrefix::default().block(source);
        loop {
            let turn = self.turn(source).await;
            let step = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
            std::mem::forget(turn);
            let pacer = self.clone();
            scope.spawn(async move {
                let _turn = Turn(&pacer);
                // The next step runs after all other tasks that are ready now.
                tokio::task::yield_now().await;
            });
            if let Poll::Ready(output) = step {
                return output;
            }
            woken().await;
        }
    }

    async fn turn(&self, source: IpAddr) -> Turn<'_> {
        if !std::mem::replace(&mut self.0.borrow_mut().taken, true) {
            return Turn(self);
        }
        let step = self.0.borrow_mut().push(source);
        let mut place = Place { pacer: self, step, kept: false };
        poll_fn(|context| {
            if place.step.state.get() == StepState::Granted {
                return Poll::Ready(());
            }
            *place.step.waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        place.kept = true;
        Turn(self)
    }

    /// Wakes the next waiting handshake step. Sources take turns, and the oldest step of a source goes first.
    fn pass_on(&self) {
        let next = self.0.borrow_mut().pop();
        if let Some(waker) = next.and_then(|step| step.waker.take()) {
            waker.wake();
        }
    }
}

impl Waiting {
    fn push(&mut self, source: IpAddr) -> Rc<Step> {
        let step = Rc::new(Step::default());
        let of_source = self.of_source.entry(source).or_default();
        if of_source.is_empty() {
            self.sources.push_back(source);
        }
        of_source.push_back(step.clone());
        step
    }

    fn pop(&mut self) -> Option<Rc<Step>> {
        debug_assert!(self.taken, "a turn is passed on that no step has");
        while let Some(source) = self.sources.pop_front() {
            let Some(of_source) = self.of_source.get_mut(&source) else { continue };
            let step = std::iter::from_fn(|| of_source.pop_front())
                .find(|step| step.state.get() == StepState::Waits);
            if of_source.is_empty() {
                self.of_source.remove(&source);
            } else {
                self.sources.push_back(source);
            }
            if let Some(step) = step {
                step.state.set(StepState::Granted);
                return Some(step);
            }
        }
        self.taken = false;
        None
    }
}

/// A waiting step, which may be abandoned at any time.
struct Place<'a> {
    pacer: &'a HandshakePacer,
    step: Rc<Step>,
    /// True once the granted turn was handed to a [`Turn`], which passes it on.
    kept: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if self.step.state.replace(StepState::Gone) == StepState::Granted {
            self.pacer.pass_on();
        }
    }
}

/// Waits until the task is woken.
async fn woken() {
    let mut waited = false;
    poll_fn(|_| if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(host: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, host])
    }

    /// Returns true if the turn is granted, and keeps the turn; the first call joins the queue.
    fn poll<F: Future>(future: &mut std::pin::Pin<Box<F>>) -> bool {
        match future.as_mut().poll(&mut std::task::Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => {
                std::mem::forget(turn);
                true
            }
            Poll::Pending => false,
        }
    }

    #[test]
    fn sources_take_turns_whatever_the_number_of_their_handshakes() {
        let pacer = HandshakePacer::default();
        let mut first = Box::pin(pacer.turn(host(1)));
        assert!(poll(&mut first), "nobody else waits");
        let order = [1, 1, 1, 2, 2, 3];
        let mut waiting: Vec<_> = order.iter().map(|of| Some(Box::pin(pacer.turn(host(*of))))).collect();
        assert!(waiting.iter_mut().flatten().all(|turn| !poll(turn)));
        let mut granted = Vec::new();
        for _ in &order {
            pacer.pass_on();
            let ready: Vec<usize> =
                (0..order.len()).filter(|at| waiting[*at].as_mut().is_some_and(poll)).collect();
            let [at] = ready[..] else { panic!("one turn at a time: {ready:?}") };
            waiting[at] = None;
            granted.push(order[at]);
        }
        assert_eq!(granted, [1, 2, 3, 1, 2, 1]);
        pacer.pass_on();
        assert!(poll(&mut Box::pin(pacer.turn(host(4)))), "the turn is free again");
    }

    #[test]
    fn a_turn_of_one_that_has_gone_is_passed_on() {
        let pacer = HandshakePacer::default();
        let mut first = Box::pin(pacer.turn(host(1)));
        assert!(poll(&mut first));
        let [mut gone, mut granted, mut last] =
            [host(1), host(2), host(3)].map(|of| Box::pin(pacer.turn(of)));
        assert!(!poll(&mut gone) && !poll(&mut granted) && !poll(&mut last));
        drop(gone);
        pacer.pass_on();
        drop(granted);
        assert!(poll(&mut last), "granted to one that was given up before it looked");
    }
}
