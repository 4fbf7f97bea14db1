//! GatewayClasses of the Gateway API.

use std::sync::Arc;

use serde::de::IgnoredAny;

use super::gateway_status::{Conditions, Stamp};
use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, objects};
use crate::table::{Table, Touched};

/// The reason why a class of this controller is not accepted, if no gateway that reads it is configured for it.
pub(crate) const NOT_SERVED: &str = "NotServed";

objects! {
    /// `GatewayClass` of `gateway.networking.k8s.io/v1`.
    GatewayClass { metadata: Meta, spec: ClassSpec, status: ClassStatus, }
    ClassSpec { controller_name: String, parameters_ref: Option<IgnoredAny>, }
    ClassStatus { conditions: Conditions, supported_features: Vec<Feature>, }
    Feature { name: String, }
}

impl Watched for GatewayClass {
    const FACTS: Facts = Facts {
        plural: "gatewayclasses",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_custom: true,
        namespaces: Namespaces::None,
        is_wanted: |spec| spec.gateway_api.is_some(),
        is_required: |spec| spec.gateway_api.is_some(),
        ..Facts::CORE
    };

    type Rows = Table<Arc<str>, ClassRecord>;

    /// Only classes of this controller are kept.
    fn record(&self, reading: &mut Reading<'_>) -> Option<ClassRecord> {
        let controller = &reading.spec.gateway_api.as_ref()?.controller;
        (self.spec.controller_name == **controller).then(|| ClassRecord {
            has_parameters: self.spec.parameters_ref.is_some(),
            is_undecided: self.status.conditions.iter().all(|condition| {
                condition.kind != "Accepted"
                    || matches!(condition.reason.as_str(), "Pending" | "Waiting" | NOT_SERVED)
            }),
            stamp: Stamp::of(&self.metadata, |digest| {
                digest.conditions("", &self.status.conditions);
                self.status
                    .supported_features
                    .iter()
                    .for_each(|found| digest.part(&["feature", &found.name]));
            }),
        })
    }

    fn touch(_: Touched<Arc<str>, ClassRecord>, tables: &mut Tables) {
        tables.dirty.gateway_api.is_all = true;
    }
}

/// A GatewayClass of this controller.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClassRecord {
    /// True if the class refers to parameters, of which Isthmus knows none.
    pub(crate) has_parameters: bool,
    /// True if no controller has accepted or refused the class. The CRD itself gives a new class the reason `Pending`.
    pub(crate) is_undecided: bool,
    pub(crate) stamp: Stamp,
}
