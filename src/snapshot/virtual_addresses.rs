//! The virtual addresses of imported services: which address of the configured ranges each service has.
//!
//! In each range, double hashing gives every name its own sequence of addresses. Names choose in order of the time of export,
//! then of name. Each name takes the first address of its sequence that no earlier name has. The result does not depend on the
//! order in which names arrive: if a name arrives late but was exported earlier, it takes the address from the name that was
//! exported later. The name that loses the address takes a later address of its own sequence. So all replicas with the same
//! records assign the same addresses, and a new export never moves an old one.
//!
//! A lease outlives its service by [`KEPT`]. During that time no other service gets the address, and a service that returns
//! gets its address back. A change costs time only for the names whose addresses change.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use twox_hash::XxHash3_64;

use isthmus_model::import::Import;
use isthmus_model::name::HostName;
use isthmus_registry::name_index::NameMap;
use isthmus_registry::shard::Shard;

/// The time for which the address of a removed service stays reserved for it.
pub const KEPT: Duration = Duration::from_secs(24 * 3600);
/// The largest number of leases; further names get no address.
pub const LEASES_MAX: usize = 1_000_000;
/// The largest number of addresses that stay reserved for names that one peer has withdrawn. Beyond it the earliest
/// reservations end before their time, so that a peer with ever new names does not use up a range.
pub const FREED_PER_PEER_MAX: usize = 4_096;
/// The number of addresses of a range that are tried for a name. If all of them are in use, the name gets no address. In a
/// range that is 90 % full, this happens to one name in a million.
const TRIES: u32 = 128;
/// The largest number of names without an address that are tried again at a time, earliest export first.
const RETRIED_MAX: usize = 1_024;

/// The ranges of virtual addresses, at most one of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// The IPv4 range; `None`: services have no IPv4 address.
    pub ipv4: Option<Ipv4Net>,
    /// The IPv6 range; `None`: services have no IPv6 address.
    pub ipv6: Option<Ipv6Net>,
}

impl Ranges {
    /// The default IPv4 range.
    pub const IPV4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(240, 250, 0, 0), 16);
    /// The default IPv6 range.
    pub const IPV6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfd69, 0x7374, 0x686d, 0, 0, 0, 0, 0), 48);
    /// The ranges from which istiod itself assigns addresses.
    pub const OF_ISTIOD: [IpNet; 2] = [
        IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(240, 240, 0, 0), 16)),
        IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0), 48)),
    ];

    /// Returns true if a service can have the address: it is in a range, and is neither the network nor the broadcast address.
    pub fn has(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(ip) => self
                .ipv4
                .is_some_and(|range| range.contains(&ip) && ip != range.network() && ip != range.broadcast()),
            IpAddr::V6(ip) => self.ipv6.is_some_and(|range| range.contains(&ip) && ip != range.network()),
        }
    }

    /// Returns the ranges as a list.
    pub fn list(&self) -> Vec<IpNet> {
        self.ipv4.map(IpNet::from).into_iter().chain(self.ipv6.map(IpNet::from)).collect()
    }

    /// Returns the addresses that a name may get in the range of a family, in the order in which they are tried.
    fn choices(&self, name: &HostName, family: Family) -> impl Iterator<Item = IpAddr> {
        let (base, bits) = match family {
            Family::V4 => {
                self.ipv4.map(|range| (u128::from(range.network().to_bits()), 32 - range.prefix_len()))
            }
            Family::V6 => self.ipv6.map(|range| (range.network().to_bits(), 128 - range.prefix_len())),
        }
        .unzip();
        let (base, bits) = (base.unwrap_or_default(), u32::from(bits.unwrap_or_default()));
        let last = 1_u128.checked_shl(bits).map_or(u128::MAX, |size| size - 1);
        let hash = |purpose: u64| -> u128 {
            let half = |seed: u64| {
                let mut hasher = XxHash3_64::with_seed(seed);
                hasher.write(&base.to_be_bytes());
                hasher.write(name.as_str().as_bytes());
                u128::from(hasher.finish())
            };
            half(KEY ^ purpose) << 64 | half(KEY ^ purpose ^ 1)
        };
        // The size of the range is a power of two, so an odd step visits every address.
        let (start, step) = (hash(2), hash(4) | 1);
        let tries = if last == 0 { 0 } else { TRIES };
        let places = (0..tries).map(move |at| start.wrapping_add(step.wrapping_mul(u128::from(at))) & last);
        let is_given = move |place: &u128| *place != 0 && (family == Family::V6 || *place != last);
        places.filter(is_given).map(move |place| match family {
            // The sum is below 2^32, since the range is an IPv4 range.
            Family::V4 => IpAddr::from(Ipv4Addr::from_bits(u32::try_from(base + place).unwrap_or(0))),
            Family::V6 => IpAddr::from(Ipv6Addr::from_bits(base + place)),
        })
    }
}

