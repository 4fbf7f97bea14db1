//! The names under which peers know services of this mesh (`docs/federation.md, "See the state"`). Each peer has a table of its
//! own, so that a name has a meaning for that peer alone. If the rules give several services the same name, the service with the
//! lowest host name gets it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::Snapshot;
use super::delta::Delta;
use super::owners::OwnerMap;
use super::service_view::ServiceView;
use isthmus_model::identity::Identity;
use isthmus_model::name::{HostName, NameError};
use isthmus_settings::export_tls::Guard;
use isthmus_settings::peer::{Peer, PeerExport};

/// The largest number of problems that are listed for one peer; further problems are only counted.
const PROBLEMS_SHOWN: usize = 10;

/// The tables of all peers, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct PeerNames {
    tables: Vec<Arc<PeerTable>>,
    /// The index of each peer in `tables`, by our name for the trust domain of the peer.
    by_alias: Arc<HashMap<Arc<str>, usize>>,
    /// True if at least one peer lists source addresses of SNI callers.
    has_sources: bool,
}

/// The services that one peer may reach, by the names that the peer uses.
#[derive(Clone, Debug)]
pub struct PeerTable {
    peer: Arc<Peer>,
    names: OwnerMap<HostName>,
    /// Names that the rules give to several services.
    contested: BTreeSet<HostName>,
    /// Services for which the rule yields an illegal host name.
    nameless: BTreeMap<HostName, NameError>,
}

/// A service of this mesh, as one peer may reach it.
#[derive(Clone, Copy, Debug)]
pub struct Exported<'a> {
    /// The name under which the peer knows the service.
    pub name: &'a HostName,
    /// The service of this mesh.
    pub service: &'a Arc<ServiceView>,
    /// The rule that exports the service.
    pub rule: &'a PeerExport,
}

/// The peers that a caller belongs to; none for callers of this mesh. An SNI caller's source address can belong to several
/// peers.
#[derive(Clone, Copy, Debug)]
pub struct PeersOf<'a> {
    names: &'a PeerNames,
    caller: Caller,
}

#[derive(Clone, Copy, Debug)]
enum Caller {
    /// A caller that belongs to no peer.
    Ours,
    /// An HBONE caller with an identity of the peer at this index.
    Identity(usize),
    /// An SNI caller without an identity; its source address may belong to peers.
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

    /// Replaces the names under which peers know a service: `old` is the service before a change, and `new` after it.
    pub(super) fn renew(&mut self, old: Option<&ServiceView>, new: Option<&ServiceView>) {
        fn named(view: Option<&ServiceView>) -> Option<(&HostName, &str, Option<Guard<'_>>)> {
            let view = view.filter(|view| view.import.is_none() && view.is_visible())?;
            Some((&view.key.hostname, &view.namespace, view.guard()))
        }
        let (before, after) = (named(old), named(new));
        if before == after {
            return;
        }
        for table in &mut self.tables {
            let claim = |named: Option<(_, _, _)>| {
                named.and_then(|(host, namespace, guard)| Claim::new(&table.peer, host, namespace, guard))
            };
            let (before, after) = (claim(before), claim(after));
            if before.is_none() && after.is_none() {
                continue;
            }
            let table = Arc::make_mut(table);
            before.into_iter().for_each(|claim| table.withdraw(claim));
            after.into_iter().for_each(|claim| table.enter(claim));
        }
    }

    /// Returns the peers that a caller belongs to, by its verified identity, or by its source address if it has no identity.
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

/// A service, and the name that a rule gives it.
struct Claim<'a> {
    service: &'a HostName,
    name: Result<HostName, NameError>,
}

impl<'a> Claim<'a> {
    /// Returns the claim that the rules of a peer make for a service of this mesh; `None` if no rule offers the service.
    fn new(peer: &Peer, service: &'a HostName, namespace: &str, guard: Option<Guard<'_>>) -> Option<Self> {
        Some(Self { service, name: peer.offered_name(service, namespace, guard)? })
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

    /// Returns the service that the peer knows under this name.
    fn service<'a>(&self, snapshot: &'a Snapshot, name: &str) -> Option<&'a Arc<ServiceView>> {
        snapshot.service(self.names.get(name).next()?.as_str())
    }

    fn exported<'a>(&'a self, snapshot: &'a Snapshot, name: &'a HostName) -> Option<Exported<'a>> {
        let service = self.service(snapshot, name.as_str())?;
        Some(Exported { name, service, rule: service.rule_for(&self.peer)? })
    }
}

