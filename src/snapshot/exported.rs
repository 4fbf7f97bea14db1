//! The names under which peers know services of this mesh (SPEC §18). Each peer has a table of its own, so that a name means
//! something to that peer alone; a name that several services would get belongs to the first of them by name.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::Snapshot;
use super::delta::Delta;
use super::owners::OwnerMap;
use super::peer::{Peer, PeerExport};
use super::service_view::ServiceView;
use crate::model::identity::Identity;
use crate::model::name::{HostName, NameError};

/// The problems of one peer that are kept with their names; further ones are counted.
const PROBLEMS_SHOWN: usize = 10;

/// The tables of all peers, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct PeerNames {
    tables: Vec<Arc<PeerTable>>,
    /// The places in `tables` by the trust domain under which a peer's callers are known.
    by_alias: Arc<HashMap<Arc<str>, usize>>,
    /// True if a peer has sources of SNI callers.
    has_sources: bool,
}

/// What one peer may reach, by the names that it uses.
#[derive(Clone, Debug)]
pub struct PeerTable {
    peer: Arc<Peer>,
    names: OwnerMap<HostName>,
    /// Names that several services would get.
    contested: BTreeSet<HostName>,
    /// Services whose name by the rule is no host name.
    nameless: BTreeMap<HostName, NameError>,
}

/// A service of ours as one peer may reach it.
#[derive(Clone, Copy, Debug)]
pub struct Exported<'a> {
    /// The name under which the peer knows the service.
    pub name: &'a HostName,
    /// The service.
    pub service: &'a Arc<ServiceView>,
    /// The rule that offers it.
    pub rule: &'a PeerExport,
}

/// The peers of a caller: none for callers of our own. A source of SNI callers can be that of several peers.
#[derive(Clone, Copy, Debug)]
pub struct PeersOf<'a> {
    names: &'a PeerNames,
    caller: Caller,
}

#[derive(Clone, Copy, Debug)]
enum Caller {
    /// The caller is not a peer's.
    Ours,
    /// An HBONE caller with an identity of the peer at this place.
    Identity(usize),
    /// An SNI caller from an address that peers have named.
    Source(IpAddr),
}

impl PeerNames {
    /// Makes the empty tables of these peers.
    pub(super) fn new(peers: &[Arc<Peer>]) -> Self {
        let empty = |peer: &Arc<Peer>| {
            Arc::new(PeerTable {
                peer: peer.clone(),
                names: OwnerMap::default(),
                contested: BTreeSet::new(),
                nameless: BTreeMap::new(),
            })
        };
        let alias = |(at, peer): (usize, &Arc<Peer>)| Some((peer.who.as_ref()?.alias.as_str().into(), at));
        Self {
            tables: peers.iter().map(empty).collect(),
            by_alias: Arc::new(peers.iter().enumerate().filter_map(alias).collect()),
            has_sources: peers.iter().any(|peer| !peer.from.is_empty()),
        }
    }

    /// Returns true if there are no peers.
    pub(super) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Moves a service from its names before a change to those after it.
    pub(super) fn renew(&mut self, old: Option<&ServiceView>, new: Option<&ServiceView>) {
        fn named(view: Option<&ServiceView>) -> Option<(&HostName, &Arc<str>)> {
            let view = view.filter(|view| view.import.is_none())?;
            Some((&view.key.hostname, &view.namespace))
        }
        let (before, after) = (named(old), named(new));
        if before == after {
            return;
        }
        for table in &mut self.tables {
            if let Some(claim) = before.and_then(|(host, namespace)| table.peer.claim(host, namespace)) {
                Arc::make_mut(table).withdraw(claim);
            }
            if let Some(claim) = after.and_then(|(host, namespace)| table.peer.claim(host, namespace)) {
                Arc::make_mut(table).enter(claim);
            }
        }
    }

    /// Returns the peers of a caller, by its verified identity, or by its address if it has none.
    pub(super) fn of_caller(&self, source: Option<IpAddr>, identity: Option<&Identity>) -> PeersOf<'_> {
        let of_peer = |identity: &Identity| self.by_alias.get(identity.trust_domain()).copied();
        let caller = match (identity, source) {
            (Some(identity), _) => of_peer(identity).map_or(Caller::Ours, Caller::Identity),
            (None, Some(source)) if self.has_sources => Caller::Source(source),
            (None, _) => Caller::Ours,
        };
        PeersOf { names: self, caller }
    }

    fn table(&self, peer: &str) -> Option<&PeerTable> {
        self.tables.iter().find(|table| &*table.peer.name == peer).map(|table| &**table)
    }
}

/// A service with the name that a rule gives it.
struct Claim<'a> {
    service: &'a HostName,
    name: Result<HostName, NameError>,
}

impl Peer {
    /// Returns the name that the peer's rules give a service of ours; `None` if they do not offer it.
    fn claim<'a>(&self, service: &'a HostName, namespace: &str) -> Option<Claim<'a>> {
        let rule = self.export_of(service.as_str())?;
        Some(Claim { service, name: rule.exported_name(service, namespace) })
    }

    /// Returns true if `from` names an address.
    pub fn has_source(&self, source: IpAddr) -> bool {
        self.from.iter().any(|block| block.contains(&source))
    }

    /// Returns true if the rules offer the peer a service under this name.
    pub(super) fn offers(&self, service: &HostName, namespace: &str, name: &str) -> bool {
        let claim = self.claim(service, namespace);
        claim.is_some_and(|claim| claim.name.is_ok_and(|given| given.as_str() == name))
    }
}

