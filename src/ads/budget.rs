//! Limits on the bytes that the server holds for its clients: subscribed names and incomplete requests. Each client has a limit,
//! and all clients together have one; if that follows the memory of the process, a client may have a quarter of it. The last
//! fifth of the common limit is reserved for sources that hold less than their share (`SECURITY.md, "Defences, and the tests that
//! show them"`): no source can exclude the others, and a single source may use all bytes. Large requests are decoded in turn.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, Semaphore, SemaphorePermit};

use isthmus_net::memory::share;

/// The bytes of large requests that the process decodes at the same time. A request of more bytes is decoded alone.
const DECODED_BYTES_MAX: u32 = 16 << 20;
/// The memory limits for the names of clients, in bytes: of one client, and of all clients together.
pub const NAMES_BYTES_MAX: (usize, usize) = (128 << 20, 1 << 30);
/// The largest number of bytes in incomplete requests of all clients. A client may have one incomplete request.
const REQUESTS_BYTES_MAX: usize = 128 << 20;
/// The names, and the incomplete requests, may each have one of so many parts of the memory budget of the process, if that is less.
const NAMES_PARTS: u64 = 8;
const REQUESTS_PARTS: u64 = 16;
/// A client may have one of so many parts of a budget that follows the memory of the process.
const CLIENT_PART: usize = 4;
/// Permits for the bytes of large requests that are decoded at the moment, of all servers and clients.
static DECODED: Semaphore = Semaphore::const_new(DECODED_BYTES_MAX as usize);

/// The common limit of all clients.
#[derive(Debug)]
pub struct Budget {
    bytes_max: usize,
    /// The limit is at most one of so many parts of the memory budget of the process. `None`: it does not follow that budget.
    memory_parts: Option<u64>,
    usage: Mutex<Usage>,
}

#[derive(Debug, Default)]
struct Usage {
    bytes: usize,
    sources: HashMap<IpAddr, Source>,
}

/// The part of a budget that the clients of one address use.
#[derive(Debug, Default)]
struct Source {
    bytes: usize,
    /// Held while a large request of the source is decoded.
    decoding: Option<Arc<AsyncMutex<()>>>,
}

/// The right to decode a large request, and to handle it; returned when dropped.
#[derive(Debug)]
pub struct Turn {
    _source: OwnedMutexGuard<()>,
    _process: Option<SemaphorePermit<'static>>,
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
        Arc::new(Self { bytes_max, memory_parts: None, usage: Mutex::default() })
    }

    /// Makes the budget of the names of a server's clients.
    pub fn names() -> Arc<Self> {
        Self::of_memory(NAMES_BYTES_MAX.1, NAMES_PARTS)
    }

    /// Makes the budget of the incomplete requests of a server's clients.
    pub fn requests() -> Arc<Self> {
        Self::of_memory(REQUESTS_BYTES_MAX, REQUESTS_PARTS)
    }

    /// Makes a budget of `bytes_max` bytes, or of one of so many parts of the memory budget if that is less.
    fn of_memory(bytes_max: usize, memory_parts: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max, memory_parts: Some(memory_parts), usage: Mutex::default() })
    }

    fn bytes_max(&self) -> usize {
        let of_memory = self.memory_parts.and_then(|parts| usize::try_from(share(parts)).ok());
        of_memory.unwrap_or(usize::MAX).min(self.bytes_max)
    }

    /// Returns the bytes that one client may have.
    fn bytes_max_of_client(&self) -> usize {
        self.memory_parts.map_or(usize::MAX, |_| self.bytes_max() / CLIENT_PART)
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
        let (all, own) = (usage.bytes + bytes, usage.sources.get(&source).map_or(0, |own| own.bytes) + bytes);
        let sources = usage.sources.len() + usize::from(own == bytes);
        let max = self.bytes_max();
        let is_reserved = all > max / 5 * 4;
        if all > max || is_reserved && sources > 1 && own > max / sources {
            return Err(Exhausted::Everyone);
        }
        usage.bytes = all;
        usage.sources.entry(source).or_default().bytes = own;
        Ok(())
    }

    fn release(&self, source: IpAddr, bytes: usize) {
        let mut usage = self.usage();
        usage.bytes -= bytes;
        if let Some(own) = usage.sources.get_mut(&source) {
            own.bytes -= bytes;
            if own.bytes == 0 {
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
        let max = self.bytes_max.min(self.budget.bytes_max_of_client());
        if self.bytes + bytes > max {
            return Err(Exhausted::Client(max));
        }
        self.budget.take(self.source, bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Waits until a request of `bytes` bytes may be decoded, while its bytes are in the account: after the other requests of its
    /// source, and when few enough bytes of other sources are being decoded.
    pub async fn turn(&self, bytes: usize) -> Turn {
        let decoding = self.budget.usage().sources.get_mut(&self.source).map(|own| {
            let decoding = own.decoding.get_or_insert_default();
            decoding.clone()
        });
        let source = decoding.unwrap_or_default().lock_owned().await;
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX).min(DECODED_BYTES_MAX);
        // Fails only if the semaphore is closed, which never happens.
        Turn { _source: source, _process: DECODED.acquire_many(permits).await.ok() }
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

    #[tokio::test(start_paused = true)]
    async fn large_requests_of_a_source_are_decoded_one_after_another_and_all_within_16_mib() {
        let budget = Budget::new(1 << 30);
        let account = |last: u8, bytes: usize| {
            let mut account = budget.account([192, 0, 2, last].into(), 1 << 30);
            account.take(bytes).expect("room");
            account
        };
        let waits = async |account: &Account, bytes: usize| {
            tokio::time::timeout(std::time::Duration::ZERO, account.turn(bytes)).await.is_err()
        };
        let (one, same, other) = (account(1, 6 << 20), account(1, 1), account(2, 32 << 20));
        let turn = one.turn(6 << 20).await;
        assert!(waits(&same, 1).await, "a request of the same source");
        assert!(!waits(&other, 10 << 20).await && waits(&other, 11 << 20).await, "of another source");
        drop(turn);
        assert!(!waits(&same, 1).await);
        let alone = other.turn(32 << 20).await;
        assert!(waits(&same, 1).await, "a request of more bytes is decoded alone");
        drop(alone);
        assert!(!waits(&same, 1).await);
    }

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

    #[test]
    fn a_budget_is_at_most_a_part_of_the_memory_of_the_process() {
        // More than other tests in this process use.
        isthmus_net::memory::set_budget(8 << 40);
        let budget = Budget::of_memory(usize::MAX, 8);
        let mut clients = [0; 5].map(|_| budget.account(IpAddr::from([127, 0, 0, 1]), usize::MAX));
        let part = 1 << 38;
        assert_eq!((clients[0].take(part), clients[0].take(1)), (Ok(()), Err(Exhausted::Client(part))));
        assert!(clients[1..4].iter_mut().all(|client| client.take(part).is_ok()));
        assert_eq!(clients[4].take(1), Err(Exhausted::Everyone));
    }
}
