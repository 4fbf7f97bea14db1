//! ReferenceGrants of the Gateway API: the permission to refer to objects of another namespace.

use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, objects};
use crate::table::{ObjectKey, Table, Touched};

objects! {
    /// `ReferenceGrant` of `gateway.networking.k8s.io`.
    ReferenceGrant { metadata: Meta, spec: GrantSpec, }
    GrantSpec { from: Vec<GrantFrom>, to: Vec<GrantTo>, }
    #[derive(Clone, PartialEq, Eq)]
    GrantFrom { group: String, kind: String, namespace: String, }
    #[derive(Clone, PartialEq, Eq)]
    GrantTo { group: String, kind: String, name: String, }
}

impl Watched for ReferenceGrant {
    const FACTS: Facts = Facts {
        plural: "referencegrants",
        versions: &["apis/gateway.networking.k8s.io/v1", "apis/gateway.networking.k8s.io/v1beta1"],
        is_custom: true,
        objects_max: 10_000,
        is_wanted: |spec| spec.gateway_api.is_some(),
        is_required: |spec| spec.gateway_api.is_some(),
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, GrantRecord>;

    fn record(&self, _: &mut Reading<'_>) -> Option<GrantRecord> {
        Some(GrantRecord { from: self.spec.from.clone(), to: self.spec.to.clone() })
    }

    fn touch(_: Touched<ObjectKey, GrantRecord>, tables: &mut Tables) {
        tables.dirty.gateway_api.is_all = true;
    }
}

/// A ReferenceGrant. Its own namespace is that of the objects that may be referred to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GrantRecord {
    pub(crate) from: Vec<GrantFrom>,
    /// The objects; an empty name stands for all objects of the kind.
    pub(crate) to: Vec<GrantTo>,
}