impl Default for Ranges {
    fn default() -> Self {
        Self { ipv4: Some(Self::IPV4), ipv6: Some(Self::IPV6) }
    }
}

/// The key of the hash. It must be the same in all replicas; a change of it moves every address.
const KEY: u64 = 0x6973_7468_6d75_7300;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Family {
    V4,
    V6,
}

/// The virtual addresses of one service name, with the state of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The peer that exports, or exported, the service of this name.
    pub peer: Arc<str>,
    /// When the peer exported the service, in seconds since 1970-01-01 UTC.
    pub exported_at: u64,
    /// The IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// The state of the service.
    pub state: LeaseState,
}

/// The state of a lease's service. Times are seconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// The service exists.
    InUse,
    /// The service existed before a restart, and no registry has delivered it since this time.
    Awaited(u64),
    /// The service was removed at this time.
    Freed(u64),
}

impl Lease {
    /// Returns the IPv4 and the IPv6 address of the lease, as far as it has them.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ipv4.map(IpAddr::from).into_iter().chain(self.ipv6.map(IpAddr::from))
    }

    fn has(&self, family: Family) -> bool {
        match family {
            Family::V4 => self.ipv4.is_some(),
            Family::V6 => self.ipv6.is_some(),
        }
    }

    fn set(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(ip) => self.ipv4 = Some(ip),
            IpAddr::V6(ip) => self.ipv6 = Some(ip),
        }
    }

    fn clear(&mut self, family: Family) {
        match family {
            Family::V4 => self.ipv4 = None,
            Family::V6 => self.ipv6 = None,
        }
    }
}

/// The leases, by name; a clone shares them.
pub type Leases = NameMap<Arc<Lease>>;

/// The numbers of leases, and of services without an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The number of services that have an address.
    pub in_use: usize,
    /// The number of leases that are reserved for services that do not exist.
    pub reserved: usize,
    /// The number of addresses that services lack, at most one for each service and configured family.
    pub without: usize,
}

/// The virtual addresses of all imported services.
#[derive(Clone, Debug, Default)]
pub struct VirtualAddresses {
    ranges: Ranges,
    leases: Leases,
    holders: HashMap<IpAddr, HostName>,
    /// The leases whose services do not exist. The key begins with the time at which the service was removed or the process
    /// restarted.
    ending: BTreeSet<(u64, HostName)>,
    /// The freed leases of each peer. The key begins with the time at which the lease was freed.
    freed: BTreeMap<Arc<str>, BTreeSet<(u64, HostName)>>,
    /// Names of existing services without an address of a family, earliest export first.
    without: BTreeSet<Lack>,
    /// The number of existing services without any address.
    addressless: usize,
}

/// The time of export and the name of a service, and the family in which it has no address.
type Lack = (u64, HostName, Family);

/// Returns the import record by which a service gets virtual addresses; `None` if it gets none: the name is not that of an imported
/// service, or one of this mesh with addresses. A service of this mesh without an address needs one if a peer's service is joined
/// with it, and has it from the first peer that has the name.
pub fn import_of<'a>(hostname: &str, shards: &'a [Arc<Shard>]) -> Option<&'a Arc<Import>> {
    let mut all = shards.iter().flat_map(|shard| shard.services_of(hostname));
    // The services before the first import decide which namespace owns the name.
    all.find_map(|service| match &service.import {
        None if service.addresses.is_empty() => None,
        import => Some(import.as_ref()),
    })?
}

