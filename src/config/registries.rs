//! `registries`: further sources of services. Only their location and scope are read here, not their
//! contents.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::aggregator::etcd::spec::{EtcdSpec, Login, PREFIX};
use crate::aggregator::kubernetes::spec::{
    AccessSpec, ClusterSource, ClustersSpec, ExportWriterSpec, KubernetesSpec, NamespaceChoice,
    SYSTEM_NAMESPACE,
};
use crate::aggregator::spec::{RegistryKind, RegistrySpec};
use crate::document::problem::{Path, Position, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::document::tree::Node;
use crate::model::address::{Scheme, Url};
use crate::model::place::{ClusterId, Network};
use crate::snapshot::policy::{self, AddressScope, ExportRule, MarkCondition, Mesh, RegistryScope};
use crate::tls::client::{CertificateFiles, Files};

use super::exports::labels;
use super::file::relative_to;
use super::table::registries::{
    ALLOW, CLUSTER_SECRETS, ETCD_TLS, GATEWAY_NAMESPACES, KUBERNETES, KUBERNETES_CLUSTERS, NAMESPACES,
    REGISTRY, REGISTRY_ETCD, REGISTRY_PATH,
};

/// Reads the registries in the order of the file.
pub(super) fn read(root: &Fields<'_>, mesh: &Mesh, problems: &mut Problems) -> Vec<RegistrySpec> {
    let list = Path::Root.key("registries");
    let mut reader = Reader {
        problems,
        files: HashMap::new(),
        etcds: HashMap::new(),
        clusters: HashMap::new(),
        registries: Vec::new(),
    };
    for (index, node) in root.items("registries").iter().enumerate() {
        let path = list.index(index);
        let fields = Fields::new(Some(node), &REGISTRY);
        let scope = scope(&fields);
        if fields.node("file").is_some() {
            reader.file(&fields.fields("file", &REGISTRY_PATH), scope, &path.key("file"));
        } else if fields.node("etcd").is_some() {
            reader.etcd(&fields.fields("etcd", &REGISTRY_ETCD), scope, &path.key("etcd"));
        } else if cfg!(not(feature = "kubernetes")) && fields.node("file").is_none() {
            let fault = "this isthmus was built without the feature kubernetes";
            reader.problems.error(node.position, &path, fault);
        } else if fields.node("kubernetes").is_some() {
            reader.kubernetes(
                &fields.fields("kubernetes", &KUBERNETES),
                scope,
                mesh,
                &path.key("kubernetes"),
            );
        } else if fields.node("kubernetesClusters").is_some() {
            reader.clusters(&fields.fields("kubernetesClusters", &KUBERNETES_CLUSTERS), scope, mesh);
        }
    }
    reader.registries
}

/// Reads the items that a registry may give.
fn scope(fields: &Fields<'_>) -> RegistryScope {
    let allow = fields.fields("allow", &ALLOW);
    let networks = allow.node("networks").map(|_| {
        let texts = allow.read_all("networks", scalar::text);
        texts.into_iter().map(Network::new).collect()
    });
    RegistryScope {
        services: allow.read_all("services", scalar::pattern),
        networks,
        finds_network: false,
        addresses: addresses(&allow, fields.node("allow").is_some()),
    }
}

/// Reads the addresses that a registry may give. Without `allow.addresses` all are allowed, or all but
/// loopback and link-local ones if `allow` limits the registry otherwise.
fn addresses(allow: &Fields<'_>, is_limited: bool) -> AddressScope {
    match allow.node("addresses") {
        Some(_) => AddressScope::Blocks(allow.read_all("addresses", scalar::cidr).into()),
        None if is_limited => AddressScope::Public,
        None => AddressScope::Any,
    }
}

/// Returns the scope of a registry in Kubernetes. Without a configured network, the registry finds its own.
fn of_kubernetes(scope: RegistryScope, has_network: bool) -> RegistryScope {
    let addresses = match scope.addresses {
        // Loopback and link-local addresses are those of the gateway's host, so pods have them only if the operator allows
        // them.
        AddressScope::Any => AddressScope::Public,
        addresses => addresses,
    };
    RegistryScope { finds_network: !has_network && scope.networks.is_none(), addresses, ..scope }
}

/// Reads the keys that one cluster and found clusters have in common.
fn kubernetes(fields: &Fields<'_>, access: AccessSpec, scope: &RegistryScope, mesh: &Mesh) -> KubernetesSpec {
    let texts = |fields: &Fields<'_>, key: &str| -> Vec<Arc<str>> {
        fields.read_all(key, scalar::text).into_iter().map(Arc::from).collect()
    };
    let system: Arc<str> = fields.read("systemNamespace", scalar::text).unwrap_or(SYSTEM_NAMESPACE).into();
    let chosen = fields.fields("namespaces", &NAMESPACES);
    let gateways = match (fields.is_off("gateways"), fields.node("gateways")) {
        (true, _) => None,
        (false, None) => Some(vec![system.clone()]),
        (false, Some(_)) => Some(texts(&fields.fields("gateways", &GATEWAY_NAMESPACES), "namespaces")),
    };
    KubernetesSpec {
        access,
        network: None,
        networks: scope.networks.clone().unwrap_or_default(),
        trust_domain: fields
            .read("trustDomain", scalar::trust_domain)
            .unwrap_or_else(|| mesh.trust_domain.clone()),
        mesh_config: fields.flag("meshConfig").unwrap_or(false),
        cluster_domain: mesh.cluster_domain.clone(),
        system_namespace: system,
        namespaces: NamespaceChoice {
            only: texts(&chosen, "only"),
            except: texts(&chosen, "except"),
            labels: labels(&chosen, "labels"),
        },
        manual_endpoints: fields.flag("manualEndpoints").unwrap_or(false),
        destination_rules: fields.flag("destinationRules").unwrap_or(false),
        gateways,
        export_writer: None,
    }
}

