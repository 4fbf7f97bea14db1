//! Services by address: the services that have an address as a virtual address, or as that of an endpoint on
//! this network.
//!
//! Built only if a listener takes HBONE, as only its callers can name an address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::bucket_map::BucketMap;
use crate::model::name::HostName;

/// A map from addresses to the services that have them.
#[derive(Clone, Debug, Default)]
pub struct AddressIndex {
    owners: BucketMap<IpAddr, Owners>,
}

/// The services of one address; mostly there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Owners {
    One(HostName),
    /// Several services, in order of name.
    Many(BTreeSet<HostName>),
}

impl AddressIndex {
    /// Returns the services that have an address, in order of name.
    pub fn get(&self, address: IpAddr) -> impl Iterator<Item = &HostName> {
        let (one, many) = match self.owners.get(&address) {
            None => (None, None),
            Some(Owners::One(name)) => (Some(name), None),
            Some(Owners::Many(names)) => (None, Some(names)),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    pub(super) fn insert(&mut self, address: IpAddr, service: &HostName) {
        if self.get(address).any(|known| known == service) {
            return;
        }
        match self.owners.get_mut(&address) {
            None => drop(self.owners.insert(address, Owners::One(service.clone()))),
            Some(Owners::Many(names)) => drop(names.insert(service.clone())),
            Some(one @ Owners::One(_)) => {
                let Owners::One(first) = &*one else { return };
                *one = Owners::Many([first.clone(), service.clone()].into());
            }
        }
    }

    pub(super) fn remove(&mut self, address: IpAddr, service: &HostName) {
        if !self.get(address).any(|known| known == service) {
            return;
        }
        if let Some(Owners::Many(names)) = self.owners.get_mut(&address) {
            names.remove(service);
            if !names.is_empty() {
                return;
            }
        }
        self.owners.remove(&address);
    }

    /// Returns all entries in order of address.
    #[cfg(test)]
    pub(super) fn sorted(&self) -> Vec<(IpAddr, Vec<HostName>)> {
        let all = self.owners.sorted().into_iter();
        all.map(|(address, _)| (*address, self.get(*address).cloned().collect())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_can_be_of_several_services() {
        let name = |text: &str| HostName::parse(text).expect("legal");
        let address = IpAddr::from([10, 0, 0, 1]);
        let mut index = AddressIndex::default();
        let names = |index: &AddressIndex| index.get(address).map(ToString::to_string).collect::<Vec<_>>();
        index.insert(address, &name("b.mesh"));
        index.insert(address, &name("a.mesh"));
        index.insert(address, &name("b.mesh"));
        let before = index.clone();
        index.remove(address, &name("b.mesh"));
        index.remove(address, &name("c.mesh"));
        assert_eq!(
            (names(&before), names(&index)),
            (vec!["a.mesh".into(), "b.mesh".into()], vec!["a.mesh".to_owned()])
        );
        index.remove(address, &name("a.mesh"));
        assert_eq!(index.sorted(), []);
    }
}