impl VirtualAddresses {
    /// Returns a table of these ranges without leases.
    pub fn new(ranges: Ranges) -> Self {
        Self { ranges, ..Self::default() }
    }

    /// Returns the ranges with the leases of an earlier process; a lease ends if its service does not appear within [`KEPT`].
    /// An address outside of the ranges is dropped, and so is an address that an earlier lease already has.
    pub fn with_leases(
        ranges: Ranges,
        leases: impl IntoIterator<Item = (HostName, Lease)>,
        now: u64,
    ) -> Self {
        let mut all = Self::new(ranges);
        for (name, mut lease) in leases {
            let since = match lease.state {
                LeaseState::InUse => now,
                LeaseState::Awaited(since) | LeaseState::Freed(since) => since.min(now),
            };
            let gone = now.saturating_sub(since) >= KEPT.as_secs();
            if gone || all.leases.contains_key(&name) || all.leases.len() >= LEASES_MAX {
                continue;
            }
            let is_free = |ip: &IpAddr| all.ranges.has(*ip) && !all.holders.contains_key(ip);
            lease.ipv4 = lease.ipv4.filter(|ip| is_free(&IpAddr::V4(*ip)));
            lease.ipv6 = lease.ipv6.filter(|ip| is_free(&IpAddr::V6(*ip)));
            lease.state = match lease.state {
                LeaseState::InUse => LeaseState::Awaited(now),
                LeaseState::Awaited(_) => LeaseState::Awaited(since),
                LeaseState::Freed(_) => LeaseState::Freed(since),
            };
            if let LeaseState::Freed(_) = lease.state {
                all.freed.entry(lease.peer.clone()).or_default().insert((since, name.clone()));
            }
            all.ending.insert((since, name.clone()));
            all.holders.extend(lease.addresses().map(|address| (address, name.clone())));
            all.leases.insert(name, Arc::new(lease));
        }
        all
    }

    /// Returns the addresses of a service that exists, IPv4 first.
    pub fn of(&self, hostname: &str) -> impl Iterator<Item = IpAddr> {
        let lease = self.leases.get(hostname).filter(|lease| lease.state == LeaseState::InUse);
        lease.into_iter().flat_map(|lease| lease.addresses())
    }

    /// Returns the ranges.
    pub fn ranges(&self) -> Ranges {
        self.ranges
    }

    /// Returns all leases.
    pub fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Returns the numbers of leases.
    pub fn counts(&self) -> Counts {
        let reserved = self.ending.len();
        let in_use = self.leases.len() - reserved - self.addressless;
        Counts { in_use, reserved, without: self.without.len() }
    }

    /// Returns the names that lack an address of some family, each once, earliest export first.
    pub fn without(&self) -> impl Iterator<Item = &HostName> {
        let mut last = None;
        let names = self.without.iter().map(|(_, name, _)| name);
        names.filter(move |name| last.replace(*name) != Some(*name))
    }

    /// Assigns a name its addresses, or frees them if `import` is `None`. Returns the names whose addresses changed.
    pub fn renew(&mut self, name: &HostName, import: Option<&Import>, now: u64) -> BTreeSet<HostName> {
        let mut changed = BTreeSet::new();
        match import {
            Some(import) => self.take(name, import, &mut changed),
            None => self.free(name, now, &mut changed),
        }
        changed
    }

