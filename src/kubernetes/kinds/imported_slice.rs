//! EndpointSlices of imported services (KEP-1645): those that this program writes.

use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};

use super::derived_service::IMPORT;
use super::endpoint_slice::{EndpointObject, SERVICE};
use super::own_object::{OwnObject, owner_of};
use super::selector::{Label, Selector};
use super::{Facts, Kind, Reading, Tables, Watched};
use crate::objects::{Meta, Port, ip, objects, port};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Health;

/// The labels of the slices that this program writes.
const OWN: Selector = Selector(&[Label::Is("endpointslice.kubernetes.io/managed-by", "isthmus.io")]);
/// The label with the name of the cluster whose endpoints a slice has.
const CLUSTER: &str = "multicluster.kubernetes.io/source-cluster";

objects! {
    /// `EndpointSlice` of `discovery.k8s.io/v1`.
    ImportedSlice { metadata: Meta, address_type: String, ports: Vec<Port>, endpoints: Vec<EndpointObject>, }
}

impl Watched for ImportedSlice {
    const FACTS: Facts = Facts {
        plural: "endpointslices",
        versions: &["apis/discovery.k8s.io/v1"],
        labels: OWN,
        is_wanted: |spec| spec.import_writer.is_some() && spec.import_extras.has_slices(),
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, Arc<SliceContent>>;

    fn record(&self, _: &mut Reading<'_>) -> Option<Arc<SliceContent>> {
        self.content().map(Arc::new)
    }

    fn touch(_: Touched<ObjectKey, Arc<SliceContent>>, _: &mut Tables) {}
}

/// The content of a slice that this program writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SliceContent {
    /// The name of the ServiceImport, which is in the same namespace.
    pub(crate) import: String,
    pub(crate) of: SliceOf,
    pub(crate) is_ipv6: bool,
    /// The names and numbers of TCP ports.
    pub(crate) ports: Vec<(String, u16)>,
    pub(crate) endpoints: Vec<ImportedEndpoint>,
}

/// The source of a slice's endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SliceOf {
    /// The endpoints of a cluster that exports the service.
    Cluster(String),
    /// The addresses to which a derived Service of this name leads.
    Derived(String),
}

impl SliceOf {
    /// Returns the label that says so, and its value.
    fn label(&self) -> (&'static str, &str) {
        match self {
            Self::Cluster(name) => (CLUSTER, name),
            Self::Derived(name) => (SERVICE, name),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ImportedEndpoint {
    pub(crate) address: IpAddr,
    pub(crate) health: Health,
    /// The zone; empty if it is not known.
    pub(crate) zone: String,
}

impl ImportedEndpoint {
    fn read(object: &EndpointObject) -> Option<Self> {
        let conditions = &object.conditions;
        Some(Self {
            address: ip(object.addresses.first()?)?,
            health: match (conditions.ready, conditions.serving, conditions.terminating) {
                (Some(true), Some(true), Some(false)) => Health::Healthy,
                (Some(false), Some(true), Some(true)) => Health::Draining,
                (Some(false), Some(false), Some(false)) => Health::Unhealthy,
                _ => return None,
            },
            zone: object.zone.clone(),
        })
    }

    fn json(&self) -> Value {
        let (ready, serving, terminating) = match self.health {
            Health::Healthy => (true, true, false),
            Health::Draining => (false, true, true),
            Health::Unhealthy => (false, false, false),
        };
        let mut endpoint = json!({
            "addresses": [self.address.to_string()],
            "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        });
        if !self.zone.is_empty() {
            endpoint["zone"] = self.zone.as_str().into();
        }
        endpoint
    }
}

impl SliceContent {
    fn ports(&self) -> Vec<Value> {
        let port = |(name, port): &(String, u16)| json!({"name": name, "port": port, "protocol": "TCP"});
        self.ports.iter().map(port).collect()
    }

    fn endpoints(&self) -> Vec<Value> {
        self.endpoints.iter().map(ImportedEndpoint::json).collect()
    }
}

impl OwnObject for ImportedSlice {
    type Content = SliceContent;

    const KIND: Kind = Kind::ImportedSlice;
    const NAME: &'static str = "EndpointSlice";

    fn metadata(&self) -> &Meta {
        &self.metadata
    }

    fn content(&self) -> Option<SliceContent> {
        if !OWN.matches(&self.metadata.labels) {
            return None;
        }
        let label = |name: &str| self.metadata.labels.get(name).map(String::as_str);
        let tcp = self.ports.iter().filter(|found| matches!(found.protocol.as_str(), "" | "TCP"));
        Some(SliceContent {
            import: label(IMPORT)?.to_owned(),
            of: match label(CLUSTER) {
                Some(cluster) => SliceOf::Cluster(cluster.to_owned()),
                None => SliceOf::Derived(label(SERVICE)?.to_owned()),
            },
            is_ipv6: self.address_type == "IPv6",
            ports: tcp.filter_map(|found| Some((found.name.clone(), port(found.port)?))).collect(),
            endpoints: self.endpoints.iter().filter_map(ImportedEndpoint::read).collect(),
        })
    }

    fn new_object(key: &ObjectKey, content: &SliceContent) -> Value {
        let labels = OWN.labels([(IMPORT, &*content.import), content.of.label()]);
        json!({
            "metadata": {"namespace": &*key.namespace, "name": &*key.name, "labels": labels},
            "addressType": if content.is_ipv6 { "IPv6" } else { "IPv4" },
            "ports": content.ports(), "endpoints": content.endpoints(),
        })
    }

    /// The import, the source and the family are part of the name of a slice, so they do not change.
    fn patch(&self, wanted: &SliceContent) -> Option<Value> {
        let version = &self.metadata.resource_version;
        (self.content().as_ref() != Some(wanted)).then(|| {
            json!({
                "metadata": {"resourceVersion": version},
                "ports": wanted.ports(), "endpoints": wanted.endpoints(),
            })
        })
    }

    fn owner(key: &ObjectKey, content: &SliceContent) -> Option<(Kind, ObjectKey)> {
        Some(owner_of(key, &content.import))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_that_was_written_reads_back_as_it_was_meant() {
        let endpoint = |text: &str, health, zone: &str| ImportedEndpoint {
            address: text.parse().expect("an address"),
            health,
            zone: zone.to_owned(),
        };
        let wanted = SliceContent {
            import: "web".to_owned(),
            of: SliceOf::Cluster("east".to_owned()),
            is_ipv6: false,
            ports: vec![("https".to_owned(), 8443)],
            endpoints: vec![
                endpoint("10.0.0.1", Health::Healthy, "a"),
                endpoint("10.0.0.2", Health::Draining, ""),
                endpoint("10.0.0.3", Health::Unhealthy, ""),
            ],
        };
        let key = ObjectKey { namespace: "shop".into(), name: "web-1".into() };
        let mut object = ImportedSlice::new_object(&key, &wanted);
        let read = |object: &Value| serde_json::from_value::<ImportedSlice>(object.clone()).expect("a slice");
        assert_eq!(read(&object).content(), Some(wanted.clone()));
        assert_eq!(read(&object).patch(&wanted), None);
        let derived = SliceContent { of: SliceOf::Derived("isthmus-1".to_owned()), ..wanted.clone() };
        assert_eq!(read(&ImportedSlice::new_object(&key, &derived)).content(), Some(derived));
        let fewer = SliceContent { endpoints: Vec::new(), ..wanted };
        assert_eq!(read(&object).patch(&fewer).expect("it differs")["endpoints"], json!([]));
        object["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] = "other".into();
        assert_eq!(read(&object).content(), None);
    }
}
