//! `identity`, `trust` and `hbone`: the gateway's certificate, the trusted roots, and the limits of HBONE.

use std::collections::HashMap;
use std::sync::Arc;

use isthmus_document::problem::{Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::table::AnyKey;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_settings::limits::HboneLimits;
use isthmus_settings::listener::Listener;
use isthmus_settings::policy::{Mesh, Node};
use isthmus_tls::roots::PeerTrust;
use isthmus_tls::source::{IstioCa, Istiod, Options, Source, TrustFile};

use super::IdentityPlaces;
use super::file::path_of;
use super::table::Root;
use super::table::identity as keys;
use super::table::peers::Peer;

/// The keys that may need an identity.
const LISTENERS: &dyn AnyKey = &Root::LISTENERS;
const XDS: &dyn AnyKey = &Root::XDS;

/// Reads the sources of the certificate and the roots.
pub(super) fn options(root: &Fields<'_>, node: &Node, mesh: &Mesh, problems: &mut Problems) -> Options {
    let source = source(&root.map(&Root::IDENTITY), node, problems);
    let expected = expected(node, mesh);
    if let (Some(Source::IstioCa(_)), None) = (&source, &expected)
        && let Some(found) = root.at(&Root::IDENTITY)
    {
        let fault = "found istioCa, which requires both node.namespace and node.serviceAccount: they form the identity that \
                     the gateway requests";
        problems.error(found.position, &Path::Root.key(Root::IDENTITY.name()), fault);
    }
    let brings_trust = source.as_ref().is_some_and(Source::brings_trust);
    Options { source, trust: trust(root, brings_trust, problems), peers: Vec::new(), state: None, expected }
}

/// Returns the identity that the certificate must have, if the node has a namespace and service account.
fn expected(node: &Node, mesh: &Mesh) -> Option<Identity> {
    if node.namespace.is_empty() || node.service_account.is_empty() {
        return None;
    }
    let (domain, namespace, account) = (&mesh.trust_domain, &node.namespace, &node.service_account);
    Identity::parse(&format!("spiffe://{domain}/ns/{namespace}/sa/{account}")).ok()
}

fn source(identity: &Fields<'_>, node: &Node, problems: &Problems) -> Option<Source> {
    if identity.at(&keys::Identity::FILES).is_some() {
        let files = identity.map(&keys::Identity::FILES);
        return Some(Source::Files {
            certificate: path_of(&files, &keys::IdentityFiles::CERTIFICATE, problems)?,
            key: path_of(&files, &keys::IdentityFiles::KEY, problems)?,
        });
    }
    if identity.at(&keys::Identity::ISTIO_CA).is_some() {
        let authority = identity.map(&keys::Identity::ISTIO_CA);
        return Some(Source::IstioCa(IstioCa {
            istiod: Istiod {
                address: authority.get(&keys::IstioCa::ADDRESS)?,
                roots: path_of(&authority, &keys::IstioCa::ROOTS, problems)?,
                token: path_of(&authority, &keys::IstioCa::TOKEN, problems)?,
                cluster: node.cluster.clone(),
            },
            validity: authority.get(&keys::IstioCa::VALIDITY),
        }));
    }
    let socket = identity.map(&keys::Identity::WORKLOAD_API).get(&keys::WorkloadApi::SOCKET)?;
    Some(Source::WorkloadApi { socket })
}

fn trust(root: &Fields<'_>, brings_trust: bool, problems: &mut Problems) -> Vec<TrustFile> {
    let list = Path::Root.key(Root::TRUST.name());
    let mut places: HashMap<TrustDomain, Position> = HashMap::new();
    let mut files = Vec::new();
    for (at, fields, _) in root.maps(&Root::TRUST) {
        let Some((trust_domain, named)) = fields.found(&keys::Trust::TRUST_DOMAIN) else { continue };
        if let Some(first) = places.insert(trust_domain.clone(), named.position) {
            let first = problems.place(first);
            let fault = format!("the trust domain {trust_domain} is listed twice; first at {first}");
            let path = list.index(at);
            problems.error(named.position, &path.key(keys::Trust::TRUST_DOMAIN.name()), fault);
            continue;
        }
        let roots = path_of(&fields, &keys::Trust::ROOTS, problems);
        let crl = path_of(&fields, &keys::Trust::CRL, problems);
        if fields.at(&keys::Trust::ROOTS).is_none() && (crl.is_none() || !brings_trust) {
            let fault = match crl {
                None => "the key roots is missing",
                Some(_) => "the key roots is missing, and identity names no source that provides roots",
            };
            problems.error(named.position, &list.index(at), fault.to_owned());
        }
        files.push(TrustFile { trust_domain, roots, crl });
    }
    files
}

/// Returns the positions of certificates and roots in the file, by subject.
pub(super) fn places(root: &Fields<'_>, peers: &[PeerTrust], problems: &Problems) -> IdentityPlaces {
    let mut places = IdentityPlaces::default();
    if let Some(files) = root.map(&Root::IDENTITY).at(&keys::Identity::FILES) {
        places.certificate = Some(format!("{}: identity.files", problems.place(files.position)));
    }
    for (at, fields, _) in root.maps(&Root::TRUST) {
        let domain = fields.get(&keys::Trust::TRUST_DOMAIN);
        if let Some((domain, roots)) = domain.zip(fields.at(&keys::Trust::ROOTS)) {
            let place = format!("{}: trust[{at}].roots", problems.place(roots.position));
            places.trust.insert(domain, place);
        }
        let domain = fields.get(&keys::Trust::TRUST_DOMAIN);
        if let Some((domain, crl)) = domain.zip(fields.at(&keys::Trust::CRL)) {
            places.crl.insert(domain, format!("{}: trust[{at}].crl", problems.place(crl.position)));
        }
    }
    for (at, fields, _) in root.maps(&Root::PEERS) {
        let name = fields.get(&Peer::NAME);
        let peer = peers.iter().find(|peer| Some(&peer.peer) == name.as_ref());
        if let Some((peer, roots)) = peer.zip(fields.at(&Peer::TRUST)) {
            let place = format!("{}: peers[{at}].trust", problems.place(roots.position));
            places.trust.insert(peer.alias.clone(), place);
        }
    }
    places
}

/// Reads the limits of HBONE, and warns of keys that `limits.memory` replaces.
pub(super) fn hbone(root: &Fields<'_>, problems: &mut Problems) -> HboneLimits {
    let fields = root.map(&Root::HBONE);
    for key in [&keys::Hbone::HELD_PER_CONNECTION, &keys::Hbone::HELD_PER_WORKER] {
        if let Some(node) = fields.at(key) {
            let path = Path::Root.key(Root::HBONE.name());
            let fault = "this key is deprecated: limits.memory bounds what HBONE holds, and this value may only lower it";
            problems.warn(node.position, &path.key(key.name()), fault);
        }
    }
    let default = HboneLimits::default();
    HboneLimits {
        streams: fields.get(&keys::Hbone::STREAMS),
        stream_window: fields.get(&keys::Hbone::STREAM_WINDOW),
        held_per_connection: fields
            .get(&keys::Hbone::HELD_PER_CONNECTION)
            .unwrap_or(default.held_per_connection),
        held_per_worker: fields.get(&keys::Hbone::HELD_PER_WORKER),
        stalled: fields.get(&keys::Hbone::STALLED),
        idle: fields.get(&keys::Hbone::IDLE),
    }
}

/// Reports listeners that accept HBONE, and `xds.tls`, if the certificate or the roots that they need are missing.
pub(super) fn needed(
    root: &Fields<'_>,
    listeners: &[Arc<Listener>],
    secure_xds: bool,
    options: &Options,
    problems: &mut Problems,
) {
    let takes = |listener: &&Arc<Listener>| listener.protocol.takes_hbone();
    let of_listener = listeners.iter().find(takes).map(|listener| {
        let protocol = listener.protocol.text();
        (LISTENERS, format!("the listener {:?} has protocol {protocol}", &*listener.name))
    });
    let of_xds = secure_xds.then(|| (XDS, "xds has tls".to_owned()));
    let brings_trust = options.source.as_ref().is_some_and(Source::brings_trust);
    let missing = match (root.at(&Root::IDENTITY), root.maps(&Root::TRUST).next().is_none()) {
        (None, _) => "identity, so the gateway has no certificate",
        (Some(_), true) if !brings_trust => "trust, so the gateway cannot verify any caller",
        (Some(_), _) => return,
    };
    for (key, who) in of_listener.into_iter().chain(of_xds) {
        if let Some(node) = root.at(key) {
            let fault = format!("{who}, but there is no {missing}");
            problems.error(node.position, &Path::Root.key(key.name()), fault);
        }
    }
}
