//! `registries`: further sources of services. Only their location and scope are read here, not their
//! contents.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use isthmus_aggregator::spec::etcd::{EtcdSpec, Login};
use isthmus_aggregator::spec::istiod::{Elsewhere, IstiodSpec};
use isthmus_aggregator::spec::kubernetes::{
    AccessSpec, ClusterSource, ClustersSpec, GatewayApiSpec, ImportExtras, Knows, KubernetesSpec, LeaseSpec,
    NamespaceChoice, SYSTEM_NAMESPACE, ServiceImports,
};
use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_document::form;
use isthmus_document::key::Defaulted;
use isthmus_document::problem::{Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::table::AnyKey;
use isthmus_document::tree::Node;
use isthmus_model::address::Scheme;
use isthmus_model::place::{ClusterId, Network};
use isthmus_settings::export::{ExportRule, MarkCondition};
use isthmus_settings::export_tls::TlsSource;
use isthmus_settings::listener::RefusalMode;
use isthmus_settings::peer::is_place_of_peer;
use isthmus_settings::policy;
use isthmus_settings::policy::Mesh;
use isthmus_settings::scope::{AddressScope, RegistryScope, Unlisted};
use isthmus_tls::client::{CertificateFiles, Files};
use isthmus_tls::source::Istiod;

use super::file::{path_of, relative_to};
use super::table::Root;
use super::table::registries as keys;

/// The registries of a config.
pub(super) struct Registries {
    /// The registries in the order of the file.
    pub(super) list: Vec<RegistrySpec>,
    /// The position of each registry, by its name.
    pub(super) places: BTreeMap<Arc<str>, String>,
    /// The ports that belong to Gateways of the Gateway API.
    pub(super) gateway_ports: Vec<GatewayPort>,
}

/// A port that belongs to Gateways of the Gateway API.
pub(super) struct GatewayPort {
    pub(super) port: u16,
    /// How TLS clients learn that they are refused.
    pub(super) refusal: RefusalMode,
    /// The path and the position of the port in the file.
    pub(super) path: String,
    pub(super) position: Position,
}

/// Reads the registries.
pub(super) fn read(root: &Fields<'_>, mesh: &Mesh, problems: &mut Problems) -> Registries {
    let list = Path::Root.key(Root::REGISTRIES.name());
    let mut places = BTreeMap::new();
    let mut reader = Reader {
        problems,
        files: HashMap::new(),
        etcds: HashMap::new(),
        clusters: HashMap::new(),
        registries: Vec::new(),
        gateway_api: None,
        gateway_ports: Vec::new(),
    };
    for (index, fields, node) in root.maps(&Root::REGISTRIES) {
        let path = list.index(index);
        let count = reader.registries.len();
        let at = |key: &dyn AnyKey| fields.at(key).map(|_| path.key(key.name()));
        let scope = scope(&fields);
        if let Some(path) = at(&keys::Registry::FILE) {
            reader.file(&fields.map(&keys::Registry::FILE), scope, &path);
        } else if let Some(path) = at(&keys::Registry::ETCD) {
            reader.etcd(&fields.map(&keys::Registry::ETCD), scope, &path);
        } else if let Some(path) = at(&keys::Registry::ISTIOD) {
            reader.istiod(&fields.map(&keys::Registry::ISTIOD), scope, &path);
        } else if cfg!(not(feature = "kubernetes")) {
            let fault =
                "this build of isthmus cannot read Kubernetes clusters; build it with the feature kubernetes";
            reader.problems.error(node.position, &path, fault);
        } else if let Some(path) = at(&keys::Registry::KUBERNETES) {
            reader.kubernetes(&fields.map(&keys::Registry::KUBERNETES), scope, mesh, &path);
        } else if let Some(path) = at(&keys::Registry::KUBERNETES_CLUSTERS) {
            reader.clusters(&fields.map(&keys::Registry::KUBERNETES_CLUSTERS), scope, mesh, &path);
        }
        let place = format!("{}: {path}", reader.problems.place(node.position));
        places
            .extend(reader.registries[count..].iter().map(|registry| (registry.name.clone(), place.clone())));
    }
    Registries { list: reader.registries, places, gateway_ports: reader.gateway_ports }
}

/// Reads `allow`: the services, networks and addresses that a registry may provide.
fn scope(fields: &Fields<'_>) -> RegistryScope {
    let allow = fields.map(&keys::Registry::ALLOW);
    RegistryScope {
        services: allow.get(&keys::Allow::SERVICES).unwrap_or_default(),
        networks: allow.get(&keys::Allow::NETWORKS),
        finds_network: false,
        addresses: addresses(&allow, fields.at(&keys::Registry::ALLOW).is_some()),
        tls: TlsSource::Written,
        unlisted: Unlisted::Lost,
    }
}

/// Reads the addresses that a registry may provide. Without `allow`, all addresses are allowed. If `allow` is present without
/// `addresses`, all addresses except loopback and link-local ones are allowed.
fn addresses(allow: &Fields<'_>, is_limited: bool) -> AddressScope {
    match allow.get(&keys::Allow::ADDRESSES) {
        Some(blocks) => AddressScope::Blocks(blocks.into()),
        None if is_limited => AddressScope::Public,
        None => AddressScope::Any,
    }
}

/// Returns the scope of a registry whose endpoints are pods, whose addresses and TLS modes others than the operator choose. Loopback and
/// link-local addresses lead to the gateway's own host, so such a registry may have them only if the operator allows them. `system` is
/// the namespace of the mesh's control plane.
fn of_pods(scope: RegistryScope, system: &Arc<str>) -> RegistryScope {
    let addresses = match scope.addresses {
        AddressScope::Any => AddressScope::Public,
        addresses => addresses,
    };
    let tls = TlsSource::Inferred { system: [KUBE_SYSTEM.into(), system.clone()].into() };
    RegistryScope { addresses, tls, ..scope }
}

/// The namespace of a Kubernetes cluster's own programs.
const KUBE_SYSTEM: &str = "kube-system";

/// Returns the scope of a Kubernetes registry. If the config sets no network for the registry, and `allow` names no networks,
/// the registry determines the networks itself, and the scope allows all of them.
fn of_kubernetes(scope: RegistryScope, has_network: bool, system: &Arc<str>) -> RegistryScope {
    let finds_network = !has_network && scope.networks.is_none();
    RegistryScope { finds_network, ..of_pods(scope, system) }
}

/// Reads the keys that `kubernetes` and `kubernetesClusters` have in common.
fn kubernetes(fields: &Fields<'_>, access: AccessSpec, scope: &RegistryScope, mesh: &Mesh) -> KubernetesSpec {
    let system = fields.get(&keys::SYSTEM);
    let chosen = fields.map(&keys::NAMESPACES);
    let gateways = match fields.at(&keys::GATEWAYS) {
        None => Some(vec![system.clone()]),
        Some(node) if node.is_off() => None,
        Some(_) => {
            let gateways = fields.map(&keys::GATEWAYS);
            Some(gateways.get(&keys::GatewayNamespaces::NAMESPACES).unwrap_or_default())
        }
    };
    KubernetesSpec {
        access,
        network: None,
        networks: scope.networks.clone().unwrap_or_default(),
        trust_domain: fields.get(&keys::TRUST_DOMAIN).unwrap_or_else(|| mesh.trust_domain.clone()),
        mesh_config: fields.get(&keys::MESH_CONFIG),
        cluster_domain: mesh.cluster_domain.clone(),
        viewer: system.clone(),
        system_namespace: system,
        namespaces: NamespaceChoice {
            only: chosen.get(&keys::Namespaces::ONLY).unwrap_or_default(),
            except: chosen.get(&keys::Namespaces::EXCEPT).unwrap_or_default(),
            labels: chosen.get(&keys::Namespaces::LABELS).unwrap_or_default().into(),
        },
        manual_endpoints: fields.get(&keys::MANUAL_ENDPOINTS),
        destination_rules: fields.get(&keys::DESTINATION_RULES),
        service_entries: fields.get(&keys::SERVICE_ENTRIES),
        replicas: fields.get(&keys::REPLICAS),
        gateways,
        export_writer: None,
        ambient: false,
        waypoints: false,
        gateway_api: None,
        import_writer: None,
        import_extras: ImportExtras::default(),
    }
}

/// Makes the node's namespace the one from which Kubernetes registries see services; without it, the system namespace is.
pub(super) fn seen_from(namespace: &Arc<str>, registries: &mut [RegistrySpec]) {
    for registry in registries.iter_mut().filter(|_| !namespace.is_empty()) {
        match &mut registry.kind {
            RegistryKind::Kubernetes(spec) => spec.viewer = namespace.clone(),
            RegistryKind::KubernetesClusters(clusters) => clusters.template.viewer = namespace.clone(),
            RegistryKind::File { .. }
            | RegistryKind::Etcd(_)
            | RegistryKind::Istiod(_)
            | RegistryKind::Peer(_) => {}
        }
    }
}

/// Makes registries read what only ambient mode needs: the waypoints for HBONE callers, and all workloads and policies for ztunnels.
pub(super) fn read_for_ambient(registries: &mut [RegistrySpec], takes_hbone: bool, has_ztunnels: bool) {
    for registry in registries {
        let spec = match &mut registry.kind {
            RegistryKind::Kubernetes(spec) => spec,
            RegistryKind::KubernetesClusters(clusters) => &mut clusters.template,
            RegistryKind::Istiod(spec) => {
                spec.ambient = has_ztunnels;
                continue;
            }
            RegistryKind::File { .. } | RegistryKind::Etcd(_) | RegistryKind::Peer(_) => continue,
        };
        spec.ambient = has_ztunnels;
        spec.waypoints = takes_hbone || has_ztunnels;
    }
}

/// Tells each registry of an istiod its own name, and what the other registries read.
pub(super) fn beside_others(registries: &mut [RegistrySpec], node: &policy::Node) {
    let places: Vec<_> = registries.iter().map(|one| (one.network.clone(), one.cluster.clone())).collect();
    for (at, registry) in registries.iter_mut().enumerate() {
        let RegistryKind::Istiod(spec) = &mut registry.kind else { continue };
        let others = || places.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, place)| place);
        spec.elsewhere = Elsewhere {
            networks: others().map(|(network, _)| network.clone()).filter(|one| !one.is_unknown()).collect(),
            clusters: others()
                .map(|(_, cluster)| cluster.clone())
                .filter(|one| !one.as_str().is_empty())
                .collect(),
        };
        for (own, of_node) in [(&mut spec.name, &node.name), (&mut spec.namespace, &node.namespace)] {
            if !of_node.is_empty() {
                own.clone_from(of_node);
            }
        }
    }
}

