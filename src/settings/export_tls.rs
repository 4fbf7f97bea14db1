//! The source of endpoints' TLS modes (an operator or a registry), and the words by which export rules open endpoints and services.
//! `port_endpoint` decides which word an endpoint needs; `exports` applies the rules.

use std::sync::Arc;

use isthmus_model::name::NamePattern;

/// The endpoints that a rule offers where nobody has written their TLS modes ([`TlsSource::Inferred`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExportTls {
    /// Endpoints in the mesh, by mesh name and by authority.
    #[default]
    Mesh,
    /// Endpoints outside the mesh too, and all of them by plain host name.
    Own,
}

impl ExportTls {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Mesh, Self::Own];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Mesh => "mesh",
            Self::Own => "own",
        }
    }
}

isthmus_model::words!(ExportTls);

/// The source of the TLS modes of a registry's endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TlsSource {
    /// An operator has written them, or a peer has sent them.
    #[default]
    Written,
    /// The registry infers them from Kubernetes objects, such as a port's name, which an operator of the gateway has not written.
    Inferred {
        /// The namespaces that only a rule that names them offers: `kube-system` and that of the mesh's control plane.
        system: Arc<[Arc<str>]>,
    },
}

impl TlsSource {
    /// Returns true if only rules that name the namespace offer its services.
    pub fn guards(&self, namespace: &str) -> bool {
        match self {
            Self::Written => false,
            Self::Inferred { system } => system.iter().any(|known| **known == *namespace),
        }
    }
}

/// The kind of name by which a caller asks for a service. It decides which TLS mode the caller expects of the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedBy {
    /// By a mesh name in the SNI.
    MeshName,
    /// By the bare host name in the SNI.
    Hostname,
    /// By the authority of a CONNECT. The stream may carry TLS or plain bytes.
    Authority,
    /// By a connection to a listener of protocol `tcp`.
    Tcp,
}

/// The least that a pattern of a rule must name, so that the rule offers a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard<'a> {
    /// The namespace of the service, or the service.
    Namespace(&'a str),
    /// This host name, which may begin with `*.`, or one under it: the mesh keeps what it names to its own cluster.
    ClusterLocal(&'a str),
}

impl Guard<'_> {
    /// Returns true if one of the patterns matches a host name, and names what the guard asks for.
    pub fn is_named(self, patterns: &[NamePattern], hostname: &str) -> bool {
        let named = match self {
            Self::Namespace(namespace) => {
                let place = format!(".{namespace}.svc.");
                hostname.find(&place).map(|at| &hostname[at + 1..])
            }
            Self::ClusterLocal(name) => name.strip_prefix('*').map(|end| end.trim_start_matches('.')),
        };
        patterns.iter().any(|pattern| match pattern {
            NamePattern::Exact(name) => name.as_str() == hostname,
            NamePattern::Suffix(suffix) => {
                pattern.matches(hostname) && named.is_some_and(|named| suffix.as_str().len() >= named.len())
            }
            NamePattern::Any => false,
        })
    }
}
