//! The resource types of WDS.

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

impl Kind {
    /// All types.
    pub const ALL: [Self; 2] = [Self::Address, Self::Authorization];

    /// Returns the type URL.
    pub fn type_url(self) -> &'static str {
        match self {
            Self::Address => "type.googleapis.com/istio.workload.Address",
            Self::Authorization => "type.googleapis.com/istio.security.Authorization",
        }
    }

    /// Returns the short name that operators and metrics use.
    pub fn text(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Authorization => "authorization",
        }
    }

    /// Returns the type of a type URL.
    pub fn of_type_url(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.type_url() == url)
    }
}
