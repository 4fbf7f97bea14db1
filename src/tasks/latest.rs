//! A value that is set later and may change. A reader waits for the first value, reads the newest, and waits for changes.
//! The handle gives access to one value only, so that a component gets no more than it needs.

use std::future::pending;
use std::sync::Arc;

use tokio::sync::watch;

/// The writer of a value.
#[derive(Debug)]
pub struct LatestWriter<T> {
    sender: watch::Sender<Option<Arc<T>>>,
}

/// A reader of the latest version of a shared value.
#[derive(Debug)]
pub struct Latest<T> {
    receiver: watch::Receiver<Option<Arc<T>>>,
}

impl<T> Default for LatestWriter<T> {
    fn default() -> Self {
        Self { sender: watch::Sender::new(None) }
    }
}

impl<T> Clone for LatestWriter<T> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone() }
    }
}

impl<T> Clone for Latest<T> {
    fn clone(&self) -> Self {
        Self { receiver: self.receiver.clone() }
    }
}

impl<T> LatestWriter<T> {
    /// Sets the value and wakes its readers.
    pub fn set(&self, value: Arc<T>) {
        self.sender.send_replace(Some(value));
    }

    /// Returns the newest value; `None` if none was set yet.
    pub fn newest(&self) -> Option<Arc<T>> {
        self.sender.borrow().clone()
    }

    /// Returns a reader.
    pub fn reader(&self) -> Latest<T> {
        Latest { receiver: self.sender.subscribe() }
    }
}

impl<T> Latest<T> {
    /// Returns the newest value; `None` if none was set yet.
    pub fn newest(&self) -> Option<Arc<T>> {
        self.receiver.borrow().clone()
    }

    /// Marks the newest value as seen by this handle.
    pub fn see(&mut self) {
        self.receiver.mark_unchanged();
    }

    /// Returns the newest value if this handle has not seen it, and marks it as seen.
    pub fn unseen(&mut self) -> Option<Arc<T>> {
        let changed = self.receiver.has_changed().unwrap_or(false);
        changed.then(|| self.receiver.borrow_and_update().clone()).flatten()
    }

    /// Returns the newest value; waits for the first value if none was set yet.
    pub async fn get(&mut self) -> Arc<T> {
        if let Ok(value) = self.receiver.wait_for(Option::is_some).await
            && let Some(value) = &*value
        {
            return value.clone();
        }
        // All writers are gone, which happens when the process stops.
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
        let writer = LatestWriter::default();
        let mut reader = writer.reader();
        assert_eq!(reader.newest(), None);
        {
            let mut get = pin!(reader.get());
            assert_eq!(poll(get.as_mut()), Poll::Pending);
            writer.set(Arc::new(1));
            writer.set(Arc::new(2));
            assert_eq!(poll(get.as_mut()), Poll::Ready(Arc::new(2)));
        }
        writer.set(Arc::new(3));
        assert_eq!(poll(pin!(reader.changed())), Poll::Ready(Arc::new(3)));
        let mut changed = pin!(reader.changed());
        assert_eq!(poll(changed.as_mut()), Poll::Pending);
    }
}
