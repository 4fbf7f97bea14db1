//! Makes the registry items of hosts that only ServiceEntries have, and counts the entries that have no effect.

use std::sync::Arc;

use super::super::claims::Owners;
use super::super::endpoints::{Made, NODE_LABEL, Sources};
use super::super::entries::{identities, made_of_entries, ports, unusable};
use super::super::kinds::Tables;
use super::super::kinds::service_entry::EntryRecord;
use super::super::table::{ObjectKey, Rows as _};
use super::Index;
use super::items::{Ruled, ServiceItems, ruled, service_port};
use super::waypoints::service_key;
use isthmus_model::load_balancing::{LoadBalancing, ServiceFamilies};
use isthmus_model::name::HostName;
use isthmus_model::service::{Service, ServiceKey};
use isthmus_registry::change::{Ignored, Item, Mark, MarkKey, MarkKind};

impl Index {
    /// Returns the items of a host that no Service has: the service that its ServiceEntries define, and its export marks.
    pub(super) fn items_of_entries(&mut self, unit: &ObjectKey) -> ServiceItems {
        let tables = &self.tables;
        let host = match &*unit.namespace {
            "" => HostName::parse(&unit.name).ok(),
            _ => service_key(tables, unit).map(|key| key.hostname),
        };
        let Some(host) = host else { return ServiceItems::default() };
        let entries = tables.entries_of(&host);
        let Some(&oldest) = entries.first() else { return ServiceItems::default() };
        let (key, entry) = oldest;
        let own_ports = ports(&entries);
        if own_ports.is_empty() {
            return ServiceItems::default();
        }
        let named = ObjectKey { namespace: key.namespace.clone(), name: unit.name.clone() };
        let Ruled { subsets, tls } = ruled(tables, &named, &host);
        let network = tables.network();
        let has_subset_of_node = subsets.values().any(|labels| labels.get(NODE_LABEL).is_some());
        let sources = Sources { tables, network: &network, has_subset_of_node };
        let made = made_of_entries(&sources, &host, (&entries, &own_ports), &tls, &mut self.texts);
        let Made { endpoints, withheld, .. } = made;
        let service = Service {
            key: ServiceKey { namespace: key.namespace.clone(), hostname: host.clone() },
            addresses: tables.addresses_of(oldest, &host),
            ports: own_ports.iter().map(service_port).collect(),
            subsets,
            waypoint: None,
            endpoints: endpoints.into(),
            exported_as: None,
            import: None,
            load_balancing: load_balancing(tables, oldest),
            families: ServiceFamilies::default(),
            identities: identities(&entries),
            demand: Box::default(),
            withheld: withheld.iter().map(|(why, count)| (*why, *count)).collect(),
        };
        let marks = marks(tables, &service.key, key, entry);
        if !withheld.is_empty() {
            self.withheld.insert(unit.clone(), withheld);
        }
        let mut made = ServiceItems::default();
        made.items.push(Item::Service(Arc::new(service)));
        made.items.extend(marks.into_iter().map(Item::Mark));
        made
    }

    /// Counts the objects that have no effect again, if they may have changed.
    pub(super) fn renew_ignored(&mut self) {
        if std::mem::take(&mut self.tables.dirty.ignored) {
            self.ignored = ignored(&self.tables);
        }
    }
}

/// Returns how callers choose among the endpoints of a host.
fn load_balancing(tables: &Tables, (key, entry): (&ObjectKey, &EntryRecord)) -> Option<Box<LoadBalancing>> {
    let distribution = entry.distribution.or_else(|| tables.distribution_of(&key.namespace))?;
    let choice = distribution.load_balancing();
    (choice != LoadBalancing::default()).then(|| choice.into())
}

/// Returns the marks of a host: the labels of its oldest ServiceEntry and of the namespace, or what hides the entry; and the setting of
/// the mesh that keeps the host to its cluster.
fn marks(tables: &Tables, service: &ServiceKey, key: &ObjectKey, entry: &EntryRecord) -> Vec<Mark> {
    let mark = |kind, object: Arc<str>, labels| {
        let key = MarkKey { service: service.clone(), object };
        Mark { key, kind, labels, export: None }
    };
    let mut marks = Vec::new();
    match &entry.hidden {
        Some(object) => marks.push(mark(MarkKind::Hidden, object.clone(), Default::default())),
        None => {
            let namespace = tables.labels_of(&key.namespace);
            if !entry.labels.is_empty() {
                let object = format!("ServiceEntry {key}").into();
                marks.push(mark(MarkKind::Service, object, entry.labels.clone()));
            }
            if !namespace.is_empty() {
                let object = format!("Namespace {}", key.namespace).into();
                marks.push(mark(MarkKind::Namespace, object, namespace.clone()));
            }
        }
    }
    let local = tables.local_hosts().local(service.hostname.as_str());
    marks.extend(local.map(|host| mark(MarkKind::ClusterLocal, host.clone(), Default::default())));
    marks
}

/// Returns the numbers of objects that have no effect, by kind, each with its first object.
fn ignored(tables: &Tables) -> Vec<Ignored> {
    let mut all = Vec::new();
    if !tables.spec.service_entries {
        let why = "`serviceEntries` of the registry is false";
        let mut off = |kind, count, first: Option<&ObjectKey>| {
            let first = first.map(|key| format!("{key}: {why}"));
            all.extend(first.map(|first| Ignored { kind, count, first }));
        };
        let (services, workloads) = (&tables.service_entries, &tables.workload_entries);
        off("ServiceEntry", services.len(), services.iter().next().map(|(key, _)| key));
        off("WorkloadEntry", workloads.len(), workloads.iter().next().map(|(key, _)| key));
        return all;
    }
    let mut owners = Owners::new();
    let of_services = tables.service_entries.iter().filter_map(|(key, entry)| {
        let why = entry.unusable.as_ref().map(ToString::to_string);
        Some(format!("{key}: {}", why.or_else(|| tables.refused_host(key, entry, &mut owners))?))
    });
    let of_workloads = tables.workload_entries.iter();
    let of_workloads =
        of_workloads.filter_map(|(key, workload)| Some(format!("{key}: {}", unusable(tables, workload)?)));
    all.extend(counted("ServiceEntry", of_services));
    all.extend(counted("WorkloadEntry", of_workloads));
    all
}

fn counted(kind: &'static str, mut lines: impl Iterator<Item = String>) -> Option<Ignored> {
    let first = lines.next()?;
    Some(Ignored { kind, count: lines.count() + 1, first })
}
