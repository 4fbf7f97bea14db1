//! The kinds of objects that are followed, and their paths on an API server.

use std::fmt::Write as _;

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    Namespace,
    Service,
    EndpointSlice,
    Pod,
    Node,
    Gateway,
    ServiceExport,
    ServiceImport,
    DestinationRule,
    ConfigMap,
    Secret,
}

/// The selectors of a request, percent-encoded; empty: none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Selectors {
    labels: &'static str,
    fields: &'static str,
}

impl Kind {
    pub(super) const ALL: [Self; 10] = [
        Self::Namespace,
        Self::Service,
        Self::EndpointSlice,
        Self::Pod,
        Self::Node,
        Self::Gateway,
        Self::ServiceExport,
        Self::ServiceImport,
        Self::DestinationRule,
        Self::ConfigMap,
    ];

    /// Returns the plural name of the kind, which RBAC and messages use.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Namespace => "namespaces",
            Self::Service => "services",
            Self::EndpointSlice => "endpointslices",
            Self::Pod => "pods",
            Self::Node => "nodes",
            Self::Gateway => "gateways",
            Self::ServiceExport => "serviceexports",
            Self::ServiceImport => "serviceimports",
            Self::DestinationRule => "destinationrules",
            Self::ConfigMap => "configmaps",
            Self::Secret => "secrets",
        }
    }

    /// Returns the API groups and versions that may have the kind, in the order in which they are tried.
    pub(super) fn versions(self) -> &'static [&'static str] {
        match self {
            Self::Namespace | Self::Service | Self::Pod | Self::Node | Self::ConfigMap | Self::Secret => {
                &["api/v1"]
            }
            Self::EndpointSlice => &["apis/discovery.k8s.io/v1"],
            Self::Gateway => &["apis/gateway.networking.k8s.io/v1"],
            Self::ServiceExport | Self::ServiceImport => {
                &["apis/multicluster.x-k8s.io/v1beta1", "apis/multicluster.x-k8s.io/v1alpha1"]
            }
            Self::DestinationRule => &["apis/networking.istio.io/v1"],
        }
    }

    /// Returns true if the cluster may lack the kind: it is defined by a CustomResourceDefinition.
    pub(super) fn is_custom(self) -> bool {
        matches!(self, Self::Gateway | Self::ServiceExport | Self::ServiceImport | Self::DestinationRule)
    }

    /// Returns true if endpoints cannot be made without this kind.
    pub(super) fn is_needed(self) -> bool {
        matches!(self, Self::Service | Self::EndpointSlice | Self::Pod)
    }

    pub(super) fn is_namespaced(self) -> bool {
        !matches!(self, Self::Namespace | Self::Node)
    }

    fn selectors(self) -> Selectors {
        match self {
            // Slices of imported services have the endpoints of other clusters, so they are not read.
            Self::EndpointSlice => Selectors {
                labels: "kubernetes.io%2Fservice-name,%21multicluster.kubernetes.io%2Fservice-name",
                fields: "",
            },
            // Pods that have ended are not read: there may be many of them until Kubernetes collects them.
            Self::Pod => {
                Selectors { labels: "", fields: "status.phase%21%3DFailed%2Cstatus.phase%21%3DSucceeded" }
            }
            Self::Gateway => Selectors { labels: "topology.istio.io%2Fnetwork", fields: "" },
            Self::Secret => Selectors { labels: "istio%2FmultiCluster%3Dtrue", fields: "" },
            Self::ConfigMap => Selectors { labels: "", fields: "metadata.name%3Distio" },
            _ => Selectors::default(),
        }
    }

    /// Returns the path and query of a list or watch; `more` is a part of the query.
    pub(super) fn request(self, version: &str, namespace: Option<&str>, more: &str) -> String {
        let mut path = format!("/{version}/");
        if let Some(namespace) = namespace.filter(|_| self.is_namespaced()) {
            let _ = write!(path, "namespaces/{namespace}/");
        }
        let Selectors { labels, fields } = self.selectors();
        let _ = write!(path, "{}?{more}", self.plural());
        if !labels.is_empty() {
            let _ = write!(path, "&labelSelector={labels}");
        }
        if !fields.is_empty() {
            let _ = write!(path, "&fieldSelector={fields}");
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_those_of_the_api() {
        let pods = Kind::Pod.request("api/v1", Some("shop"), "limit=500");
        assert_eq!(
            pods,
            "/api/v1/namespaces/shop/pods?limit=500&fieldSelector=status.phase%21%3DFailed%2Cstatus.phase%21%3DSucceeded"
        );
        assert_eq!(Kind::Node.request("api/v1", Some("shop"), "watch=1"), "/api/v1/nodes?watch=1");
        for kind in Kind::ALL {
            let all = kind.request(kind.versions()[0], None, "limit=1");
            assert!(all.parse::<http::uri::PathAndQuery>().is_ok(), "{all}");
        }
    }
}
