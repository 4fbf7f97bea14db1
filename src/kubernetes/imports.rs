//! Writes a ServiceImport for each service of the cluster set (KEP-1645), in the namespace of its name. Only one replica writes at a
//! time: the holder of a Lease. Only imports with the label [`MANAGED_BY`] are changed or removed; an import of another program
//! stays as it is, and none is written beside it. The same replica writes the EndpointSlices of the imports (`import_slices`), if the
//! registry writes them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::client::{Client, Fault};
use super::import_slices::{self, Place};
use super::index::items::alias;
use super::kinds::imported_slice::{ImportedSlice, SliceContent};
use super::kinds::service_import::{ImportContent, MANAGED_BY, ServiceImport};
use super::lease::{Lease, RENEW_EVERY};
use super::objects::Texts;
use super::own_objects::{OwnObjects, There, Wanted};
use super::table::ObjectKey;
use super::writer::Turns;
use super::writing::{Duty, Lack, Writing};
use isthmus_aggregator::spec::kubernetes::Knows;
use isthmus_model::endpoint::Labels;
use isthmus_model::place::{ClusterId, Network};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;
use isthmus_world::{LaterReader, Reader};

/// The writes of the slices of imports, and their right.
const SLICES: Duty = Duty {
    subject: "EndpointSlices of ServiceImports",
    grant: "kubernetes.serviceImports.slices",
    lack: Lack::Problem,
};
/// The prefix of the names of peers among those of clusters. A slash cannot be in a DNS label, which these names are.
const PEER: (&str, &str) = ("peer/", "peer-");

/// The ServiceImports and the namespaces of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Imports {
    /// True if the cluster has the kind, and all imports are known.
    pub(super) is_known: bool,
    /// The namespaces that exist and are read.
    pub(super) namespaces: BTreeSet<Arc<str>>,
    /// The imports in these namespaces.
    pub(super) objects: There<ImportContent>,
    /// The slices of imports in these namespaces; `None`: this registry writes none.
    pub(super) slices: Option<There<SliceContent>>,
    /// The network of the cluster.
    pub(super) network: Network,
}

/// Writes ServiceImports and their slices.
pub(super) struct ImportWriter {
    knows: Knows,
    cluster: ClusterId,
    world: LaterReader,
    imports: OwnObjects<ServiceImport>,
    slices: OwnObjects<ImportedSlice>,
    /// The slices that the cluster should have, after the generation of the snapshot and the objects from which they were made. This
    /// visits all endpoints of the cluster set, and so it is not done at rest.
    made: Option<(u64, Arc<Imports>, Wanted<SliceContent>)>,
}

impl ImportWriter {
    pub(super) fn new(client: Arc<Client>, knows: Knows, (cluster, world): (ClusterId, LaterReader)) -> Self {
        Self {
            knows,
            cluster,
            world,
            imports: OwnObjects::new(client.clone(), Self::DUTY),
            slices: OwnObjects::new(client, &SLICES),
            made: None,
        }
    }
}

impl Turns for ImportWriter {
    type Objects = Imports;
    const DUTY: &'static Duty =
        &Duty { subject: "ServiceImports", grant: "kubernetes.serviceImports.write", lack: Lack::Problem };

    fn lease(&self) -> String {
        "isthmus-service-imports".to_owned()
    }

    async fn turn(&mut self, there: &Arc<Imports>, lease: &mut Lease) -> Result<Duration, Fault> {
        let Some(snapshot) = self.world.get().map(Reader::latest).filter(|_| there.is_known) else {
            lease.let_go();
            return Ok(RENEW_EVERY);
        };
        let wanted = wanted(&snapshot, &self.cluster, &there.namespaces);
        let is_none_there = there.objects.values().all(Option::is_none)
            && there.slices.as_ref().is_none_or(|slices| slices.is_empty());
        if wanted.is_empty() && is_none_there {
            lease.let_go();
            return Ok(RENEW_EVERY);
        }
        lease.renew().await?;
        if !lease.is_held() {
            self.imports.clear();
            self.slices.clear();
            self.made = None;
            return Ok(RENEW_EVERY);
        }
        let may_be_unread =
            |key: &ObjectKey| alias(key).is_some_and(|name| snapshot.unread.may_have(name.as_str()));
        let known = (self.knows, &self.cluster);
        let is_held_back = |key: &ObjectKey, has: &ImportContent, wanted: Option<&ImportContent>| {
            loses(has, wanted, may_be_unread(key), known)
        };
        self.imports.write(&wanted, &there.objects, is_held_back).await?;
        let Some(slices) = &there.slices else { return Ok(RENEW_EVERY) };
        let made = self
            .made
            .take()
            .filter(|(generation, of, _)| *generation == snapshot.generation && Arc::ptr_eq(of, there));
        let make = || {
            let place = Place { network: &there.network, imports: &there.objects };
            (snapshot.generation, there.clone(), import_slices::wanted(&snapshot, &place))
        };
        let (_, _, wanted) = &*self.made.insert(made.unwrap_or_else(make));
        let is_held_back = |key: &ObjectKey, has: &SliceContent, _: Option<&SliceContent>| {
            let service = ObjectKey { namespace: key.namespace.clone(), name: has.service.as_str().into() };
            may_be_unread(&service)
                || (self.knows == Knows::OwnCluster && has.cluster != self.cluster.as_str())
        };
        self.slices.write(wanted, slices, is_held_back).await?;
        Ok(RENEW_EVERY)
    }

