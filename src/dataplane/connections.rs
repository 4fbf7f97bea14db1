//! The live connections and CONNECT streams of one worker.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;

use slab::Slab;

use super::entry::Entry;
use isthmus_model::reason::Reason;
use isthmus_net::ranking::Ranking;

/// The number of connections that a task of the worker handles before it yields: a few hundred microseconds of work.
pub(crate) const AT_ONCE: usize = 256;
/// The key under which [`Connections::pending`] lists connections that have not announced their source. No source has this
/// address, because the addresses of IPv4 sources are never in their IPv6-mapped form.
pub(crate) const NO_SOURCE: IpAddr = IpAddr::V6(Ipv4Addr::UNSPECIFIED.to_ipv6_mapped());

/// The connections of one worker.
#[derive(Default)]
pub(crate) struct Connections {
    /// All connections and streams.
    pub(crate) table: RefCell<Slab<Rc<Entry>>>,
    /// The connections whose hello or TLS handshake is not complete yet.
    pub(crate) pending: RefCell<Ranking<Rc<Entry>>>,
    /// The connections under a limit of bandwidth that have moved bytes lately.
    pub(crate) limited: RefCell<Vec<Rc<Entry>>>,
}

impl Connections {
    /// Puts a connection into the table.
    pub(crate) fn insert(&self, entry: &Rc<Entry>) {
        entry.register(self.table.borrow_mut().insert(entry.clone()));
    }

    /// Removes a connection from the table.
    pub(crate) fn remove(&self, entry: &Entry) {
        self.table.borrow_mut().try_remove(entry.key());
    }

    /// Returns the connection with this key in the table.
    pub(crate) fn at(&self, key: usize) -> Option<Rc<Entry>> {
        self.table.borrow().get(key).cloned()
    }

    /// Returns the entries of the table, so that a task can handle them in batches.
    pub(crate) fn entries(&self) -> Vec<Rc<Entry>> {
        self.table.borrow().iter().map(|(_, entry)| entry.clone()).collect()
    }

    /// Returns true if the connection is in the table.
    pub(crate) fn has(&self, entry: &Rc<Entry>) -> bool {
        self.table.borrow().get(entry.key()).is_some_and(|known| Rc::ptr_eq(known, entry))
    }

    /// Orders the chosen HBONE connections to accept no new streams and to end with the last open stream.
    pub(crate) fn retire_where(&self, which: impl Fn(&Entry) -> bool) {
        for (_, entry) in self.table.borrow().iter().filter(|(_, entry)| which(entry)) {
            entry.retire();
        }
    }

    /// Orders the chosen connections to end.
    pub(crate) fn cut_where(&self, which: impl Fn(&Entry) -> bool, reason: Reason) {
        for (_, entry) in self.table.borrow().iter().filter(|(_, entry)| which(entry)) {
            entry.cut(reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::limits::SourcePrefix;

    #[test]
    fn no_block_of_addresses_is_that_of_unannounced_connections() {
        for prefix in
            [SourcePrefix::default(), SourcePrefix { ipv4: 1, ipv6: 1 }, SourcePrefix { ipv4: 32, ipv6: 128 }]
        {
            for ip in ["::", "::1", "::ffff:0.0.0.0", "0.0.0.0", "127.0.0.1", "2001:db8::1"] {
                let ip: IpAddr = ip.parse().expect("an address");
                assert_ne!(prefix.block(ip), NO_SOURCE, "{ip} {prefix:?}");
            }
        }
    }
}
