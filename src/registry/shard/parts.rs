//! The two forms in which a shard holds the services of a host name, and a service whose endpoints come in sets.

use std::collections::BTreeMap;
use std::sync::Arc;

use isthmus_model::endpoint::Endpoint;
use isthmus_model::service::Service;

/// The services of one host name.
#[derive(Clone, Debug)]
pub(super) enum Namespaces {
    One(Arc<Service>),
    /// Services of several namespaces, in order of namespace.
    Many(Arc<[Arc<Service>]>),
}

/// A service whose endpoints come in sets.
#[derive(Clone, Debug, Default)]
pub(super) struct Sets {
    /// The service as its own object defines it; `None` while only endpoint sets of the service exist.
    pub(super) service: Option<Arc<Service>>,
    pub(super) endpoints: BTreeMap<Arc<str>, Arc<[Endpoint]>>,
}

impl Namespaces {
    pub(super) fn as_slice(&self) -> &[Arc<Service>] {
        match self {
            Self::One(service) => std::slice::from_ref(service),
            Self::Many(services) => services,
        }
    }

    pub(super) fn of(&self, namespace: &str) -> Option<&Arc<Service>> {
        self.as_slice().iter().find(|service| *service.key.namespace == *namespace)
    }

    /// Returns the services after the service of a namespace is replaced or removed; `None` if no service is left.
    pub(super) fn with(&self, namespace: &str, service: Option<Arc<Service>>) -> Option<Self> {
        let others = self.as_slice().iter().filter(|service| *service.key.namespace != *namespace);
        let mut all: Vec<Arc<Service>> = others.cloned().chain(service).collect();
        all.sort_by(|one, other| one.key.namespace.cmp(&other.key.namespace));
        match all.len() {
            0 | 1 => all.pop().map(Self::One),
            _ => Some(Self::Many(all.into())),
        }
    }
}

impl Sets {
    /// Returns the service with the endpoints of all sets; `None` while its own object is unknown.
    pub(super) fn joined(&self) -> Option<Arc<Service>> {
        let service = self.service.as_ref()?;
        let mut lists = std::iter::once(&service.endpoints).chain(self.endpoints.values());
        let mut filled = lists.by_ref().filter(|list| !list.is_empty());
        let endpoints = match (filled.next(), filled.next()) {
            (None, _) => return Some(service.clone()),
            // A single list is shared, not copied.
            (Some(only), None) => only.clone(),
            (Some(first), Some(second)) => first
                .iter()
                .chain(second.iter())
                .chain(filled.flat_map(|list| list.iter()))
                .cloned()
                .collect(),
        };
        Some(Arc::new(Service { endpoints, ..(**service).clone() }))
    }
}