impl fmt::Display for PeerTable {
    /// Writes the peer's name, for messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.peer.name)
    }
}

impl<'a> PeersOf<'a> {
    /// Returns true if the caller belongs to no peer.
    pub fn is_ours(self) -> bool {
        self.peers().next().is_none()
    }

    /// Returns the caller's peers, in the order of the config file.
    pub fn peers(self) -> impl Iterator<Item = &'a Arc<Peer>> {
        self.tables().map(|table| &table.peer)
    }

    /// Returns the first of the caller's peers that knows a service under this name, the service, and the rule that exports it.
    pub fn knowing(
        self,
        snapshot: &'a Snapshot,
        name: &str,
    ) -> Option<(&'a Arc<Peer>, &'a Arc<ServiceView>, &'a PeerExport)> {
        self.tables().find_map(|table| {
            let service = table.service(snapshot, name)?;
            Some((&table.peer, service, service.rule_for(&table.peer)?))
        })
    }

    /// Returns all peers that know a service under this name, including peers that the caller does not belong to.
    pub fn all_knowing(self, name: &str) -> impl Iterator<Item = &'a Arc<Peer>> {
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
    /// Returns the services of this mesh that a peer may reach, in order of exported name; none for an unknown peer.
    pub fn exports_to<'a>(&'a self, peer: &str) -> Vec<Exported<'a>> {
        let Some(table) = self.peer_names.table(peer) else { return Vec::new() };
        table.names.keys().into_iter().filter_map(|name| table.exported(self, name)).collect()
    }

    /// Returns the service that a peer knows under a name.
    pub fn export_to<'a>(&'a self, peer: &str, name: &'a HostName) -> Option<Exported<'a>> {
        self.peer_names.table(peer)?.exported(self, name)
    }

    /// Compares the names that are exported to a peer in this snapshot with those in the earlier snapshot `held`. Returns the
    /// names whose services may differ; `None` if all names may differ. `deltas` are the steps from `held` to this snapshot.
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
        let views = Delta::services_of(deltas)
            .into_iter()
            .flat_map(|name| [held.service(name.as_str()), self.service(name.as_str())]);
        let ours = views.flatten().filter(|view| view.import.is_none());
        let names = ours.filter_map(|view| {
            Claim::new(&table.peer, &view.key.hostname, &view.namespace, view.guard())?.name.ok()
        });
        Some(names.collect())
    }

    /// Returns the reasons why a peer cannot reach services that its rules name, one sentence each.
    pub fn export_conflicts(&self, peer: &str) -> Vec<String> {
        let Some(table) = self.peer_names.table(peer) else { return Vec::new() };
        let contested = table.contested.iter().take(PROBLEMS_SHOWN).map(|name| {
            let all: Vec<&str> = table.names.get(name.as_str()).map(HostName::as_str).collect();
            let (first, others) = all.split_first().map_or(("", &[][..]), |(first, others)| (*first, others));
            let shown = others.iter().take(PROBLEMS_SHOWN).copied().collect::<Vec<_>>().join(", ");
            format!("the export rules give several services the name {name} for the peer {table}: the name leads to {first}, \
                     so the peer cannot reach {shown}")
        });
        let nameless = table.nameless.iter().take(PROBLEMS_SHOWN).map(|(service, error)| {
            format!("the peer {table} cannot reach {service}, because the name that the export rule gives the service is not \
                     legal: {error}")
        });
        let mut all: Vec<String> = contested.chain(nameless).collect();
        let more = table.contested.len().saturating_sub(PROBLEMS_SHOWN)
            + table.nameless.len().saturating_sub(PROBLEMS_SHOWN);
        if more > 0 {
            all.push(format!(
                "{more} more names of exported services for the peer {table} conflict or are not legal"
            ));
        }
        all
    }
}
