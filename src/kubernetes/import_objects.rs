//! The objects that a cluster should have for the services of the cluster set: ServiceImports, and what is written beside them. They
//! are made again only for the services that may have changed, because this visits all endpoints of a service.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::import_services::Derived;
use super::import_slices;
use super::index::items::alias;
use super::kinds::derived_service::{DerivedContent, derived_key};
use super::kinds::imported_slice::SliceContent;
use super::kinds::own_object::{MANAGED_BY, owner_of};
use super::kinds::service_import::ImportContent;
use super::objects::Texts;
use super::own_objects::{There, Wanted};
use super::table::ObjectKey;
use isthmus_aggregator::spec::kubernetes::ImportExtras;
use isthmus_model::endpoint::Labels;
use isthmus_model::place::{ClusterId, Network};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;
use isthmus_snapshot::delta::Delta;
use isthmus_world::{Reader, Since};

/// The prefix of the names of peers among those of clusters. A slash cannot be in a DNS label, which these names are.
pub(super) const PEER: (&str, &str) = ("peer/", "peer-");

/// The ServiceImports and the namespaces of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Imports {
    /// True if the cluster has the kind, and all imports are known.
    pub(super) is_known: bool,
    /// The namespaces that exist and are read.
    pub(super) namespaces: BTreeSet<Arc<str>>,
    /// The imports in these namespaces.
    pub(super) objects: There<ImportContent>,
    /// The slices that this program has written there.
    pub(super) slices: There<SliceContent>,
    /// The derived Services there, and those of other programs whose names derived ones may have.
    pub(super) services: There<DerivedContent>,
    /// The virtual addresses that the cluster has given the derived Services.
    pub(super) addresses: BTreeMap<ObjectKey, Vec<IpAddr>>,
    /// The network of the cluster.
    pub(super) network: Network,
}

/// The objects that a cluster should have.
#[derive(Default)]
pub(super) struct ImportObjects {
    pub(super) imports: Wanted<ImportContent>,
    pub(super) services: Wanted<DerivedContent>,
    pub(super) slices: Wanted<SliceContent>,
    /// The names of the objects beside each import.
    beside: BTreeMap<ObjectKey, Beside>,
    /// The generation of the snapshot, and the objects in the cluster, from which they were made last; `None`: they were not made.
    of: Option<(u64, Arc<Imports>)>,
}

/// The names of the objects beside an import.
#[derive(Default)]
struct Beside {
    service: Option<ObjectKey>,
    slices: Vec<ObjectKey>,
}

/// The inputs of the objects.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) cluster: &'a ClusterId,
    pub(super) extras: ImportExtras,
    pub(super) there: &'a Arc<Imports>,
}

impl ImportObjects {
    /// Makes the objects that may have changed since the last call.
    pub(super) fn renew(&mut self, source: Source<'_>, reader: &Reader) {
        let Source { snapshot, there, .. } = source;
        let changed = self.of.as_ref().and_then(|(generation, before)| {
            let Since::Deltas(deltas) = reader.since(*generation, snapshot.generation) else { return None };
            let same = before.network == there.network;
            same.then(|| self.changed(snapshot, &deltas, (before, there)))
        });
        match changed {
            Some(keys) => keys.iter().for_each(|key| self.make(key, source)),
            None => {
                *self = Self::default();
                let all = snapshot
                    .cluster_set()
                    .filter_map(|service| there.key_of(service.namespace, service.name));
                all.for_each(|key| self.make(&key, source));
            }
        }
        self.of = Some((snapshot.generation, there.clone()));
    }

    /// Returns the imports that may have to be made again.
    fn changed(
        &self,
        snapshot: &Snapshot,
        deltas: &[Arc<Delta>],
        (before, there): (&Imports, &Arc<Imports>),
    ) -> BTreeSet<ObjectKey> {
        let networks: BTreeSet<&Network> = deltas.iter().flat_map(|delta| &delta.networks).collect();
        let behind = networks.into_iter().flat_map(|network| snapshot.services_behind(network));
        // The name of the cluster set stands for a service of the same name and namespace.
        let of_name = |hostname: &str| {
            let (name, rest) = hostname.split_once('.')?;
            let (namespace, rest) = rest.split_once('.')?;
            rest.starts_with("svc.").then(|| there.key_of(namespace, name)).flatten()
        };
        let names = Delta::services_of(deltas).into_iter().chain(behind);
        let mut keys: BTreeSet<ObjectKey> = names.filter_map(|name| of_name(name.as_str())).collect();
        if std::ptr::eq(before, &**there) {
            return keys;
        }
        if before.namespaces != there.namespaces {
            let differs = |namespace: &str| {
                before.namespaces.contains(namespace) != there.namespaces.contains(namespace)
            };
            let services = snapshot.cluster_set().filter(|service| differs(service.namespace));
            keys.extend(services.filter_map(|service| there.key_of(service.namespace, service.name)));
            keys.extend(self.imports.keys().filter(|key| differs(&key.namespace)).cloned());
        }
        keys.extend(there.differing(before));
        keys
    }

