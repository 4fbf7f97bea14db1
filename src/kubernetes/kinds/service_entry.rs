//! ServiceEntries: services by host name, with endpoints of their own, or with the pods and WorkloadEntries that they select.
//! `entries` finds the one that has a host, and its endpoints.

use std::net::IpAddr;
use std::sync::Arc;

use super::claimed::Claimant;
use super::service::{PortRecord, TrafficDistribution, names_viewer, protocol_named};
use super::workload_entry::{WorkloadRecord, WorkloadSpec};
use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, ip, objects, port};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;
use isthmus_model::identity::Identity;
use isthmus_model::name::HostName;
use isthmus_net::channel::cut;
use isthmus_settings::scope::AddressScope;

/// The largest number of ServiceEntries that are read.
const ENTRIES_MAX: usize = 20_000;
/// The largest number of hosts of one ServiceEntry.
const HOSTS_MAX: usize = 256;
/// The largest number of endpoints that one ServiceEntry has for all of its hosts together. Without it, one object of 1.5 MiB could have
/// a million.
const ENDPOINTS_MAX: usize = 20_000;
/// The largest number of identities that the `subjectAltNames` of one ServiceEntry give all of its hosts together.
const IDENTITIES_MAX: usize = 1_024;

objects! {
    /// `ServiceEntry` of `networking.istio.io/v1`.
    ServiceEntry { metadata: Meta, spec: EntrySpec, status: EntryStatus, }
    EntrySpec {
        hosts: Vec<String>,
        addresses: Vec<String>,
        ports: Vec<EntryPort>,
        location: String,
        resolution: String,
        endpoints: Vec<WorkloadSpec>,
        workload_selector: Option<WorkloadSelector>,
        export_to: Vec<String>,
        subject_alt_names: Vec<String>,
    }
    EntryPort { number: i64, name: String, protocol: String, target_port: i64, }
    WorkloadSelector { labels: Texts, }
    EntryStatus { addresses: Vec<EntryAddress>, }
    EntryAddress { value: String, host: String, }
}

impl Watched for ServiceEntry {
    const FACTS: Facts = Facts {
        plural: "serviceentries",
        versions: &["apis/networking.istio.io/v1"],
        is_custom: true,
        objects_max: ENTRIES_MAX,
        is_wanted: |spec| spec.service_entries || spec.destination_rules,
        is_required: |spec| spec.service_entries,
        ..Facts::CORE
    };

    /// The records are boxed, because the nodes of a B-tree are often half empty.
    type Rows = Table<ObjectKey, Box<EntryRecord>>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<Box<EntryRecord>> {
        Some(Box::new(EntryRecord::read(self, reading)))
    }

    /// Marks the hosts of the entry, and what other entries claim at its addresses.
    fn touch(touched: Touched<ObjectKey, Box<EntryRecord>>, tables: &mut Tables) {
        let Touched { key, before } = touched;
        tables.dirty.ignored = true;
        let claimant = Claimant::ServiceEntry(key.clone());
        let mut addresses = Vec::new();
        if let Some(before) = &before {
            addresses.extend(before.ips());
            before.hosts.iter().for_each(|host| tables.claims.forget_host(host, &key));
            before.ips().for_each(|ip| tables.claims.forget(ip, &claimant));
            tables.mark_hosts(&before.hosts);
        }
        let now =
            tables.service_entries.get(&key).map(|now| (now.hosts.clone(), now.ips().collect::<Vec<_>>()));
        if let Some((hosts, ips)) = now {
            hosts.iter().for_each(|host| tables.claims.add_host(host.clone(), key.clone()));
            ips.iter().for_each(|ip| tables.claims.add(*ip, claimant.clone()));
            addresses.extend(ips);
            tables.mark_hosts(&hosts);
        }
        tables.mark_claimants(addresses);
    }
}

/// How the endpoints of a ServiceEntry are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resolution {
    /// By address. Names of endpoints are not used.
    Static,
    /// By address or name. Without endpoints and selector, the host is the name.
    Dns,
    /// At any address that the caller asks for. A gateway has only what a selector adds.
    None,
}

