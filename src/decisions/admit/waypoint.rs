//! The waypoint of a service: the callers that are connected to it in place of the endpoints, and the choice among several.
//!
//! A service that has a waypoint is never reached past it because the waypoint is down or not known: such calls are refused. As with
//! Istio's gateway, a caller of this mesh is believed the header `x-istio-source`, by which waypoints and ingress gateways of other
//! networks ask for the endpoints: they have applied the policies for HTTP, and expect the identities of the endpoints.

use std::sync::Arc;

use super::Asking;
use crate::decision::{Requested, Trace};
use isthmus_model::endpoint::Health;
use isthmus_model::service::{CallerKind, ServiceKey, Waypoint};
use isthmus_snapshot::candidates::Candidates;
use isthmus_snapshot::service_view::ServiceView;
use isthmus_snapshot::service_view::waypoint::WaypointView;

/// The endpoints that a caller is connected to.
pub(super) enum Way {
    /// The endpoints of the service.
    Endpoints,
    /// The waypoint at an address.
    Address(Arc<Candidates>),
    /// The endpoints of the waypoint's service; `None`: it has none here.
    Services(Option<Arc<Candidates>>),
}

/// Returns the endpoints that a caller of a service is connected to.
pub(super) fn way(asking: &Asking<'_>, service: &ServiceView, trace: &mut impl Trace) -> Way {
    let Some(waypoint) = &service.waypoint else { return Way::Endpoints };
    if let Some(why) = passes_by(asking, service, waypoint) {
        trace.step(|| format!("{why}, so the caller is connected to the endpoints"));
        return Way::Endpoints;
    }
    if let Some(candidates) = &waypoint.by_address {
        trace.step(|| "the service has a waypoint, to which the caller is connected".to_owned());
        return Way::Address(candidates.clone());
    }
    let names = || {
        let name = |(key, share): &(ServiceKey, u32)| match waypoint.told.services().len() {
            1 => key.to_string(),
            _ => format!("{key} ({share} %)"),
        };
        waypoint.told.services().iter().map(name).collect::<Vec<_>>().join(" or ")
    };
    if waypoint.told.services().is_empty() {
        trace.step(|| {
            "the service has a waypoint, but the registry cannot read which one, so no caller is connected".to_owned()
        });
        return Way::Services(None);
    }
    let chosen = chosen(asking, waypoint);
    trace.step(|| match chosen {
        Some((key, _)) => {
            format!("the service has the waypoint {}; the caller is connected to {key}", names())
        }
        None => format!("the service has the waypoint {}, which has no endpoint here", names()),
    });
    Way::Services(chosen.map(|(_, candidates)| candidates.clone()))
}

/// Returns why a caller is not connected to the waypoint; `None` if it is.
fn passes_by(asking: &Asking<'_>, service: &ServiceView, waypoint: &WaypointView) -> Option<&'static str> {
    let request = asking.request;
    let Requested::Authority(_) = request.requested else {
        return Some("only HBONE callers are connected to the service's waypoint");
    };
    let mut own = asking.snapshot.waypoint_identities(&waypoint.told);
    if own.any(|own| Some(own) == request.identity) {
        return Some("the caller is the service's waypoint");
    }
    let takes_ingress = match &*waypoint.told {
        Waypoint::Address { .. } => false,
        // Waypoints know services by their virtual addresses; inside the cluster too, callers use the addresses of pods.
        Waypoint::Services { .. } if service.addresses.is_empty() => {
            return Some(
                "the service has a waypoint but no virtual address, by which alone a waypoint takes calls",
            );
        }
        Waypoint::Services { takes_ingress, .. } => *takes_ingress,
    };
    // The policies of another organisation are not those of this mesh.
    let kind = if asking.peers.is_ours() { request.kind } else { CallerKind::Other };
    match kind {
        CallerKind::Waypoint => Some("the caller says that it is a waypoint (x-istio-source)"),
        CallerKind::Ingress if !takes_ingress => Some(
            "the caller says that it is an ingress gateway (x-istio-source), and the service has no istio.io/ingress-use-waypoint",
        ),
        CallerKind::Ingress | CallerKind::Other => None,
    }
}

/// Returns the waypoint that takes the call, by chance in proportion to the shares; of those with a healthy endpoint here, or else of
/// those with any.
fn chosen<'a>(
    asking: &Asking<'a>,
    waypoint: &'a WaypointView,
) -> Option<(&'a ServiceKey, &'a Arc<Candidates>)> {
    let is_healthy = |candidates: &Candidates| {
        candidates.endpoints().iter().any(|endpoint| endpoint.health == Health::Healthy)
    };
    let having = |needs_healthy: bool| {
        let all = waypoint.candidates(asking.snapshot);
        all.filter(move |(_, _, candidates)| {
            !candidates.is_empty() && (!needs_healthy || is_healthy(candidates))
        })
    };
    let needs_healthy = having(true).next().is_some();
    let total: u64 = having(needs_healthy).map(|(_, share, _)| u64::from(share)).sum();
    let mut left = asking.request.draw.unwrap_or_default() % total.max(1);
    let mut taking = having(needs_healthy);
    taking.find_map(|(key, share, candidates)| {
        let takes = left < u64::from(share);
        left = left.saturating_sub(share.into());
        takes.then_some((key, candidates))
    })
}

