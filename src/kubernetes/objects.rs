//! The few fields of Kubernetes objects that are read. Everything may be absent or null, and unknown fields are skipped: an
//! API server of another version, or a controller with a fault, must not make a whole list unreadable.

use std::collections::BTreeMap;

use serde::de::{Error as _, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// The largest number of items of one page. A page with more is refused.
const ITEMS_MAX: usize = 250_000;

/// Labels or annotations.
pub(super) type Texts = BTreeMap<String, String>;

/// Deserializes null as the default value.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Defines structs of which every field may be absent or null.
macro_rules! objects {
    ($($(#[$attribute:meta])* $name:ident { $($(#[$of_field:meta])* $field:ident: $kind:ty,)* })*) => {
        $($(#[$attribute])*
        #[derive(Debug, Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        pub(super) struct $name {
            $($(#[$of_field])* #[serde(deserialize_with = "or_default")] pub(super) $field: $kind,)*
        })*
    };
}

objects! {
    /// `ObjectMeta`.
    Meta {
        name: String,
        namespace: String,
        uid: String,
        generation: i64,
        resource_version: String,
        labels: Texts,
        annotations: Texts,
        creation_timestamp: String,
        deletion_timestamp: String,
    }
    /// An object of which only the metadata is read: Namespace, and any object whose other fields cannot be read.
    Bare { metadata: Meta, }
    Service { metadata: Meta, spec: ServiceSpec, status: ServiceStatus, }
    ServiceStatus { load_balancer: LoadBalancer, }
    LoadBalancer { ingress: Vec<Ingress>, }
    Ingress { ip: String, hostname: String, }
    Port {
        name: String,
        port: i64,
        protocol: String,
        app_protocol: String,
        target_port: IntOrText,
        node_port: i64,
    }
    SessionAffinityConfig {
        #[serde(rename = "clientIP")]
        client_ip: ClientIpConfig,
    }
    ClientIpConfig { timeout_seconds: i64, }
    /// `EndpointSlice` of `discovery.k8s.io/v1`.
    Slice { metadata: Meta, address_type: String, ports: Vec<Port>, endpoints: Vec<SliceEndpoint>, }
    SliceEndpoint {
        addresses: Vec<String>,
        conditions: Conditions,
        hostname: String,
        node_name: String,
        zone: String,
        target_ref: Reference,
    }
    /// Absent conditions mean: ready, serving, not terminating.
    Conditions { ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>, }
    Reference { kind: String, namespace: String, name: String, uid: String, }
    Pod { metadata: Meta, spec: PodSpec, status: PodStatus, }
    PodSpec { service_account_name: String, node_name: String, }
    PodStatus {
        #[serde(rename = "podIPs")]
        pod_ips: Vec<PodIp>,
    }
    PodIp { ip: String, }
    Node { metadata: Meta, status: NodeStatus, }
    NodeStatus { addresses: Vec<TypedAddress>, }
    TypedAddress {
        #[serde(rename = "type")]
        kind: String,
        address: String,
        value: String,
    }
    /// `Gateway` of `gateway.networking.k8s.io/v1`.
    Gateway { metadata: Meta, spec: GatewaySpec, status: GatewayStatus, }
    GatewaySpec { gateway_class_name: String, addresses: Vec<TypedAddress>, listeners: Vec<GatewayListener>, }
    GatewayStatus { addresses: Vec<TypedAddress>, }
    GatewayListener { name: String, port: i64, protocol: String, tls: GatewayTls, }
    GatewayTls { mode: String, options: Texts, }
    /// `ServiceExport` of `multicluster.x-k8s.io`.
    ServiceExport { metadata: Meta, status: ExportStatus, }
    ExportStatus { conditions: Vec<Condition>, }
    Condition {
        #[serde(rename = "type")]
        kind: String,
        status: String,
        reason: String,
        message: String,
        last_transition_time: String,
    }
    /// `ServiceImport` of `multicluster.x-k8s.io`.
    ServiceImport { metadata: Meta, spec: ImportSpec, }
    ImportSpec { ips: Vec<String>, }
    /// `DestinationRule` of `networking.istio.io/v1`.
    DestinationRule { metadata: Meta, spec: DestinationSpec, }
    DestinationSpec { host: String, subsets: Vec<Subset>, }
    Subset { name: String, labels: Texts, }
    ConfigMap { metadata: Meta, data: Texts, }
    Secret { metadata: Meta, data: Texts, }
    /// `Status`: the response of an API server in place of an object.
    Status { code: i64, reason: String, message: String, details: StatusDetails, }
    StatusDetails { retry_after_seconds: i64, }
    /// The metadata of a list.
    ListMeta {
        resource_version: String,
        #[serde(rename = "continue")]
        token: String,
    }
}

/// `Service.spec`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ServiceSpec {
    #[serde(rename = "type", deserialize_with = "or_default")]
    pub(super) kind: String,
    #[serde(rename = "clusterIP", deserialize_with = "or_default")]
    pub(super) cluster_ip: String,
    #[serde(rename = "clusterIPs", deserialize_with = "or_default")]
    pub(super) cluster_ips: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ip_families: Vec<String>,
    #[serde(rename = "externalIPs", deserialize_with = "or_default")]
    pub(super) external_ips: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub(super) ports: Vec<Port>,
    #[serde(deserialize_with = "or_default")]
    pub(super) internal_traffic_policy: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) external_traffic_policy: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) session_affinity: String,
    #[serde(deserialize_with = "or_default")]
    pub(super) session_affinity_config: SessionAffinityConfig,
}

/// `IntOrString`.
#[derive(Debug, Default, Deserialize)]
#[serde(untagged)]
pub(super) enum IntOrText {
    Number(i64),
    /// The name of a pod's port.
    Text(IgnoredAny),
    #[default]
    Absent,
}

/// One page of a list. Its items are read one by one, so that an item with mistakes does not affect the others.
#[derive(Deserialize)]
pub(super) struct List<'a> {
    #[serde(default)]
    pub(super) metadata: ListMeta,
    #[serde(borrow, default)]
    pub(super) items: Items<'a>,
}

/// The items of a page, at most [`ITEMS_MAX`]; null: none.
#[derive(Default)]
pub(super) struct Items<'a>(pub(super) Vec<&'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for Items<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct All;

        impl<'de> Visitor<'de> for All {
            type Value = Items<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of items")
            }

            fn visit_unit<E>(self) -> Result<Items<'de>, E> {
                Ok(Items::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Items<'de>, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = from.next_element()? {
                    if items.len() == ITEMS_MAX {
                        return Err(A::Error::custom(format!("more than {ITEMS_MAX} items")));
                    }
                    items.push(item);
                }
                Ok(Items(items))
            }
        }

        from.deserialize_any(All)
    }
}

