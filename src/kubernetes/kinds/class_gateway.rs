//! Gateways of the Gateway API that a GatewayClass of Isthmus may serve, and the listeners that they have in common with ListenerSets.

use std::net::IpAddr;
use std::sync::Arc;

use serde::de::IgnoredAny;

use super::gateway_status::{Conditions, Digest, Stamp};
use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};

/// The largest number of listeners of one object that are read, as many as the API allows.
pub(crate) const LISTENERS_MAX: usize = 64;

objects! {
    /// `Gateway` of `gateway.networking.k8s.io/v1`.
    ClassGateway { metadata: Meta, spec: ClassGatewaySpec, status: ListenersStatus, }
    ClassGatewaySpec {
        gateway_class_name: String,
        addresses: Vec<RequestedAddress>,
        listeners: Vec<ListenerSpec>,
        infrastructure: Infrastructure,
        allowed_listeners: AllowedListeners,
    }
    Infrastructure { parameters_ref: Option<IgnoredAny>, }
    AllowedListeners { namespaces: AllowedNamespaces, }
    #[derive(Clone, PartialEq, Eq)]
    RequestedAddress {
        #[serde(rename = "type")]
        kind: String,
        value: String,
    }
    /// A listener of a Gateway or a ListenerSet.
    #[derive(Clone, PartialEq, Eq)]
    ListenerSpec {
        name: String,
        hostname: String,
        port: i64,
        protocol: String,
        tls: ListenerTls,
        allowed_routes: AllowedRoutes,
    }
    #[derive(Clone, PartialEq, Eq)]
    ListenerTls { mode: String, certificate_refs: Vec<CertificateRef>, }
    #[derive(Clone, PartialEq, Eq)]
    CertificateRef { group: String, kind: String, namespace: String, name: String, }
    #[derive(Clone, PartialEq, Eq)]
    AllowedRoutes { namespaces: AllowedNamespaces, kinds: Vec<RouteKindRef>, }
    #[derive(Clone, PartialEq, Eq)]
    RouteKindRef { group: Option<String>, kind: String, }
    /// The namespaces whose objects may be attached; `from` is empty, `All`, `Same`, `Selector` or `None`.
    #[derive(Clone, PartialEq, Eq)]
    AllowedNamespaces { from: String, selector: LabelSelector, }
    #[derive(Clone, PartialEq, Eq)]
    LabelSelector { match_labels: Texts, match_expressions: Vec<Expression>, }
    #[derive(Clone, PartialEq, Eq)]
    Expression { key: String, operator: String, values: Vec<String>, }
    /// The status of a Gateway or a ListenerSet.
    ListenersStatus {
        addresses: Vec<RequestedAddress>,
        conditions: Conditions,
        listeners: Vec<ListenerStatus>,
        attached_listener_sets: i64,
    }
    ListenerStatus {
        name: String,
        attached_routes: i64,
        supported_kinds: Vec<RouteKindRef>,
        conditions: Conditions,
    }
}

impl ListenerTls {
    /// Returns true if TLS is passed through unchanged.
    pub(crate) fn is_passed_through(&self) -> bool {
        self.mode == "Passthrough"
    }
}

/// Returns the beginning of the message of the condition `Accepted`, by which a release recognises the conditions that it has written
/// to a Gateway or ListenerSet: the API has no field for their controller.
pub(crate) fn mark_of_class(class: &str) -> String {
    format!("GatewayClass {class}: ")
}

impl ListenersStatus {
    /// Returns true if a release that serves this class has written the condition `Accepted`.
    pub(crate) fn is_of_class(&self, class: &str) -> bool {
        let mark = mark_of_class(class);
        self.conditions.iter().any(|found| found.kind == "Accepted" && found.message.starts_with(&mark))
    }

    /// Adds the status to a digest.
    pub(crate) fn add_to(&self, digest: &mut Digest) {
        for address in &self.addresses {
            digest.part(&["address", &address.kind, &address.value]);
        }
        if self.attached_listener_sets > 0 {
            digest.part(&["attachedListenerSets", &self.attached_listener_sets.to_string()]);
        }
        digest.conditions("", &self.conditions);
        for listener in &self.listeners {
            digest.part(&["listener", &listener.name, &listener.attached_routes.to_string()]);
            for kind in &listener.supported_kinds {
                digest.part(&["kind", &listener.name, &kind.kind]);
            }
            digest.conditions(&listener.name, &listener.conditions);
        }
    }
}

impl Watched for ClassGateway {
    const FACTS: Facts = Facts {
        plural: "gateways",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_custom: true,
        is_wanted: |spec| spec.gateway_api.is_some(),
        is_required: |spec| spec.gateway_api.is_some(),
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, ClassGatewayRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<ClassGatewayRecord> {
        let Self { metadata, spec, status } = self;
        let served = reading.spec.gateway_api.as_ref()?;
        let class = reading.texts.text(&spec.gateway_class_name);
        // Gateways of other classes may be most of them, so only their class is kept.
        let is_written = status.is_of_class(&served.class);
        let stamp = || Stamp::of(metadata, |digest| status.add_to(digest));
        Some(match class == served.class {
            false if is_written => {
                ClassGatewayRecord { class, is_written, stamp: stamp(), ..ClassGatewayRecord::default() }
            }
            false => ClassGatewayRecord { class, ..ClassGatewayRecord::default() },
            true => ClassGatewayRecord {
                class,
                is_written,
                created: metadata.created().into(),
                addresses: spec.addresses.clone(),
                shown: status.addresses.iter().filter_map(|address| address.value.parse().ok()).collect(),
                listeners: spec.listeners.iter().take(LISTENERS_MAX).cloned().collect(),
                has_parameters: spec.infrastructure.parameters_ref.is_some(),
                allowed_listeners: spec.allowed_listeners.namespaces.clone(),
                stamp: stamp(),
            },
        })
    }

    fn touch(_: Touched<ObjectKey, ClassGatewayRecord>, tables: &mut Tables) {
        tables.dirty.gateway_api.is_all = true;
    }
}

/// A Gateway of the class that Isthmus serves; of another class, the other fields have their defaults.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ClassGatewayRecord {
    pub(crate) class: Arc<str>,
    /// True if the condition `Accepted` is that of a release that serves the class. Such a Gateway of another class has a stamp, too.
    pub(crate) is_written: bool,
    pub(crate) created: Box<str>,
    pub(crate) addresses: Vec<RequestedAddress>,
    /// The addresses of the status.
    pub(crate) shown: Vec<IpAddr>,
    pub(crate) listeners: Vec<ListenerSpec>,
    /// True if the Gateway refers to parameters, of which Isthmus knows none.
    pub(crate) has_parameters: bool,
    pub(crate) allowed_listeners: AllowedNamespaces,
    pub(crate) stamp: Stamp,
}

impl ClassGatewayRecord {
    /// Returns true if the choice of an address is left to the controller.
    pub(crate) fn requests_no_address(&self) -> bool {
        self.addresses.iter().all(|address| address.value.is_empty())
    }

    /// Returns the IP addresses that the Gateway requests.
    pub(crate) fn requested(&self) -> Vec<IpAddr> {
        self.addresses.iter().filter_map(|address| address.value.parse().ok()).collect()
    }
}
