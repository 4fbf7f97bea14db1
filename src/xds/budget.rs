//! Limits on the bytes that the server holds for its clients: subscribed names and incomplete requests. Each client has a
//! limit, and all clients together have one. The last fifth of the common limit is reserved for sources that hold less than
//! their share (SPEC §10): no source can exclude the others, and a single source may use all bytes.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The common limit of all clients.
#[derive(Debug)]
pub struct Budget {
    bytes_max: usize,
    usage: Mutex<Usage>,
}

#[derive(Debug, Default)]
struct Usage {
    bytes: usize,
    /// Bytes by source.
    sources: HashMap<IpAddr, usize>,
}

/// The bytes that one client uses of a budget; released when dropped.
#[derive(Debug)]
pub struct Account {
    budget: Arc<Budget>,
    source: IpAddr,
    bytes_max: usize,
    bytes: usize,
}

/// The reason why a client gets no more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exhausted {
    /// The client would exceed its own limit of this many bytes.
    #[error("the names of the client exceed {0} bytes")]
    Client(usize),
    /// The common limit is reached, or the client's source has used its share.
    #[error("the names of all clients together exceed their limit")]
    Everyone,
}

impl Budget {
    /// Makes a budget of `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes_max, usage: Mutex::default() })
    }

    /// Opens an account of at most `bytes_max` bytes for a client.
    pub fn account(self: &Arc<Self>, source: IpAddr, bytes_max: usize) -> Account {
        Account { budget: self.clone(), source, bytes_max, bytes: 0 }
    }

    /// Returns the bytes that all clients use.
    pub fn bytes(&self) -> usize {
        self.usage().bytes
    }

    fn take(&self, source: IpAddr, bytes: usize) -> Result<(), Exhausted> {
        let mut usage = self.usage();
        let (all, own) = (usage.bytes + bytes, usage.sources.get(&source).copied().unwrap_or(0) + bytes);
        let sources = usage.sources.len() + usize::from(own == bytes);
        let is_reserved = all > self.bytes_max / 5 * 4;
        if all > self.bytes_max || is_reserved && sources > 1 && own > self.bytes_max / sources {
            return Err(Exhausted::Everyone);
        }
        usage.bytes = all;
        usage.sources.insert(source, own);
        Ok(())
    }

    fn release(&self, source: IpAddr, bytes: usize) {
        let mut usage = self.usage();
        usage.bytes -= bytes;
        if let Some(own) = usage.sources.get_mut(&source) {
            *own -= bytes;
            if *own == 0 {
                usage.sources.remove(&source);
            }
        }
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        // A poisoned lock is usable, because every change is a single step.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    /// Returns the bytes that the client uses.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes `bytes` more bytes, or none if a limit refuses them.
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

    /// Releases `bytes` of the bytes that the client uses, or all of them if it uses fewer.
    pub fn release(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        if bytes > 0 {
            self.budget.release(self.source, bytes);
            self.bytes -= bytes;
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.release(self.bytes);
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
        // The first source already uses more than half of the budget.
        assert_eq!(first.take(1), Err(Exhausted::Everyone));
        first.release(500);
        assert_eq!((first.take(500), first.bytes(), budget.bytes()), (Err(Exhausted::Everyone), 400, 460));
        drop(first);
        drop(second);
        assert_eq!(budget.bytes(), 0);
        assert!(budget.usage().sources.is_empty());
    }
}