/// Has the registry of the node's own cluster write the conditions of ServiceExports, if an export rule requires them.
pub(super) fn with_export_writer(
    mut registries: Vec<RegistrySpec>,
    node: &policy::Node,
    exports: &[Arc<ExportRule>],
) -> Vec<RegistrySpec> {
    if !exports.iter().any(|rule| rule.marked == Some(MarkCondition::ServiceExport)) {
        return registries;
    }
    let or = |text: &Arc<str>, other: &str| if text.is_empty() { other.into() } else { text.clone() };
    for registry in registries.iter_mut().filter(|registry| registry.cluster == node.cluster) {
        if let RegistryKind::Kubernetes(spec) = &mut registry.kind {
            spec.export_writer = Some(ExportWriterSpec {
                namespace: or(&node.namespace, &spec.system_namespace),
                holder: or(&node.name, "isthmus"),
            });
        }
    }
    registries
}

struct Reader<'r> {
    problems: &'r mut Problems,
    /// The positions of files and of etcd prefixes, to find duplicates.
    files: HashMap<PathBuf, Position>,
    etcds: HashMap<Arc<str>, Position>,
    /// The positions of Kubernetes clusters, to find duplicates.
    clusters: HashMap<Arc<str>, Position>,
    registries: Vec<RegistrySpec>,
}

