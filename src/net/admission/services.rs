//! The connections and CONNECT streams to each service, under `limits.perService`.
//!
//! The count of a service is one atomic. Each worker keeps handles to the counts ([`Handles`]), so that a connection takes no
//! lock that other workers take. A count is dropped when the service has no connections and no worker has a handle to the
//! count.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dashmap::DashMap;
use hashbrown::{DefaultHashBuilder, HashMap};

use isthmus_model::limits::ServiceLimitKey;

/// The value that means that no limit is configured.
const OFF: usize = usize::MAX;

/// The numbers of open connections to each service, and their limit.
#[derive(Debug)]
pub struct Services {
    limit: AtomicUsize,
    numbers: DashMap<ServiceLimitKey, Arc<AtomicUsize>, DefaultHashBuilder>,
}

/// One worker's handles to the counts of services.
#[derive(Debug, Default)]
pub struct Handles(RefCell<HashMap<ServiceLimitKey, Arc<AtomicUsize>>>);

/// Counts one connection to a service until it is dropped.
#[derive(Debug)]
pub struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        let before = self.0.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a place is given back twice");
    }
}

impl Default for Services {
    fn default() -> Self {
        Self { limit: AtomicUsize::new(OFF), numbers: DashMap::default() }
    }
}

impl Services {
    /// Changes the limit of each service; `None` means no limit. Connections above the new limit stay open, and are counted
    /// until they end.
    pub fn set_limit(&self, limit: Option<usize>) {
        self.limit.store(limit.unwrap_or(OFF), Ordering::Relaxed);
    }

    /// Returns the limit of each service, if there is one.
    pub fn limit(&self) -> Option<usize> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit != OFF)
    }

    /// Returns the number of connections to a service.
    pub fn used(&self, key: &ServiceLimitKey) -> usize {
        self.numbers.get(key).map_or(0, |number| number.load(Ordering::Relaxed))
    }

    /// Returns the number of services whose connections are counted.
    pub fn counted(&self) -> usize {
        self.numbers.len()
    }
}

impl Handles {
    /// Takes a slot for a connection to a service. Returns `None` if the limit is reached.
    pub fn admit(&self, services: &Services, key: &ServiceLimitKey) -> Option<Place> {
        let place = self.count(services, key);
        // The connection counts itself first, so that two threads cannot both take the last slot.
        (place.0.load(Ordering::Relaxed) <= services.limit.load(Ordering::Relaxed)).then_some(place)
    }

    /// Counts a connection that is already open, whatever the limit.
    pub fn count(&self, services: &Services, key: &ServiceLimitKey) -> Place {
        let mut handles = self.0.borrow_mut();
        let number = handles
            .entry_ref(key)
            .or_insert_with(|| services.numbers.entry(key.clone()).or_default().clone());
        number.fetch_add(1, Ordering::Relaxed);
        Place(number.clone())
    }

    /// Drops the handles of services without connections.
    pub fn sweep(&self, services: &Services) {
        let mut handles = self.0.borrow_mut();
        for (key, number) in handles.extract_if(|_, number| number.load(Ordering::Relaxed) == 0) {
            drop(number);
            // Dropping the last handle removes the count from the map. No worker can take a new handle at that moment, because
            // the map's entry is locked.
            services.numbers.remove_if(&key, |_, number| Arc::strong_count(number) == 1);
        }
        if handles.len() < handles.capacity() / 4 {
            handles.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str) -> ServiceLimitKey {
        ServiceLimitKey::Service(name.into())
    }

    #[test]
    fn a_service_has_as_many_places_as_its_limit_over_all_workers() {
        let (services, one, other) = (Services::default(), Handles::default(), Handles::default());
        services.set_limit(Some(3));
        let mut places: Vec<Place> = [&one, &other, &one]
            .into_iter()
            .map(|worker| worker.admit(&services, &service("a")).expect("below the limit"))
            .collect();
        assert!(
            one.admit(&services, &service("a")).is_none() && other.admit(&services, &service("a")).is_none()
        );
        assert_eq!(services.used(&service("a")), 3, "a refused connection leaves nothing behind");
        assert!(other.admit(&services, &service("b")).is_some(), "another service has places of its own");
        assert!(
            one.admit(&services, &ServiceLimitKey::Route("a".into())).is_some(),
            "so has a route of this name"
        );
        places.pop();
        assert!(other.admit(&services, &service("a")).is_some());
        services.set_limit(Some(1));
        assert!(one.admit(&services, &service("a")).is_none());
        places.push(one.count(&services, &service("a")));
        assert_eq!((services.used(&service("a")), services.limit()), (3, Some(1)));
    }

    #[test]
    fn numbers_of_services_without_connections_are_dropped() {
        let (services, one, other) = (Services::default(), Handles::default(), Handles::default());
        services.set_limit(Some(10_000));
        for index in 0..1_000 {
            drop(one.admit(&services, &service(&format!("s{index}"))));
        }
        let kept = other.admit(&services, &service("s7"));
        one.sweep(&services);
        assert_eq!((services.counted(), services.used(&service("s7"))), (1, 1));
        assert!(one.0.borrow().len() <= 1);
        drop(kept);
        other.sweep(&services);
        one.sweep(&services);
        assert_eq!(services.counted(), 0);
    }
}
