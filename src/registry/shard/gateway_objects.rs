//! The Gateways and routes of the Gateway API in a shard.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bucket_map::BucketMap;
use crate::change::{Dirty, Item};
use crate::gateway_api::{GatewayPlaces, GatewayRoute};

/// The items of the Gateway API, by their objects.
#[derive(Clone, Debug, Default)]
pub(super) struct GatewayObjects {
    pub(super) gateways: Arc<BTreeMap<Arc<str>, Arc<GatewayPlaces>>>,
    pub(super) routes: BucketMap<Arc<str>, Arc<GatewayRoute>>,
}

impl GatewayObjects {
    pub(super) fn put_places(&mut self, gateway: Arc<GatewayPlaces>, dirty: &mut Dirty) {
        if self.gateways.get(&gateway.object) != Some(&gateway) {
            dirty.gateway_places = true;
            Arc::make_mut(&mut self.gateways).insert(gateway.object.clone(), gateway);
        }
    }

    pub(super) fn put_route(&mut self, route: Arc<GatewayRoute>, dirty: &mut Dirty) {
        if self.routes.get(&*route.object) != Some(&route) {
            dirty.gateway_routes.insert(route.object.clone());
            self.routes.insert(route.object.clone(), route);
        }
    }

    pub(super) fn remove_places(&mut self, object: &Arc<str>, dirty: &mut Dirty) {
        if self.gateways.contains_key(object) {
            dirty.gateway_places = true;
            Arc::make_mut(&mut self.gateways).remove(object);
        }
    }

    pub(super) fn remove_route(&mut self, object: &Arc<str>, dirty: &mut Dirty) {
        if self.routes.remove(&**object).is_some() {
            dirty.gateway_routes.insert(object.clone());
        }
    }

    pub(super) fn items(&self) -> impl Iterator<Item = Item> {
        let gateways = self.gateways.values().cloned().map(Item::GatewayPlaces);
        gateways.chain(self.routes.iter().map(|(_, route)| Item::GatewayRoute(route.clone())))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.gateways.is_empty() && self.routes.is_empty()
    }
}
