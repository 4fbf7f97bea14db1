//! The addresses of this process and of its host, so that the gateway never connects to itself.
//!
//! A connection to an address that the process listens on would be accepted, routed and dialled again without end. A connection
//! to the admin API of the process would carry a stranger's requests. Such an address is recognised before it is dialled. A
//! host may also accept connections to addresses that no interface has. A connection to such an address is recognised on
//! arrival by its two addresses: dials to a port of this process are registered while they last. The source alone does not
//! suffice, because the kernel gives the same local port to connections with different destinations.

use std::collections::BTreeSet;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use dashmap::{DashMap, Entry};
use hashbrown::DefaultHashBuilder;

use isthmus_model::address::{canonical_ip, canonical_socket, embedded_ip};

/// The interval at which the addresses of the host's interfaces are read.
pub const LOOK_UP_EVERY: Duration = Duration::from_secs(30);
/// If the list of the host's addresses is older than this, it is read again before the gateway dials an address that is not in
/// the list, on a port on which this process listens for all addresses. The address may have been added to the host meanwhile.
const FRESH: Duration = Duration::from_secs(1);

/// The addresses that this process listens on, and the dials by which this process might reach itself.
#[derive(Debug, Default)]
pub struct OwnAddresses {
    listening: ArcSwap<Vec<SocketAddr>>,
    host: ArcSwap<BTreeSet<IpAddr>>,
    /// The time at which the host's addresses were last read.
    looked_up: Mutex<Option<Instant>>,
    /// The destinations of the dials from each local address.
    dials: DashMap<SocketAddr, Vec<SocketAddr>, DefaultHashBuilder>,
    /// The number of dials per hash of the local IP address. If it is 0 for the hash of a source, `dials` need not be searched.
    dials_from: [[AtomicU32; 16]; 16],
}

/// The registration of a dial, which ends when this is dropped.
#[derive(Debug)]
pub struct OwnDial {
    own: Arc<OwnAddresses>,
    local: SocketAddr,
    to: SocketAddr,
}

impl Drop for OwnDial {
    fn drop(&mut self) {
        if let Entry::Occupied(mut dials) = self.own.dials.entry(self.local) {
            let all = dials.get_mut();
            if let Some(at) = all.iter().position(|to| *to == self.to) {
                all.swap_remove(at);
            }
            if all.is_empty() {
                dials.remove();
            }
        }
        let before = self.own.dials_from(self.local.ip()).fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a dial ends twice");
    }
}

impl OwnAddresses {
    /// Reads the host's addresses, and starts without listening addresses.
    pub fn new() -> Arc<Self> {
        let own = Self::default();
        own.look_up_host();
        Arc::new(own)
    }

    /// Adds a listening address, with the port that the kernel chose.
    pub fn listens(&self, address: SocketAddr) {
        self.listening.rcu(|listening| {
            let mut next = Vec::clone(listening);
            next.push(address);
            next
        });
    }

    /// Removes an address on which the process has stopped listening.
    pub fn closed(&self, address: SocketAddr) {
        self.listening.rcu(|listening| {
            let mut next = Vec::clone(listening);
            if let Some(at) = next.iter().position(|own| *own == address) {
                next.swap_remove(at);
            }
            next
        });
    }

    /// Reads the addresses of the host's interfaces again. On an error, the previous addresses stay.
    pub fn look_up_host(&self) {
        *self.looked_up.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        match host_addresses() {
            Ok(addresses) => {
                if **self.host.load() != addresses {
                    self.host.store(Arc::new(addresses));
                }
            }
            Err(error) => tracing::debug!(%error, "cannot read the addresses of this host"),
        }
    }

    /// Returns true if a connection to this address would reach a listener of this process.
    pub fn is_own(&self, address: SocketAddr) -> bool {
        let listening = self.listening.load();
        let same_port = || listening.iter().filter(|own| own.port() == address.port());
        let is_of_host = |ip| self.host.load().contains(&ip);
        let is_at = |own: IpAddr| reached_by(address.ip()).into_iter().any(|ip| reaches(own, ip, is_of_host));
        let is_own = || same_port().any(|own| is_at(own.ip()));
        let everywhere = || same_port().any(|own| own.ip().is_unspecified());
        is_own() || everywhere() && self.look_up_host_again() && is_own()
    }

    /// Reads the addresses of the host again and returns true; returns false if the last read is too recent.
    fn look_up_host_again(&self) -> bool {
        let looked_up = *self.looked_up.lock().unwrap_or_else(PoisonError::into_inner);
        let stale = looked_up.is_none_or(|at| at.elapsed() >= FRESH);
        if stale {
            self.look_up_host();
        }
        stale
    }

    /// Returns true if the process listens on this port, on any address.
    pub fn has_port(&self, port: u16) -> bool {
        self.listening.load().iter().any(|own| own.port() == port)
    }

