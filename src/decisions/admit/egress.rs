//! Calls that this gateway passes on to gateways of other networks, because clients on its network call other networks through it
//! (`networks.NET.egress: gateway`). A call goes out if its caller is known as one of the own network, and never a second time.

use std::sync::Arc;

use super::{Asking, admit_to, granted};
use crate::decision::{Admission, Carried, Onward, Permit, Refusal, RouteMatch, Trace};
use isthmus_model::reason::Reason;
use isthmus_settings::export_tls::AskedBy;
use isthmus_snapshot::candidates::Candidates;
use isthmus_snapshot::exports::Offer;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// Tells whether a call goes to an endpoint on this gateway's network or to a gateway of another network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// To another network if the service has endpoints there. Clients on the own network reach the endpoints of that network by
    /// themselves.
    FarFirst,
    /// To another network only if no endpoint is on the own one. The caller is of this mesh, and may be on any network.
    NearFirst,
    /// To an endpoint on the own network.
    NearOnly,
}

/// Decides on a call of a service of this mesh, to an endpoint on the own network or beyond it.
pub(super) fn admit_near_or_far(
    asking: &Asking<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    (subset, asked): (&str, AskedBy),
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let offered = |offer: &Offer| port.offered(subset, asked, offer);
    let snapshot = asking.snapshot;
    if !snapshot.networks().leaves_by_gateway(&snapshot.policy.node.network) {
        return admit_to(asking, service, port, offered, matched, trace);
    }
    // They are computed only for callers who are passed on.
    let far = || far_gateways(asking, service, port, subset, asked);
    match order(asking, trace) {
        Order::FarFirst => match far() {
            Some(far) => pass_on(asking, service, port, (far, asked), matched, trace),
            None => admit_to(asking, service, port, offered, matched, trace),
        },
        Order::NearFirst => match admit_to(asking, service, port, offered, matched, trace) {
            Err(Refusal { reason: Reason::NoEndpoints, matched }) => match far() {
                Some(far) => pass_on(asking, service, port, (far, asked), matched, trace),
                None => Err(Refusal { reason: Reason::NoEndpoints, matched }),
            },
            answer => answer,
        },
        Order::NearOnly => match admit_to(asking, service, port, offered, matched, trace) {
            Err(Refusal { reason: Reason::NoEndpoints, matched })
                if asking.request.is_passed_on && far().is_some() =>
            {
                Err(Refusal { reason: Reason::HopLimit, matched })
            }
            answer => answer,
        },
    }
}

/// Returns the gateways of other networks that lead to a service port and subset.
pub(super) fn far_gateways(
    asking: &Asking<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    subset: &str,
    asked: AskedBy,
) -> Option<Arc<Candidates>> {
    asking.request.far?.of(asking.snapshot, service, port, subset, asked)
}

/// Returns the order in which the endpoints on the own network and the gateways of others are used for a caller.
fn order(asking: &Asking<'_>, trace: &mut impl Trace) -> Order {
    let (policy, request) = (&asking.snapshot.policy, asking.request);
    let own = &policy.node.network;
    if request.is_passed_on || !asking.peers.is_ours() {
        trace.step(|| {
            let whence = if request.is_passed_on {
                "another gateway has passed the call on"
            } else {
                "the caller belongs to a peer"
            };
            format!("{whence}, so it does not leave the network {own} again")
        });
        return Order::NearOnly;
    }
    let is_of_mesh =
        request.identity.map(|identity| identity.trust_domain() == policy.mesh.trust_domain.as_str());
    if is_of_mesh == Some(false) {
        trace.step(|| {
            format!("the caller's identity is not in the trust domain of this mesh, so the call does not leave the network {own}")
        });
        return Order::NearOnly;
    }
    let network =
        request.source.map(|source| (source, asking.snapshot.networks().network_of_address(source)));
    match network {
        None => {
            trace.step(|| {
                format!(
                    "the source must be on this gateway's network {own} for the call to leave it (not checked: no source was given)"
                )
            });
            Order::FarFirst
        }
        Some((source, Some(network))) if network == own => {
            trace.step(|| {
                format!("the source {source} is on this gateway's network {own}, whose clients call other networks through it")
            });
            Order::FarFirst
        }
        Some((source, None)) if is_of_mesh.is_some() => {
            trace.step(|| {
                format!(
                    "the caller is of this mesh, and its source {source} is in no `networks[].cidrs`, so the call leaves the network {own} \
                     only if no endpoint is on it"
                )
            });
            Order::NearFirst
        }
        Some((source, _)) => {
            trace.step(|| {
                format!(
                    "the source {source} is not in `networks[].cidrs` of this gateway's network {own}, and only calls from there leave it"
                )
            });
            Order::NearOnly
        }
    }
}

/// Admits a caller to the gateways of other networks, if an export rule allows it.
fn pass_on(
    asking: &Asking<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    (far, asked): (Arc<Candidates>, AskedBy),
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let granted = match granted(asking, service, port, trace) {
        Ok(granted) => granted,
        Err(reason) => return Err(Refusal { reason, matched }),
    };
    if granted.offer.clusters.is_some() {
        trace.step(|| {
            "the rule names clusters, and which of them a gateway of another network takes is not known here".to_owned()
        });
        return Err(Refusal { reason: Reason::NoEndpoints, matched });
    }
    let permit =
        Permit::Export { hostname: service.export_name.clone(), port: port.port, tls: granted.offer.tls() };
    let exported_name = service.key.hostname.clone();
    let to = Carried { peer: Arc::default(), exported_name, port: port.port, asked };
    Ok(through(far, to, permit, matched, trace))
}

/// Returns the admission of a call that goes through gateways of other networks.
pub(super) fn through(
    far: Arc<Candidates>,
    to: Carried,
    permit: Permit,
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Admission {
    trace
        .step(|| format!("the call is passed on to a gateway of another network: {}", far.endpoints().len()));
    let onward = Some(Arc::new(Onward::Gateway(to)));
    Admission { matched, candidates: far, clusters: None, permit, onward }
}
