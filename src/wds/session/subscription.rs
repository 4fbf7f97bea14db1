//! The subscription of a client to the type `Address`: everything (wildcard), or the names that it asks for (on demand).
//!
//! On demand, a client waits until a response has a resource of the very name that it asked for, or has the name among the removed
//! ones. A name of the form `network/address` is of no resource: it is answered by the resources at the address and, as removed, by
//! itself, which removes nothing. A client never asks for what it has, also from an earlier stream, so that it gets all of the
//! group of each resource that it has (see [`Table::groups`]) and every change of it. Nor does it ask for the workloads of its own
//! node, and the services that those serve: calls through a gateway arrive under the name of the service.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use isthmus_ads::budget::Account;
use isthmus_ads::protocol::Overview;
use isthmus_ads::resource::Version;
use isthmus_ads::session::{Earlier, NAMES_MAX, Refusal};
use isthmus_snapshot::unread::Unread;

use super::held::{Held, compare};
use super::{Draft, NAME_COST};
use crate::render::read_alias;
use crate::table::Table;

/// The name that stands for all resources.
const ALL: &str = "*";

/// The state of the type `Address`.
pub(super) struct Subscription {
    /// The node of the client, as `cluster/node`.
    node: Arc<str>,
    wants: Wants,
    /// The names that the client asked for, which are answered by the next response.
    asked: BTreeSet<Arc<str>>,
    /// The table of the last draft.
    seen: Option<Arc<Table>>,
    /// The bytes of the account that the resources of an earlier stream use.
    earlier_cost: usize,
}

enum Wants {
    Everything(Held),
    Names(Named),
}

/// The state of a client on demand.
#[derive(Default)]
struct Named {
    /// The names that the client asked for in this stream or before.
    names: BTreeSet<Arc<str>>,
    /// The resources that the client has.
    sent: BTreeMap<Arc<str>, Version>,
    earlier: Earlier,
}

fn cost(name: &str) -> usize {
    name.len() + NAME_COST
}

impl Subscription {
    pub(super) fn new(node: Arc<str>) -> Self {
        let wants = Wants::Everything(Held::default());
        Self { node, wants, asked: BTreeSet::new(), seen: None, earlier_cost: 0 }
    }

    /// Returns the subscription, for operators.
    pub(super) fn overview(&self) -> Overview {
        let (wildcard, names, held_back) = match &self.wants {
            Wants::Everything(held) => (true, 0, held.withheld()),
            Wants::Names(named) => (false, named.names.len(), named.earlier.len()),
        };
        Overview { wildcard, names, held_back, ..Overview::default() }
    }

    /// Applies the first request.
    pub(super) fn begin(
        &mut self,
        names: &[String],
        unsubscribe: &[String],
        earlier: Earlier,
        account: &mut Account,
    ) -> Result<(), Refusal> {
        let is_all = |name: &String| name == ALL;
        self.earlier_cost = earlier.keys().map(|name| cost(name)).sum();
        account.take(self.earlier_cost)?;
        // Without any name a request is for everything, as that of clients which do not know `*`.
        let everything = (names.is_empty() && unsubscribe.is_empty()) || names.iter().any(is_all);
        if everything && !unsubscribe.iter().any(is_all) {
            self.wants = Wants::Everything(Held::of(earlier));
        } else {
            if earlier.len() > NAMES_MAX {
                return Err(Refusal::TooManyNames);
            }
            let names = earlier.keys().cloned().collect();
            self.wants = Wants::Names(Named { names, earlier, ..Named::default() });
            // The names stay, so that their bytes do.
            self.earlier_cost = 0;
        }
        self.add(names, account)
    }

    /// Applies a later request.
    pub(super) fn change(
        &mut self,
        names: &[String],
        unsubscribe: &[String],
        account: &mut Account,
    ) -> Result<(), Refusal> {
        if names.iter().any(|name| name == ALL)
            && let Wants::Names(named) = &mut self.wants
        {
            let has =
                std::mem::take(&mut named.sent).into_iter().map(|(name, version)| (name, Some(version)));
            let earlier = std::mem::take(&mut named.earlier).into_iter().chain(has).collect();
            self.wants = Wants::Everything(Held::of(earlier));
            self.seen = None;
        }
        if let Wants::Names(named) = &mut self.wants {
            for name in unsubscribe {
                if named.names.remove(name.as_str()) {
                    account.release(cost(name));
                }
                named.sent.remove(name.as_str());
                self.asked.remove(name.as_str());
            }
        }
        self.add(names, account)
    }

