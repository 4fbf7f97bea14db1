//! `peers`: other organisations with which services are exchanged.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use ipnet::IpNet;

use isthmus_aggregator::spec::peer::PeerSpec;
use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_document::problem::{Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::table::AnyKey;
use isthmus_model::identity::TrustDomain;
use isthmus_model::place::{ClusterId, Network};
use isthmus_peer::enrolled::{Dialling, EnrolledLink, GatewayAddress};
use isthmus_peer::options::{DIAL_MAX, LinkOptions, Stored};
use isthmus_settings::export_tls::TlsSource;
use isthmus_settings::listener::Listener;
use isthmus_settings::network::NetworkPolicy;
use isthmus_settings::peer::{
    Carry, IMPORT_PATTERNS_MAX, Peer, PeerExport, PeerIdentity, PeerImport, PeerLimits, place_of,
};
use isthmus_settings::policy::Mesh;
use isthmus_settings::scope::{AddressScope, RegistryScope, Unlisted};
use isthmus_tls::roots::PeerTrust;
use isthmus_tls::source::TrustFile;

use super::aggregation;
use super::file::path_of;
use super::table::Root;
use super::table::peers as keys;

/// The peers, as each part of the program needs them.
#[derive(Default)]
pub(super) struct Peers {
    /// The names, identities and rules of the peers.
    pub(super) peers: Vec<Arc<Peer>>,
    /// The roots that verify the identities of each peer.
    pub(super) trust: Vec<PeerTrust>,
    /// The settings of the links with the peers.
    pub(super) links: Vec<LinkOptions>,
    /// The registry of each peer's services.
    pub(super) registries: Vec<RegistrySpec>,
}

/// Reads the peers in the order of the file.
pub(super) fn read(
    root: &Fields<'_>,
    mesh: &Mesh,
    own_trust: &[TrustFile],
    listeners: &[Arc<Listener>],
    problems: &mut Problems,
) -> Peers {
    let list = Path::Root.key(Root::PEERS.name());
    let state = aggregation::state(root, problems);
    let mut reader = Reader {
        problems,
        mesh,
        own_trust,
        state,
        names: HashMap::new(),
        aliases: HashMap::new(),
        peers: Peers::default(),
    };
    for (index, fields, node) in root.maps(&Root::PEERS) {
        reader.peer(&fields, node.position, &list.index(index));
    }
    let Reader { peers, .. } = reader;
    if let Some(node) = root.at(&Root::PEERS).filter(|_| !peers.links.is_empty()) {
        needed(root, listeners, &peers, node.position, &list, problems);
    }
    peers
}

/// Reports settings that links need and the file lacks.
fn needed(
    root: &Fields<'_>,
    listeners: &[Arc<Listener>],
    peers: &Peers,
    position: Position,
    list: &Path<'_>,
    problems: &mut Problems,
) {
    if root.at(&Root::IDENTITY).is_none() {
        let fault = "found peers, but no identity, so the gateway has no certificate for links with peers";
        problems.error(position, list, fault);
    }
    let takes_links = listeners.iter().any(|listener| listener.protocol.takes_hbone());
    // Enrolled links are left out: an enrolment must not make the file illegal.
    if peers.links.iter().any(|link| link.accept && link.stored != Stored::InUse) && !takes_links {
        let fault = "found accept: true, but peers can connect only to a listener of protocol auto or hbone, and there is none";
        problems.error(position, list, fault);
    }
}

/// Warns of services that are offered to peers although there is no gateway through which a peer could call them.
pub(super) fn warn_of_offers_without_gateways(
    root: &Fields<'_>,
    networks: &[NetworkPolicy],
    registries: &[RegistrySpec],
    problems: &mut Problems,
) {
    let mut gateways = networks.iter().flat_map(|network| &network.gateways);
    let has_gateways = networks.iter().any(|network| !network.gateways.is_empty());
    if gateways.any(|gateway| gateway.hbone_port.is_some())
        || registries.iter().any(|registry| registry.kind.finds_gateways())
    {
        return;
    }
    let list = Path::Root.key(Root::PEERS.name());
    for (index, fields, _) in root.maps(&Root::PEERS) {
        let Some(node) = fields.at(&keys::Peer::EXPORT).filter(|node| !node.items().is_empty()) else {
            continue;
        };
        if fields.get(&keys::Peer::CARRY).is_some_and(|carry| carry.contains(&Carry::FromPeer)) {
            continue;
        }
        let fault = match (has_gateways, fields.at(&keys::Peer::FROM)) {
            (true, Some(_)) => continue,
            (true, None) => {
                "the peer cannot call the services that it is offered: the gateways of networks have no hbonePort, and callers by \
                 SNI are known only by their address; list the addresses of the peer's callers in from"
            }
            (false, _) => {
                "the peer cannot call the services that it is offered, because this gateway knows no gateway of its own networks: \
                 networks has no gateways, and no registry reads a Kubernetes cluster"
            }
        };
        problems.warn(node.position, &list.index(index).key(keys::Peer::EXPORT.name()), fault);
    }
}

/// Warns of carriers to peers that no caller by SNI may use, because no address is known to be on this gateway's own network.
pub(super) fn warn_of_unknown_callers(
    root: &Fields<'_>,
    own: &Network,
    networks: &[NetworkPolicy],
    problems: &mut Problems,
) {
    if networks.iter().any(|network| network.name == *own && !network.cidrs.is_empty()) {
        return;
    }
    let list = Path::Root.key(Root::PEERS.name());
    for (index, fields, _) in root.maps(&Root::PEERS) {
        let Some((carry, node)) = fields.found(&keys::Peer::CARRY) else { continue };
        if carry.contains(&Carry::ToPeer) {
            let fault = format!(
                "found toPeer, but networks has no cidrs of this gateway's network {own}, so no caller by SNI may use the carriers: \
                 only callers by HBONE with an identity of this mesh may"
            );
            problems.warn(node.position, &list.index(index).key(keys::Peer::CARRY.name()), fault);
        }
    }
}

/// The link that an enrolment has stored.
struct Enrolled {
    identity: PeerIdentity,
    /// The file with the roots.
    roots: PathBuf,
    dialling: Dialling,
}

/// The error for an enrolment's stored link that cannot be used: the fault of the link, which has already been reported.
struct Unusable(Arc<str>);

struct Reader<'r> {
    problems: &'r mut Problems,
    mesh: &'r Mesh,
    /// The entries of `trust`. A peer's alias must differ from their trust domains.
    own_trust: &'r [TrustFile],
    /// The folder with the links of enrolments; `None`: there is none.
    state: Option<PathBuf>,
    /// The positions of the peers' names, to find duplicates.
    names: HashMap<Arc<str>, Position>,
    /// The positions of the trust domains or their aliases, to find duplicates.
    aliases: HashMap<TrustDomain, Position>,
    peers: Peers,
}

