//! Makes endpoints from ServiceEntries and WorkloadEntries, as istiod does: the endpoints that a ServiceEntry has or selects, and the
//! WorkloadEntries that a Service selects beside its pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::endpoints::{Instance, Made, Sources, finished, of_slices};
use super::interner::Interner;
use super::kinds::Tables;
use super::kinds::pod::PodRecord;
use super::kinds::service::{PortRecord, ServiceRecord};
use super::kinds::service_entry::{EntryRecord, Resolution};
use super::kinds::workload_entry::WorkloadRecord;
use super::mutual_tls::ServiceTls;
use super::table::ObjectKey;
use isthmus_model::address::Host;
use isthmus_model::endpoint::Labels;
use isthmus_model::identity::Identity;
use isthmus_model::name::HostName;
use isthmus_model::service::Withheld;

/// The use of endpoints whose address is a host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Resolve,
    LeaveOut,
}

/// Makes the endpoints of a Service: those of its slices, and those that entries add.
pub(super) fn made(
    sources: &Sources<'_>,
    (key, host): (&ObjectKey, &HostName),
    service: &ServiceRecord,
    tls: &ServiceTls<'_>,
    texts: &mut Interner,
) -> Made {
    let (tables, mut made) = (sources.tables, Made::default());
    let mut instances = of_slices(tables, key, &mut made);
    add_selected_by_service(tables, key, service, &mut instances, &mut made);
    let entries = tables.entries_of(host);
    add_of_host(tables, (host, Names::LeaveOut), &entries, &mut instances, &mut made);
    finished(sources, instances, (&service.ports, service.prefers_v6, tls), texts, made)
}

/// Makes the endpoints of a host that only ServiceEntries have, with these ports.
pub(super) fn made_of_entries(
    sources: &Sources<'_>,
    host: &HostName,
    (entries, ports): (&[(&ObjectKey, &EntryRecord)], &[PortRecord]),
    tls: &ServiceTls<'_>,
    texts: &mut Interner,
) -> Made {
    let is_dns = entries.first().is_some_and(|(_, entry)| entry.resolution == Resolution::Dns);
    let names = if is_dns { Names::Resolve } else { Names::LeaveOut };
    let (mut made, mut instances) = (Made::default(), Vec::new());
    add_of_host(sources.tables, (host, names), entries, &mut instances, &mut made);
    finished(sources, instances, (ports, false, tls), texts, made)
}

/// Returns the ports of a host: those of its ServiceEntries, oldest first. Of two with one name or number the first counts.
pub(super) fn ports(entries: &[(&ObjectKey, &EntryRecord)]) -> Vec<PortRecord> {
    let mut ports: Vec<PortRecord> = Vec::new();
    for port in entries.iter().flat_map(|(_, entry)| &entry.ports) {
        if ports.iter().all(|known| known.name != port.name && known.number != port.number) {
            ports.push(port.clone());
        }
    }
    ports
}

/// Returns the identities by which clients verify the endpoints of a host, besides those of the endpoints themselves.
pub(super) fn identities(entries: &[(&ObjectKey, &EntryRecord)]) -> Box<[Identity]> {
    let all: BTreeSet<&Identity> = entries.iter().flat_map(|(_, entry)| &entry.identities).collect();
    all.into_iter().cloned().collect()
}

/// Adds the WorkloadEntries that a Service selects.
fn add_selected_by_service<'a>(
    tables: &'a Tables,
    key: &'a ObjectKey,
    service: &'a ServiceRecord,
    instances: &mut Vec<Instance<'a>>,
    made: &mut Made,
) {
    let Some(selector) = &service.selector else { return };
    for workload in selected(tables, &key.namespace, selector).filter(|workload| !workload.is_named()) {
        let own = service.ports.iter().filter_map(|port| Some((&*port.name, of_service(port, workload)?)));
        add(tables, workload, own.collect(), instances, made);
    }
}