impl Reader<'_> {
    fn file(&mut self, file: &Fields<'_>, scope: RegistryScope, at: &Path<'_>) {
        let Some((written, node)) = file.read("path", scalar::path).zip(file.node("path")) else { return };
        let path = relative_to(self.problems.file(node.position.file), written);
        if let Some(first) = self.files.get(&path) {
            let first = self.problems.place(*first);
            let fault = format!("{node} is the file of two registries; first at {first}");
            return self.problems.error(node.position, &at.key("path"), fault);
        }
        self.files.insert(path.clone(), node.position);
        let written: Arc<str> = written.to_string_lossy().into();
        let taken = self.registries.iter().any(|other| other.name == written);
        let name = if taken { path.to_string_lossy().into() } else { written };
        self.add(name, file, scope, RegistryKind::File { path });
    }

    fn etcd(&mut self, etcd: &Fields<'_>, scope: RegistryScope, at: &Path<'_>) {
        let endpoints: Vec<Url> = etcd.read_all("endpoints", scalar::etcd);
        let prefix: Arc<str> = etcd.read("prefix", scalar::etcd_prefix).unwrap_or(PREFIX).into();
        let tls = self.tls(etcd, at);
        let login = self.login(etcd, at);
        let Some((first, node)) = endpoints.first().zip(etcd.node("endpoints")) else { return };
        // The prefix usually begins with a slash, and always ends with one.
        let name: Arc<str> = format!("{first}/{}", prefix.trim_start_matches('/')).into();
        if let Some(other) = self.etcds.insert(name.clone(), node.position) {
            let other = self.problems.place(other);
            let fault = format!("two registries have the name {name}; first at {other}");
            return self.problems.error(node.position, &at.key("endpoints"), fault);
        }
        self.add(name, etcd, scope, RegistryKind::Etcd(EtcdSpec { endpoints, prefix, tls, login }));
    }

    fn kubernetes(&mut self, fields: &Fields<'_>, scope: RegistryScope, mesh: &Mesh, at: &Path<'_>) {
        let Some((cluster, node)) = fields.read("cluster", scalar::text).zip(fields.node("cluster")) else {
            return;
        };
        let name: Arc<str> = format!("kubernetes/{cluster}").into();
        if let Some(first) = self.clusters.insert(name.clone(), node.position) {
            let first = self.problems.place(first);
            let fault = format!("{node} is the cluster of two Kubernetes registries; first at {first}");
            return self.problems.error(node.position, &at.key("cluster"), fault);
        }
        let Some(access) = self.access(fields, at) else { return };
        let network = fields.read("network", scalar::text).map(Network::new);
        let scope = of_kubernetes(scope, network.is_some());
        let spec = KubernetesSpec { network, ..kubernetes(fields, access, &scope, mesh) };
        self.add(name, fields, scope, RegistryKind::Kubernetes(spec));
    }

    /// Reads a source of clusters.
    fn clusters(&mut self, fields: &Fields<'_>, scope: RegistryScope, mesh: &Mesh) {
        let scope = of_kubernetes(scope, false);
        let secrets = fields.fields("secrets", &CLUSTER_SECRETS);
        let (name, source) = match (fields.node("folder"), secrets.read("namespace", scalar::text)) {
            (Some(node), _) => {
                let Some(folder) = self.path(node) else { return };
                (format!("kubernetesClusters/{}", folder.display()), ClusterSource::Folder(folder))
            }
            (None, Some(namespace)) => (
                format!("kubernetesClusters/secrets/{namespace}"),
                ClusterSource::Secrets { namespace: namespace.into() },
            ),
            (None, None) => return,
        };
        let template = kubernetes(fields, AccessSpec::ServiceAccount, &scope, mesh);
        let spec = ClustersSpec { source, template };
        let kind = RegistryKind::KubernetesClusters(spec);
        // Each of its clusters has a name of its own, and finds its network.
        let (cluster, network) = (ClusterId::default(), Network::default());
        self.registries.push(RegistrySpec { name: name.into(), cluster, network, scope, kind });
    }

    /// Reads how the API server is found, and the credentials.
    fn access(&mut self, fields: &Fields<'_>, at: &Path<'_>) -> Option<AccessSpec> {
        if let Some(node) = fields.node("kubeconfig") {
            return Some(AccessSpec::Kubeconfig {
                path: self.path(node)?,
                context: fields.read("context", scalar::text).map(str::to_owned),
                token_file: fields.node("tokenFile").and_then(|node| self.path(node)),
            });
        }
        for key in ["context", "tokenFile"] {
            if let Some(node) = fields.node(key) {
                let fault = format!("found {key}, but no kubeconfig to use it with");
                self.problems.error(node.position, &at.key(key), fault);
            }
        }
        Some(AccessSpec::ServiceAccount)
    }

    fn add(&mut self, name: Arc<str>, fields: &Fields<'_>, scope: RegistryScope, kind: RegistryKind) {
        self.registries.push(RegistrySpec {
            name,
            cluster: fields.read("cluster", scalar::text).map(ClusterId::new).unwrap_or_default(),
            network: fields.read("network", scalar::text).map(Network::new).unwrap_or_default(),
            scope,
            kind,
        });
    }

    /// Reads the roots and the certificate, which are required for members with `https` URLs and refused for
    /// others.
    fn tls(&mut self, etcd: &Fields<'_>, at: &Path<'_>) -> Option<Files> {
        let members = etcd.items("endpoints").iter();
        let with = |scheme| {
            let mut of_scheme = members.clone().enumerate().filter(move |(_, node)| {
                node.text().and_then(|text| scalar::etcd(text).ok()).is_some_and(|url| url.scheme == scheme)
            });
            of_scheme.next()
        };
        let (secure, plain) = (with(Scheme::Https), with(Scheme::Http));
        let list = at.key("endpoints");
        if let (Some(_), Some((index, node))) = (secure, plain) {
            let fault =
                format!("found {node}, but other members use https://; expected https:// for all of them");
            self.problems.error(node.position, &list.index(index), fault);
        }
        let tls = etcd.node("tls");
        match (secure, plain, tls) {
            (Some((index, node)), _, None) => {
                let fault =
                    format!("found {node}, but no tls; add tls.roots, which verify etcd's certificate");
                self.problems.error(node.position, &list.index(index), fault);
            }
            (None, Some(_), Some(tls)) => {
                let fault = "found tls, but all endpoints are http://, which is plain TCP";
                self.problems.error(tls.position, &at.key("tls"), fault);
            }
            _ => {}
        }
        let fields = etcd.fields("tls", &ETCD_TLS);
        let certificate = self.both(&fields, "certificate", "key", &at.key("tls"));
        let certificate = certificate.and_then(|(chain, key)| {
            Some(CertificateFiles { chain: self.path(chain)?, key: self.path(key)? })
        });
        Some(Files { roots: self.path(fields.node("roots")?)?, certificate })
    }

    fn login(&mut self, etcd: &Fields<'_>, at: &Path<'_>) -> Option<Login> {
        let (user, password) = self.both(etcd, "user", "passwordFile", at)?;
        Some(Login { user: user.text()?.to_owned(), password: self.path(password)? })
    }

    /// Reads two keys that must be given together.
    fn both<'n>(
        &mut self,
        fields: &Fields<'n>,
        one: &str,
        other: &str,
        at: &Path<'_>,
    ) -> Option<(&'n Node, &'n Node)> {
        let (found, missing) = match (fields.node(one), fields.node(other)) {
            (Some(one), Some(other)) => return Some((one, other)),
            (Some(node), None) => ((one, node), other),
            (None, Some(node)) => ((other, node), one),
            (None, None) => return None,
        };
        let (key, node) = found;
        let fault = format!("found {key}, but no {missing}; expected both or neither");
        self.problems.error(node.position, &at.key(key), fault);
        None
    }

    /// Returns a path, relative to the file that names it.
    fn path(&self, node: &Node) -> Option<PathBuf> {
        let path = scalar::path(node.text()?).ok()?;
        Some(relative_to(self.problems.file(node.position.file), path))
    }
}