#[cfg(test)]
mod tests {
    use super::super::admit;
    use super::*;
    use crate::decision::AdmissionRequest;
    use crate::view::onward::Computed;
    use isthmus_model::authority::Authority;
    use isthmus_model::endpoint::{Encapsulation, Endpoint, EndpointTemplate};
    use isthmus_model::identity::Identity;
    use isthmus_model::service::{PortProtocol, Service};
    use isthmus_snapshot::Snapshot;
    use isthmus_snapshot::testing::{Mesh, endpoint, host_name, port, rule, service, shard};

    const SELF: &str = "spiffe://td/ns/shop/sa/gate";

    /// Collects the steps of a decision.
    #[derive(Default)]
    struct Steps(Vec<String>);

    impl Trace for Steps {
        fn step(&mut self, text: impl FnOnce() -> String) {
            self.0.push(text());
        }

        fn canonical(&mut self, _: &str) {}
    }

    fn gate(host: &str) -> Endpoint {
        let identity = Some(Identity::parse(SELF).expect("legal"));
        let template =
            EndpointTemplate { identity, encapsulation: Encapsulation::Hbone, ..Default::default() };
        Endpoint { template: template.into(), ..endpoint(host, 1) }
    }

    fn waypoint_service(name: &str, hosts: &[&str]) -> Service {
        let hosts = hosts.iter().map(|host| gate(host)).collect();
        service(name, vec![port(15_008, PortProtocol::Tcp)], hosts)
    }

    fn named(shares: &[(&str, u32)], takes_ingress: bool) -> Option<Arc<Waypoint>> {
        let key = |name: &str| ServiceKey { namespace: "shop".into(), hostname: host_name(name) };
        let services = shares.iter().map(|(name, share)| (key(name), *share)).collect();
        Some(Arc::new(Waypoint::Services { services, takes_ingress }))
    }

    /// Returns a mesh whose service `web.mesh`, alone exported, has this waypoint.
    fn mesh(waypoint: Option<Arc<Waypoint>>, gates: &[&str], is_headless: bool) -> Mesh {
        let plain = service("web.mesh", vec![port(80, PortProtocol::Http)], vec![endpoint("10.0.0.1", 1)]);
        let addresses = if is_headless { Vec::new() } else { vec!["240.0.0.1".parse().expect("legal")] };
        let web = Service { addresses, waypoint, ..plain };
        let listing =
            vec![web, waypoint_service("gate.mesh", gates), waypoint_service("canary.mesh", &["10.0.0.8"])];
        let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", listing)]);
        Arc::make_mut(&mut mesh.policy).exports = vec![rule("web.mesh")];
        mesh
    }

    /// Returns the addresses to which a call to `web.mesh` leads, or the reason of the refusal, and the last step but one.
    fn leads(snapshot: &Snapshot, caller: &str, kind: CallerKind, draw: u64) -> (String, String) {
        let authority = Authority::parse("web.mesh:80").expect("legal");
        let identity = Identity::parse(caller).expect("legal");
        let request = AdmissionRequest {
            listener: &snapshot.policy.listeners[0],
            requested: Requested::Authority(&authority),
            source: Some([10, 0, 0, 9].into()),
            alpn: None,
            identity: Some(&identity),
            kind,
            local: None,
            draw: Some(draw),
            is_passed_on: false,
            far: Some(&Computed),
        };
        let mut steps = Steps::default();
        let to = match admit(snapshot, &request, &mut steps) {
            Err(refusal) => refusal.reason.text().to_owned(),
            Ok(admission) => {
                let all = admission.candidates.endpoints().iter().map(|one| one.key.address.to_string());
                all.collect::<Vec<_>>().join(" ")
            }
        };
        (to, steps.0[steps.0.len().saturating_sub(2)].clone())
    }

