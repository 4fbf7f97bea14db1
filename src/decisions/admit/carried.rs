//! Calls of a peer's services that this gateway passes on: on carriers of the peer (`docs/federation.md, "Call a network without an open
//! port"`), or through the peer's gateways if clients on its network call others through it (`networks.NET.egress: gateway`). Only
//! callers that are known as ones of this mesh go out, and nothing that came from a peer or another gateway does.

use std::sync::Arc;

use super::egress::{far_gateways, through};
use super::{Asking, ports_text, target};
use crate::decision::{Admission, Carried, MatchKind, Onward, Permit, Refusal, Requested, RouteMatch, Trace};
use isthmus_model::mesh_name::{Dialect, read};
use isthmus_model::reason::Reason;
use isthmus_settings::export_tls::{AskedBy, ExportTls};
use isthmus_snapshot::candidates::Candidates;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The largest number of gateways that a call passes: one of the caller's organisation, and one of the service's.
const GATEWAYS_MAX: usize = 2;

/// Returns an error if a call has passed as many gateways as it may before this one. `path` has the trust domain of each. A path that
/// leaves some out gains nothing: what a peer has passed on never goes out again.
pub fn admit_path(path: &[Box<str>]) -> Result<(), Reason> {
    if path.len() < GATEWAYS_MAX { Ok(()) } else { Err(Reason::HopLimit) }
}

/// Decides on a server name of a service that this gateway passes on; `None` if it is no name of such a service.
pub(super) fn admit_carried_name(
    asking: &Asking<'_>,
    name: &str,
    trace: &mut impl Trace,
) -> Option<Result<Admission, Refusal>> {
    match read(name) {
        // The service's name for its peer has no subsets.
        Dialect::Mesh(mesh) if mesh.subset.is_empty() => {
            admit_carried_port(asking, mesh.hostname, mesh.port, MatchKind::MeshName, trace)
        }
        Dialect::Mesh(_) | Dialect::Malformed => None,
        Dialect::Plain => {
            let service = found(asking, name)?;
            let port = service.tls_port(ExportTls::Own)?;
            Some(admit_carried(
                asking,
                service,
                port,
                matched(service, port.port, MatchKind::Hostname),
                trace,
            ))
        }
    }
}

/// Decides on a service port that a peer offers on carriers, by the name under which the peer exports the service; `None` if it exports
/// no such service.
pub(super) fn admit_carried_port(
    asking: &Asking<'_>,
    name: &str,
    port: u16,
    kind: MatchKind,
    trace: &mut impl Trace,
) -> Option<Result<Admission, Refusal>> {
    let service = found(asking, name)?;
    let Some(view) = service.port(port) else {
        trace.step(|| format!("the service has no port {port}; it has {}", ports_text(service)));
        let unknown = match kind {
            MatchKind::Authority => Reason::AuthorityUnknown,
            _ => Reason::SniUnknown,
        };
        return Some(Err(unknown.into()));
    };
    Some(admit_carried(asking, service, view, matched(service, port, kind), trace))
}

/// Returns the service that a peer exports under this name and to which calls are passed on, unless a service of this mesh has the name.
fn found<'a>(asking: &Asking<'a>, name: &str) -> Option<&'a Arc<ServiceView>> {
    let service = asking.snapshot.passed_on(name)?;
    let own = asking.snapshot.service(name).filter(|own| own.import.is_none());
    own.is_none().then_some(service)
}

fn matched(service: &ServiceView, port: u16, kind: MatchKind) -> RouteMatch {
    RouteMatch {
        kind: Some(kind),
        rule: Some(service.name.clone()),
        service: Some(target(service, Some(port), "")),
        peer: None,
    }
}

/// Admits callers of this mesh to a service of a peer.
pub(super) fn admit_carried(
    asking: &Asking<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let snapshot = asking.snapshot;
    let Some(import) = &service.import else {
        return Err(Refusal { reason: Reason::NoEndpoints, matched });
    };
    let (peer, is_carried) = (&import.peer, snapshot.is_carried(service));
    trace.step(|| {
        format!(
            "{} is called {} of the peer {peer}, which exports it as {}",
            service.name,
            if is_carried { "on carriers" } else { "through gateways" },
            import.exported_name
        )
    });
    if !asking.peers.is_ours() {
        trace.step(|| "the caller belongs to a peer, and no call goes from one peer to another".to_owned());
        return Err(Refusal { reason: Reason::HopLimit, matched });
    }
    if asking.request.is_passed_on {
        trace.step(|| "another gateway has passed the call on, so it does not go out to a peer".to_owned());
        return Err(Refusal { reason: Reason::HopLimit, matched });
    }
    if !is_own(asking, trace) {
        return Err(Refusal { reason: Reason::NotExported, matched });
    }
    let asked = match asking.request.requested {
        Requested::Authority(_) => AskedBy::Authority,
        Requested::ServerName(_) | Requested::Nothing if matched.kind == Some(MatchKind::Hostname) => {
            AskedBy::Hostname
        }
        Requested::ServerName(_) | Requested::Nothing => AskedBy::MeshName,
    };
    let carried =
        Carried { peer: peer.clone(), exported_name: import.exported_name.clone(), port: port.port, asked };
    if !is_carried {
        return match far_gateways(asking, service, port, "", asked) {
            Some(far) => Ok(through(far, carried, Permit::Carried, matched, trace)),
            None => {
                trace.step(|| format!("no gateway of the peer {peer} can be used"));
                Err(Refusal { reason: Reason::NoEndpoints, matched })
            }
        };
    }
    let candidates = port.candidates("", asked).cloned().unwrap_or_else(|| {
        let group = format!("{}:{}", service.name, port.port).into();
        Arc::new(Candidates::new(group, snapshot.policy.tuning.of(&service.name).clone(), Vec::new()))
    });
    let onward = Some(Arc::new(Onward::Carrier(carried)));
    Ok(Admission { matched, candidates, clusters: None, permit: Permit::Carried, onward })
}

/// Returns true if the caller is known as one of this mesh: by an identity in its trust domain, or, without an identity, by an address on
/// the network of this gateway.
fn is_own(asking: &Asking<'_>, trace: &mut impl Trace) -> bool {
    let policy = &asking.snapshot.policy;
    match (asking.request.identity, asking.request.source) {
        (Some(identity), _) => {
            let is_own = identity.trust_domain() == policy.mesh.trust_domain.as_str();
            trace.step(|| match is_own {
                true => "the caller's identity is in the trust domain of this mesh".to_owned(),
                false => "the caller's identity is not in the trust domain of this mesh".to_owned(),
            });
            is_own
        }
        (None, Some(source)) => {
            let own = &policy.node.network;
            let is_own = asking.snapshot.networks().network_of_address(source) == Some(own);
            trace.step(|| match is_own {
                true => format!("the source {source} is on this gateway's network {own}"),
                false => format!(
                    "the source {source} is not in `networks[].cidrs` of this gateway's network {own}, and only callers from there are \
                     passed on"
                ),
            });
            is_own
        }
        (None, None) => {
            trace.step(|| {
                "the source must be on this gateway's network (not checked: no source was given)".to_owned()
            });
            true
        }
    }
}
