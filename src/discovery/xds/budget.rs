//! Bytes that the server holds for its clients: the names they want, and requests that are not whole yet. Each client has a
//! bound of its own, and all together have one, of which the last fifth is for sources that hold less than their part
//! (SPEC §10): one source cannot keep the others out, and one that is alone may have all.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bound for all clients together.
#[derive(Debug)]
pub struct Budget {
    bytes_max: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    /// Bytes of each source that holds any.
    sources: HashMap<IpAddr, usize>,
}

/// What one client holds of a budget; given back when dropped.
#[derive(Debug)]
pub struct Account {
    budget: Arc<Budget>,
    source: IpAddr,
    bytes_max: usize,
    bytes: usize,
}

/// Why a client is given no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exhausted {
    #[error("the names of the client exceed {0} bytes")]
    Client(usize),
    #[error("the names of all clients together exceed their limit")]
    Everyone,
}

impl Budget {
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes_max, held: Mutex::default() })
    }

    /// An account for one more client, which may hold so much.
    pub fn account(self: &Arc<Self>, source: IpAddr, bytes_max: usize) -> Account {
        Account { budget: self.clone(), source, bytes_max, bytes: 0 }
    }

    /// Bytes that all clients hold.
    pub fn bytes(&self) -> usize {
        self.held().bytes
    }

    fn take(&self, source: IpAddr, bytes: usize) -> Result<(), Exhausted> {
        let mut held = self.held();
        let (all, own) = (held.bytes + bytes, held.sources.get(&source).copied().unwrap_or(0) + bytes);
        let sources = held.sources.len() + usize::from(own == bytes);
        let is_reserved = all > self.bytes_max / 5 * 4;
        if all > self.bytes_max || is_reserved && sources > 1 && own > self.bytes_max / sources {
            return Err(Exhausted::Everyone);
        }
        held.bytes = all;
        held.sources.insert(source, own);
        Ok(())
    }

    fn give_back(&self, source: IpAddr, bytes: usize) {
        let mut held = self.held();
        held.bytes -= bytes;
        if let Some(own) = held.sources.get_mut(&source) {
            *own -= bytes;
            if *own == 0 {
                held.sources.remove(&source);
            }
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Each change is whole by itself.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes so much more, or nothing.
    pub fn take(&mut self, bytes: usize) -> Result<(), Exhausted> {
        if bytes == 0 {
            return Ok(());
        }
        if self.bytes + bytes > self.bytes_max {
            return Err(Exhausted::Client(self.bytes_max));
        }
        self.budget.take(self.source, bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Gives back some of what was taken.
    pub fn give_back(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        if bytes > 0 {
            self.budget.give_back(self.source, bytes);
            self.bytes -= bytes;
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_is_alone_may_have_all_and_others_keep_their_part() {
        let budget = Budget::new(1000);
        let [one, other] = [1, 2].map(|last| IpAddr::from([127, 0, 0, last]));
        let mut first = budget.account(one, 5000);
        assert_eq!((first.take(900), first.take(101)), (Ok(()), Err(Exhausted::Everyone)));
        let mut second = budget.account(other, 60);
        assert_eq!(second.take(61), Err(Exhausted::Client(60)));
        assert_eq!(second.take(60), Ok(()));
        // The first has more than half already.
        assert_eq!(first.take(1), Err(Exhausted::Everyone));
        first.give_back(500);
        assert_eq!((first.take(500), first.bytes(), budget.bytes()), (Err(Exhausted::Everyone), 400, 460));
        drop(first);
        drop(second);
        assert_eq!(budget.bytes(), 0);
        assert!(budget.held().sources.is_empty());
    }
}