/// Gives the registries that write to their API servers the node's name and namespace, under which they hold a Lease. The registry
/// of the node's own cluster writes the conditions of ServiceExports, if an export rule requires them. A registry with
/// `serviceImports` writes ServiceImports, whatever its cluster.
pub(super) fn with_writers(
    mut registries: Vec<RegistrySpec>,
    node: &policy::Node,
    exports: &[Arc<ExportRule>],
) -> Vec<RegistrySpec> {
    let or = |text: &Arc<str>, other: &str| if text.is_empty() { other.into() } else { text.clone() };
    let clusters: Vec<Option<ClusterId>> = registries.iter().filter_map(cluster_of).collect();
    let knows = |own: &ClusterId| match clusters.iter().any(|cluster| cluster.as_ref() != Some(own)) {
        true => Knows::OtherClusters,
        false => Knows::OwnCluster,
    };
    for registry in &mut registries {
        let RegistryKind::Kubernetes(spec) = &mut registry.kind else { continue };
        if let Some(writer) = &mut spec.import_writer {
            writer.knows = knows(&registry.cluster);
        }
        let writers = spec.gateway_api.iter_mut().map(|spec| &mut spec.writer);
        for writer in writers.chain(&mut spec.import_writer) {
            writer.namespace = or(&node.namespace, &writer.namespace);
            writer.holder = or(&node.name, &writer.holder);
        }
    }
    if !exports.iter().any(|rule| rule.marked == Some(MarkCondition::ServiceExport)) {
        return registries;
    }
    let knows = knows(&node.cluster);
    for registry in registries.iter_mut().filter(|registry| registry.cluster == node.cluster) {
        if let RegistryKind::Kubernetes(spec) = &mut registry.kind {
            spec.export_writer = Some(LeaseSpec {
                namespace: or(&node.namespace, &spec.system_namespace),
                holder: or(&node.name, "isthmus"),
                knows,
            });
        }
    }
    registries
}