/// A text; empty if the value has another type.
#[derive(Default)]
struct Loose(String);

impl<'de> Deserialize<'de> for Loose {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Any {
            Text(String),
            Other(IgnoredAny),
        }

        Ok(Self(match Any::deserialize(from)? {
            Any::Text(text) => text,
            Any::Other(_) => String::new(),
        }))
    }
}

impl Meta {
    /// Reads the fields that identify an object, whatever mistakes its other fields have.
    pub(super) fn lenient(raw: &RawValue) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct LooseObject {
            metadata: LooseMeta,
        }

        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct LooseMeta {
            name: Loose,
            namespace: Loose,
            uid: Loose,
            resource_version: Loose,
        }

        if let Ok(Bare { metadata }) = serde_json::from_str(raw.get()) {
            return metadata;
        }
        let LooseObject { metadata } = serde_json::from_str(raw.get()).unwrap_or_default();
        Self {
            name: metadata.name.0,
            namespace: metadata.namespace.0,
            uid: metadata.uid.0,
            resource_version: metadata.resource_version.0,
            ..Self::default()
        }
    }

    /// Returns the first field that is missing here although every object of an API server has it.
    pub(super) fn lack(&self) -> Option<&'static str> {
        let fields = [("metadata.name", &self.name), ("metadata.resourceVersion", &self.resource_version)];
        fields.iter().find(|(_, text)| text.is_empty()).map(|(name, _)| *name)
    }
}

