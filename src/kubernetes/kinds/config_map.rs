//! The ConfigMap of the mesh, which names its trust domain, and the services that each cluster keeps to itself.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_document::problem::Problems;
use isthmus_document::tree::{Node, Source, parse};
use isthmus_model::identity::TrustDomain;

/// The largest number of host names in `serviceSettings` that are read.
const SETTINGS_MAX: usize = 1_000;

objects! {
    ConfigMap { metadata: Meta, data: Texts, }
}

impl Watched for ConfigMap {
    const FACTS: Facts = Facts {
        plural: "configmaps",
        namespaces: Namespaces::System,
        fields: "metadata.name=istio",
        is_wanted: |spec| spec.mesh_config,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, MeshRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<MeshRecord> {
        let mesh = self.mesh();
        let named = mesh.as_ref().and_then(trust_domain);
        Some(MeshRecord {
            names_another: named.is_some_and(|named| named != *reading.trust_domain),
            local: LocalHosts::of(mesh.as_ref(), reading.spec),
        })
    }

    /// Marks the session, which has to begin again with the other trust domain; the mark stays if the ConfigMap is deleted. Marks all
    /// services if others are kept to their cluster.
    fn touch(touched: Touched<ObjectKey, MeshRecord>, tables: &mut Tables) {
        let now = tables.mesh_configs.get(&touched.key);
        if let Some(record) = now {
            tables.dirty.session = record.names_another;
        }
        tables.dirty.is_all |=
            now.map(|now| &now.local) != touched.before.as_ref().map(|before| &before.local);
    }
}

impl ConfigMap {
    /// Returns the trust domain of the mesh configuration, if it names one.
    pub(crate) fn trust_domain(&self) -> Option<TrustDomain> {
        trust_domain(&self.mesh()?)
    }

    /// Returns the mesh configuration, if it can be read.
    fn mesh(&self) -> Option<Node> {
        let text = self.data.get("mesh")?;
        let mut problems = Problems::new();
        let file = problems.add_file(Path::new("mesh"))?;
        parse(Source { file, text, environment: None }, None, &mut problems)
    }
}

fn trust_domain(mesh: &Node) -> Option<TrustDomain> {
    TrustDomain::parse(mesh.get("trustDomain")?.text()?).ok()
}

/// The settings of a mesh that are kept.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MeshRecord {
    /// True if the mesh's own configuration names another trust domain than the one in use.
    names_another: bool,
    pub(crate) local: LocalHosts,
}

/// The host names that a mesh keeps to the cluster of the caller, as istiod does: those in `serviceSettings`, and by default those of
/// `kube-system`, of the API server, and of istiod.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LocalHosts {
    /// The host names; one that begins with `*` stands for all names with its end. False: callers of all clusters share the service.
    hosts: BTreeMap<Arc<str>, bool>,
}

impl LocalHosts {
    /// Returns the host names of a mesh configuration; of the defaults alone if there is none.
    pub(crate) fn of(mesh: Option<&Node>, spec: &KubernetesSpec) -> Self {
        let (domain, system) = (&spec.cluster_domain, &spec.system_namespace);
        let named = mesh.and_then(|mesh| mesh.get("defaultConfig")?.get("discoveryAddress")?.text());
        let istiod =
            named.map(|address| address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned());
        let istiod = istiod.unwrap_or_else(|| format!("istiod.{system}.svc"));
        let istiod = match istiod.ends_with(domain.as_str()) {
            true => istiod,
            false => format!("{istiod}.{domain}"),
        };
        let mut defaults =
            vec![format!("*.kube-system.svc.{domain}"), format!("kubernetes.default.svc.{domain}"), istiod];
        let settings = mesh.and_then(|mesh| mesh.get("serviceSettings")).map(Node::items).unwrap_or_default();
        let hosts = settings.iter().flat_map(|one| {
            let is_local = one.get("settings").and_then(|own| own.get("clusterLocal")?.switch());
            let hosts = one.get("hosts").map(Node::items).unwrap_or_default();
            hosts.iter().filter_map(Node::text).map(move |host| (host, is_local.unwrap_or_default()))
        });
        let hosts: Vec<(&str, bool)> = hosts.take(SETTINGS_MAX).collect();
        for (host, _) in hosts.iter().filter(|(_, is_local)| !is_local) {
            // A setting that shares a default, or a part of it, takes the place of the whole default.
            defaults.retain(|default| {
                *host != default && !default.strip_prefix('*').is_some_and(|end| host.ends_with(end))
            });
        }
        let mut all: BTreeMap<Arc<str>, bool> =
            hosts.into_iter().map(|(host, is_local)| (host.into(), is_local)).collect();
        all.extend(defaults.into_iter().map(|host| (host.into(), true)));
        Self { hosts: all }
    }

