//! Other organisations that exchange services with this mesh: the services that each of them may reach here, and the services
//! that this mesh imports from it (`docs/federation.md, "Federation"`). These types hold configuration; the link to a peer is not
//! part of them.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use super::export_tls::{ExportTls, Guard};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::name::{HostName, NameError, NamePattern};
use isthmus_model::place::Network;

/// Another organisation, which exchanges services with this mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// This mesh's name for the peer; unique.
    pub name: Arc<str>,
    /// The identity of the peer; `None` until the peer is enrolled.
    pub who: Option<PeerIdentity>,
    /// The reason why the link that an enrolment has stored for the peer is not used; `None` if it is used, or there is none.
    pub unused_link: Option<Arc<str>>,
    /// The source addresses by which SNI callers are recognised as callers of the peer; empty: no SNI caller belongs to the
    /// peer.
    pub from: Vec<IpNet>,
    /// The rules for services that the peer may reach, in the order of the file. The first rule that matches a service applies.
    pub exports: Vec<PeerExport>,
    /// The rules for services that are imported from the peer, in the order of the file. The first rule that matches a service
    /// applies.
    pub imports: Vec<PeerImport>,
    /// The directions in which calls may cross on carriers; empty: in none.
    pub carry: Vec<Carry>,
    /// The limits on services and connections of the peer.
    pub limits: PeerLimits,
}

/// A direction of calls that cross on carriers: connections that a gateway without an open port has dialled
/// (`docs/federation.md, "Call a network without an open port"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carry {
    /// The peer's callers reach this mesh: this gateway dials the peer's gateways, and holds the carriers open.
    FromPeer,
    /// Callers of this mesh reach the peer: this gateway accepts the carriers that the peer's gateways dial.
    ToPeer,
}

impl Carry {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::FromPeer, Self::ToPeer];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::FromPeer => "fromPeer",
            Self::ToPeer => "toPeer",
        }
    }
}

isthmus_model::words!(Carry);

/// The identity and the trust domain of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// The SPIFFE ID that the peer's gateways have on the link.
    pub gateway: Identity,
    /// The only trust domain that the peer's certificates may name.
    pub trust_domain: TrustDomain,
    /// Our name for the peer's trust domain. An identity that is verified with the peer's roots gets this name as its trust
    /// domain. The name is unique, and differs from our own trust domain.
    pub alias: TrustDomain,
}

impl PeerIdentity {
    /// Returns the identity of the peer's gateways under our name for the peer's trust domain.
    pub fn known_gateway(&self) -> Identity {
        self.gateway.in_domain(&self.alias)
    }
}

/// A rule that offers services to one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerExport {
    /// The name of the rule in messages, such as `peers[0].export[1]`.
    pub rule: Arc<str>,
    /// The services of this mesh that the rule offers.
    pub services: Vec<NamePattern>,
    /// Services that the rule does not offer although `services` matches them.
    pub except: Vec<NamePattern>,
    /// The name under which the peer knows the service; `None`: the host name of the service.
    pub rename: Option<NameTemplate>,
    /// The endpoints that the rule offers where nobody has written their TLS modes; `None`: the rule does not say, and
    /// [`ExportTls::Mesh`] applies.
    pub tls: Option<ExportTls>,
}

/// A rule that imports services of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerImport {
    /// The name of the rule in messages, such as `peers[0].import[1]`.
    pub rule: Arc<str>,
    /// The services that the rule imports: patterns of the names under which the peer exports them.
    pub services: Vec<NamePattern>,
    /// The name that the service has here; `None`: the name under which the peer exports it.
    pub rename: Option<NameTemplate>,
    /// The largest number of services that the rule imports; further services, in order of name, are not imported. `None`: the
    /// rule itself sets no limit.
    pub limit: Option<usize>,
    /// True if the services are joined with equal names of this mesh, and of other peers whose rules say the same; otherwise a
    /// name has one owner.
    pub merge: bool,
}

/// The ALPN protocol of a link's hello, by which a listener recognises links.
pub const LINK_PROTOCOL: &[u8] = b"isthmus-peer/1";

/// The ALPN protocol of an enrolment's hello.
pub const ENROL_PROTOCOL: &[u8] = b"isthmus-enrol/1";

/// The ALPN protocol of a carrier's hello.
pub const CARRY_PROTOCOL: &[u8] = b"isthmus-carry/1";

/// The word in `Hello.features` of a gateway whose config allows carriers with the peer.
pub const CARRY_FEATURE: &str = "carry";

/// The limits on services and connections of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerLimits {
    /// The largest number of services that are imported from the peer.
    pub services: usize,
    /// The largest size of the peer's records in memory, over all its links, in bytes.
    pub memory: usize,
    /// The largest number of concurrent connections and CONNECT streams of the peer's callers.
    pub connections: usize,
    /// The largest number of new connections and CONNECT streams of the peer's callers per second.
    pub new_per_second: u32,
    /// The bandwidth of the peer's callers in each direction, in bytes per second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
}

