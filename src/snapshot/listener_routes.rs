//! The routes that apply on one listener, in the order in which they apply: of the listener, of all listeners, and of the Gateway
//! API.

use std::sync::Arc;

use super::gateway_table::Claimed;
use super::policy::RouteName;
use super::routes::{RouteEntry, RouteTable, Scope};
use isthmus_model::name::NamePattern;

/// The routes that apply on a listener: its own, those that all listeners share, and those of the Gateway API. For an equal key
/// they apply in this order.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListenerRoutes<'a> {
    own: Option<&'a Scope>,
    common: &'a Scope,
    claimed: Option<&'a Claimed>,
    listener: &'a str,
}

impl<'a> ListenerRoutes<'a> {
    /// Returns the routes of a listener; `claimed` are those of the Gateway API.
    pub(super) fn new(routes: &'a RouteTable, listener: &'a str, claimed: Option<&'a Claimed>) -> Self {
        let (own, common) = routes.scopes(listener);
        Self { own, common, claimed, listener }
    }

    /// Returns the route whose key is this name.
    pub(super) fn exact(&self, name: &str) -> Option<&'a Arc<RouteEntry>> {
        let claimed = || self.claimed.and_then(|claimed| claimed.exact(name));
        self.first(|scope| scope.by_name.exact(name)).or_else(claimed)
    }

    /// Returns the route whose key is this name, and which applies only on other listeners.
    pub(super) fn elsewhere(&self, name: &str) -> Option<&'a Arc<RouteEntry>> {
        self.common.by_name.exact(name).filter(|entry| !entry.on_listener(self.listener))
    }

    /// Returns the wildcard route with the longest suffix that matches a name; `"*"` is the shortest.
    pub(super) fn wildcard(&self, name: &'a str) -> Option<&'a Arc<RouteEntry>> {
        let longest = |scope: &'a Scope| {
            let mut all = scope.by_name.suffixes(name).chain(scope.by_name.any());
            all.find(|entry| entry.on_listener(self.listener))
        };
        let length = |entry: &Arc<RouteEntry>| match &entry.route.key {
            RouteName::Name(NamePattern::Suffix(suffix)) => suffix.as_str().len(),
            RouteName::Name(_) | RouteName::NoSni | RouteName::Raw | RouteName::Alpn => 0,
        };
        let longer =
            |first: Option<&'a Arc<RouteEntry>>, second: Option<&'a Arc<RouteEntry>>| match (first, second) {
                (Some(first), Some(second)) if length(second) > length(first) => Some(second),
                (first, second) => first.or(second),
            };
        let claimed = self.claimed.and_then(|claimed| claimed.longest(name));
        longer(longer(self.own.and_then(longest), longest(self.common)), claimed)
    }

    /// Returns the route `"-"`, for hellos without SNI.
    pub(super) fn no_sni(&self) -> Option<&'a Arc<RouteEntry>> {
        self.first(|scope| scope.no_sni.as_ref())
    }

    /// Returns the route of connections from which no hello is read: the listener's `target` or `fallback`.
    pub(super) fn raw(&self) -> Option<&'a Arc<RouteEntry>> {
        self.first(|scope| scope.raw.as_ref()).or_else(|| self.claimed?.raw())
    }

    /// Returns the listener's own route of the config if there is one, and otherwise the common one if it applies on the listener.
    fn first(&self, of: impl Fn(&'a Scope) -> Option<&'a Arc<RouteEntry>>) -> Option<&'a Arc<RouteEntry>> {
        let common = || of(self.common).filter(|entry| entry.on_listener(self.listener));
        self.own.and_then(&of).or_else(common)
    }
}