    fn take(&mut self, name: &HostName, import: &Import, changed: &mut BTreeSet<HostName>) {
        let known = self.leases.get(name).cloned();
        let same = |lease: &Arc<Lease>| {
            let of_import = lease.peer == import.peer && lease.exported_at == import.exported_at;
            of_import && lease.state == LeaseState::InUse
        };
        if known.as_ref().is_some_and(same) {
            return;
        }
        let mut lease = match known {
            Some(lease) => {
                self.forget(name, &lease);
                (*lease).clone()
            }
            None => Lease {
                peer: import.peer.clone(),
                exported_at: 0,
                ipv4: None,
                ipv6: None,
                state: LeaseState::InUse,
            },
        };
        let is_new = lease.state != LeaseState::InUse || !lease.addresses().any(|_| true);
        lease.peer = import.peer.clone();
        lease.exported_at = import.exported_at;
        lease.state = LeaseState::InUse;
        let (lacks_ipv4, lacks_ipv6) = (!lease.has(Family::V4), !lease.has(Family::V6));
        if is_new {
            changed.insert(name.clone());
        }
        self.leases.insert(name.clone(), Arc::new(lease));
        if lacks_ipv4 && self.ranges.ipv4.is_some() {
            self.place(name.clone(), Family::V4, changed);
        }
        if lacks_ipv6 && self.ranges.ipv6.is_some() {
            self.place(name.clone(), Family::V6, changed);
        }
    }

    /// Removes a lease from the tables, except from `leases` and `holders`.
    fn forget(&mut self, name: &HostName, lease: &Lease) {
        for family in [Family::V4, Family::V6] {
            self.remove_lack(&(lease.exported_at, name.clone(), family));
        }
        let since = match lease.state {
            LeaseState::InUse => return,
            LeaseState::Awaited(since) | LeaseState::Freed(since) => since,
        };
        self.ending.remove(&(since, name.clone()));
        if let Some(freed) = self.freed.get_mut(&lease.peer) {
            freed.remove(&(since, name.clone()));
            if freed.is_empty() {
                self.freed.remove(&lease.peer);
            }
        }
    }

    /// Assigns a name the first address of its sequence that is free or belongs to a later export. In the second case the later
    /// export then gets another address in the same manner. Each reassignment concerns a later export than the one before, so
    /// the loop ends.
    fn place(&mut self, name: HostName, family: Family, changed: &mut BTreeSet<HostName>) {
        let mut next = Some(name);
        while let Some(name) = next.take() {
            let exported_at = self.leases.get(&name).map_or(0, |lease| lease.exported_at);
            let choice = (self.leases.len() <= LEASES_MAX)
                .then(|| {
                    self.ranges.choices(&name, family).find(|address| {
                        self.holders.get(address).is_none_or(|holder| self.yields(holder, exported_at, &name))
                    })
                })
                .flatten();
            let Some(address) = choice else {
                // Only names of existing services wait for an address. The lease of a service that no registry has delivered
                // yet gets an address when the service arrives.
                if self.leases.get(&name).is_some_and(|lease| lease.state == LeaseState::InUse) {
                    self.add_lack((exported_at, name.clone(), family));
                }
                return;
            };
            self.remove_lack(&(exported_at, name.clone(), family));
            next = self.holders.insert(address, name.clone());
            if let Some(holder) = &next {
                tracing::warn!(
                    %address, service = %holder, %name,
                    "a service loses its virtual address to a service that was exported earlier, and gets another address"
                );
                self.change(holder, |lease| lease.clear(family));
                changed.insert(holder.clone());
            }
            self.change(&name, |lease| lease.set(address));
            changed.insert(name);
        }
    }

    fn add_lack(&mut self, lack: Lack) {
        if self.without.insert(lack.clone()) && self.lacks_all(&lack) {
            self.addressless += 1;
        }
    }

    fn remove_lack(&mut self, lack: &Lack) {
        let lacked_all = self.lacks_all(lack);
        if self.without.remove(lack) && lacked_all {
            self.addressless -= 1;
        }
    }

    /// Returns true if the service lacks an address of each configured family.
    fn lacks_all(&self, (exported_at, name, _): &Lack) -> bool {
        let families = [(Family::V4, self.ranges.ipv4.is_some()), (Family::V6, self.ranges.ipv6.is_some())];
        let mut configured = families.into_iter().filter(|(_, is_configured)| *is_configured);
        configured.all(|(family, _)| self.without.contains(&(*exported_at, name.clone(), family)))
    }

