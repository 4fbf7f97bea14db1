//! The resource types of ztunnels (WDS), which the WDS server serves and a registry of an istiod asks for.

use super::kind::ResourceKind;

/// The method of gRPC that serves all resource types on one stream.
pub const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";

/// A resource type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `istio.workload.Address`: a workload or a service.
    Address,
    /// `istio.security.Authorization`: a policy.
    Authorization,
}

impl ResourceKind for Kind {
    const ALL: &'static [Self] = &[Self::Address, Self::Authorization];

    fn type_url(self) -> &'static str {
        match self {
            Self::Address => "type.googleapis.com/istio.workload.Address",
            Self::Authorization => "type.googleapis.com/istio.security.Authorization",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Authorization => "authorization",
        }
    }
}
