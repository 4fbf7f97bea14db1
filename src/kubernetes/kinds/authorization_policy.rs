//! AuthorizationPolicies: the rules by which ztunnels admit connections. How they are converted is in `authorization`.

use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::authorization::{PolicySpec, converted};
use crate::objects::{Meta, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;

objects! {
    /// `AuthorizationPolicy` of `security.istio.io`.
    AuthorizationPolicy { metadata: Meta, spec: PolicySpec, }
}

impl Watched for AuthorizationPolicy {
    const FACTS: Facts = Facts {
        plural: "authorizationpolicies",
        versions: &["apis/security.istio.io/v1", "apis/security.istio.io/v1beta1"],
        is_custom: true,
        namespaces: Namespaces::Every,
        is_wanted: |spec| spec.ambient,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, PolicyRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<PolicyRecord> {
        let message = converted(&self.spec, &self.metadata, &reading.spec.system_namespace)?;
        let selector =
            self.spec.selector.as_ref().map(|selector| reading.texts.labels(&selector.match_labels));
        Some(PolicyRecord { selector, message })
    }

    fn touch(_: Touched<ObjectKey, PolicyRecord>, tables: &mut Tables) {
        tables.dirty.mark_ambient();
    }
}

/// A policy for ztunnels.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PolicyRecord {
    /// The labels of the workloads that the policy is for; `None`: all of the namespace, or of the mesh.
    pub(crate) selector: Option<Labels>,
    /// The encoded `istio.security.Authorization`.
    pub(crate) message: Vec<u8>,
}
