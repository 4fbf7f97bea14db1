//! Services by a key that several of them may have, such as an address or a name. The services of one key are sorted by name.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::hash::Hash;
use std::net::IpAddr;

use isthmus_model::name::HostName;
use isthmus_registry::bucket_map::BucketMap;

/// The services by address: by each virtual address, and by the address of each endpoint on this network.
///
/// Built only if a listener accepts HBONE, since only HBONE callers can request an address.
pub type AddressIndex = OwnerMap<IpAddr>;

/// A map from keys to the services that have them.
#[derive(Clone, Debug)]
pub struct OwnerMap<K> {
    owners: BucketMap<K, Owners>,
}

/// The services of one key; in most cases there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Owners {
    One(HostName),
    /// Several services, in order of name.
    Many(BTreeSet<HostName>),
}

impl<K> Default for OwnerMap<K> {
    fn default() -> Self {
        Self { owners: BucketMap::default() }
    }
}

impl<K: Clone + Eq + Hash + Ord> OwnerMap<K> {
    /// Returns the services that have a key, in order of name.
    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> impl Iterator<Item = &HostName>
    where
        K: Borrow<Q>,
    {
        let (one, many) = match self.owners.get(key) {
            None => (None, None),
            Some(Owners::One(name)) => (Some(name), None),
            Some(Owners::Many(names)) => (None, Some(names)),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }

    pub(super) fn insert(&mut self, key: K, service: &HostName) {
        if self.get(&key).any(|known| known == service) {
            return;
        }
        match self.owners.get_mut(&key) {
            None => drop(self.owners.insert(key, Owners::One(service.clone()))),
            Some(Owners::Many(names)) => drop(names.insert(service.clone())),
            Some(one @ Owners::One(_)) => {
                let Owners::One(first) = &*one else { return };
                *one = Owners::Many([first.clone(), service.clone()].into());
            }
        }
    }

    pub(super) fn remove(&mut self, key: &K, service: &HostName) {
        if !self.get(key).any(|known| known == service) {
            return;
        }
        if let Some(Owners::Many(names)) = self.owners.get_mut(key) {
            names.remove(service);
            if !names.is_empty() {
                return;
            }
        }
        self.owners.remove(key);
    }

    /// Returns all keys, in order.
    pub fn keys(&self) -> Vec<&K> {
        self.owners.sorted().into_iter().map(|(key, _)| key).collect()
    }

    /// Returns all entries in order of key.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn sorted(&self) -> Vec<(K, Vec<HostName>)> {
        let all = self.owners.sorted().into_iter();
        all.map(|(key, _)| (key.clone(), self.get(key).cloned().collect())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_can_be_of_several_services() {
        let name = |text: &str| HostName::parse(text).expect("legal");
        let address = IpAddr::from([10, 0, 0, 1]);
        let mut index = OwnerMap::default();
        let names =
            |index: &OwnerMap<IpAddr>| index.get(&address).map(ToString::to_string).collect::<Vec<_>>();
        index.insert(address, &name("b.mesh"));
        index.insert(address, &name("a.mesh"));
        index.insert(address, &name("b.mesh"));
        let before = index.clone();
        index.remove(&address, &name("b.mesh"));
        index.remove(&address, &name("c.mesh"));
        assert_eq!(
            (names(&before), names(&index)),
            (vec!["a.mesh".into(), "b.mesh".into()], vec!["a.mesh".to_owned()])
        );
        index.remove(&address, &name("a.mesh"));
        assert_eq!(index.sorted(), []);
    }
}
