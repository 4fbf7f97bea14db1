//! Services that this program derives from ServiceImports (KEP-1645), so that pods outside the mesh reach imported services by a virtual
//! address.

use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use super::own_object::{MANAGED_BY, OwnObject, is_owned_by, owner_of};
use super::selector::{Label, Selector};
use super::{Facts, Kind, Reading, Tables, Watched};
use crate::objects::{Meta, Port, ip, objects, port};
use crate::table::{ObjectKey, Table, Touched};

/// The labels of the Services that this program derives from imports.
const OWN: Selector = Selector(&[Label::Is(MANAGED_BY.0, MANAGED_BY.1), Label::Present(IMPORT)]);
/// The beginning of the names of derived Services. The name of an import may be too long for one, so a hash of it follows.
const PREFIX: &str = "isthmus-";
/// The label with the name of the ServiceImport.
pub(super) const IMPORT: &str = "multicluster.kubernetes.io/service-name";

objects! {
    /// `Service` of the core API.
    DerivedService { metadata: Meta, spec: DerivedSpec, }
    DerivedSpec {
        #[serde(rename = "clusterIPs")]
        cluster_ips: Vec<String>,
        ports: Vec<Port>,
    }
}

impl Watched for DerivedService {
    const FACTS: Facts = Facts {
        plural: "services",
        labels: OWN,
        is_wanted: |spec| spec.import_writer.is_some() && spec.import_extras.derived_services,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, DerivedRecord>;

    fn record(&self, _: &mut Reading<'_>) -> Option<DerivedRecord> {
        let content = Arc::new(self.content()?);
        let ips = self.spec.cluster_ips.iter().filter_map(|text| ip(text)).collect();
        Some(DerivedRecord { content, ips })
    }

    fn touch(_: Touched<ObjectKey, DerivedRecord>, _: &mut Tables) {}
}

/// Returns the key of the Service that is derived from an import.
pub(crate) fn derived_key(import: &ObjectKey) -> ObjectKey {
    let name = format!("{PREFIX}{:016x}", XxHash3_64::oneshot(import.name.as_bytes()));
    ObjectKey { namespace: import.namespace.clone(), name: name.into() }
}

/// Returns true if a derived Service could have this name.
pub(crate) fn is_name_of_derived(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Returns the name of the import from which this program has derived a Service; `None` for a Service of another program. A derived
/// Service has the labels, and its import as an owner. It leads to the endpoints of other services, and so it is no service of its own.
pub(super) fn import_of(service: &Meta) -> Option<&str> {
    let import = service.labels.get(IMPORT).filter(|_| OWN.matches(&service.labels))?;
    is_owned_by(service, import).then_some(import)
}

/// A derived Service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DerivedRecord {
    pub(crate) content: Arc<DerivedContent>,
    /// The virtual addresses that the cluster has given it.
    pub(crate) ips: Vec<IpAddr>,
}

/// The part of a derived Service that this program writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DerivedContent {
    /// The name of the ServiceImport, which is in the same namespace.
    pub(crate) import: String,
    /// The names, numbers and protocols of the ports.
    pub(crate) ports: Vec<(String, u16, String)>,
}

impl DerivedContent {
    fn ports(&self) -> Vec<Value> {
        let port = |(name, port, protocol): &(String, u16, String)| json!({"name": name, "port": port, "protocol": protocol});
        self.ports.iter().map(port).collect()
    }
}

impl OwnObject for DerivedService {
    type Content = DerivedContent;

    const KIND: Kind = Kind::DerivedService;
    const NAME: &'static str = "Service";

    fn metadata(&self) -> &Meta {
        &self.metadata
    }

    fn content(&self) -> Option<DerivedContent> {
        let import = import_of(&self.metadata)?.to_owned();
        let ports = self.spec.ports.iter().filter_map(|found| {
            let protocol = if found.protocol.is_empty() { "TCP" } else { &*found.protocol };
            Some((found.name.clone(), port(found.port)?, protocol.to_owned()))
        });
        Some(DerivedContent { import, ports: ports.collect() })
    }

    fn new_object(key: &ObjectKey, content: &DerivedContent) -> Value {
        let labels = OWN.labels([(IMPORT, &*content.import)]);
        json!({
            "metadata": {"namespace": &*key.namespace, "name": &*key.name, "labels": labels},
            "spec": {"type": "ClusterIP", "ipFamilyPolicy": "PreferDualStack", "ports": content.ports()},
        })
    }

    fn patch(&self, wanted: &DerivedContent) -> Option<Value> {
        let version = &self.metadata.resource_version;
        (self.content().as_ref() != Some(wanted))
            .then(|| json!({"metadata": {"resourceVersion": version}, "spec": {"ports": wanted.ports()}}))
    }

    fn owner(key: &ObjectKey, content: &DerivedContent) -> Option<(Kind, ObjectKey)> {
        Some(owner_of(key, &content.import))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_that_was_written_reads_back_as_it_was_meant_and_one_of_others_is_not_derived() {
        let ports =
            vec![("https".to_owned(), 443, "TCP".to_owned()), ("dns".to_owned(), 53, "UDP".to_owned())];
        let wanted = DerivedContent { import: "web".to_owned(), ports };
        let key = ObjectKey { namespace: "shop".into(), name: "isthmus-1".into() };
        let mut object = DerivedService::new_object(&key, &wanted);
        let read =
            |object: &Value| serde_json::from_value::<DerivedService>(object.clone()).expect("a service");
        assert_eq!(read(&object).content(), None, "someone has copied the labels");
        object["metadata"]["ownerReferences"] = json!([{"kind": "ServiceImport", "name": "other"}]);
        assert_eq!(read(&object).content(), None);
        object["metadata"]["ownerReferences"][0]["name"] = "web".into();
        assert_eq!(read(&object).content(), Some(wanted.clone()));
        assert_eq!(read(&object).patch(&wanted), None);
        let fewer = DerivedContent { ports: wanted.ports[..1].to_vec(), ..wanted };
        let patch = read(&object).patch(&fewer).expect("it differs");
        assert_eq!(patch["spec"], json!({"ports": [{"name": "https", "port": 443, "protocol": "TCP"}]}));
        object["metadata"]["labels"][MANAGED_BY.0] = "other".into();
        assert_eq!(read(&object).content(), None);
    }
}