    fn result(&self) -> Writing {
        self.imports.result().or(self.slices.result())
    }
}

/// Returns the imports for the services of the cluster set whose namespaces exist.
fn wanted(
    snapshot: &Snapshot,
    cluster: &ClusterId,
    namespaces: &BTreeSet<Arc<str>>,
) -> Wanted<ImportContent> {
    let here = snapshot.cluster_set().filter_map(|service| {
        let namespace = namespaces.get(service.namespace)?.clone();
        let key = ObjectKey { namespace, name: service.name.into() };
        Some((key, Arc::new(content(&service, &service.addresses_in(snapshot, cluster)))))
    });
    here.collect()
}

/// Returns the content of the import of a service, which has these addresses in the import's cluster.
fn content(service: &ClusterSetService<'_>, addresses: &[IpAddr]) -> ImportContent {
    let cluster = |cluster: &&ClusterId| match cluster.as_str().strip_prefix(PEER.0) {
        Some(peer) => format!("{}{peer}", PEER.1),
        None => cluster.as_str().to_owned(),
    };
    let export = service.oldest;
    let texts = |texts: &Labels| -> Texts {
        let others = texts.iter().filter(|(name, _)| &***name != MANAGED_BY.0);
        others.map(|(name, value)| (name.to_string(), value.to_string())).collect()
    };
    let is_headless = export.is_some_and(|export| export.is_headless);
    let families = export.map(|export| &*export.ip_families).unwrap_or_default();
    let families: Vec<&str> = families.split(", ").filter(|name| !name.is_empty()).collect();
    ImportContent {
        is_headless,
        ips: if is_headless { Vec::new() } else { ips(addresses, &families) },
        ip_families: families.into_iter().map(str::to_owned).collect(),
        ports: service.ports.clone(),
        session_affinity: export.map_or("None", |export| &export.session_affinity).to_owned(),
        session_seconds: export.map_or(0, |export| export.session_seconds).into(),
        traffic_distribution: export
            .map(|export| export.traffic_distribution.to_string())
            .unwrap_or_default(),
        internal_traffic_policy: if is_headless { String::new() } else { "Cluster".to_owned() },
        labels: export.map(|export| texts(&export.labels)).unwrap_or_default(),
        annotations: export.map(|export| texts(&export.annotations)).unwrap_or_default(),
        clusters: service.clusters.iter().map(cluster).collect(),
    }
}

/// Returns the `ips` of an import: an address of each family, in the order of `ipFamilies`.
fn ips(addresses: &[IpAddr], families: &[&str]) -> Vec<String> {
    let first = |family: &str| addresses.iter().find(|ip| ip.is_ipv6() == (family == "IPv6"));
    let families = if families.is_empty() { &["IPv4", "IPv6"] } else { families };
    families.iter().filter_map(|family| first(family)).map(ToString::to_string).collect()
}

/// Returns true if an import would lose a cluster that may still export the service: this replica has not read the cluster yet, or
/// never reads it, and another replica does.
fn loses(
    has: &ImportContent,
    wanted: Option<&ImportContent>,
    may_be_unread: bool,
    (knows, own): (Knows, &ClusterId),
) -> bool {
    let mut lost =
        has.clusters.iter().filter(|name| wanted.is_none_or(|wanted| !wanted.clusters.contains(*name)));
    if may_be_unread {
        return wanted.is_none() || lost.next().is_some();
    }
    knows == Knows::OwnCluster && lost.any(|name| name != own.as_str() && !name.starts_with(PEER.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(clusters: &[&str]) -> ImportContent {
        let clusters = clusters.iter().map(|name| (*name).to_owned()).collect();
        ImportContent { clusters, ..ImportContent::default() }
    }

    #[test]
    fn a_cluster_that_this_replica_does_not_know_is_not_taken_from_an_import() {
        let own = ClusterId::new("east");
        let several = |has: &[&str], wanted: Option<&[&str]>, may_be_unread| {
            let wanted = wanted.map(of);
            loses(&of(has), wanted.as_ref(), may_be_unread, (Knows::OtherClusters, &own))
        };
        assert!(!several(&["east", "west"], Some(&["east"]), false));
        assert!(!several(&["west"], None, false));
        assert!(several(&["east", "west"], Some(&["east"]), true));
        assert!(several(&[], None, true));
        assert!(!several(&["east"], Some(&["east", "west"]), true), "a further cluster takes nothing away");
        let alone = |has: &[&str], wanted: Option<&[&str]>| {
            let wanted = wanted.map(of);
            loses(&of(has), wanted.as_ref(), false, (Knows::OwnCluster, &own))
        };
        assert!(alone(&["east", "west"], Some(&["east"])) && alone(&["west"], None));
        assert!(!alone(&["east"], None) && !alone(&["east", "peer-west"], None));
    }

    #[test]
    fn an_import_has_one_address_of_each_family_in_the_order_of_the_families() {
        let all = ["10.96.0.1", "fd00::1", "10.96.0.2"].map(|text| text.parse().expect("an address"));
        assert_eq!(ips(&all, &["IPv6", "IPv4"]), ["fd00::1", "10.96.0.1"]);
        assert_eq!(ips(&all, &["IPv6"]), ["fd00::1"]);
        assert_eq!(ips(&all[..1], &["IPv4", "IPv6"]), ["10.96.0.1"]);
        assert_eq!(ips(&all, &[]), ["10.96.0.1", "fd00::1"], "a service that only peers have");
    }
}