    /// Returns true if `name`, exported at `exported_at`, may take an address from its holder: the holder was exported later,
    /// and the address is not reserved for a removed service.
    fn yields(&self, holder: &HostName, exported_at: u64, name: &HostName) -> bool {
        self.leases.get(holder).is_none_or(|lease| {
            !matches!(lease.state, LeaseState::Freed(_)) && (exported_at, name) < (lease.exported_at, holder)
        })
    }

    fn change(&mut self, name: &HostName, change: impl FnOnce(&mut Lease)) {
        if let Some(lease) = self.leases.get_mut(name) {
            change(Arc::make_mut(lease));
        }
    }

    fn free(&mut self, name: &HostName, now: u64, changed: &mut BTreeSet<HostName>) {
        let Some(lease) = self.leases.get(name).filter(|lease| lease.state == LeaseState::InUse).cloned()
        else {
            return;
        };
        changed.insert(name.clone());
        self.forget(name, &lease);
        if lease.addresses().next().is_none() {
            self.leases.remove(name);
            return;
        }
        self.change(name, |lease| lease.state = LeaseState::Freed(now));
        self.ending.insert((now, name.clone()));
        let freed = self.freed.entry(lease.peer.clone()).or_default();
        freed.insert((now, name.clone()));
        if freed.len() > FREED_PER_PEER_MAX
            && let Some((_, first)) = freed.first().cloned()
        {
            self.end(&first);
        }
    }

    /// Removes a lease and releases its addresses.
    fn end(&mut self, name: &HostName) {
        let Some(lease) = self.leases.remove(name) else { return };
        self.forget(name, &lease);
        for address in lease.addresses() {
            self.holders.remove(&address);
        }
    }

    /// Releases the addresses of services that have been absent for [`KEPT`], and assigns addresses to services that have none.
    /// Returns the names whose addresses changed.
    pub fn expire(&mut self, now: u64) -> BTreeSet<HostName> {
        let mut changed = BTreeSet::new();
        let mut released = false;
        while let Some((since, name)) = self.ending.first().cloned()
            && now.saturating_sub(since) >= KEPT.as_secs()
        {
            self.end(&name);
            released = true;
        }
        if released {
            let again: Vec<_> = self.without.iter().take(RETRIED_MAX).cloned().collect();
            for (_, name, family) in again {
                self.place(name, family, &mut changed);
            }
        }
        changed
    }

    /// Asserts, in debug builds, that the tables agree. Visits all leases.
    #[cfg(test)]
    fn check(&self) {
        let mut addresses = 0;
        for (name, lease) in self.leases.iter() {
            for address in lease.addresses() {
                addresses += 1;
                assert_eq!(self.holders.get(&address), Some(name), "{address}");
                assert!(self.ranges.has(address), "{address}");
            }
            let since = match lease.state {
                LeaseState::InUse => None,
                LeaseState::Awaited(since) | LeaseState::Freed(since) => Some(since),
            };
            let is_ending = since.is_some_and(|since| self.ending.contains(&(since, name.clone())));
            assert_eq!(is_ending, since.is_some(), "{name}");
            for family in [Family::V4, Family::V6] {
                let without = self.without.contains(&(lease.exported_at, name.clone(), family));
                let has_range = self.ranges.list().iter().any(|range| match range {
                    IpNet::V4(_) => family == Family::V4,
                    IpNet::V6(_) => family == Family::V6,
                });
                let lacks = has_range && since.is_none() && !lease.has(family);
                assert_eq!(without, lacks, "{name} {family:?}");
            }
        }
        assert_eq!(self.holders.len(), addresses);
        let is_addressless =
            |lease: &Arc<Lease>| lease.state == LeaseState::InUse && lease.addresses().next().is_none();
        let addressless = self.leases.iter().filter(|(_, lease)| is_addressless(lease)).count();
        assert_eq!(self.addressless, addressless);
        let freed: usize = self.freed.values().map(BTreeSet::len).sum();
        assert!(freed <= self.ending.len());
    }
}

#[cfg(test)]
mod tests;
