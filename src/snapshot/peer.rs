//! Other organisations that exchange services with this mesh: what each of them may reach here, and what is taken from it
//! (SPEC §18). Data of the config; the link to a peer is not part of it.

use std::fmt;
use std::sync::Arc;

use ipnet::IpNet;

use crate::model::identity::{Identity, TrustDomain};
use crate::model::name::{HostName, NameError, NamePattern};
use crate::model::place::Network;

/// Another organisation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Our name for it; unique.
    pub name: Arc<str>,
    /// Who the peer is; `None` until it is enrolled.
    pub who: Option<PeerIdentity>,
    /// Source addresses of its clients that call by SNI; empty: no SNI caller is taken for the peer's.
    pub from: Vec<IpNet>,
    /// The services that the peer may reach, in the order of the file; the first that matches a service gives its name.
    pub exports: Vec<PeerExport>,
    /// The services that are taken from the peer, in the order of the file; the first that matches a service gives its name.
    pub imports: Vec<PeerImport>,
    /// Limits of what the peer may use.
    pub limits: PeerLimits,
}

/// Who a peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// The SPIFFE ID of the gateways that speak for the peer on the link.
    pub gateway: Identity,
    /// The only trust domain that the peer's certificates may name.
    pub trust_domain: TrustDomain,
    /// Our name for that trust domain: identities that the peer's roots have verified are known under it. Unique, and not
    /// our own trust domain.
    pub alias: TrustDomain,
}

impl PeerIdentity {
    /// Returns the identity of the peer's gateways as it is known here: in the trust domain that is our name for the peer's.
    pub fn known_gateway(&self) -> Identity {
        self.gateway.in_domain(&self.alias)
    }
}

/// A rule that offers services to one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerExport {
    /// The name in messages: `peers[0].export[1]`.
    pub rule: Arc<str>,
    /// Our services.
    pub services: Vec<NamePattern>,
    /// Services that the rule does not offer although `services` matches them.
    pub except: Vec<NamePattern>,
    /// The name under which the peer knows the service; `None`: its own.
    pub rename: Option<NameTemplate>,
}

/// A rule that takes services of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerImport {
    /// The name in messages: `peers[0].import[1]`.
    pub rule: Arc<str>,
    /// The services by the names under which the peer exports them.
    pub services: Vec<NamePattern>,
    /// The name that the service has here; `None`: the name under which the peer exports it.
    pub rename: Option<NameTemplate>,
    /// The largest number of services that the rule takes; further ones are left out, in order of name. `None`: no limit of its
    /// own.
    pub limit: Option<usize>,
}

/// The protocol (ALPN) that the hello of a link offers. A listener knows links by it.
pub const LINK_PROTOCOL: &[u8] = b"isthmus-peer/1";

/// The protocol (ALPN) that the hello of an enrolment offers.
pub const ENROL_PROTOCOL: &[u8] = b"isthmus-enrol/1";

/// Limits of what one peer may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerLimits {
    /// Services that are taken from the peer.
    pub services: usize,
    /// Concurrent connections and CONNECT streams of its callers.
    pub connections: usize,
    /// New connections and CONNECT streams of its callers in a second.
    pub new_per_second: u32,
}

impl Default for PeerLimits {
    fn default() -> Self {
        Self { services: 10_000, connections: 20_000, new_per_second: 2_000 }
    }
}

/// A host name with `{service}` and `{namespace}` in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameTemplate {
    text: Arc<str>,
}

/// An error of a text that is not a name template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The text has a brace that is not part of a known placeholder.
    #[error("'{{' and '}}' are allowed only as '{{service}}' and '{{namespace}}'")]
    Placeholder,
    /// The text is not a host name where its placeholders are filled in.
    #[error(transparent)]
    Name(#[from] NameError),
}

const SERVICE: &str = "{service}";
const NAMESPACE: &str = "{namespace}";