/// Returns the port on which a WorkloadEntry listens for a port of a Service; `None` if it does not have the named port.
fn of_service(port: &PortRecord, workload: &WorkloadRecord) -> Option<u16> {
    let own = |name: &Arc<str>| workload.ports.get(name).copied();
    match port.target {
        Some(number) => Some(own(&port.name).unwrap_or(number)),
        None => own(&port.target_name),
    }
}

/// Adds the endpoints that ServiceEntries have for a host.
fn add_of_host<'a>(
    tables: &'a Tables,
    (host, names): (&'a HostName, Names),
    entries: &[(&'a ObjectKey, &'a EntryRecord)],
    instances: &mut Vec<Instance<'a>>,
    made: &mut Made,
) {
    for (key, entry) in entries {
        let listens = |named: &dyn Fn(&str) -> Option<u16>| -> BTreeMap<&'a str, u16> {
            let own = entry
                .ports
                .iter()
                .map(|port| (&*port.name, named(&port.name).or(port.target).unwrap_or(port.number)));
            own.collect()
        };
        let mut take = |workload: &'a WorkloadRecord| {
            let is_taken = names == Names::Resolve || !workload.is_named();
            if is_taken {
                let own = listens(&|name| workload.ports.get(name).copied());
                add(tables, workload, own, instances, made);
            }
        };
        let Some(selector) = &entry.selector else {
            entry.endpoints.iter().for_each(take);
            if entry.endpoints.is_empty() && entry.resolution == Resolution::Dns && names == Names::Resolve {
                instances.push(Instance::of_name(host, listens(&|_| None)));
            }
            continue;
        };
        let most = entry.selected_max();
        selected(tables, &key.namespace, selector).take(most).for_each(&mut take);
        for pod in pods(tables, &key.namespace, selector).take(most) {
            let own = listens(&|name| pod.template.ports.get(name).copied());
            instances.extend(pod.template.selectable.map(|health| Instance::of_selected(pod, health, own)));
        }
    }
}

/// Returns the WorkloadEntries of a namespace with these labels.
fn selected<'a>(
    tables: &'a Tables,
    namespace: &'a Arc<str>,
    selector: &'a Labels,
) -> impl Iterator<Item = &'a WorkloadRecord> {
    let all = tables.workload_entries.inside(namespace).map(|(_, workload)| &**workload);
    all.filter(move |workload| workload.template.labels.has_all(selector))
}

/// Returns the pods of a namespace with these labels that have an address.
fn pods<'a>(
    tables: &'a Tables,
    namespace: &'a Arc<str>,
    selector: &'a Labels,
) -> impl Iterator<Item = &'a PodRecord> {
    let all = tables.pods.inside(namespace).filter(|pod| !pod.addresses.as_slice().is_empty());
    all.filter(move |pod| pod.labels().has_all(selector))
}

/// Adds a workload with its own ports, unless its address is that of others.
fn add<'a>(
    tables: &Tables,
    workload: &'a WorkloadRecord,
    ports: BTreeMap<&'a str, u16>,
    instances: &mut Vec<Instance<'a>>,
    made: &mut Made,
) {
    if unusable(tables, workload).is_some() {
        return;
    }
    match workload.ip() {
        Some(ip) if !tables.may_lead_to(&workload.template.namespace, ip) => {
            *made.withheld.entry(Withheld::Claimed).or_default() += 1;
        }
        _ => instances.push(Instance::of_workload(workload, ports)),
    }
}

/// Returns why a workload is no endpoint of any service, if so.
pub(super) fn unusable(tables: &Tables, workload: &WorkloadRecord) -> Option<&'static str> {
    let network = workload.template.network.as_ref();
    match &workload.host {
        None => Some("its address is neither an IP address nor a host name"),
        Some(Host::Ips(_)) if network.is_none_or(|network| *network == tables.network()) => {
            Some("it has no address, and is not on another network")
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests;