    /// Makes the objects of an import again.
    fn make(&mut self, key: &ObjectKey, source: Source<'_>) {
        let Source { snapshot, cluster, extras, there } = source;
        self.imports.remove(key);
        let before = self.beside.remove(key).unwrap_or_default();
        before.service.iter().for_each(|service| drop(self.services.remove(service)));
        before.slices.iter().for_each(|slice| drop(self.slices.remove(slice)));
        let service = alias(key).filter(|_| there.namespaces.contains(&key.namespace));
        let Some(service) = service.and_then(|name| snapshot.of_cluster_set(name.as_str())) else { return };
        let mut import = content(&service, &service.addresses_in(snapshot, cluster));
        let mut beside = Beside::default();
        // An import of another program gets nothing beside it.
        let is_own = matches!(there.objects.get(key), Some(Some(_)));
        let mut slices = Vec::new();
        if is_own && extras.slices {
            slices.extend(import_slices::of_clusters(snapshot, &there.network, key, &service));
        }
        let place = (&there.network, cluster);
        let derived = (is_own && extras.derived_services)
            .then(|| Derived::of(snapshot, &service, (key, &import), place));
        let derived = derived.flatten();
        let is_taken = |derived: &Derived| there.services.get(&derived.key).is_some_and(Option::is_none);
        if let Some(derived) = derived.as_ref().filter(|derived| is_taken(derived)) {
            derived.complete_without(&mut import);
        } else if let Some(derived) = derived {
            let addresses = there.addresses.get(&derived.key).map(Vec::as_slice);
            derived.complete(addresses.unwrap_or_default(), &there.slices, &mut import);
            self.services.insert(derived.key.clone(), Arc::new(derived.content));
            beside.service = Some(derived.key);
            slices.extend(derived.slices);
        }
        beside.slices = slices.iter().map(|(slice, _)| slice.clone()).collect();
        self.slices.extend(slices);
        self.imports.insert(key.clone(), Arc::new(import));
        self.beside.insert(key.clone(), beside);
    }
}

impl Imports {
    /// Returns true if the cluster has an object of this program.
    pub(super) fn has_own(&self) -> bool {
        self.objects.values().any(Option::is_some) || !self.services.is_empty() || !self.slices.is_empty()
    }

    /// Returns the import of this name in a namespace; `None` if the namespace does not exist or is not read.
    fn key_of(&self, namespace: &str, name: &str) -> Option<ObjectKey> {
        let namespace = self.namespaces.get(namespace)?;
        Some(ObjectKey { namespace: namespace.clone(), name: name.into() })
    }

    /// Returns the imports for which other objects may be wanted because the cluster has these objects and not those of `before`.
    fn differing(&self, before: &Self) -> BTreeSet<ObjectKey> {
        let is_own = |all: &Self, key: &ObjectKey| matches!(all.objects.get(key), Some(Some(_)));
        let objects = before.objects.keys().chain(self.objects.keys());
        let objects = objects.filter(|key| is_own(before, key) != is_own(self, key)).cloned();
        let services = before.addresses.keys().chain(self.addresses.keys());
        let services = services.filter(|key| before.addresses.get(*key) != self.addresses.get(*key));
        let import = |key: &ObjectKey| {
            let service = [self, before].into_iter().find_map(|all| all.services.get(key)?.as_ref())?;
            Some(owner_of(key, &service.import).1)
        };
        let of_slices = |all: &Self, other: &Self| -> Vec<ObjectKey> {
            let new = all.slices.iter().filter(|(key, _)| !other.slices.contains_key(*key));
            new.filter_map(|(key, slice)| Some(owner_of(key, &slice.as_ref()?.import).1)).collect()
        };
        let slices = of_slices(self, before).into_iter().chain(of_slices(before, self));
        let is_taken = |all: &Self, key: &ObjectKey| all.services.get(key).is_some_and(Option::is_none);
        let derived = before.services.keys().chain(self.services.keys());
        let freed_or_taken: BTreeSet<_> =
            derived.filter(|key| is_taken(before, key) != is_taken(self, key)).collect();
        let imports = self.objects.keys().filter(|_| !freed_or_taken.is_empty());
        let imports = imports.filter(|import| freed_or_taken.contains(&derived_key(import))).cloned();
        objects.chain(services.filter_map(import)).chain(slices).chain(imports).collect()
    }
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
        ready: None,
    }
}

