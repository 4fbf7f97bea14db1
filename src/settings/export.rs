//! The rules that let callers reach services.

use std::sync::Arc;

use ipnet::IpNet;

use super::export_tls::ExportTls;
use super::route::has_listener;
use isthmus_model::endpoint::Labels;
use isthmus_model::identity::IdentityPattern;
use isthmus_model::name::NamePattern;
use isthmus_model::place::ClusterId;

/// A rule that lets callers reach services. Without a rule no service can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportRule {
    /// The name of the rule in messages, such as `exports[0]`.
    pub name: Arc<str>,
    /// The services that the rule covers.
    pub services: Vec<NamePattern>,
    /// Services that the rule does not cover although `services` matches them.
    pub except: Vec<NamePattern>,
    /// Service ports that the rule covers; empty: all.
    pub ports: Vec<u16>,
    /// Clusters whose endpoints the rule offers; empty: all.
    pub clusters: Vec<ClusterId>,
    /// The mark that a service needs in a cluster, so that its endpoints there are offered; `None`: no mark is needed.
    pub marked: Option<MarkCondition>,
    /// The names of the listeners on which the rule applies; empty: all.
    pub listeners: Vec<Arc<str>>,
    /// The callers that the rule admits.
    pub to: ExportScope,
    /// The endpoints that the rule offers where nobody has written their TLS modes; `None`: the rule does not say, and
    /// [`ExportTls::Mesh`] applies.
    pub tls: Option<ExportTls>,
}

/// The mark that an export rule requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MarkCondition {
    /// A `ServiceExport` of the service's name and namespace.
    ServiceExport,
    /// Labels of the service.
    Labels(Labels),
    /// Labels of the service's namespace.
    NamespaceLabels(Labels),
}

impl MarkCondition {
    /// Returns a description of the mark, for messages.
    pub fn text(&self) -> String {
        let list = |labels: &Labels| {
            labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::ServiceExport => "a ServiceExport".to_owned(),
            Self::Labels(labels) => format!("the labels {} of the service", list(labels)),
            Self::NamespaceLabels(labels) => {
                format!("the labels {} of the namespace of the service", list(labels))
            }
        }
    }
}

/// The callers that a rule admits. If both lists are given, a caller must match both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportScope {
    /// The source addresses that are admitted; empty: all.
    pub cidrs: Vec<IpNet>,
    /// The identities that are admitted; empty: callers with any identity, and callers without one.
    pub identities: Vec<IdentityPattern>,
}

impl ExportRule {
    /// Returns the endpoints that the rule offers where nobody has written their TLS modes.
    pub fn tls(&self) -> ExportTls {
        self.tls.unwrap_or_default()
    }

    /// Returns true if the rule speaks of endpoints of the cluster.
    pub fn has_cluster(&self, cluster: &ClusterId) -> bool {
        self.clusters.is_empty() || self.clusters.contains(cluster)
    }

    /// Returns true if the rule applies on the listener.
    pub fn on_listener(&self, listener: &str) -> bool {
        has_listener(&self.listeners, listener)
    }
}