impl PeerTable {
    fn enter(&mut self, claim: Claim<'_>) {
        match claim.name {
            Err(error) => drop(self.nameless.insert(claim.service.clone(), error)),
            Ok(name) => {
                self.names.insert(name.clone(), claim.service);
                if self.names.get(&name).nth(1).is_some() {
                    self.contested.insert(name);
                }
            }
        }
    }

    fn withdraw(&mut self, claim: Claim<'_>) {
        match claim.name {
            Err(_) => drop(self.nameless.remove(claim.service)),
            Ok(name) => {
                self.names.remove(&name, claim.service);
                if self.names.get(&name).nth(1).is_none() {
                    self.contested.remove(&name);
                }
            }
        }
    }

    /// Returns the service that the peer knows under a name.
    fn service<'a>(&self, snapshot: &'a Snapshot, name: &str) -> Option<&'a Arc<ServiceView>> {
        snapshot.service(self.names.get(name).next()?.as_str())
    }

    fn exported<'a>(&'a self, snapshot: &'a Snapshot, name: &'a HostName) -> Option<Exported<'a>> {
        let service = self.service(snapshot, name.as_str())?;
        Some(Exported { name, service, rule: self.peer.export_of(&service.name)? })
    }
}

impl fmt::Display for PeerTable {
    /// Writes the peer's name, for messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.peer.name)
    }
}

impl<'a> PeersOf<'a> {
    /// Returns true if the caller is one of our own.
    pub(super) fn is_ours(self) -> bool {
        self.peers().next().is_none()
    }

    /// Returns the caller's peers, in the order of the file.
    pub(super) fn peers(self) -> impl Iterator<Item = &'a Arc<Peer>> {
        self.tables().map(|table| &table.peer)
    }

    /// Returns the first of the caller's peers that knows a service under this name, and the service.
    pub(super) fn knowing(
        self,
        snapshot: &'a Snapshot,
        name: &str,
    ) -> Option<(&'a Arc<Peer>, &'a Arc<ServiceView>)> {
        self.tables().find_map(|table| Some((&table.peer, table.service(snapshot, name)?)))
    }

    /// Returns the peers, of which the caller may be none, that know a service under this name.
    pub(super) fn all_knowing(self, name: &str) -> impl Iterator<Item = &'a Arc<Peer>> {
        let tables = self.names.tables.iter();
        tables.filter(move |table| table.names.get(name).next().is_some()).map(|table| &table.peer)
    }

    fn tables(self) -> impl Iterator<Item = &'a PeerTable> {
        let all = self.names.tables.as_slice();
        let some = match self.caller {
            Caller::Ours => &[],
            Caller::Identity(at) => all.get(at..=at).unwrap_or_default(),
            Caller::Source(_) => all,
        };
        some.iter().map(|table| &**table).filter(move |table| match self.caller {
            Caller::Source(source) => table.peer.has_source(source),
            Caller::Ours | Caller::Identity(_) => true,
        })
    }
}

impl Snapshot {
    /// Returns the services of ours that a peer may reach, in order of exported name; none for an unknown peer.
    pub fn exports_to<'a>(&'a self, peer: &str) -> Vec<Exported<'a>> {
        let Some(table) = self.peer_names.table(peer) else { return Vec::new() };
        table.names.keys().into_iter().filter_map(|name| table.exported(self, name)).collect()
    }

    /// Returns the service that a peer knows under a name.
    pub fn export_to<'a>(&'a self, peer: &str, name: &'a HostName) -> Option<Exported<'a>> {
        self.peer_names.table(peer)?.exported(self, name)
    }

    /// Returns the exported names of a peer whose services may differ from those in `held`, an earlier snapshot; `None` if any
    /// name may. `deltas` lead from `held` to this snapshot.
    pub fn exported_names_changed(
        &self,
        held: &Self,
        deltas: &[Arc<Delta>],
        peer: &str,
    ) -> Option<BTreeSet<HostName>> {
        if deltas.iter().any(|delta| delta.everything) {
            return None;
        }
        let Some(table) = self.peer_names.table(peer) else { return Some(BTreeSet::new()) };
        let services: BTreeSet<&HostName> = deltas.iter().flat_map(|delta| delta.services.keys()).collect();
        let views =
            services.into_iter().flat_map(|name| [held.service(name.as_str()), self.service(name.as_str())]);
        let ours = views.flatten().filter(|view| view.import.is_none());
        let names = ours.filter_map(|view| table.peer.claim(&view.key.hostname, &view.namespace)?.name.ok());
        Some(names.collect())
    }

    /// Returns why services that a peer's rules name cannot be reached by that peer, one sentence each.
    pub fn export_conflicts(&self, peer: &str) -> Vec<String> {
        let Some(table) = self.peer_names.table(peer) else { return Vec::new() };
        let contested = table.contested.iter().take(PROBLEMS_SHOWN).map(|name| {
            let all: Vec<&str> = table.names.get(name.as_str()).map(HostName::as_str).collect();
            let (first, others) = all.split_first().map_or(("", &[][..]), |(first, others)| (*first, others));
            let shown = others.iter().take(PROBLEMS_SHOWN).copied().collect::<Vec<_>>().join(", ");
            format!("the peer {table} knows {first} as {name}, so it cannot reach {shown}, to which the rules give this name too")
        });
        let nameless = table.nameless.iter().take(PROBLEMS_SHOWN).map(|(service, error)| {
            format!("the peer {table} cannot reach {service}: the name that the rule makes of it is not legal: {error}")
        });
        let mut all: Vec<String> = contested.chain(nameless).collect();
        let more = table.contested.len().saturating_sub(PROBLEMS_SHOWN)
            + table.nameless.len().saturating_sub(PROBLEMS_SHOWN);
        if more > 0 {
            all.push(format!("the peer {table} has {more} more such names"));
        }
        all
    }
}

#[cfg(test)]
mod tests;