    fn add(&mut self, names: &[String], account: &mut Account) -> Result<(), Refusal> {
        for name in names.iter().filter(|name| *name != ALL) {
            let name: Arc<str> = name.as_str().into();
            if let Wants::Names(named) = &mut self.wants
                && !named.names.contains(&name)
            {
                if named.names.len() == NAMES_MAX {
                    return Err(Refusal::TooManyNames);
                }
                account.take(cost(&name))?;
                named.names.insert(name.clone());
            }
            if self.asked.len() == NAMES_MAX {
                return Err(Refusal::TooManyNames);
            }
            self.asked.insert(name);
        }
        Ok(())
    }

    /// Adds what the client lacks of the table.
    pub(super) fn draft(&mut self, table: &Arc<Table>, draft: &mut Draft, account: &mut Account) {
        let is_same = self.seen.as_ref().is_some_and(|seen| Arc::ptr_eq(seen, table));
        if is_same && self.asked.is_empty() {
            return;
        }
        let asked = std::mem::take(&mut self.asked);
        let has_asked = !asked.is_empty();
        let earlier = self.overview().held_back;
        let withholds = |name: &str| may_come(&table.unread, name);
        match &mut self.wants {
            Wants::Everything(held) => {
                held.draft(&table.addresses, draft, withholds);
                if held.withheld() == 0 {
                    account.release(std::mem::take(&mut self.earlier_cost));
                }
                for name in asked {
                    answer(table, &name, draft, |found, draft| {
                        draft.resources.extend(table.addresses.get(&**found).cloned());
                    });
                }
            }
            Wants::Names(named) => {
                let has = compare(&mut named.earlier, &table.addresses, draft, withholds);
                named.sent.extend(has);
                let mut wanted = named.renew(self.seen.as_deref(), table, &self.node, draft);
                for name in asked {
                    let sent = &mut named.sent;
                    answer(table, &name, draft, |found, _| {
                        // The client waits for this very resource, also if it has it.
                        if **found == *name {
                            sent.remove(&**found);
                        }
                        wanted.insert(found.clone());
                    });
                }
                for name in named.with_groups(table, wanted) {
                    let Some(resource) = table.addresses.get(&*name) else { continue };
                    if !named.earlier.contains_key(&name)
                        && named.sent.insert(name, resource.version) != Some(resource.version)
                    {
                        draft.resources.push(resource.clone());
                    }
                }
            }
        }
        if has_asked {
            // Several names may lead to one resource, and to one that has changed.
            draft.keep_once();
        }
        draft.must_answer |= !draft.removed.is_empty();
        let left = match self.seen.as_deref() {
            _ if earlier > 0 => with_address_in_namespaces(table, draft),
            Some(seen) => left_at_addresses(seen, table),
            None => BTreeSet::new(),
        };
        for name in left {
            let has = match &self.wants {
                Wants::Everything(_) => true,
                Wants::Names(named) => named.sent.contains_key(&name),
            };
            draft.again.extend(table.addresses.get(&*name).filter(|_| has).cloned());
        }
        self.seen = Some(table.clone());
    }
}

impl Named {
    /// Adds the changes of what the client has. Returns the names of the resources that the client needs since the table `seen`.
    fn renew(
        &mut self,
        seen: Option<&Table>,
        table: &Table,
        node: &Arc<str>,
        draft: &mut Draft,
    ) -> BTreeSet<Arc<str>> {
        let none = Table::default();
        let is_first = seen.is_none();
        let seen = seen.unwrap_or(&none);
        if !is_first {
            let changed =
                table.addresses.changed_since(&seen.addresses, |one, other| one.version == other.version);
            for name in changed {
                if !self.sent.contains_key(&name) {
                    continue;
                }
                match table.addresses.get(&*name) {
                    Some(resource) => {
                        self.sent.insert(name, resource.version);
                        draft.resources.push(resource.clone());
                    }
                    None => {
                        self.sent.remove(&name);
                        draft.removed.push(name);
                    }
                }
            }
        }
        let same = |one: &Arc<[Arc<str>]>, other: &Arc<[Arc<str>]>| Arc::ptr_eq(one, other) || one == other;
        let set = |all: Vec<Arc<str>>| all.into_iter().collect::<BTreeSet<_>>();
        let groups = set(table.groups.changed_since(&seen.groups, same));
        let aliases = set(table.aliases.changed_since(&seen.aliases, same));
        let mut wanted = BTreeSet::new();
        for name in &self.names {
            let mut targets = table.aliases.get(&**name).into_iter().flat_map(|targets| targets.iter());
            // Without a table before, `groups` has all groups.
            if groups.contains(name)
                || aliases.contains(name)
                || targets.any(|target| groups.contains(target))
            {
                wanted.extend(table.resolve(name));
            }
        }
        for name in groups.iter().filter(|name| self.sent.contains_key(*name)) {
            wanted.extend(table.resolve(name));
        }
        for workload in table.nodes.get(&**node).into_iter().flat_map(|names| names.iter()) {
            wanted.extend(table.serves.get(&**workload).into_iter().flat_map(|names| names.iter().cloned()));
            wanted.insert(workload.clone());
        }
        wanted
    }

