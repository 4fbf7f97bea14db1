//! The index of the hosts and addresses that ServiceEntries and WorkloadEntries name, and of the addresses of Services. Whose they are is
//! decided in `claims` of the crate.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::table::ObjectKey;
use isthmus_model::name::HostName;

/// An object that claims an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Claimant {
    ServiceEntry(ObjectKey),
    WorkloadEntry(ObjectKey),
}

/// The claims of a cluster's entries, and the addresses of its Services.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    hosts: BTreeMap<HostName, BTreeSet<ObjectKey>>,
    addresses: BTreeMap<IpAddr, BTreeSet<Claimant>>,
    /// The Services by cluster IP.
    services: BTreeMap<IpAddr, BTreeSet<ObjectKey>>,
}

impl Claims {
    pub(crate) fn add(&mut self, ip: IpAddr, claimant: Claimant) {
        self.addresses.entry(ip).or_default().insert(claimant);
    }

    pub(crate) fn forget(&mut self, ip: IpAddr, claimant: &Claimant) {
        forget(&mut self.addresses, &ip, claimant);
    }

    pub(crate) fn add_host(&mut self, host: HostName, entry: ObjectKey) {
        self.hosts.entry(host).or_default().insert(entry);
    }

    pub(crate) fn forget_host(&mut self, host: &HostName, entry: &ObjectKey) {
        forget(&mut self.hosts, host, entry);
    }

    pub(crate) fn add_service(&mut self, ip: IpAddr, service: ObjectKey) {
        self.services.entry(ip).or_default().insert(service);
    }

    pub(crate) fn forget_service(&mut self, ip: IpAddr, service: &ObjectKey) {
        forget(&mut self.services, &ip, service);
    }

    /// Returns the ServiceEntries with a host.
    pub(crate) fn of_host(&self, host: &HostName) -> impl Iterator<Item = &ObjectKey> {
        self.hosts.get(host).into_iter().flatten()
    }

    /// Returns the entries with an address.
    pub(crate) fn at(&self, ip: IpAddr) -> impl Iterator<Item = &Claimant> {
        self.addresses.get(&ip).into_iter().flatten()
    }

    /// Returns the Services with a cluster IP.
    pub(crate) fn services_at(&self, ip: IpAddr) -> impl Iterator<Item = &ObjectKey> {
        self.services.get(&ip).into_iter().flatten()
    }

    /// Returns true if an entry has the host.
    pub(crate) fn has_host(&self, host: &HostName) -> bool {
        self.hosts.contains_key(host)
    }

    /// Returns all hosts.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &HostName> {
        self.hosts.keys()
    }
}

/// Removes a value from the set of a key, and the key with its last value.
pub(crate) fn forget<K: Ord, V: Ord>(all: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &V) {
    let Some(of) = all.get_mut(key) else { return };
    of.remove(value);
    if of.is_empty() {
        all.remove(key);
    }
}