/// Returns the writer of a registry in which the node is not yet named.
fn writer_of(cluster: &KubernetesSpec) -> LeaseSpec {
    LeaseSpec {
        namespace: cluster.system_namespace.clone(),
        holder: "isthmus".into(),
        knows: Knows::OwnCluster,
    }
}

/// Returns the cluster whose ServiceExports a registry reads; `Some(None)` for clusters that are found while the gateway runs.
fn cluster_of(registry: &RegistrySpec) -> Option<Option<ClusterId>> {
    match &registry.kind {
        RegistryKind::Kubernetes(_) => Some(Some(registry.cluster.clone())),
        RegistryKind::KubernetesClusters(_) => Some(None),
        RegistryKind::File { .. }
        | RegistryKind::Etcd(_)
        | RegistryKind::Istiod(_)
        | RegistryKind::Peer(_) => None,
    }
}

struct Reader<'r> {
    problems: &'r mut Problems,
    /// The positions of files, to find duplicates.
    files: HashMap<PathBuf, Position>,
    /// The positions of etcd prefixes, to find duplicates.
    etcds: HashMap<Arc<str>, Position>,
    /// The positions of Kubernetes clusters, to find duplicates.
    clusters: HashMap<Arc<str>, Position>,
    registries: Vec<RegistrySpec>,
    /// The position of the first `gatewayApi`.
    gateway_api: Option<Position>,
    gateway_ports: Vec<GatewayPort>,
}

