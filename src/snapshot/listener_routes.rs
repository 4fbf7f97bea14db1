//! The routes of the config that apply on one listener, in the order in which they apply: those of the listener, then those of all
//! listeners.

use std::sync::Arc;

use super::routes::{RouteEntry, RouteTable, Scope};
use isthmus_model::name::NamePattern;

/// The routes that apply on a listener: its own, and those that all listeners share. For an equal key they apply in this order.
#[derive(Clone, Copy, Debug)]
pub struct ListenerRoutes<'a> {
    own: Option<&'a Scope>,
    common: &'a Scope,
    listener: &'a str,
}

impl<'a> ListenerRoutes<'a> {
    /// Returns the routes of a listener.
    pub fn new(routes: &'a RouteTable, listener: &'a str) -> Self {
        let (own, common) = routes.scopes(listener);
        Self { own, common, listener }
    }

    /// Returns the route whose key is this name.
    pub fn exact(&self, name: &str) -> Option<&'a Arc<RouteEntry>> {
        self.first(|scope| scope.by_name.exact(name))
    }

    /// Returns the route whose key is this name, and which applies only on other listeners.
    pub fn elsewhere(&self, name: &str) -> Option<&'a Arc<RouteEntry>> {
        self.common.by_name.exact(name).filter(|entry| !entry.route.on_listener(self.listener))
    }

    /// Returns the wildcard route with the longest suffix that matches a name; `"*"` is the shortest.
    pub fn wildcard(&self, name: &'a str) -> Option<&'a Arc<RouteEntry>> {
        let longest = |scope: &'a Scope| {
            let mut all = scope.by_name.suffixes(name).chain(scope.by_name.any());
            all.find(|entry| entry.route.on_listener(self.listener))
        };
        match (self.own.and_then(longest), longest(self.common)) {
            (Some(own), Some(common)) if covers(common.route.key.pattern(), own.route.key.pattern()) => {
                Some(own)
            }
            (own, common) => common.or(own),
        }
    }

    /// Returns true if a wildcard route that matches a name lists this listener.
    pub fn lists_wildcard(&self, name: &'a str) -> bool {
        let mut all = self.common.by_name.suffixes(name).chain(self.common.by_name.any());
        all.any(|entry| {
            !entry.route.conditions.listeners.is_empty() && entry.route.on_listener(self.listener)
        })
    }

    /// Returns the route `"-"`, for hellos without SNI.
    pub fn no_sni(&self) -> Option<&'a Arc<RouteEntry>> {
        self.first(|scope| scope.no_sni.as_ref())
    }

    /// Returns the route of connections from which no hello is read: the listener's `target` or `fallback`.
    pub fn raw(&self) -> Option<&'a Arc<RouteEntry>> {
        self.first(|scope| scope.raw.as_ref())
    }

    /// Returns the listener's own route of the config if there is one, and otherwise the common one if it applies on the listener.
    fn first(&self, of: impl Fn(&'a Scope) -> Option<&'a Arc<RouteEntry>>) -> Option<&'a Arc<RouteEntry>> {
        let common = || of(self.common).filter(|entry| entry.route.on_listener(self.listener));
        self.own.and_then(&of).or_else(common)
    }
}

/// Returns true if a pattern has all names of another one.
fn covers(outer: Option<&NamePattern>, inner: Option<&NamePattern>) -> bool {
    outer.zip(inner).is_some_and(|(outer, inner)| outer.contains(inner))
}