impl Reader<'_> {
    /// Reports an error if more names are imported than a link can subscribe to.
    fn not_too_many_patterns(&mut self, peer: &Fields<'_>, path: &Path<'_>) {
        let rules = peer.maps(&keys::Peer::IMPORT);
        let patterns =
            rules.map(|(_, rule, _)| rule.get(&keys::PeerImport::SERVICES).map_or(0, |all| all.len()));
        let count: usize = patterns.sum();
        let node = peer.at(&keys::Peer::IMPORT).filter(|_| count > IMPORT_PATTERNS_MAX);
        if let Some(node) = node {
            let fault = format!(
                "found {count} services in all rules, and a link takes at most {IMPORT_PATTERNS_MAX}; use patterns such as \
                 \"*.west.global\""
            );
            self.problems.error(node.position, &path.key(keys::Peer::IMPORT.name()), fault);
        }
    }

    fn peer(&mut self, fields: &Fields<'_>, position: Position, path: &Path<'_>) {
        let Some((name, named)) = fields.found(&keys::Peer::NAME) else { return };
        if let Some(first) = self.names.insert(name.clone(), named.position) {
            let first = self.problems.place(first);
            let fault = format!("two peers have the name {name}; first at {first}");
            return self.problems.error(named.position, &path.key(keys::Peer::NAME.name()), fault);
        }
        let mut who = self.who(fields, path);
        let (mut accept, mut dial) = (fields.get(&keys::Peer::ACCEPT), self.dial(fields, path));
        let mut trust = path_of(fields, &keys::Peer::TRUST, self.problems);
        self.check_link(fields, who.is_some(), trust.is_some(), accept, position, path);
        let enrolled = self.enrolled(fields, &name, named.position, path);
        let stored = match &enrolled {
            Ok(None) => Stored::Nothing,
            Ok(Some(_)) => Stored::InUse,
            Err(Unusable(_)) => Stored::Unusable,
        };
        let unused_link = enrolled.as_ref().err().map(|Unusable(fault)| fault.clone());
        if let Ok(Some(Enrolled { identity, roots, dialling })) = enrolled {
            (who, trust) = (Some(identity), Some(roots));
            match dialling {
                Dialling::Theirs => accept = true,
                Dialling::Ours(addresses) if dial.is_empty() => dial = addresses,
                Dialling::Ours(_) => {}
            }
        }
        self.not_too_many_patterns(fields, path);
        self.check_carriers(fields, &dial, path);
        self.warn_of_shared_sources(fields, path);
        let peer = Arc::new(policy_of(fields, &name, who, unused_link, path));
        self.peers.trust.extend(peer.who.as_ref().map(|who| PeerTrust {
            peer: name.clone(),
            alias: who.alias.clone(),
            trust_domain: who.trust_domain.clone(),
            roots: trust.clone(),
            is_enrolled: stored == Stored::InUse,
        }));
        let spec = PeerSpec {
            peer: peer.clone(),
            stale_after: fields.get(&keys::Peer::STALE_AFTER),
            expire_after: fields.get(&keys::Peer::EXPIRE_AFTER),
        };
        let scope = match fields.get(&keys::Peer::ADDRESSES) {
            Some(blocks) => AddressScope::Blocks(blocks.into()),
            None => AddressScope::Public,
        };
        let place = place_of(&name);
        self.peers.registries.push(RegistrySpec {
            name: place.as_str().into(),
            cluster: ClusterId::new(&place),
            network: Network::new(&place),
            // The scope need not limit networks, because the name of each of this registry's networks begins with `place`.
            scope: RegistryScope {
                services: Vec::new(),
                networks: None,
                finds_network: true,
                addresses: scope.clone(),
                tls: TlsSource::Written,
                unlisted: Unlisted::Lost,
            },
            kind: RegistryKind::Peer(spec),
        });
        self.peers.links.push(LinkOptions {
            peer: peer.clone(),
            accept,
            dial,
            scope,
            expire_after: fields.get(&keys::Peer::EXPIRE_AFTER),
            trust_domain: fields.get(&keys::Peer::TRUST_DOMAIN),
            alias: fields.get(&keys::Peer::TRUST_ALIAS),
            trust,
            stored,
        });
        self.peers.peers.push(peer);
    }

    /// Reads the addresses to which this gateway connects. Reports an error if there are too many.
    fn dial(&mut self, fields: &Fields<'_>, path: &Path<'_>) -> Vec<GatewayAddress> {
        let Some((dial, node)) = fields.found(&keys::Peer::DIAL) else { return Vec::new() };
        if dial.len() > DIAL_MAX {
            let fault = format!("found {} addresses, and at most {DIAL_MAX} are allowed", dial.len());
            self.problems.error(node.position, &path.key(keys::Peer::DIAL.name()), fault);
        }
        dial
    }

    /// Warns of carriers that cannot be opened. Reports an error for names on carriers that shall be joined.
    fn check_carriers(&mut self, fields: &Fields<'_>, dial: &[GatewayAddress], path: &Path<'_>) {
        let Some((carry, node)) = fields.found(&keys::Peer::CARRY) else { return };
        if carry.contains(&Carry::FromPeer) && dial.is_empty() {
            let fault =
                "found fromPeer, but no dial, so this gateway has no address at which it could open carriers";
            self.problems.warn(node.position, &path.key(keys::Peer::CARRY.name()), fault);
        }
        if !carry.contains(&Carry::ToPeer) {
            return;
        }
        let import = path.key(keys::Peer::IMPORT.name());
        for (at, rule, _) in fields.maps(&keys::Peer::IMPORT) {
            if let Some(node) =
                rule.at(&keys::PeerImport::MERGE).filter(|_| rule.get(&keys::PeerImport::MERGE))
            {
                let fault = "found true, but carry has toPeer, and a name on carriers has one owner; remove merge, or toPeer";
                let path = import.index(at);
                self.problems.error(node.position, &path.key(keys::PeerImport::MERGE.name()), fault);
            }
        }
    }

    /// Warns of addresses in `from` that an earlier peer has too: a caller from there belongs to both.
    fn warn_of_shared_sources(&mut self, fields: &Fields<'_>, path: &Path<'_>) {
        for (at, block, node) in fields.values(&keys::Peer::FROM) {
            let shares = |other: &IpNet| other.contains(&block) || block.contains(other);
            let mut earlier = self.peers.peers.iter();
            if let Some(other) = earlier.find(|peer| peer.from.iter().any(shares)) {
                let fault = format!(
                    "{block} overlaps with `from` of the peer {}, so SNI callers from there reach what either peer may reach",
                    other.name
                );
                self.problems.warn(node.position, &path.key(keys::Peer::FROM.name()).index(at), fault);
            }
        }
    }

    /// Reports keys that together allow no link with the peer.
    fn check_link(
        &mut self,
        fields: &Fields<'_>,
        has_identity: bool,
        has_trust: bool,
        accept: bool,
        position: Position,
        path: &Path<'_>,
    ) {
        if has_identity && has_trust && !accept && fields.at(&keys::Peer::DIAL).is_none() {
            let fault = "found neither accept: true nor dial, so there can be no link with the peer";
            self.problems.error(position, path, fault);
        }
        if has_identity != has_trust {
            let (found, missing) = if has_identity { ("identity", "trust") } else { ("trust", "identity") };
            let fault = format!(
                "found {found}, but no {missing}; set both, or set neither and enrol the peer with `isthmus peer invite` and \
                 `join`"
            );
            self.problems.error(position, path, fault);
        }
    }

    /// Reads the identity of the peer; `None` if an enrolment has to provide it, or if the value is wrong.
    fn who(&mut self, fields: &Fields<'_>, path: &Path<'_>) -> Option<PeerIdentity> {
        let (gateway, node) = fields.found(&keys::Peer::IDENTITY)?;
        let of_gateway = TrustDomain::parse(gateway.trust_domain()).ok()?;
        let trust_domain = fields.get(&keys::Peer::TRUST_DOMAIN).unwrap_or_else(|| of_gateway.clone());
        if trust_domain != of_gateway {
            let fault = format!("found {node}, which is not in the trustDomain {trust_domain}");
            self.problems.error(node.position, &path.key(keys::Peer::IDENTITY.name()), fault);
        }
        let written = fields.found(&keys::Peer::TRUST_ALIAS);
        let (alias, position) = match written {
            Some((alias, node)) => (alias, node.position),
            None => (trust_domain.clone(), node.position),
        };
        if let Err(fault) = self.take_alias(&alias, position) {
            self.problems.error(position, &path.key(keys::Peer::TRUST_ALIAS.name()), fault);
        }
        Some(PeerIdentity { gateway, trust_domain, alias })
    }

    /// Records the alias of a peer's trust domain. The error says why the alias cannot be used.
    fn take_alias(&mut self, alias: &TrustDomain, position: Position) -> Result<(), String> {
        if *alias == self.mesh.trust_domain {
            return Err(format!(
                "the trust domain {alias} is that of this mesh; give the trust domain of the peer another name with trustAlias"
            ));
        }
        if self.own_trust.iter().any(|file| file.trust_domain == *alias) {
            return Err(format!(
                "the trust domain {alias} also has roots in trust; give the trust domain of the peer another name with \
                 trustAlias, or remove {alias} from trust"
            ));
        }
        match self.aliases.get(alias) {
            Some(first) => Err(format!(
                "two peers have the trust domain {alias}; first at {}; give it another name for one of the peers with \
                 trustAlias",
                self.problems.place(*first)
            )),
            None => {
                self.aliases.insert(alias.clone(), position);
                Ok(())
            }
        }
    }

    /// Reads the link that an enrolment has stored for a peer whose identity the file does not give. A fault of the stored link
    /// is only a warning: the peer then counts as not enrolled, and the rest of the file is used.
    fn enrolled(
        &mut self,
        fields: &Fields<'_>,
        name: &str,
        position: Position,
        path: &Path<'_>,
    ) -> Result<Option<Enrolled>, Unusable> {
        let is_written =
            fields.at(&keys::Peer::IDENTITY).is_some() || fields.at(&keys::Peer::TRUST).is_some();
        let Some(state) = self.state.clone().filter(|_| !is_written) else { return Ok(None) };
        self.load_enrolled(fields, name, position, &state).map_err(|fault| {
            let warning = format!("the link that was stored when {name} was enrolled is not used: {fault}");
            self.problems.warn(position, path, warning);
            Unusable(fault.into())
        })
    }

    fn load_enrolled(
        &mut self,
        fields: &Fields<'_>,
        name: &str,
        position: Position,
        state: &std::path::Path,
    ) -> Result<Option<Enrolled>, String> {
        let Some(link) = EnrolledLink::load(state, name)? else { return Ok(None) };
        let trust_domain =
            TrustDomain::parse(link.identity.trust_domain()).map_err(|error| error.to_string())?;
        if let Some(wanted) = fields.get(&keys::Peer::TRUST_DOMAIN).filter(|wanted| *wanted != trust_domain) {
            return Err(format!(
                "the peer has the trust domain {trust_domain}, but the key trustDomain is {wanted}"
            ));
        }
        let alias = fields.get(&keys::Peer::TRUST_ALIAS).unwrap_or_else(|| trust_domain.clone());
        self.take_alias(&alias, position)?;
        Ok(Some(Enrolled {
            identity: PeerIdentity { gateway: link.identity, trust_domain, alias },
            roots: EnrolledLink::path(state, name),
            dialling: link.dialling,
        }))
    }
}