/// Returns the `ips` of an import: an address of each family, in the order of `ipFamilies`.
fn ips(addresses: &[IpAddr], families: &[&str]) -> Vec<String> {
    let first = |family: &str| addresses.iter().find(|ip| ip.is_ipv6() == (family == "IPv6"));
    let families = if families.is_empty() { &["IPv4", "IPv6"] } else { families };
    families.iter().filter_map(|family| first(family)).map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::super::kinds::service_import::Ready;
    use super::*;
    use isthmus_model::endpoint::{DeclaredTls, Endpoint, EndpointTemplate, TlsMode};
    use isthmus_model::service::{PortProtocol, Service};
    use isthmus_registry::change::{Dirty, Item, Key};
    use isthmus_snapshot::build;
    use isthmus_snapshot::testing::{
        Mesh, endpoint, gateway, host_name, network, port, service, service_export, shard,
    };
    use isthmus_world::Publisher;

    const LOAD_BALANCER: &str = "lb.example.com";

    /// A cluster on the network n1, and the services of a cluster on n2 behind a load balancer, and of one on n3.
    struct Run {
        mesh: Mesh,
        publisher: Publisher,
        reader: Reader,
        there: Arc<Imports>,
        objects: ImportObjects,
    }

    fn exported(name: &str, host: &str) -> Service {
        let tls = Some(DeclaredTls::Mode(TlsMode::Own));
        let template = EndpointTemplate { tls, ..EndpointTemplate::default() };
        let endpoint = Endpoint { template: template.into(), ..endpoint(host, 1) };
        let hostname = format!("{name}.shop.svc.clusterset.local");
        service(&hostname, vec![port(443, PortProtocol::Tls)], vec![endpoint])
    }

    fn import(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    impl Run {
        fn new() -> Self {
            let networks = vec![
                network("n2", vec![gateway(LOAD_BALANCER, 1)]),
                network("n3", vec![gateway("192.0.2.3", 1)]),
            ];
            let mut mesh =
                Mesh::new(networks, vec![shard("west", "n2", vec![]), shard("north", "n3", vec![])]);
            mesh.resolved.insert(host_name(LOAD_BALANCER), [[192, 0, 2, 1].into()].into());
            let (publisher, reader) = Publisher::new(mesh.snapshot());
            let own = |name: &str| (import(name), Some(Arc::new(ImportContent::default())));
            let there = Imports {
                namespaces: ["shop".into()].into(),
                objects: ["a", "b", "c"].map(own).into(),
                network: Network::new("n1"),
                ..Imports::default()
            };
            let there = Arc::new(there);
            Self { mesh, publisher, reader, there, objects: ImportObjects::default() }
        }

        /// Puts a service and its export into a shard.
        fn put(&mut self, shard: usize, service: Service, dirty: &mut Dirty) {
            let shard = Arc::make_mut(&mut self.mesh.shards[shard]);
            shard.put(service_export(&service), dirty);
            shard.put(Item::Service(service.into()), dirty);
        }

        /// Publishes what is dirty, and makes the objects. Returns the imports that were made again.
        fn step(&mut self, dirty: &Dirty) -> Vec<String> {
            if !dirty.is_empty() {
                let (next, delta) = build::next(&self.publisher.current(), self.mesh.world(), dirty);
                self.publisher.publish(next, delta);
            }
            let before = self.objects.imports.clone();
            let snapshot = self.reader.latest();
            let source = Source {
                snapshot: &snapshot,
                cluster: &ClusterId::new("east"),
                extras: ImportExtras { slices: true, derived_services: true },
                there: &self.there,
            };
            self.objects.renew(source, &self.reader);
            let mut all = ImportObjects::default();
            all.renew(source, &self.reader);
            assert_eq!(self.objects.imports, all.imports);
            assert_eq!(self.objects.services, all.services);
            assert_eq!(self.objects.slices, all.slices);
            let is_same = |(key, now): &(&ObjectKey, &Arc<ImportContent>)| {
                before.get(key).is_some_and(|before| Arc::ptr_eq(before, now))
            };
            let made = self.objects.imports.iter().filter(|one| !is_same(one));
            made.map(|(key, _)| key.name.to_string()).collect()
        }

        /// Returns the addresses to which the derived Services of all imports lead.
        fn led(&self) -> Vec<String> {
            let slices = self.objects.slices.values();
            slices
                .flat_map(|slice| slice.endpoints.iter().map(|endpoint| endpoint.address.to_string()))
                .collect()
        }
    }

    #[tokio::test]
    async fn only_the_imports_of_services_that_may_have_changed_are_made_again() {
        let mut run = Run::new();
        let mut dirty = Dirty::default();
        for (at, name, host) in [(0, "a", "10.2.0.1"), (0, "b", "10.2.0.2"), (1, "c", "10.3.0.1")] {
            run.put(at, exported(name, host), &mut dirty);
        }
        assert_eq!(run.step(&dirty), ["a", "b", "c"]);
        assert_eq!(run.led(), ["192.0.2.1", "192.0.2.1", "192.0.2.3"]);
        assert_eq!(run.step(&Dirty::default()), [""; 0]);
        let mut dirty = Dirty::default();
        run.put(0, exported("b", "10.2.0.9"), &mut dirty);
        assert_eq!(run.step(&dirty), ["b"]);

        // A network's gateways are those of its services alone.
        run.mesh.resolved.insert(host_name(LOAD_BALANCER), [[192, 0, 2, 2].into()].into());
        let dirty = Dirty { resolved: [host_name(LOAD_BALANCER)].into(), ..Dirty::default() };
        assert_eq!(run.step(&dirty), ["a", "b"]);
        assert_eq!(run.led(), ["192.0.2.2", "192.0.2.2", "192.0.2.3"]);

        // The objects of the cluster: an address, an import of another program, and a namespace.
        let (service, content) =
            run.objects.services.first_key_value().map(|(key, one)| (key.clone(), one.clone())).expect("one");
        let mut there = Imports::clone(&run.there);
        there.addresses.insert(service.clone(), vec![[10, 96, 0, 1].into()]);
        there.services.insert(service, Some(content.clone()));
        run.there = Arc::new(there.clone());
        assert_eq!(run.step(&Dirty::default()), [content.import.as_str()]);
        assert_eq!(run.objects.imports[&import(&content.import)].ips, ["10.96.0.1"]);
        let ready = |run: &Run| run.objects.imports[&import(&content.import)].ready.clone().expect("derived");
        assert!(ready(&run).message.contains("no EndpointSlice"), "{:?}", ready(&run));
        let is_of_it = |slice: &&(ObjectKey, Arc<SliceContent>)| slice.1.import == content.import;
        let slices: Vec<_> = run.objects.slices.iter().map(|(key, one)| (key.clone(), one.clone())).collect();
        there
            .slices
            .extend(slices.iter().filter(is_of_it).map(|(key, one)| (key.clone(), Some(one.clone()))));
        run.there = Arc::new(there.clone());
        assert_eq!(run.step(&Dirty::default()), [content.import.as_str()]);
        assert_eq!(ready(&run).status, "True");

        // Another program has a Service of that name: the import says so, and nothing leads there.
        let mut taken = there.clone();
        let key = derived_key(&import(&content.import));
        taken.services.insert(key.clone(), None);
        taken.addresses.remove(&key);
        run.there = Arc::new(taken);
        assert_eq!(run.step(&Dirty::default()), [content.import.as_str()]);
        assert_eq!((&*ready(&run).status, &*ready(&run).reason), ("False", Ready::NAME_TAKEN));
        assert!(ready(&run).message.contains(&*key.name), "{}", ready(&run).message);
        assert!(run.objects.imports[&import(&content.import)].ips.is_empty());
        assert!(
            !run.objects.services.contains_key(&key)
                && !run.objects.slices.values().any(|one| one.import == content.import)
        );
        run.there = Arc::new(there.clone());
        assert_eq!(run.step(&Dirty::default()), [content.import.as_str()]);
        assert_eq!(ready(&run).status, "True");

        there.objects.insert(import("c"), None);
        run.there = Arc::new(there.clone());
        assert_eq!(run.step(&Dirty::default()), ["c"]);
        assert_eq!((run.objects.imports.len(), run.objects.services.len()), (3, 2));
        let gone = Imports { namespaces: BTreeSet::new(), ..there.clone() };
        run.there = Arc::new(gone);
        run.step(&Dirty::default());
        assert!(run.objects.imports.is_empty() && run.objects.beside.is_empty() && run.led().is_empty());
        run.there = Arc::new(there);
        assert_eq!(run.step(&Dirty::default()), ["a", "b", "c"]);

        // A service goes, and then all may differ.
        let mut dirty = Dirty::default();
        let key = exported("a", "10.2.0.1").key;
        Arc::make_mut(&mut run.mesh.shards[0]).remove(&Key::Service(key), &mut dirty);
        assert_eq!(run.step(&dirty), [""; 0]);
        assert_eq!((run.objects.imports.len(), run.objects.services.len()), (2, 1));
        let (next, delta) = build::next(&run.publisher.current(), run.mesh.world(), &Dirty::default());
        run.publisher.publish(next, Delta { everything: true, ..delta });
        assert_eq!(run.step(&Dirty::default()), ["b", "c"]);
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