/// A ServiceEntry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EntryRecord {
    pub(crate) created: Arc<str>,
    /// The hosts that a service can have.
    pub(crate) hosts: Arc<[HostName]>,
    /// Why one of the hosts or identities, or the whole entry, cannot be used; `None` if all can.
    pub(crate) unusable: Option<Arc<str>>,
    pub(crate) ports: Box<[PortRecord]>,
    pub(crate) resolution: Resolution,
    /// The labels of the workloads that are endpoints, in place of endpoints of its own.
    pub(crate) selector: Option<Labels>,
    pub(crate) endpoints: Box<[WorkloadRecord]>,
    /// The identities by which clients verify the endpoints, besides those of the endpoints themselves (`subjectAltNames`).
    pub(crate) identities: Box<[Identity]>,
    /// The virtual addresses, each for one host or for all.
    addresses: Box<[(Option<HostName>, IpAddr)]>,
    /// Why export rules do not apply, if so.
    pub(crate) hidden: Option<Arc<str>>,
    pub(crate) labels: Labels,
    pub(crate) distribution: Option<TrafficDistribution>,
}

impl EntryRecord {
    fn read(object: &ServiceEntry, reading: &mut Reading<'_>) -> Self {
        let ServiceEntry { metadata, spec, status } = object;
        let resolution = match spec.resolution.as_str() {
            "STATIC" => Resolution::Static,
            "DNS" | "DNS_ROUND_ROBIN" => Resolution::Dns,
            _ => Resolution::None,
        };
        let (mut hosts, mut unusable) = hosts(spec);
        if let Some(why) = unusable_whole(spec, resolution, hosts.len()) {
            (hosts, unusable) = (Vec::new(), Some(why));
        }
        let is_used = !hosts.is_empty();
        let most = IDENTITIES_MAX.checked_div(hosts.len()).unwrap_or_default();
        let names = spec.subject_alt_names.iter().take(most);
        let (identities, others): (Vec<_>, Vec<_>) =
            names.map(|name| Identity::parse(name).map_err(|_| cut(name))).partition(Result::is_ok);
        if is_used && spec.subject_alt_names.len() > most {
            unusable.get_or_insert_with(|| {
                format!("it has more than {most} subjectAltNames for each of its hosts")
            });
        }
        if let Some(name) = others.into_iter().find_map(Result::err) {
            unusable
                .get_or_insert_with(|| format!("its subjectAltNames have {name:?}, which is no SPIFFE ID"));
        }
        let own = spec.endpoints.iter().filter(|_| is_used && spec.workload_selector.is_none());
        let own = own.map(|one| WorkloadRecord::read(one, &one.labels, &metadata.namespace, reading));
        let endpoints = own.collect();
        let texts = &mut *reading.texts;
        let ports = spec.ports.iter().filter(|found| !found.protocol.eq_ignore_ascii_case("UDP"));
        let ports = ports.filter_map(|found| {
            let (number, target) = (port(found.number)?, port(found.target_port));
            Some(PortRecord {
                name: texts.text(&found.name),
                number,
                protocol: protocol_named(&found.protocol),
                target: target.or(Some(number)),
                target_name: Arc::default(),
                node_port: None,
            })
        });
        let ports = ports.collect();
        let selector = spec.workload_selector.as_ref();
        Self {
            created: texts.text(metadata.created()),
            hosts: hosts.into(),
            unusable: unusable.map(|why| texts.text(&why)),
            ports,
            resolution,
            selector: selector.map(|selector| texts.labels(&selector.labels)),
            endpoints,
            identities: identities.into_iter().flatten().collect(),
            addresses: addresses(metadata, spec, status, resolution),
            hidden: hidden(metadata, spec, &reading.spec.viewer).map(|why| texts.text(&why)),
            labels: texts.labels(&metadata.labels),
            distribution: TrafficDistribution::of_annotation(metadata),
        }
    }

    /// Returns the largest number of workloads that the selector adds to each host.
    pub(crate) fn selected_max(&self) -> usize {
        ENDPOINTS_MAX / self.hosts.len().max(1)
    }

    /// Returns the virtual addresses of a host.
    pub(crate) fn addresses_of(&self, host: &HostName) -> impl Iterator<Item = IpAddr> {
        let is_of = move |of: &Option<HostName>| of.as_ref().is_none_or(|of| of == host);
        self.addresses.iter().filter(move |(of, _)| is_of(of)).map(|(_, ip)| *ip)
    }

