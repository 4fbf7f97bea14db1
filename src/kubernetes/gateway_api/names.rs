//! The names of routes in one cluster: which routes a change of names concerns, whose a name is, and whose it was a short while ago.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::super::kinds::gateway_route::RouteId;
use super::routes::{Owners, object_of, text_of};
use isthmus_model::name::NamePattern;
use isthmus_registry::gateway_api::{Claim, GatewayPlaces, GatewayRoute, Place};
use isthmus_snapshot::gateway_table::GatewayTable;
use isthmus_telemetry::clock::rfc3339;

/// The time for which the earlier owner of a name is known after it has lost the name.
const KNOWN_FOR: Duration = Duration::from_secs(600);
/// The largest number of names whose earlier owner is known; names that are lost beyond it are not noted.
const LEFT_MAX: usize = 10_000;

/// The names of routes.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// The table in which admission finds a name.
    table: GatewayTable,
    /// The routes with a name at a place, by the name with its labels reversed, so that the names under a suffix follow one another.
    routes: BTreeMap<(Place, String), BTreeSet<RouteId>>,
    /// The names that routes have lost, and their last owners.
    left: BTreeMap<(Place, Option<NamePattern>), Left>,
}

/// The last owner of a name.
#[derive(Clone, Debug)]
struct Left {
    owner: Arc<str>,
    at: SystemTime,
    /// True if the log says that a route of another namespace has the name.
    is_told: bool,
}

impl Names {
    /// Replaces the Gateways.
    pub(crate) fn set_gateways<'g>(&mut self, gateways: impl Iterator<Item = &'g Arc<GatewayPlaces>>) {
        self.table.set_gateways(gateways);
    }

    /// Replaces the names of a route. Returns the routes of which some names may have another owner now.
    pub(crate) fn set(
        &mut self,
        id: &RouteId,
        old: Option<&Arc<GatewayRoute>>,
        new: Option<&Arc<GatewayRoute>>,
        now: SystemTime,
    ) -> BTreeSet<RouteId> {
        let claims = |of: Option<&Arc<GatewayRoute>>| -> BTreeSet<Claim> {
            of.iter().flat_map(|route| route.claims.iter().cloned()).collect()
        };
        let (before, after) = (claims(old), claims(new));
        let is_renewed = old.zip(new).is_some_and(|(old, new)| old.created != new.created);
        let object = object_of(id);
        let mut concerned = BTreeSet::new();
        if before == after && !is_renewed {
            self.table.set_route(&object, new);
            return concerned;
        }
        let held: Vec<&Claim> =
            before.iter().filter(|claim| self.holder(claim).as_ref() == Some(&object)).collect();
        for claim in &before {
            if let Some(routes) = self.routes.get_mut(&key(claim)) {
                routes.remove(id);
                if routes.is_empty() {
                    self.routes.remove(&key(claim));
                }
            }
        }
        self.table.set_route(&object, new);
        for claim in &after {
            self.routes.entry(key(claim)).or_default().insert(id.clone());
        }
        self.left.retain(|_, left| now.duration_since(left.at).is_ok_and(|since| since < KNOWN_FOR));
        for claim in &held {
            if self.left.len() < LEFT_MAX && self.holder(claim).as_ref() != Some(&object) {
                let left = Left { owner: object.clone(), at: now, is_told: false };
                self.left.insert((claim.place, claim.applied().cloned()), left);
            }
        }
        held.into_iter().chain(&after).for_each(|claim| self.note_holder(claim));
        let changed = before.symmetric_difference(&after);
        match is_renewed {
            true => before.union(&after).for_each(|claim| self.under(claim, &mut concerned)),
            false => changed.for_each(|claim| self.under(claim, &mut concerned)),
        }
        concerned
    }

    /// Forgets that a route has lost a name if it has it again, and logs once that a route of another namespace has it.
    fn note_holder(&mut self, claim: &Claim) {
        let Some(holder) = self.holder(claim) else { return };
        let of = (claim.place, claim.applied().cloned());
        let Some(left) = self.left.get_mut(&of) else { return };
        if left.owner == holder {
            self.left.remove(&of);
        } else if namespace_of(&left.owner) != namespace_of(&holder)
            && !std::mem::replace(&mut left.is_told, true)
        {
            let (name, from) = (text_of(claim), &*left.owner);
            tracing::warn!(name, from, to = &*holder, "a name has passed to a route of another namespace");
        }
    }

    /// Adds the routes that have names of a claim.
    fn under(&self, claim: &Claim, found: &mut BTreeSet<RouteId>) {
        let (place, text) = key(claim);
        match claim.applied() {
            None | Some(NamePattern::Exact(_)) => {
                found.extend(self.routes.get(&(place, text)).into_iter().flatten().cloned());
            }
            Some(NamePattern::Suffix(_) | NamePattern::Any) => {
                let prefix = text.trim_end_matches('*').to_owned();
                let all = self.routes.range((place, prefix.clone())..);
                let all = all.take_while(|((at, name), _)| *at == place && name.starts_with(&prefix));
                found.extend(all.flat_map(|(_, routes)| routes).cloned());
            }
        }
    }

    /// Returns the route that has the names of a claim.
    fn holder(&self, claim: &Claim) -> Option<Arc<str>> {
        let Place { port, address } = claim.place;
        let name = claim.applied().map(ToString::to_string);
        let entry = match &name {
            None => self.table.raw(port, address)?,
            Some(name) => self.table.holder(port, address, name)?.route?.0,
        };
        Some(entry.route.name.clone())
    }
}

impl Owners for Names {
    fn other_owner(&self, route: &Arc<str>, claim: &Claim) -> Option<String> {
        let Place { port, address } = claim.place;
        let Some(name) = claim.applied() else {
            let holder = self.holder(claim).filter(|holder| holder != route)?;
            return Some(holder.to_string());
        };
        let name = name.to_string();
        let holder = self.table.holder(port, address, &name)?;
        match holder.route {
            Some((entry, _)) if entry.route.name == *route => None,
            Some((entry, _)) => Some(entry.route.name.to_string()),
            None => Some(format!("the listener {}, which has no such route", holder.listener)),
        }
    }

    fn earlier_owner(&self, route: &Arc<str>, claim: &Claim) -> Option<String> {
        let left = self.left.get(&(claim.place, claim.applied().cloned()))?;
        if namespace_of(&left.owner) == namespace_of(route) || self.holder(claim).as_ref() != Some(route) {
            return None;
        }
        Some(format!("{} was that of {} until {}", text_of(claim), left.owner, rfc3339(left.at)))
    }
}

/// Returns the namespace of a route by its name, such as `TLSRoute shop/web`.
fn namespace_of(route: &str) -> Option<&str> {
    let (_, key) = route.split_once(' ')?;
    key.split_once('/').map(|(namespace, _)| namespace)
}

/// Returns the place and the name of a claim, with the labels of the name reversed: `test.a.*` for `*.a.test`.
fn key(claim: &Claim) -> (Place, String) {
    let reversed = |name: &str| name.rsplit('.').collect::<Vec<_>>().join(".");
    let text = match claim.applied() {
        None => "-".to_owned(),
        Some(NamePattern::Any) => "*".to_owned(),
        Some(NamePattern::Exact(name)) => reversed(name.as_str()),
        Some(NamePattern::Suffix(suffix)) => format!("{}.*", reversed(suffix.as_str())),
    };
    (claim.place, text)
}