impl NameTemplate {
    /// Parses a template.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let filled = text.replace(SERVICE, "s").replace(NAMESPACE, "n");
        if filled.contains(['{', '}']) {
            return Err(TemplateError::Placeholder);
        }
        HostName::parse(&filled)?;
        Ok(Self { text: text.into() })
    }

    /// Returns the name for a service: its first label and its namespace. An error if that is no host name.
    pub fn fill(&self, service: &str, namespace: &str) -> Result<HostName, NameError> {
        HostName::parse(&self.text.replace(SERVICE, service).replace(NAMESPACE, namespace))
    }
}

impl fmt::Display for NameTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns the first label of a host name, which is the service's name in names of Kubernetes.
pub fn service_label(hostname: &str) -> &str {
    hostname.split('.').next().unwrap_or_default()
}

/// The beginning of the names of peers' registries, clusters and networks.
const PLACES: &str = "peer/";

/// Returns true if this is the name of the registry, of the cluster or of a network of a peer.
pub fn is_place_of_peer(name: &str) -> bool {
    name.starts_with(PLACES)
}

/// Returns the name of the registry of a peer, which is also that of its cluster and the beginning of its networks.
pub fn place_of(peer: &str) -> String {
    format!("{PLACES}{peer}")
}

impl Peer {
    /// Returns our name for a network of the peer.
    pub fn network(&self, network: &str) -> Network {
        Network::new(&format!("{}/{network}", place_of(&self.name)))
    }

    /// Returns the namespace that a service of the peer has here: one of the peer's own, so that it is never merged with ours.
    pub fn namespace_here(&self, namespace: &str) -> String {
        format!("{}/{namespace}", self.name)
    }

    /// Returns the rule that offers a service of ours to the peer.
    pub fn export_of(&self, hostname: &str) -> Option<&PeerExport> {
        let none_of = |patterns: &[NamePattern]| !patterns.iter().any(|pattern| pattern.matches(hostname));
        self.exports.iter().find(|rule| {
            rule.services.iter().any(|pattern| pattern.matches(hostname)) && none_of(&rule.except)
        })
    }

    /// Returns the rule that takes a service of the peer, by the name under which the peer exports it.
    pub fn import_of(&self, exported_name: &str) -> Option<&PeerImport> {
        self.imports.iter().find(|rule| rule.services.iter().any(|pattern| pattern.matches(exported_name)))
    }

    /// Returns the namespace that the peer gives a service, of the one that [`namespace_here`](Self::namespace_here) has made.
    pub fn namespace_of<'a>(&self, namespace: &'a str) -> &'a str {
        let of_peer = namespace.strip_prefix(&*self.name).and_then(|rest| rest.strip_prefix('/'));
        of_peer.unwrap_or(namespace)
    }
}

impl PeerImport {
    /// Returns the name that a service of the peer has here.
    pub fn imported_name(&self, exported: &HostName, namespace: &str) -> Result<HostName, NameError> {
        match &self.rename {
            None => Ok(exported.clone()),
            Some(template) => template.fill(service_label(exported.as_str()), namespace),
        }
    }
}

impl PeerExport {
    /// Returns the name under which the peer knows a service of ours.
    pub fn exported_name(&self, hostname: &HostName, namespace: &str) -> Result<HostName, NameError> {
        match &self.rename {
            None => Ok(hostname.clone()),
            Some(template) => template.fill(service_label(hostname.as_str()), namespace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_filled() {
        let template = NameTemplate::parse("{service}.{namespace}.east.global").expect("legal");
        let name = template.fill("checkout", "shop").expect("legal");
        assert_eq!(name.as_str(), "checkout.shop.east.global");
        assert!(template.fill("a b", "shop").is_err());
        for wrong in ["{name}.x", "{service.x", "service}.x"] {
            assert_eq!(NameTemplate::parse(wrong), Err(TemplateError::Placeholder), "{wrong}");
        }
        assert!(matches!(NameTemplate::parse("{service}..x"), Err(TemplateError::Name(_))));
    }
}
