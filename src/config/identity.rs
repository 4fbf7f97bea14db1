//! `identity`, `trust` and `hbone`: the gateway's certificate, the trusted roots, and the limits of HBONE.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::document::problem::{Path, Position, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::model::identity::{Identity, TrustDomain};
use crate::snapshot::policy::{HboneLimits, Listener, ListenerProtocol, Mesh, Node};
use crate::tls::source::{IstioCa, Options, Source, TrustFile};

use super::IdentityPlaces;
use super::file::relative_to;
use super::table::identity::{HBONE, IDENTITY, IDENTITY_FILES, ISTIO_CA, TRUST, WORKLOAD_API};

/// The default validity of certificates from Istio's authority.
const VALIDITY: Duration = Duration::from_secs(24 * 3600);
/// A connection window has 31 bits (RFC 9113 §6.9.1); half of the largest one is enough.
const CONNECTION_WINDOW_MAX: u64 = 1 << 30;

/// Reads the sources of the certificate and the roots.
pub(super) fn options(root: &Fields<'_>, node: &Node, mesh: &Mesh, problems: &mut Problems) -> Options {
    let source = source(&root.fields("identity", &IDENTITY), node, problems);
    let expected = expected(node, mesh);
    if let (Some(Source::IstioCa(_)), None) = (&source, &expected)
        && let Some(found) = root.node("identity")
    {
        let fault = "found istioCa, but not both node.namespace and node.serviceAccount, which form the identity \
                     to request";
        problems.error(found.position, &Path::Root.key("identity"), fault);
    }
    Options { source, trust: trust(root, problems), expected }
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
    let path = |fields: &Fields<'_>, key| -> Option<PathBuf> {
        let (path, node) = fields.read(key, scalar::path).zip(fields.node(key))?;
        Some(relative_to(problems.file(node.position.file), path))
    };
    if identity.node("files").is_some() {
        let files = identity.fields("files", &IDENTITY_FILES);
        return Some(Source::Files { certificate: path(&files, "certificate")?, key: path(&files, "key")? });
    }
    if identity.node("istioCa").is_some() {
        let authority = identity.fields("istioCa", &ISTIO_CA);
        return Some(Source::IstioCa(IstioCa {
            address: authority.read("address", scalar::https)?.to_owned(),
            roots: path(&authority, "roots")?,
            token: path(&authority, "token")?,
            validity: authority.read("validity", scalar::duration).unwrap_or(VALIDITY),
            cluster: node.cluster.clone(),
        }));
    }
    let socket = identity.fields("workloadApi", &WORKLOAD_API).read("socket", scalar::unix_socket)?;
    Some(Source::WorkloadApi { socket: socket.to_owned() })
}

fn trust(root: &Fields<'_>, problems: &mut Problems) -> Vec<TrustFile> {
    let list = Path::Root.key("trust");
    let mut places: HashMap<TrustDomain, Position> = HashMap::new();
    let mut files = Vec::new();
    for (at, node) in root.items("trust").iter().enumerate() {
        let fields = Fields::new(Some(node), &TRUST);
        let domain = fields.read("trustDomain", scalar::trust_domain).zip(fields.node("trustDomain"));
        let Some((trust_domain, named)) = domain else { continue };
        if let Some(first) = places.insert(trust_domain.clone(), named.position) {
            let first = problems.place(first);
            let fault = format!("the trust domain {trust_domain} is listed twice; first at {first}");
            problems.error(named.position, &list.index(at).key("trustDomain"), fault);
            continue;
        }
        if let Some((path, node)) = fields.read("roots", scalar::path).zip(fields.node("roots")) {
            let roots = relative_to(problems.file(node.position.file), path);
            files.push(TrustFile { trust_domain, roots });
        }
    }
    files
}

/// Returns the positions of certificates and roots in the file, by subject.
pub(super) fn places(root: &Fields<'_>, problems: &Problems) -> IdentityPlaces {
    let mut places = IdentityPlaces::default();
    if let Some(files) = root.fields("identity", &IDENTITY).node("files") {
        places.certificate = Some(format!("{}: identity.files", problems.place(files.position)));
    }
    for (at, node) in root.items("trust").iter().enumerate() {
        let fields = Fields::new(Some(node), &TRUST);
        if let Some((domain, roots)) =
            fields.read("trustDomain", scalar::trust_domain).zip(fields.node("roots"))
        {
            let place = format!("{}: trust[{at}].roots", problems.place(roots.position));
            places.trust.insert(domain, place);
        }
    }
    places
}

pub(super) fn hbone(root: &Fields<'_>) -> HboneLimits {
    let (fields, default) = (root.fields("hbone", &HBONE), HboneLimits::default());
    let size = |key, default: u32| {
        let read = fields.read(key, scalar::size).and_then(|bytes| u32::try_from(bytes).ok());
        read.unwrap_or(default)
    };
    let bytes = |key, default: usize| {
        let read = fields.read(key, scalar::size).and_then(|bytes| usize::try_from(bytes).ok());
        read.unwrap_or(default)
    };
    let time = |key, default| fields.read(key, scalar::duration).unwrap_or(default);
    let streams: u32 = fields.number("streams").unwrap_or(default.streams);
    let stream_window = size("streamWindow", default.stream_window);
    let all = (u64::from(streams) * u64::from(stream_window)).min(CONNECTION_WINDOW_MAX);
    HboneLimits {
        streams,
        stream_window,
        connection_window: size("connectionWindow", u32::try_from(all).unwrap_or(u32::MAX)),
        frame_size: size("frameSize", default.frame_size),
        header_bytes: size("headerBytes", default.header_bytes),
        held_per_connection: bytes("heldPerConnection", default.held_per_connection),
        held_per_worker: bytes("heldPerWorker", default.held_per_worker),
        stalled: time("stalled", default.stalled),
        handshake_timeout: time("handshakeTimeout", default.handshake_timeout),
        ping_interval: time("pingInterval", default.ping_interval),
        ping_timeout: time("pingTimeout", default.ping_timeout),
        idle: time("idle", default.idle),
        resets: fields.number("resets").unwrap_or(default.resets),
        pings: fields.number("pings").unwrap_or(default.pings),
        settings: fields.number("settings").unwrap_or(default.settings),
        empty_frames: fields.number("emptyFrames").unwrap_or(default.empty_frames),
    }
}

/// Reports listeners that take HBONE, and `xds.tls`, if the certificate or the roots that they need are
/// missing.
pub(super) fn needed(
    root: &Fields<'_>,
    listeners: &[Arc<Listener>],
    secure_xds: bool,
    options: &Options,
    problems: &mut Problems,
) {
    let takes = |listener: &&Arc<Listener>| listener.protocol != ListenerProtocol::Sni;
    let of_listener = listeners.iter().find(takes).map(|listener| {
        ("listeners", format!("the listener {:?} has protocol {}", &*listener.name, listener.protocol.text()))
    });
    let of_xds = secure_xds.then(|| ("xds", "xds has tls".to_owned()));
    let brings_trust = options.source.as_ref().is_some_and(Source::brings_trust);
    let missing = match (root.node("identity"), options.trust.is_empty() && root.items("trust").is_empty()) {
        (None, _) => "identity, so there is no certificate to show",
        (Some(_), true) if !brings_trust => "trust, so no caller could be verified",
        (Some(_), _) => return,
    };
    for (key, who) in of_listener.into_iter().chain(of_xds) {
        if let Some(node) = root.node(key) {
            let fault = format!("{who}, but there is no {missing}");
            problems.error(node.position, &Path::Root.key(key), fault);
        }
    }
}