/// One line of a watch.
#[derive(Deserialize)]
pub(super) struct WatchLine<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'a str,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nulls_absent_and_unknown_fields_are_taken() {
        let nulls = r#"{"kind":"EndpointSlice","metadata":null,"addressType":null,"ports":null,"endpoints":null,"x":{"y":[1]}}"#;
        let slice: Slice = serde_json::from_str(nulls).expect("legal");
        assert!(slice.endpoints.is_empty() && slice.metadata.name.is_empty());
        let inner = r#"{"endpoints":[{"addresses":["10.0.0.1"],"conditions":null,"targetRef":null,"nodeName":null}]}"#;
        let slice: Slice = serde_json::from_str(inner).expect("legal");
        assert_eq!(slice.endpoints[0].conditions.ready, None);
        for empty in ["{}", r#"{"spec":{"ports":[{}]}}"#, r#"{"spec":null,"status":{"loadBalancer":null}}"#] {
            let _: Service = serde_json::from_str(empty).expect("legal");
        }
        let named = r#"{"spec":{"type":"NodePort","clusterIPs":["None"],"externalIPs":["192.0.2.1"],"ports":[{"targetPort":"web","port":80},{"targetPort":8080}]}}"#;
        let service: Service = serde_json::from_str(named).expect("legal");
        assert_eq!((service.spec.kind.as_str(), service.spec.cluster_ips[0].as_str()), ("NodePort", "None"));
        assert_eq!(service.spec.external_ips, ["192.0.2.1"]);
        assert!(matches!(service.spec.ports[0].target_port, IntOrText::Text(_)));
        assert!(matches!(service.spec.ports[1].target_port, IntOrText::Number(8080)));
        assert!(serde_json::from_str::<Pod>(r#"{"status":{"podIPs":[{"ip":7}]}}"#).is_err(), "a wrong type");
        let pod: Pod = serde_json::from_str(r#"{"status":{"podIPs":[{"ip":"10.0.0.1"}]}}"#).expect("legal");
        assert_eq!(pod.status.pod_ips[0].ip, "10.0.0.1");
    }

    #[test]
    fn items_of_a_list_are_not_read_with_it() {
        let page = r#"{"metadata":{"resourceVersion":"7","continue":"x"},"items":[{"metadata":7},{"metadata":{"name":"a"}}]}"#;
        let list: List<'_> = serde_json::from_str(page).expect("a list");
        assert_eq!((list.metadata.resource_version.as_str(), list.metadata.token.as_str()), ("7", "x"));
        let Items(items) = list.items;
        assert!(serde_json::from_str::<Bare>(items[0].get()).is_err());
        assert_eq!(serde_json::from_str::<Bare>(items[1].get()).expect("legal").metadata.name, "a");
        for none in [r#"{"items":null}"#, "{}"] {
            assert!(serde_json::from_str::<List<'_>>(none).expect("a list").items.0.is_empty());
        }
        let many = format!(r#"{{"items":[{}0]}}"#, "0,".repeat(ITEMS_MAX));
        assert!(serde_json::from_str::<List<'_>>(&many).is_err());
    }

    #[test]
    fn an_object_with_mistakes_is_known_by_what_is_right_of_its_metadata() {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).expect("JSON");
        let read = |text: &str| Meta::lenient(&raw(text));
        let labels = read(
            r#"{"metadata":{"name":"a","namespace":"b","uid":7,"labels":{"x":[]},"resourceVersion":"3"}}"#,
        );
        assert_eq!((&*labels.name, &*labels.namespace, &*labels.uid), ("a", "b", ""));
        assert_eq!((&*labels.resource_version, labels.lack()), ("3", None));
        assert_eq!(read(r#"{"metadata":{"name":"a"},"spec":[]}"#).lack(), Some("metadata.resourceVersion"));
        for nothing in ["7", "[]", "{}", r#"{"metadata":7}"#, r#"{"metadata":{"name":[{}],"labels":7}}"#] {
            assert_eq!(read(nothing).lack(), Some("metadata.name"), "{nothing}");
        }
    }
}