impl Default for PeerLimits {
    fn default() -> Self {
        Self {
            services: 10_000,
            memory: 64 << 20,
            connections: 20_000,
            new_per_second: 2_000,
            bytes_per_second: None,
        }
    }
}

/// A host name that contains the placeholders `{service}` and `{namespace}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameTemplate {
    text: Arc<str>,
}

/// The error of a text that is not a name template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The text has a brace that is not part of a known placeholder.
    #[error("'{{' and '}}' are allowed only as '{{service}}' and '{{namespace}}'")]
    Placeholder,
    /// The text is not a host name when its placeholders are filled in.
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

    /// Returns the name for a service; `service` is the first label of its host name. Returns an error if the result is not a
    /// legal host name.
    pub fn fill(&self, service: &str, namespace: &str) -> Result<HostName, NameError> {
        HostName::parse(&self.text.replace(SERVICE, service).replace(NAMESPACE, namespace))
    }
}

impl fmt::Display for NameTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns the first label of a host name, which is the name of the service in Kubernetes host names.
pub fn service_label(hostname: &str) -> &str {
    hostname.split('.').next().unwrap_or_default()
}

/// The prefix of the names of peers' registries, clusters and networks.
/// The largest number of patterns of names that may be imported from one peer.
pub const IMPORT_PATTERNS_MAX: usize = 1_024;

const PLACES: &str = "peer/";

/// Returns true if the name is that of a peer's registry, cluster or network.
pub fn is_place_of_peer(name: &str) -> bool {
    name.starts_with(PLACES)
}

/// Returns true if the network is one of this peer.
pub fn is_network_of(network: &Network, peer: &str) -> bool {
    let rest = network.as_str().strip_prefix(&place_of(peer));
    rest.is_some_and(|rest| rest.starts_with('/'))
}

/// Returns the name of the peer whose network this is; `None` if it is no network of a peer.
pub fn peer_of(network: &Network) -> Option<&str> {
    network.as_str().strip_prefix(PLACES)?.split_once('/').map(|(peer, _)| peer)
}

/// Returns the peer whose place this is; `None` if it is no place of a peer.
pub fn peer_of_place(name: &str) -> Option<&str> {
    name.strip_prefix(PLACES)
}

/// Returns the name of a peer's registry, which is also the name of its cluster and the prefix of its networks' names.
pub fn place_of(peer: &str) -> String {
    format!("{PLACES}{peer}")
}

impl Peer {
    /// Returns our name for a network of the peer.
    pub fn network(&self, network: &str) -> Network {
        Network::new(&format!("{}/{network}", place_of(&self.name)))
    }

    /// Returns the namespace that a service of the peer has here. It contains the name of the peer, so that the service is
    /// never merged with one of ours.
    pub fn namespace_here(&self, namespace: &str) -> String {
        format!("{}/{namespace}", self.name)
    }

    /// Returns the rule that offers a service of this mesh to the peer. If the service has a guard, only rules that name what it asks
    /// for do.
    pub fn export_of(&self, hostname: &HostName, guard: Option<Guard<'_>>) -> Option<&PeerExport> {
        let hostname = hostname.as_str();
        let none_of = |patterns: &[NamePattern]| !patterns.iter().any(|pattern| pattern.matches(hostname));
        self.exports.iter().find(|rule| {
            rule.services.iter().any(|pattern| pattern.matches(hostname))
                && none_of(&rule.except)
                && guard.is_none_or(|guard| guard.is_named(&rule.services, hostname))
        })
    }

    /// Returns the name that the rules give a service of this mesh; `None` if no rule offers the service.
    pub fn offered_name(
        &self,
        service: &HostName,
        namespace: &str,
        guard: Option<Guard<'_>>,
    ) -> Option<Result<HostName, NameError>> {
        Some(self.export_of(service, guard)?.exported_name(service, namespace))
    }

    /// Returns true if the source addresses of this peer's SNI callers contain the address.
    pub fn has_source(&self, source: IpAddr) -> bool {
        self.from.iter().any(|block| block.contains(&source))
    }

    /// Returns true if the config allows calls on carriers in this direction.
    pub fn carries(&self, direction: Carry) -> bool {
        self.carry.contains(&direction)
    }

    /// Returns the rule that imports a service of the peer, by the name under which the peer exports it.
    pub fn import_of(&self, exported_name: &str) -> Option<&PeerImport> {
        self.imports.iter().find(|rule| rule.services.iter().any(|pattern| pattern.matches(exported_name)))
    }

    /// Returns true if the rules consent that a service of the peer is joined with others of its name here, by the name under which
    /// the peer exports it.
    pub fn joins(&self, exported_name: &str) -> bool {
        self.import_of(exported_name).is_some_and(|rule| rule.merge)
    }

    /// Returns the peer's own name of a namespace that [`namespace_here`](Self::namespace_here) returned.
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
    /// Returns the endpoints that the rule offers where nobody has written their TLS modes.
    pub fn tls(&self) -> ExportTls {
        self.tls.unwrap_or_default()
    }

    /// Returns the name under which the peer knows a service of this mesh.
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
