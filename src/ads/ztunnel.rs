//! The resource types of ztunnels (WDS), which the WDS server serves and a registry of an istiod asks for.

use super::kind::ResourceKind;

/// The method of gRPC that serves all resource types on one stream.
pub const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";

/// A resource type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `istio.security.Authorization`: a policy.
    Authorization,
    /// `istio.workload.Address`: a workload or a service.
    Address,
}

impl ResourceKind for Kind {
    const ALL: &'static [Self] = &[Self::Authorization, Self::Address];
    // A ztunnel ignores the names of policies that it does not have, so the policies arrive before the workloads that name them.
    const GATE: Option<Self> = Some(Self::Authorization);

    fn type_url(self) -> &'static str {
        match self {
            Self::Authorization => "type.googleapis.com/istio.security.Authorization",
            Self::Address => "type.googleapis.com/istio.workload.Address",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Authorization => "authorization",
            Self::Address => "address",
        }
    }
}
