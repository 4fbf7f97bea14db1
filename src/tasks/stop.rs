//! The order to end to tasks that serve clients, and the wait for their end.

use std::sync::Arc;

use tokio::sync::watch;

/// Orders tasks to end; cheap to clone.
#[derive(Clone, Debug)]
pub struct Stop(Arc<watch::Sender<bool>>);

/// The order as one task sees it. [`Stop::finished`] waits until the task drops it.
#[derive(Clone, Debug)]
pub struct Stopped(watch::Receiver<bool>);

impl Default for Stop {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl Stop {
    /// Returns the order for one more task.
    pub fn receiver(&self) -> Stopped {
        Stopped(self.0.subscribe())
    }

    /// Orders all tasks to end.
    pub fn order(&self) {
        self.0.send_replace(true);
    }

    /// Waits until no task has the order any more.
    pub async fn finished(&self) {
        self.0.closed().await;
    }
}

impl Stopped {
    /// Waits for the order. Cancel safe.
    pub async fn ordered(&mut self) {
        if self.0.wait_for(|ordered| *ordered).await.is_err() {
            // Nobody can give the order any more.
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stop_waits_for_the_tasks_that_it_orders_to_end() {
        let stop = Stop::default();
        let mut order = stop.receiver();
        let task = async {
            order.ordered().await;
            drop(order);
        };
        let stopping = async {
            stop.order();
            stop.finished().await;
        };
        tokio::join!(task, stopping);
        stop.receiver().ordered().await;
    }
}