/// Reads what the peer may reach, what it may offer, and its limits.
fn policy_of(
    fields: &Fields<'_>,
    name: &Arc<str>,
    who: Option<PeerIdentity>,
    unused_link: Option<Arc<str>>,
    path: &Path<'_>,
) -> Peer {
    let rule = |key: &dyn AnyKey, at: usize| path.key(key.name()).index(at).to_string().into();
    let exports = fields.maps(&keys::Peer::EXPORT).map(|(at, fields, _)| PeerExport {
        rule: rule(&keys::Peer::EXPORT, at),
        services: fields.get(&keys::PeerExport::SERVICES).unwrap_or_default(),
        except: fields.get(&keys::PeerExport::EXCEPT).unwrap_or_default(),
        rename: fields.get(&keys::PeerExport::AS),
        tls: fields.get(&keys::PeerExport::TLS),
    });
    let imports = fields.maps(&keys::Peer::IMPORT).map(|(at, fields, _)| PeerImport {
        rule: rule(&keys::Peer::IMPORT, at),
        services: fields.get(&keys::PeerImport::SERVICES).unwrap_or_default(),
        rename: fields.get(&keys::PeerImport::AS),
        limit: fields.get(&keys::PeerImport::LIMIT),
        merge: fields.get(&keys::PeerImport::MERGE),
    });
    let limits = fields.map(&keys::Peer::LIMITS);
    Peer {
        who,
        unused_link,
        from: fields.get(&keys::Peer::FROM).unwrap_or_default(),
        exports: exports.collect(),
        imports: imports.collect(),
        carry: fields.get(&keys::Peer::CARRY).unwrap_or_default(),
        limits: PeerLimits {
            services: limits.get(&keys::PeerUse::SERVICES),
            memory: limits.get(&keys::PeerUse::MEMORY),
            connections: limits.get(&keys::PeerUse::CONNECTIONS),
            new_per_second: limits.get(&keys::PeerUse::NEW_PER_SECOND),
            bytes_per_second: limits.get(&keys::PeerUse::BYTES_PER_SECOND),
        },
        name: name.clone(),
    }
}
