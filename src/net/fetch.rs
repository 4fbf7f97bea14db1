//! A value that comes later and may change: whoever needs it waits for the first one, reads the newest, and hears of
//! change. The handle reads one thing and nothing else, so that a component is given no more than it needs.

use std::future::pending;
use std::sync::Arc;

use tokio::sync::watch;

/// Where the value is put.
#[derive(Debug)]
pub struct Slot<T> {
    sender: watch::Sender<Option<Arc<T>>>,
}

/// Reads the value.
#[derive(Debug)]
pub struct Fetch<T> {
    receiver: watch::Receiver<Option<Arc<T>>>,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { sender: watch::Sender::new(None) }
    }
}

impl<T> Clone for Slot<T> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone() }
    }
}

impl<T> Clone for Fetch<T> {
    fn clone(&self) -> Self {
        Self { receiver: self.receiver.clone() }
    }
}

impl<T> Slot<T> {
    pub fn put(&self, value: Arc<T>) {
        self.sender.send_replace(Some(value));
    }

    pub fn newest(&self) -> Option<Arc<T>> {
        self.sender.borrow().clone()
    }

    pub fn fetch(&self) -> Fetch<T> {
        Fetch { receiver: self.sender.subscribe() }
    }
}

impl<T> Fetch<T> {
    /// The newest value, if there is one yet.
    pub fn newest(&self) -> Option<Arc<T>> {
        self.receiver.borrow().clone()
    }

    /// From here on, this handle has seen what there is now.
    pub fn see(&mut self) {
        self.receiver.mark_unchanged();
    }

    /// The newest value, if this handle has not seen it.
    pub fn unseen(&mut self) -> Option<Arc<T>> {
        let changed = self.receiver.has_changed().unwrap_or(false);
        changed.then(|| self.receiver.borrow_and_update().clone()).flatten()
    }

    /// The newest value; waits for the first.
    pub async fn get(&mut self) -> Arc<T> {
        if let Ok(value) = self.receiver.wait_for(Option::is_some).await
            && let Some(value) = &*value
        {
            return value.clone();
        }
        // Nobody is left who could put one there, as when the process stops.
        pending().await
    }

    /// Waits for a value that this handle has not seen.
    pub async fn changed(&mut self) -> Arc<T> {
        loop {
            if self.receiver.changed().await.is_err() {
                return pending().await;
            }
            if let Some(value) = &*self.receiver.borrow_and_update() {
                return value.clone();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn the_first_value_is_waited_for_and_the_newest_is_given() {
        let slot = Slot::default();
        let mut fetch = slot.fetch();
        assert_eq!(fetch.newest(), None);
        {
            let mut get = pin!(fetch.get());
            assert_eq!(poll(get.as_mut()), Poll::Pending);
            slot.put(Arc::new(1));
            slot.put(Arc::new(2));
            assert_eq!(poll(get.as_mut()), Poll::Ready(Arc::new(2)));
        }
        slot.put(Arc::new(3));
        assert_eq!(poll(pin!(fetch.changed())), Poll::Ready(Arc::new(3)));
        let mut changed = pin!(fetch.changed());
        assert_eq!(poll(changed.as_mut()), Poll::Pending);
    }
}