    /// Returns true if one of the virtual addresses is this one.
    pub(crate) fn has_address(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|(_, own)| *own == ip)
    }

    /// Returns the virtual addresses and those of the endpoints.
    fn ips(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().map(|(_, ip)| *ip).chain(self.endpoints.iter().filter_map(WorkloadRecord::ip))
    }
}

/// Returns the hosts that a service can have, and why one of the others cannot be one.
fn hosts(spec: &EntrySpec) -> (Vec<HostName>, Option<String>) {
    let (mut hosts, mut unusable) = (Vec::new(), None);
    if spec.hosts.len() > HOSTS_MAX {
        unusable = Some(format!("it has {} hosts, and {HOSTS_MAX} are read", spec.hosts.len()));
    }
    for text in spec.hosts.iter().take(HOSTS_MAX) {
        match HostName::parse(text) {
            Ok(host) if !hosts.contains(&host) => hosts.push(host),
            Ok(_) => {}
            Err(_) if text.starts_with('*') => unusable = Some(format!("the host {text} has a wildcard")),
            Err(error) => unusable = Some(format!("{text:?} is no host name: {error}")),
        }
    }
    (hosts, unusable)
}

/// Returns why no host of an entry can be used, if so.
fn unusable_whole(spec: &EntrySpec, resolution: Resolution, hosts: usize) -> Option<String> {
    let endpoints = hosts.saturating_mul(spec.endpoints.len());
    if endpoints > ENDPOINTS_MAX {
        return Some(format!(
            "its hosts have {endpoints} endpoints together, and at most {ENDPOINTS_MAX} are read"
        ));
    }
    let has_none = spec.endpoints.is_empty() && spec.workload_selector.is_none();
    (resolution == Resolution::None && has_none && hosts > 0).then(|| {
        let written = if spec.resolution.is_empty() { "NONE" } else { spec.resolution.as_str() };
        format!("its resolution {written} has no endpoints")
    })
}

/// Returns the virtual addresses of an entry: those that it has, or else those that Istio's controller has allocated. A network of more
/// than one address is none.
fn addresses(
    metadata: &Meta,
    spec: &EntrySpec,
    status: &EntryStatus,
    resolution: Resolution,
) -> Box<[(Option<HostName>, IpAddr)]> {
    let is_legal = |ip: &IpAddr| AddressScope::Public.allows(*ip);
    if !spec.addresses.is_empty() {
        let single = spec.addresses.iter().filter_map(|text| match text.split_once('/') {
            None => ip(text),
            Some((address, bits)) => ip(address).filter(|ip| bits == if ip.is_ipv4() { "32" } else { "128" }),
        });
        return single.filter(is_legal).map(|ip| (None, ip)).collect();
    }
    let refused = metadata.labels.get("networking.istio.io/enable-autoallocate-ip");
    if resolution == Resolution::None || refused.is_some_and(|text| text.eq_ignore_ascii_case("false")) {
        return Box::default();
    }
    let allocated = status.addresses.iter().filter_map(|found| {
        Some((Some(HostName::parse(&found.host).ok()?), ip(&found.value).filter(is_legal)?))
    });
    allocated.collect()
}

/// Returns why export rules do not apply to an entry, if so: Istio's gateway has no services outside of the mesh, and none that its
/// namespace does not see.
fn hidden(metadata: &Meta, spec: &EntrySpec, viewer: &str) -> Option<String> {
    let (namespace, name) = (&metadata.namespace, &metadata.name);
    let list = &spec.export_to;
    let names = || list.iter().map(String::as_str);
    let is_public = list.is_empty() || names().any(|one| one == "*");
    let is_none = names().any(|one| one == "~");
    if !is_public && (is_none || !names_viewer(names(), namespace, viewer)) {
        return Some(format!("exportTo {:?} of ServiceEntry {namespace}/{name}", list.join(",")));
    }
    // The default is `MESH_EXTERNAL`.
    let is_external = spec.location != "MESH_INTERNAL";
    is_external.then(|| format!("location MESH_EXTERNAL of ServiceEntry {namespace}/{name}"))
}
