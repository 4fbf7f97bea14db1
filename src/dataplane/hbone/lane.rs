//! One handshake step per turn of the event loop. A step costs some hundred microseconds of public-key arithmetic;
//! a hundred of them in a row would be felt by every connection that is being relayed.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use tokio::sync::Semaphore;

use crate::net::scope::LocalScope;

/// The order in which handshakes of one worker go on.
#[derive(Clone)]
pub(crate) struct Lane {
    turns: Rc<Semaphore>,
}

impl Default for Lane {
    fn default() -> Self {
        Self { turns: Rc::new(Semaphore::new(1)) }
    }
}

impl Lane {
    /// Runs a future so that each of its steps waits for its turn.
    pub(crate) async fn paced<F: Future>(&self, scope: &LocalScope, future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            // Fails only where the semaphore is closed, which nobody does.
            if let Ok(turn) = self.turns.acquire().await {
                turn.forget();
            }
            let step = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
            let turns = self.turns.clone();
            scope.spawn(async move {
                // The next step comes after whatever else is ready now.
                tokio::task::yield_now().await;
                turns.add_permits(1);
            });
            if let Poll::Ready(output) = step {
                return output;
            }
            woken().await;
        }
    }
}

/// Waits until the task is woken, by whomever.
async fn woken() {
    let mut waited = false;
    poll_fn(|_| if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}