    /// Adds the groups of those resources that the client does not have yet. The groups of the others are up to date.
    fn with_groups(&self, table: &Table, wanted: BTreeSet<Arc<str>>) -> BTreeSet<Arc<str>> {
        let mut open: Vec<Arc<str>> =
            wanted.iter().filter(|name| !self.sent.contains_key(*name)).cloned().collect();
        let mut all = wanted;
        while let Some(name) = open.pop() {
            for needed in table.groups.get(&*name).into_iter().flat_map(|names| names.iter()) {
                if all.insert(needed.clone()) && !self.sent.contains_key(needed) {
                    open.push(needed.clone());
                }
            }
        }
        all
    }
}

/// Returns the services at the addresses that other services have left since the table `seen`.
fn left_at_addresses(seen: &Table, table: &Table) -> BTreeSet<Arc<str>> {
    let same = |one: &Arc<[Arc<str>]>, other: &Arc<[Arc<str>]>| Arc::ptr_eq(one, other) || one == other;
    let mut left = BTreeSet::new();
    for alias in table.aliases.changed_since(&seen.aliases, same) {
        let Some(now) = table.aliases.get(&*alias) else { continue };
        let before = seen.aliases.get(&*alias).map(|names| &**names).unwrap_or_default();
        if before.iter().any(|name| service_parts(name).is_some() && !now.contains(name)) {
            left.extend(now.iter().filter(|name| service_parts(name).is_some()).cloned());
        }
    }
    left
}

/// Returns the services with an address in the namespaces of the services of a draft: for a client that has resources of an earlier
/// stream, because nothing tells which addresses its services had.
fn with_address_in_namespaces(table: &Table, draft: &Draft) -> BTreeSet<Arc<str>> {
    let drafted = draft.resources.iter().map(|resource| &resource.name).chain(&draft.removed);
    let namespaces: BTreeSet<&str> =
        drafted.filter_map(|name| service_parts(name)).map(|(namespace, _)| namespace).collect();
    let is_in =
        |name: &&Arc<str>| service_parts(name).is_some_and(|(namespace, _)| namespaces.contains(namespace));
    let all = table.aliases.iter().filter(|_| !namespaces.is_empty()).flat_map(|(_, names)| names.iter());
    all.filter(is_in).cloned().collect()
}

/// Returns the namespace and the host name if the name is of a service.
fn service_parts(name: &str) -> Option<(&str, &str)> {
    name.split_once('/').filter(|(_, hostname)| !hostname.contains('/') && read_alias(name).is_none())
}

/// Answers the question for a name: calls `add` with the names of the resources that the client needs.
fn answer(table: &Table, name: &Arc<str>, draft: &mut Draft, mut add: impl FnMut(&Arc<str>, &mut Draft)) {
    let mut found = table.resolve(name);
    if found.is_empty()
        && let Some(alias) = read_alias(name)
    {
        found = table.resolve(&alias);
    }
    found.iter().for_each(|found| add(found, draft));
    if !table.addresses.contains_key(&**name) {
        draft.removed.push(name.clone());
    }
    draft.must_answer = true;
}

/// Returns true if a registry that was not read yet may have the resource. The service of a pod is not known from its name.
fn may_come(unread: &Unread, name: &str) -> bool {
    if unread.is_empty() {
        return false;
    }
    let hostname = match name.strip_prefix("SplitHorizon/") {
        // The number of a port may be the last part.
        Some(rest) => rest.rsplit('/').find(|part| part.parse::<u16>().is_err()),
        None => service_parts(name).map(|(_, hostname)| hostname),
    };
    match hostname {
        Some(hostname) => unread.may_have(hostname) && !unread.is_changed(hostname),
        None => true,
    }
}
