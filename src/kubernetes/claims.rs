//! The host names and addresses that ServiceEntries and WorkloadEntries claim, and the rules by which a claim holds: whoever may write in
//! one namespace has no host and no address of another one.
//!
//! - A host `NAME.NAMESPACE.svc.DOMAIN` is for entries of that namespace alone, and names in the cluster set are for ServiceExports. Any
//!   other host is for the namespace of its oldest ServiceEntry.
//! - The address of a pod or of a Service is for entries of the same namespace alone, as an endpoint. As a virtual address it is for none;
//!   another one is for the namespace of the oldest ServiceEntry that has it.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::kinds::Tables;
use super::kinds::claimed::Claimant;
use super::kinds::service::ServiceClass;
use super::kinds::service_entry::EntryRecord;
use super::table::ObjectKey;
use isthmus_model::endpoint::Labels;
use isthmus_model::name::HostName;
use isthmus_snapshot::clusterset::DOMAIN;

/// The oldest ServiceEntry of each host, as far as it was looked for.
pub(super) type Owners<'t> = BTreeMap<&'t HostName, Option<&'t ObjectKey>>;

/// Returns true if a selector selects a workload with these labels.
fn selects(selector: &Option<Labels>, labels: &Labels) -> bool {
    selector.as_ref().is_some_and(|wanted| labels.has_all(wanted))
}

/// The place of a host among the names of a cluster.
enum Place<'a> {
    /// A name of the cluster set.
    ClusterSet,
    /// A name under those of a namespace's Services: the labels before the namespace, and the namespace.
    Namespace(&'a str, &'a str),
    /// Any other name.
    Elsewhere,
}