    const CALLER: &str = "spiffe://td/ns/shop/sa/a";
    const ENDPOINT: &str = "10.0.0.1:8080";

    #[test]
    fn callers_are_connected_to_all_endpoints_of_the_waypoint_unless_its_policies_were_applied() {
        const GATES: &str = "10.0.0.5:15008 10.0.0.6:15008";
        use CallerKind::{Ingress, Other, Waypoint};
        for (takes_ingress, caller, kind, expected) in [
            (false, CALLER, Other, GATES),
            (false, CALLER, Waypoint, ENDPOINT),
            (false, CALLER, Ingress, ENDPOINT),
            (true, CALLER, Ingress, GATES),
            (false, SELF, Other, ENDPOINT),
        ] {
            let told = named(&[("gate.mesh", 1)], takes_ingress);
            let snapshot = mesh(told, &["10.0.0.5", "10.0.0.6"], false).snapshot();
            let (to, why) = leads(&snapshot, caller, kind, 0);
            assert_eq!(to, expected, "{takes_ingress} {caller} {kind:?}: {why}");
            let told = if expected == GATES {
                "has the waypoint shop/gate.mesh"
            } else {
                "is connected to the endpoints"
            };
            assert!(why.contains(told), "{why}");
        }
    }

    #[test]
    fn a_waypoint_that_is_down_or_not_known_is_never_passed_by() {
        let (to, why) = leads(
            &mesh(named(&[("gate.mesh", 1)], false), &[], false).snapshot(),
            CALLER,
            CallerKind::Other,
            0,
        );
        assert_eq!(to, "no_endpoints");
        assert!(why.contains("gate.mesh, which has no endpoint here"), "{why}");
        for unknown in [&[][..], &[("absent.mesh", 1)]] {
            let snapshot = mesh(named(unknown, false), &["10.0.0.5"], false).snapshot();
            assert_eq!(leads(&snapshot, CALLER, CallerKind::Other, 0).0, "no_endpoints", "{unknown:?}");
        }
    }

    #[test]
    fn a_service_without_a_virtual_address_is_not_reached_through_its_waypoint() {
        let snapshot = mesh(named(&[("gate.mesh", 1)], false), &["10.0.0.5"], true).snapshot();
        let (to, why) = leads(&snapshot, CALLER, CallerKind::Other, 0);
        assert_eq!(to, ENDPOINT);
        assert!(why.contains("no virtual address"), "{why}");
    }

    #[test]
    fn calls_are_divided_among_weighted_waypoints_by_their_shares() {
        let shares = [("gate.mesh", 90), ("canary.mesh", 10)];
        let count = |gates: &[&str], shares: &[(&str, u32)]| {
            let snapshot = mesh(named(shares, false), gates, false).snapshot();
            let to = (0..100).map(|draw| leads(&snapshot, CALLER, CallerKind::Other, draw).0);
            to.filter(|to| to == "10.0.0.8:15008").count()
        };
        assert_eq!(count(&["10.0.0.5"], &shares), 10);
        assert_eq!(count(&["10.0.0.5"], &[("gate.mesh", 100), ("canary.mesh", 0)]), 0);
        assert_eq!(count(&[], &shares), 100, "one without endpoints has no share");
    }

    /// A gateway leads only to its own network, where another cluster's waypoint has no endpoint.
    #[test]
    fn the_waypoint_of_a_cluster_on_another_network_is_its_gateways_matter() {
        let plain = service("web.mesh", vec![port(80, PortProtocol::Http)], vec![endpoint("10.0.0.1", 1)]);
        let far = Service {
            addresses: vec!["240.0.0.1".parse().expect("legal")],
            waypoint: named(&[("gate.mesh", 1)], false),
            endpoints: vec![endpoint("10.1.0.1", 1)].into(),
            ..plain.clone()
        };
        let shards = vec![shard("a", "n1", vec![plain]), shard("b", "n2", vec![far])];
        let mesh = Mesh::new(Vec::new(), shards);
        assert_eq!(leads(&mesh.snapshot(), CALLER, CallerKind::Other, 0).0, ENDPOINT);
    }
}