    /// Returns the host name by which a service is kept to its cluster: the most specific one that matches decides.
    pub(crate) fn local(&self, hostname: &str) -> Option<&Arc<str>> {
        let closeness = |host: &str| match host.strip_prefix('*') {
            Some(end) => hostname.ends_with(end).then_some(end.len()),
            None => (host == hostname).then_some(usize::MAX),
        };
        let matching =
            self.hosts.iter().filter_map(|(host, is_local)| Some((closeness(host)?, host, *is_local)));
        matching
            .max_by_key(|(closeness, ..)| *closeness)
            .filter(|(.., is_local)| *is_local)
            .map(|(_, host, _)| host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_configuration_names_its_trust_domain() {
        let read = |text: &str| map(text).trust_domain().map(|domain| domain.as_str().to_owned());
        assert_eq!(read("rootNamespace: x\ntrustDomain: west.example\n"), Some("west.example".to_owned()));
        assert_eq!(read("trustDomain: \"west.example\" # ours\n"), Some("west.example".to_owned()));
        assert_eq!(read("{\"trustDomain\": \"west.example\"}"), Some("west.example".to_owned()));
        assert_eq!(read("defaultConfig:\n  trustDomain: other\n"), None, "of another section");
        assert_eq!(read("trustDomain: ''\n"), None);
        assert_eq!(read("a: [\n"), None);
        assert_eq!(ConfigMap::default().trust_domain(), None);
    }

    fn map(text: &str) -> ConfigMap {
        ConfigMap { data: Texts::from([("mesh".to_owned(), text.to_owned())]), ..ConfigMap::default() }
    }

    #[test]
    fn the_most_specific_setting_says_whether_a_service_is_kept_to_its_cluster() {
        let local = |text: &str, name: &str| {
            let hosts = LocalHosts::of(map(text).mesh().as_ref(), &KubernetesSpec::plain());
            hosts
                .local(&format!("{name}.svc.cluster.local"))
                .map(|host| host.replace(".svc.cluster.local", ""))
        };
        let by = |host: &str| Some(host.to_owned());
        for text in ["", "rootNamespace: x\n", "serviceSettings: []\n", "a: [\n"] {
            assert_eq!(local(text, "kdns.kube-system"), by("*.kube-system"), "{text}");
            assert_eq!(local(text, "kubernetes.default"), by("kubernetes.default"));
            assert_eq!(local(text, "istiod.istio-system"), by("istiod.istio-system"));
            assert_eq!(local(text, "web.istio-system"), None);
            assert_eq!(local(text, "web.shop"), None);
        }
        let discovery = "defaultConfig: {discoveryAddress: \"istiod-1-30.istio-system.svc:15012\"}\n";
        assert_eq!(local(discovery, "istiod-1-30.istio-system"), by("istiod-1-30.istio-system"));
        assert_eq!(local(discovery, "istiod.istio-system"), None);
        let set = |hosts: &str, is_local: bool| {
            format!("serviceSettings: [{{settings: {{clusterLocal: {is_local}}}, hosts: [{hosts}]}}]\n")
        };
        let shop = set("\"*.shop.svc.cluster.local\", db.pay.svc.cluster.local", true);
        assert_eq!(local(&shop, "web.shop"), by("*.shop"));
        assert_eq!(local(&shop, "db.pay"), by("db.pay"));
        assert_eq!(local(&shop, "web.pay"), None);
        assert_eq!(local(&shop, "kdns.kube-system"), by("*.kube-system"), "the defaults stay");
        let one = set("kdns.kube-system.svc.cluster.local", false);
        assert_eq!(local(&one, "kdns.kube-system"), None);
        assert_eq!(local(&one, "other.kube-system"), None, "the whole default goes");
        assert_eq!(local(&one, "kubernetes.default"), by("kubernetes.default"));
        let (wide, near) = ("\"*.shop.svc.cluster.local\"", "web.shop.svc.cluster.local");
        let both = format!(
            "serviceSettings:\n- settings: {{clusterLocal: true}}\n  hosts: [{wide}]\n- settings: {{}}\n  hosts: [{near}]\n"
        );
        assert_eq!((local(&both, "web.shop"), local(&both, "other.shop")), (None, by("*.shop")));
    }
}