impl Reader<'_> {
    fn file(&mut self, file: &Fields<'_>, scope: RegistryScope, at: &Path<'_>) {
        let Some((written, node)) = file.found(&keys::RegistryPath::PATH) else { return };
        let path = relative_to(self.problems.file(node.position.file), &written);
        if let Some(first) = self.files.get(&path) {
            let first = self.problems.place(*first);
            let fault = format!("two registries read the file {node}; first at {first}");
            return self.problems.error(node.position, &at.key(keys::RegistryPath::PATH.name()), fault);
        }
        self.files.insert(path.clone(), node.position);
        let written = written.to_string_lossy();
        // Registries of other kinds have names that begin with these words. Two registries must not have one name.
        let is_of_other_kind = ["peer/", "istiod/", "kubernetes/", "kubernetesClusters/"]
            .iter()
            .any(|prefix| written.starts_with(prefix));
        let written: Arc<str> = if is_of_other_kind { format!("./{written}").into() } else { written.into() };
        let taken = self.registries.iter().any(|other| other.name == written);
        let name = if taken { path.to_string_lossy().into() } else { written };
        let cluster = file.get(&keys::RegistryPath::CLUSTER).unwrap_or_default();
        let network = file.get(&keys::RegistryPath::NETWORK).unwrap_or_default();
        self.not_of_a_peer(file, &keys::RegistryPath::CLUSTER, cluster.as_str(), at);
        self.not_of_a_peer(file, &keys::RegistryPath::NETWORK, network.as_str(), at);
        self.registries.push(RegistrySpec {
            name,
            cluster,
            network,
            scope: RegistryScope { unlisted: Unlisted::Removed, ..scope },
            kind: RegistryKind::File { path },
        });
    }

    fn etcd(&mut self, etcd: &Fields<'_>, scope: RegistryScope, at: &Path<'_>) {
        let endpoints = etcd.get(&keys::RegistryEtcd::ENDPOINTS).unwrap_or_default();
        let prefix = etcd.get(&keys::RegistryEtcd::PREFIX);
        let tls = self.tls(etcd, at);
        let login = self.login(etcd, at);
        let Some((first, node)) = endpoints.first().zip(etcd.at(&keys::RegistryEtcd::ENDPOINTS)) else {
            return;
        };
        // The prefix usually begins with a slash, and always ends with one.
        let name: Arc<str> = format!("{first}/{}", prefix.trim_start_matches('/')).into();
        if let Some(other) = self.etcds.insert(name.clone(), node.position) {
            let other = self.problems.place(other);
            let fault = format!("two registries have the name {name}; first at {other}");
            return self.problems.error(node.position, &at.key(keys::RegistryEtcd::ENDPOINTS.name()), fault);
        }
        let cluster = etcd.get(&keys::RegistryEtcd::CLUSTER).unwrap_or_default();
        let network = etcd.get(&keys::RegistryEtcd::NETWORK).unwrap_or_default();
        self.not_of_a_peer(etcd, &keys::RegistryEtcd::CLUSTER, cluster.as_str(), at);
        self.not_of_a_peer(etcd, &keys::RegistryEtcd::NETWORK, network.as_str(), at);
        let kind = RegistryKind::Etcd(EtcdSpec { endpoints, prefix, tls, login });
        self.registries.push(RegistrySpec { name, cluster, network, scope, kind });
    }

    /// Returns true if no registry before has this name, which its kind and its cluster make; else reports it.
    fn is_first(&mut self, name: &Arc<str>, kind: &str, cluster: &Node, at: &Path<'_>) -> bool {
        let Some(first) = self.clusters.insert(name.clone(), cluster.position) else { return true };
        let first = self.problems.place(first);
        let fault = format!("two {kind} registries have the cluster {cluster}; first at {first}");
        self.problems.error(cluster.position, at, fault);
        false
    }

    fn istiod(&mut self, fields: &Fields<'_>, scope: RegistryScope, at: &Path<'_>) {
        let Some((cluster, node)) = fields.found(&keys::RegistryIstiod::CLUSTER) else { return };
        let name: Arc<str> = format!("istiod/{cluster}").into();
        if !self.is_first(&name, "istiod", node, &at.key(keys::RegistryIstiod::CLUSTER.name())) {
            return;
        }
        let network = fields.get(&keys::RegistryIstiod::NETWORK).unwrap_or_default();
        self.not_of_a_peer(fields, &keys::RegistryIstiod::CLUSTER, cluster.as_str(), at);
        self.not_of_a_peer(fields, &keys::RegistryIstiod::NETWORK, network.as_str(), at);
        let Some(address) = fields.get(&keys::RegistryIstiod::ADDRESS) else { return };
        let roots = path_of(fields, &keys::RegistryIstiod::ROOTS, self.problems);
        let token = path_of(fields, &keys::RegistryIstiod::TOKEN, self.problems);
        let Some((roots, token)) = roots.zip(token) else { return };
        let kind = RegistryKind::Istiod(IstiodSpec {
            istiod: Istiod { address, roots, token, cluster: cluster.clone() },
            name: "isthmus".into(),
            namespace: SYSTEM_NAMESPACE.into(),
            ambient: false,
            elsewhere: Elsewhere::default(),
        });
        self.registries.push(RegistrySpec {
            name,
            cluster,
            network,
            scope: of_pods(scope, &SYSTEM_NAMESPACE.into()),
            kind,
        });
    }

    fn kubernetes(&mut self, fields: &Fields<'_>, scope: RegistryScope, mesh: &Mesh, at: &Path<'_>) {
        let Some((cluster, node)) = fields.found(&keys::Kubernetes::CLUSTER) else { return };
        let name: Arc<str> = format!("kubernetes/{cluster}").into();
        if !self.is_first(&name, "Kubernetes", node, &at.key(keys::Kubernetes::CLUSTER.name())) {
            return;
        }
        let Some(access) = self.access(fields, at) else { return };
        let network = fields.get(&keys::Kubernetes::NETWORK);
        self.not_of_a_peer(fields, &keys::Kubernetes::CLUSTER, cluster.as_str(), at);
        let of_network = network.as_ref().map_or("", Network::as_str);
        self.not_of_a_peer(fields, &keys::Kubernetes::NETWORK, of_network, at);
        let scope = of_kubernetes(scope, network.is_some(), &fields.get(&keys::SYSTEM));
        let spec = kubernetes(fields, access, &scope, mesh);
        let gateway_api = self.gateway_api(fields, &spec, at);
        let import_writer = match fields.get(&keys::Kubernetes::SERVICE_IMPORTS) {
            ServiceImports::Off => None,
            ServiceImports::Write => Some(writer_of(&spec)),
        };
        self.entries_need_all(fields, &spec, at);
        let mut extra = |key: &Defaulted<form::Boolean>| {
            let is_set = fields.get(key);
            if is_set && import_writer.is_none() {
                let fault = "found true, which requires serviceImports: write";
                let position = fields.at(key).map_or(node.position, |node| node.position);
                self.problems.error(position, &at.key(key.name()), fault);
            }
            is_set
        };
        let import_extras = ImportExtras {
            slices: extra(&keys::Kubernetes::SLICES),
            derived_services: extra(&keys::Kubernetes::DERIVED_SERVICES),
        };
        if import_extras.derived_services && spec.service_entries {
            self.derived_services_need_no_entries(fields, at);
        }
        let spec =
            KubernetesSpec { network: network.clone(), gateway_api, import_writer, import_extras, ..spec };
        let (network, kind) = (network.unwrap_or_default(), RegistryKind::Kubernetes(spec));
        self.registries.push(RegistrySpec { name, cluster, network, scope, kind });
    }

    /// Reports an error if ServiceEntries are read, but not all namespaces: an address is nobody's only if all pods and Services are
    /// known.
    fn entries_need_all(&mut self, fields: &Fields<'_>, spec: &KubernetesSpec, at: &Path<'_>) {
        if let Some(node) = fields.at(&keys::SERVICE_ENTRIES)
            && spec.service_entries
            && !spec.namespaces.only.is_empty()
        {
            let fault = "found true, which cannot be used with namespaces.only: whose an address is is known only if all \
                         namespaces are read";
            self.problems.error(node.position, &at.key(keys::SERVICE_ENTRIES.name()), fault);
        }
    }

    /// Reports an error for Services that are derived from imports where ServiceEntries are read.
    fn derived_services_need_no_entries(&mut self, fields: &Fields<'_>, at: &Path<'_>) {
        if let Some(node) = fields.at(&keys::Kubernetes::DERIVED_SERVICES) {
            let fault = "found true, which cannot be used with serviceEntries: a ServiceEntry of any namespace could have the \
                         cluster IP of a derived Service";
            self.problems.error(node.position, &at.key(keys::Kubernetes::DERIVED_SERVICES.name()), fault);
        }
    }

    /// Reads `gatewayApi`. Only one registry may have it, because two clusters cannot share the ports of one process.
    fn gateway_api(
        &mut self,
        fields: &Fields<'_>,
        cluster: &KubernetesSpec,
        at: &Path<'_>,
    ) -> Option<GatewayApiSpec> {
        let path = at.key(keys::Kubernetes::GATEWAY_API.name());
        let node = fields.at(&keys::Kubernetes::GATEWAY_API).filter(|node| !node.is_off())?;
        if let Some(first) = self.gateway_api {
            let first = self.problems.place(first);
            let fault = format!("only one registry may have gatewayApi; first at {first}");
            self.problems.error(node.position, &path, fault);
            return None;
        }
        self.gateway_api = Some(node.position);
        let of = fields.map(&keys::Kubernetes::GATEWAY_API);
        let refusal = of.get(&keys::GatewayApi::REFUSAL);
        let from = of.map(&keys::GatewayApi::GATEWAYS_FROM);
        let list = path.key(keys::GatewayApi::PORTS.name());
        let ports = of.values(&keys::GatewayApi::PORTS).map(|(index, port, node)| {
            let path = list.index(index).to_string();
            GatewayPort { port, refusal, path, position: node.position }
        });
        self.gateway_ports = ports.collect();
        Some(GatewayApiSpec {
            class: of.get(&keys::GatewayApi::CLASS).unwrap_or_default(),
            controller: of.get(&keys::GatewayApi::CONTROLLER),
            ports: self.gateway_ports.iter().map(|port| port.port).collect(),
            addresses: of.get(&keys::GatewayApi::ADDRESSES).unwrap_or_default(),
            service: of.get(&keys::GatewayApi::SERVICE),
            pool: of.get(&keys::GatewayApi::POOL).unwrap_or_default(),
            requestable: of.get(&keys::GatewayApi::REQUESTABLE).unwrap_or_default(),
            from: NamespaceChoice {
                only: from.get(&keys::GatewaysFrom::NAMESPACES).unwrap_or_default(),
                except: Vec::new(),
                labels: from.get(&keys::GatewaysFrom::LABELS).unwrap_or_default().into(),
            },
            routes_per_namespace: of.get(&keys::GatewayApi::ROUTES_PER_NAMESPACE),
            writer: writer_of(cluster),
        })
    }

    /// Reports an error if the name of a cluster or network is one of a peer. A registry of this mesh must not speak for a peer.
    fn not_of_a_peer(&mut self, fields: &Fields<'_>, key: &dyn AnyKey, name: &str, at: &Path<'_>) {
        if let Some(node) = fields.at(key).filter(|_| is_place_of_peer(name)) {
            let fault = format!(
                "found {node}, but names that begin with peer/ belong to peers; expected another name"
            );
            self.problems.error(node.position, &at.key(key.name()), fault);
        }
    }

    /// Reads `kubernetesClusters`, a source of Kubernetes clusters that become registries while the gateway runs.
    fn clusters(&mut self, fields: &Fields<'_>, scope: RegistryScope, mesh: &Mesh, at: &Path<'_>) {
        let scope = of_kubernetes(scope, false, &fields.get(&keys::SYSTEM));
        let folder = path_of(fields, &keys::KubernetesClusters::FOLDER, self.problems);
        let secrets = fields.map(&keys::KubernetesClusters::SECRETS);
        let (name, source) = match (folder, secrets.get(&keys::ClusterSecrets::NAMESPACE)) {
            (Some(folder), _) => {
                (format!("kubernetesClusters/{}", folder.display()), ClusterSource::Folder(folder))
            }
            (None, Some(namespace)) => {
                (format!("kubernetesClusters/secrets/{namespace}"), ClusterSource::Secrets { namespace })
            }
            (None, None) => return,
        };
        let template = kubernetes(fields, AccessSpec::ServiceAccount, &scope, mesh);
        self.entries_need_all(fields, &template, at);
        let kind = RegistryKind::KubernetesClusters(ClustersSpec { source, template });
        // Each cluster of the source has a name of its own, and discovers its network.
        let (cluster, network) = (ClusterId::default(), Network::default());
        self.registries.push(RegistrySpec { name: name.into(), cluster, network, scope, kind });
    }

    /// Reads the location of the API server, and the credentials for it.
    fn access(&mut self, fields: &Fields<'_>, at: &Path<'_>) -> Option<AccessSpec> {
        if fields.at(&keys::Kubernetes::KUBECONFIG).is_some() {
            return Some(AccessSpec::Kubeconfig {
                path: path_of(fields, &keys::Kubernetes::KUBECONFIG, self.problems)?,
                context: fields.get(&keys::Kubernetes::CONTEXT).map(|context| context.to_string()),
                token_file: path_of(fields, &keys::Kubernetes::TOKEN_FILE, self.problems),
            });
        }
        let of_kubeconfig: [&dyn AnyKey; 2] = [&keys::Kubernetes::CONTEXT, &keys::Kubernetes::TOKEN_FILE];
        for key in of_kubeconfig {
            if let Some(node) = fields.at(key) {
                let fault = format!("found {}, which requires the key kubeconfig", key.name());
                self.problems.error(node.position, &at.key(key.name()), fault);
            }
        }
        Some(AccessSpec::ServiceAccount)
    }

    /// Reads the roots and the certificate, which are required for members with `https` URLs and refused for
    /// others.
    fn tls(&mut self, etcd: &Fields<'_>, at: &Path<'_>) -> Option<Files> {
        let with = |scheme| {
            let mut members = etcd.values(&keys::RegistryEtcd::ENDPOINTS);
            members.find(|(_, url, _)| url.scheme == scheme).map(|(index, _, node)| (index, node))
        };
        let (secure, plain) = (with(Scheme::Https), with(Scheme::Http));
        let list = at.key(keys::RegistryEtcd::ENDPOINTS.name());
        if let (Some(_), Some((index, node))) = (secure, plain) {
            let fault =
                format!("found {node}, but other members use https://; expected https:// for all of them");
            self.problems.error(node.position, &list.index(index), fault);
        }
        let tls = etcd.at(&keys::RegistryEtcd::TLS);
        match (secure, plain, tls) {
            (Some((index, node)), _, None) => {
                let fault = format!(
                    "found {node}, but no tls; add tls.roots, the root certificates that verify etcd"
                );
                self.problems.error(node.position, &list.index(index), fault);
            }
            (None, Some(_), Some(tls)) => {
                let fault = "found tls, but all endpoints have http:// URLs; write https:// or remove tls";
                self.problems.error(tls.position, &at.key(keys::RegistryEtcd::TLS.name()), fault);
            }
            _ => {}
        }
        let fields = etcd.map(&keys::RegistryEtcd::TLS);
        let at = at.key(keys::RegistryEtcd::TLS.name());
        let certificate = self.has_both(&fields, &keys::EtcdTls::CERTIFICATE, &keys::EtcdTls::KEY, &at);
        let certificate = certificate.then(|| {
            Some(CertificateFiles {
                chain: path_of(&fields, &keys::EtcdTls::CERTIFICATE, self.problems)?,
                key: path_of(&fields, &keys::EtcdTls::KEY, self.problems)?,
            })
        });
        let roots = path_of(&fields, &keys::EtcdTls::ROOTS, self.problems)?;
        Some(Files { roots, certificate: certificate.flatten() })
    }

    fn login(&mut self, etcd: &Fields<'_>, at: &Path<'_>) -> Option<Login> {
        let (user, password) = (keys::RegistryEtcd::USER, keys::RegistryEtcd::PASSWORD_FILE);
        if !self.has_both(etcd, &user, &password, at) {
            return None;
        }
        Some(Login { user: etcd.get(&user)?.to_string(), password: path_of(etcd, &password, self.problems)? })
    }

    /// Returns true if a map has both of two keys that require each other. Reports an error if the map has only one of them.
    fn has_both(&mut self, fields: &Fields<'_>, one: &dyn AnyKey, other: &dyn AnyKey, at: &Path<'_>) -> bool {
        let (key, node, missing) = match (fields.at(one), fields.at(other)) {
            (Some(_), Some(_)) => return true,
            (Some(node), None) => (one.name(), node, other.name()),
            (None, Some(node)) => (other.name(), node, one.name()),
            (None, None) => return false,
        };
        let fault = format!("found {key}, but no {missing}; expected both or neither");
        self.problems.error(node.position, &at.key(key), fault);
        false
    }
}