    /// Registers a dial from a local address to another address.
    pub fn dialling(self: &Arc<Self>, local: SocketAddr, to: SocketAddr) -> OwnDial {
        let (local, to) = (canonical_socket(local), canonical_socket(to));
        self.dials.entry(local).or_default().push(to);
        self.dials_from(local.ip()).fetch_add(1, Ordering::Relaxed);
        OwnDial { own: self.clone(), local, to }
    }

    fn dials_from(&self, ip: IpAddr) -> &AtomicU32 {
        let [row, column, ..] = self.dials.hasher().hash_one(ip).to_ne_bytes();
        &self.dials_from[usize::from(row % 16)][usize::from(column % 16)]
    }

    /// Returns true if a connection from `source` to one of the addresses `reached` was made by this process. The addresses are
    /// computed only if the process has made a connection from `source`.
    pub fn is_own_dial(&self, source: SocketAddr, reached: impl IntoIterator<Item = SocketAddr>) -> bool {
        let source = canonical_socket(source);
        if self.dials_from(source.ip()).load(Ordering::Relaxed) == 0 {
            return false;
        }
        let dials = self.dials.get(&source).map(|dials| dials.clone());
        dials.is_some_and(|dials| reached.into_iter().any(|reached| dials.contains(&reached)))
    }
}

/// Returns the addresses of this host's interfaces, IPv4-mapped ones as IPv4.
pub fn host_addresses() -> std::io::Result<BTreeSet<IpAddr>> {
    let interfaces = if_addrs::get_if_addrs()?;
    Ok(interfaces.iter().map(|interface| canonical_ip(interface.ip())).collect())
}

/// Returns true if a connection to `ip` reaches a listener bound to `bound` with the same port. A connection
/// to the unspecified address goes to loopback.
pub fn reaches(bound: IpAddr, ip: IpAddr, is_of_host: impl Fn(IpAddr) -> bool) -> bool {
    if bound.is_unspecified() {
        // An IPv6 socket may accept connections of both families.
        let same_family = bound.is_ipv6() || ip.is_ipv4();
        return same_family && (ip.is_unspecified() || ip.is_loopback() || is_of_host(ip));
    }
    bound == ip || ip.is_unspecified() && bound.is_loopback() && bound.is_ipv4() == ip.is_ipv4()
}

/// Returns the addresses that a connection to an address may reach: itself, and the IPv4 address that it may be translated to.
pub fn reached_by(ip: IpAddr) -> [IpAddr; 2] {
    [canonical_ip(ip), embedded_ip(ip)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn every_spelling_of_an_own_address_is_recognised() {
        let own = OwnAddresses::default();
        own.host.store(Arc::new(["10.0.0.7", "fd00::7"].map(|ip| ip.parse().expect("an address")).into()));
        own.listens(socket("[::]:15443"));
        own.listens(socket("127.0.0.1:15000"));
        for address in [
            "10.0.0.7:15443",
            "[fd00::7]:15443",
            "[::ffff:10.0.0.7]:15443",
            "127.0.0.9:15443",
            "[::1]:15443",
            "0.0.0.0:15443",
            "[::]:15443",
            "127.0.0.1:15000",
            "[::ffff:127.0.0.1]:15000",
            "[64:ff9b::127.0.0.1]:15000",
            "[2002:7f00:1::1]:15000",
            "[::127.0.0.1]:15000",
            "[64:ff9b::10.0.0.7]:15443",
            "0.0.0.0:15000",
        ] {
            assert!(own.is_own(socket(address)), "{address}");
        }
        for address in ["10.0.0.8:15443", "10.0.0.7:15000", "127.0.0.2:15000", "10.0.0.7:443", "[::]:15000"] {
            assert!(!own.is_own(socket(address)), "{address}");
        }
        own.closed(socket("[::]:15443"));
        assert!(!own.is_own(socket("10.0.0.7:15443")) && own.is_own(socket("127.0.0.1:15000")));
    }

    #[test]
    fn a_dial_is_known_for_as_long_as_it_lasts() {
        let own = OwnAddresses::new();
        let is_own = |source: &str, reached: &str| own.is_own_dial(socket(source), [socket(reached)]);
        let dial = own.dialling(socket("[::ffff:10.0.0.7]:40000"), socket("[::ffff:10.0.0.9]:443"));
        assert!(is_own("10.0.0.7:40000", "10.0.0.9:443") && !is_own("10.0.0.7:40001", "10.0.0.9:443"));
        assert!(!is_own("10.0.0.7:40000", "10.0.0.7:443"), "another connection with the same local port");
        let other = own.dialling(socket("10.0.0.7:40000"), socket("10.0.0.8:443"));
        drop(dial);
        assert!(!is_own("10.0.0.7:40000", "10.0.0.9:443") && is_own("10.0.0.7:40000", "10.0.0.8:443"));
        drop(other);
        assert!(!is_own("10.0.0.7:40000", "10.0.0.8:443") && own.dials.is_empty());
    }

    #[test]
    fn the_host_has_its_loopback_address() {
        let addresses = host_addresses().expect("interfaces");
        assert!(addresses.contains(&IpAddr::from([127, 0, 0, 1])), "{addresses:?}");
    }
}