impl Tables {
    fn place_of<'a>(&self, host: &'a HostName) -> Place<'a> {
        let is_below = |suffix: &str| {
            host.as_str().strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        if is_below(DOMAIN) {
            return Place::ClusterSet;
        }
        let domain = self.spec.cluster_domain.as_str();
        let rest = host.as_str().strip_suffix(domain).and_then(|rest| rest.strip_suffix(".svc."));
        match rest {
            None => Place::Elsewhere,
            Some(rest) => {
                let (name, namespace) = rest.rsplit_once('.').unwrap_or(("", rest));
                Place::Namespace(name, namespace)
            }
        }
    }

    /// Returns the key under which the services of a host are made: that of the Service whose host it is, or else one without a
    /// namespace.
    pub(super) fn unit_of(&self, host: &HostName) -> ObjectKey {
        let (namespace, name) = match self.place_of(host) {
            Place::Namespace(name, namespace) if !name.is_empty() && !name.contains('.') => (namespace, name),
            Place::ClusterSet | Place::Namespace(..) | Place::Elsewhere => ("", host.as_str()),
        };
        ObjectKey { namespace: namespace.into(), name: name.into() }
    }

    /// Returns the ServiceEntries that have a host, oldest first, all of one namespace.
    pub(super) fn entries_of(&self, host: &HostName) -> Vec<(&ObjectKey, &EntryRecord)> {
        let mut all: Vec<_> = self.candidates_of(host).collect();
        all.sort_by_key(|(key, entry)| (&entry.created, *key));
        let Some((owner, _)) = all.first().copied() else { return all };
        all.retain(|(key, _)| key.namespace == owner.namespace);
        all
    }

    /// Returns the ServiceEntries that may have a host, in no particular order.
    fn candidates_of(&self, host: &HostName) -> impl Iterator<Item = (&ObjectKey, &EntryRecord)> {
        let keys = self.claims.of_host(host).filter(|_| self.spec.service_entries);
        let keys = keys.filter(|key| self.refusal(key, host).is_none());
        keys.filter_map(|key| Some((key, &**self.service_entries.get(key)?)))
    }

    /// Returns why a ServiceEntry may not have a host, whoever else has it; `None` if it may.
    fn refusal(&self, entry: &ObjectKey, host: &HostName) -> Option<String> {
        let namespace = &entry.namespace;
        if !self.spec.namespaces.takes(namespace, self.labels_of(namespace)) {
            return Some(format!("the namespace {namespace} is not read"));
        }
        match self.place_of(host) {
            Place::Elsewhere => None,
            Place::ClusterSet => Some(format!("the host {host} is for ServiceExports")),
            Place::Namespace(_, of) if of != &**namespace => {
                Some(format!("the host {host} is for the namespace {of}"))
            }
            Place::Namespace(name, _) => {
                let (of_pod, name) = name.rsplit_once('.').unwrap_or(("", name));
                let service = ObjectKey { namespace: namespace.clone(), name: name.into() };
                let class = self.services.get(&service)?.class;
                if !of_pod.is_empty() {
                    return Some(format!("the host {host} is for pods of the Service {service}"));
                }
                (class == ServiceClass::ExternalName)
                    .then(|| format!("the host {host} is that of the Service {service} of type ExternalName"))
            }
        }
    }

    /// Returns why a ServiceEntry does not have one of its hosts; `None` if it has all of them. `owners` are remembered between calls.
    pub(super) fn refused_host<'t>(
        &'t self,
        entry: &ObjectKey,
        record: &'t EntryRecord,
        owners: &mut Owners<'t>,
    ) -> Option<String> {
        record.hosts.iter().find_map(|host| {
            self.refusal(entry, host).or_else(|| {
                let owner = owners.entry(host).or_insert_with(|| {
                    let oldest = self.candidates_of(host).min_by_key(|(key, entry)| (&entry.created, *key));
                    oldest.map(|(key, _)| key)
                });
                let owner = (*owner)?;
                let is_others = owner.namespace != entry.namespace;
                is_others.then(|| format!("the host {host} is that of the older ServiceEntry {owner}"))
            })
        })
    }

    /// Returns the virtual addresses that a ServiceEntry has for a host.
    pub(super) fn addresses_of(
        &self,
        (key, entry): (&ObjectKey, &EntryRecord),
        host: &HostName,
    ) -> Vec<IpAddr> {
        let is_free =
            |ip: &IpAddr| self.claims.services_at(*ip).next().is_none() && self.pods.at(*ip).next().is_none();
        let has = |ip: &IpAddr| {
            let mut others = self.claims.at(*ip);
            others.all(|claimant| {
                let Claimant::ServiceEntry(other) = claimant else { return true };
                let Some(record) = self.service_entries.get(other).filter(|record| record.has_address(*ip))
                else {
                    return true;
                };
                other.namespace == key.namespace || (&entry.created, key) < (&record.created, other)
            })
        };
        entry.addresses_of(host).filter(is_free).filter(has).collect()
    }

    /// Returns true if entries of a namespace may have an endpoint at this address.
    pub(super) fn may_lead_to(&self, namespace: &str, ip: IpAddr) -> bool {
        let mut pods = self.pods.at(ip).peekable();
        let is_of_pods = pods.peek().is_none() || pods.any(|pod| *pod.template.namespace == *namespace);
        let mut services = self.claims.services_at(ip).peekable();
        let is_of_services =
            services.peek().is_none() || services.any(|service| *service.namespace == *namespace);
        is_of_pods && is_of_services
    }

    /// Marks the services of these hosts.
    pub(super) fn mark_hosts(&mut self, hosts: &[HostName]) {
        for host in hosts.iter().filter(|_| self.spec.service_entries) {
            let unit = self.unit_of(host);
            self.dirty.services.insert(unit);
        }
    }

    /// Marks the services of a namespace's ServiceEntries.
    pub(super) fn mark_entries_of(&mut self, namespace: &Arc<str>) {
        let hosts = self.service_entries.inside(namespace).flat_map(|(_, entry)| entry.hosts.iter());
        let hosts: Vec<HostName> = hosts.cloned().collect();
        self.dirty.ignored |= !hosts.is_empty();
        self.mark_hosts(&hosts);
    }

    /// Marks the services that have WorkloadEntries with these labels among their endpoints.
    pub(super) fn mark_selecting(&mut self, namespace: &Arc<str>, labels: &Labels) {
        if !self.spec.service_entries {
            return;
        }
        let services =
            self.services.inside(namespace).filter(|(_, service)| selects(&service.selector, labels));
        self.dirty.services.extend(services.map(|(key, _)| key.clone()));
        self.mark_selecting_pods(namespace, labels);
    }

    /// Marks the services of ServiceEntries that have pods with these labels among their endpoints.
    pub(super) fn mark_selecting_pods(&mut self, namespace: &Arc<str>, labels: &Labels) {
        let entries =
            self.service_entries.inside(namespace).filter(|(_, entry)| selects(&entry.selector, labels));
        let hosts: Vec<HostName> = entries.flat_map(|(_, entry)| entry.hosts.iter()).cloned().collect();
        self.mark_hosts(&hosts);
    }

    /// Marks the services of entries that claim one of these addresses, because others have it, or have it no longer.
    pub(super) fn mark_claimants(&mut self, addresses: impl IntoIterator<Item = IpAddr>) {
        let claimants = addresses.into_iter().flat_map(|ip| self.claims.at(ip));
        let claimants: BTreeSet<Claimant> = claimants.cloned().collect();
        for claimant in claimants {
            match claimant {
                Claimant::ServiceEntry(key) => {
                    let hosts = self.service_entries.get(&key).map(|entry| entry.hosts.clone());
                    self.mark_hosts(&hosts.unwrap_or_default());
                }
                Claimant::WorkloadEntry(key) => {
                    let record = self.workload_entries.get(&key);
                    let labels = record.map(|record| record.template.labels.clone()).unwrap_or_default();
                    self.mark_selecting(&key.namespace, &labels);
                }
            }
        }
    }
}
