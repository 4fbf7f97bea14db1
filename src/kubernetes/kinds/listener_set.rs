//! ListenerSets of the Gateway API: further listeners of a Gateway.

use super::class_gateway::{LISTENERS_MAX, ListenerSpec, ListenersStatus};
use super::gateway_status::Stamp;
use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, objects};
use crate::table::{ObjectKey, Table, Touched};

objects! {
    /// `ListenerSet` of `gateway.networking.k8s.io/v1`.
    ListenerSet { metadata: Meta, spec: ListenerSetSpec, status: ListenersStatus, }
    ListenerSetSpec { parent_ref: GatewayRef, listeners: Vec<ListenerSpec>, }
    GatewayRef { group: Option<String>, kind: Option<String>, namespace: Option<String>, name: String, }
}

impl Watched for ListenerSet {
    const FACTS: Facts = Facts {
        plural: "listenersets",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_custom: true,
        objects_max: 10_000,
        is_wanted: |spec| spec.gateway_api.is_some(),
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, ListenerSetRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<ListenerSetRecord> {
        let Self { metadata, spec: ListenerSetSpec { parent_ref, listeners }, status } = self;
        let is = |text: &Option<String>, default: &str| text.as_deref().unwrap_or(default) == default;
        if !is(&parent_ref.group, "gateway.networking.k8s.io") || !is(&parent_ref.kind, "Gateway") {
            return None;
        }
        let namespace = parent_ref.namespace.as_ref().unwrap_or(&metadata.namespace);
        Some(ListenerSetRecord {
            created: metadata.created().into(),
            gateway: ObjectKey {
                namespace: reading.texts.text(namespace),
                name: reading.texts.text(&parent_ref.name),
            },
            listeners: listeners.iter().take(LISTENERS_MAX).cloned().collect(),
            is_written: reading.spec.gateway_api.as_ref().is_some_and(|of| status.is_of_class(&of.class)),
            stamp: Stamp::of(metadata, |digest| status.add_to(digest)),
        })
    }

    fn touch(_: Touched<ObjectKey, ListenerSetRecord>, tables: &mut Tables) {
        tables.dirty.gateway_api.is_all = true;
    }
}

/// A ListenerSet of any Gateway.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListenerSetRecord {
    pub(crate) created: Box<str>,
    pub(crate) gateway: ObjectKey,
    pub(crate) listeners: Vec<ListenerSpec>,
    /// True if the condition `Accepted` is that of a release that serves the class.
    pub(crate) is_written: bool,
    pub(crate) stamp: Stamp,
}
