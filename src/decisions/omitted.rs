//! Counts the endpoints of a name that this gateway cannot choose, by reason. `explain` and `validate` show the counts if a
//! name has fewer candidates than its registries have endpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use super::decision::{AdmissionRequest, MatchKind, RouteMatch};
use isthmus_model::endpoint::{Encapsulation, HBONE_PORT, MeshTlsOff};
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::Withheld;
use isthmus_registry::shard::Standing;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::route::RouteTarget;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::exports::{Caller, Offer, grant, is_among};
use isthmus_snapshot::port_endpoint::{PortEndpoint, on_own_network};
use isthmus_snapshot::routes::{RouteEntry, addresses, places};
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The reason why an endpoint cannot be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OmissionReason {
    /// The endpoint is on another network.
    OtherNetwork,
    /// The endpoint has a host name that has not been resolved to an address.
    Unresolved,
    /// The scope of the registry does not allow the address.
    AddressNotAllowed,
    /// The address is that of a gateway of the node's own network.
    Gateway,
    /// The registry uses the number or the name of the port for another port.
    PortConflict,
    /// The endpoint does not have the labels that the subset selects, nor has any other endpoint.
    NotInSubset,
    /// The endpoint has another TLS mode than the preferred one.
    OtherTlsMode,
    /// The endpoint does not accept HBONE, and endpoints that accept HBONE are preferred.
    NoTunnel,
    /// Nobody has written the endpoint's TLS mode, and no rule with `tls: own` admits the caller to it.
    OutsideMesh,
    /// An object turns the mesh's mutual TLS off on the port of the endpoint, and no rule with `tls: own` admits the caller to it.
    MeshTlsOff(MeshTlsOff),
    /// The export rules do not cover the endpoint's cluster.
    OtherCluster,
    /// The registry could not be read for some time, and another registry that can be read has ready endpoints.
    Demoted,
    /// The registry could not be read for so long that its endpoints are not used.
    Expired,
    /// The registry itself withholds the endpoint.
    Withheld(Withheld),
}

impl OmissionReason {
    /// All values, in the order of `docs/reasons.md`.
    pub const ALL: [Self; 18] = [
        Self::OtherNetwork,
        Self::Unresolved,
        Self::AddressNotAllowed,
        Self::Gateway,
        Self::PortConflict,
        Self::NotInSubset,
        Self::OtherTlsMode,
        Self::NoTunnel,
        Self::OutsideMesh,
        Self::MeshTlsOff(MeshTlsOff::DestinationRule),
        Self::MeshTlsOff(MeshTlsOff::PeerAuthentication),
        Self::OtherCluster,
        Self::Demoted,
        Self::Expired,
        Self::Withheld(Withheld::Claimed),
        Self::Withheld(Withheld::WaitingForPod),
        Self::Withheld(Withheld::NoPod),
        Self::Withheld(Withheld::ForeignNetwork),
    ];

    /// Returns the value as `explain` shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::OtherNetwork => "other network",
            Self::Unresolved => "unresolved",
            Self::AddressNotAllowed => "address not allowed",
            Self::Gateway => "gateway",
            Self::PortConflict => "port conflict",
            Self::NotInSubset => "not in subset",
            Self::OtherTlsMode => "other TLS mode",
            Self::NoTunnel => "no tunnel",
            Self::OutsideMesh => "outside the mesh",
            Self::MeshTlsOff(by) => by.text(),
            Self::OtherCluster => "other cluster",
            Self::Demoted => "registry demoted",
            Self::Expired => "registry expired",
            Self::Withheld(why) => why.text(),
        }
    }

    /// Returns the meaning of the value, as `docs/reasons.md` shows it.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::OtherNetwork => {
                "The endpoint is on another network, or has no network. A gateway connects only to endpoints of \
                 its own network. Compare `node.network` with the `network` of the registry."
            }
            Self::Unresolved => "The endpoint's host name does not resolve.",
            Self::AddressNotAllowed => {
                "The registry's `allow.addresses` does not permit the endpoint's address, or any address that its \
                 host name resolves to. Without that key, loopback and link-local addresses are not permitted."
            }
            Self::Gateway => {
                "The endpoint is a gateway of this gateway's own network (`networks`). Two gateways that chose \
                 each other would pass a connection back and forth without end."
            }
            Self::PortConflict => {
                "The endpoint's registry defines the port with another number or protocol than an earlier registry."
            }
            Self::NotInSubset => {
                "No endpoint of the service has the labels that the subset in the name selects. `explain` shows the \
                 labels; compare them with those of the pods."
            }
            Self::OtherTlsMode => {
                "The gateway uses endpoints of one TLS mode per port, and this endpoint has another mode. For SNI \
                 clients, `tls: none` is never used."
            }
            Self::NoTunnel => {
                "Other endpoints of the port have `tunnel: hbone`. If any ready endpoint has it, only such \
                 endpoints are used."
            }
            Self::OutsideMesh => {
                "The endpoint is of Kubernetes or an istiod, and has no mTLS of the mesh, or the client used a plain host name. Only an export \
                 rule with `tls: own` leads there."
            }
            Self::MeshTlsOff(MeshTlsOff::DestinationRule) => {
                "A DestinationRule gives the port a `tls.mode` other than `ISTIO_MUTUAL`, so the gateway does not lead mesh callers \
                 there, as istiod's gateway does not. Only an export rule with `tls: own` leads there."
            }
            Self::MeshTlsOff(MeshTlsOff::PeerAuthentication) => {
                "A PeerAuthentication has `DISABLE` for the mesh, the namespace, the pod or its port, so the endpoint does not accept \
                 mTLS of the mesh. Only an export rule with `tls: own` leads there."
            }
            Self::OtherCluster => {
                "The export rule that allows the caller does not offer the endpoint's cluster: the rule names other \
                 `clusters`, or that cluster lacks the mark that the rule requires, or hides the service with \
                 `networking.istio.io/exportTo`."
            }
            Self::Demoted => {
                "The endpoint's registry cannot be read, and another registry has a ready endpoint for the port."
            }
            Self::Expired => {
                "The endpoint's registry could not be read for longer than `aggregator.expireAfter`."
            }
            Self::Withheld(Withheld::Claimed) => {
                "An EndpointSlice names a pod with another UID, namespace or address for the endpoint, or a ServiceEntry or \
                 WorkloadEntry has the address of another namespace's pod or Service. Otherwise, anyone who may write such \
                 objects could direct a service there."
            }
            Self::Withheld(Withheld::WaitingForPod) => {
                "The EndpointSlice names a pod for this endpoint, and the API server has not listed that pod yet, or does \
                 not permit this gateway to list it."
            }
            Self::Withheld(Withheld::NoPod) => {
                "An EndpointSlice has the endpoint without a pod, and the registry has no `manualEndpoints: true`."
            }
            Self::Withheld(Withheld::ForeignNetwork) => {
                "The endpoint, or the network label of its pod, names a network that `allow.networks` of the registry does not \
                 list. Without that key, only the registry's own `network` is permitted."
            }
        }
    }
}

/// The endpoints that are omitted for one reason on one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Omitted {
    /// The reason why the endpoints cannot be chosen.
    pub reason: OmissionReason,
    /// The network of the endpoints.
    pub network: Network,
    /// The number of endpoints.
    pub count: usize,
    /// The clusters whose registries list the endpoints.
    pub clusters: BTreeSet<ClusterId>,
    /// The host names without addresses, if the reason is [`OmissionReason::Unresolved`].
    pub names: BTreeSet<HostName>,
}

#[derive(Default)]
struct Count {
    all: BTreeMap<(OmissionReason, Network), Omitted>,
}

impl Count {
    fn add(&mut self, reason: OmissionReason, found: &PortEndpoint<'_>) {
        let name = found.endpoint.host.name().filter(|_| reason == OmissionReason::Unresolved);
        self.add_to(reason, found.network, Some(&found.origin.cluster), name);
    }

    fn add_to(
        &mut self,
        reason: OmissionReason,
        network: &Network,
        cluster: Option<&ClusterId>,
        name: Option<&HostName>,
    ) {
        let new = || Omitted {
            reason,
            network: network.clone(),
            count: 0,
            clusters: BTreeSet::new(),
            names: BTreeSet::new(),
        };
        let omitted = self.all.entry((reason, network.clone())).or_insert_with(new);
        omitted.count += 1;
        omitted.clusters.extend(cluster.cloned());
        omitted.names.extend(name.cloned());
    }

    fn finish(self) -> Vec<Omitted> {
        self.all.into_values().collect()
    }
}

/// Counts the omitted endpoints of the rule that a name matched.
pub fn omitted(snapshot: &Snapshot, request: &AdmissionRequest<'_>, matched: &RouteMatch) -> Vec<Omitted> {
    let by_route = matches!(
        matched.kind,
        Some(
            MatchKind::ExactRoute
                | MatchKind::WildcardRoute
                | MatchKind::NoSniRoute
                | MatchKind::Target
                | MatchKind::Fallback
        )
    );
    if by_route && matched.service.is_none() {
        let route = matched.rule.as_ref().and_then(|key| snapshot.routes.named(key));
        return route.map(|route| of_route(snapshot, route)).unwrap_or_default();
    }
    let Some(target) = &matched.service else { return Vec::new() };
    let service = snapshot.service(&target.hostname);
    let found = service.and_then(|service| Some((service, service.port(target.port?)?)));
    let Some((service, port)) = found else { return Vec::new() };
    let asked = match matched.kind {
        Some(MatchKind::MeshName) => AskedBy::MeshName,
        Some(MatchKind::Authority | MatchKind::VirtualAddress) => AskedBy::Authority,
        // The caller named the address of one endpoint, so that the other endpoints are not omissions.
        Some(MatchKind::EndpointAddress) => return Vec::new(),
        Some(
            MatchKind::Hostname | MatchKind::ExactRoute | MatchKind::WildcardRoute | MatchKind::NoSniRoute,
        )
        | None => AskedBy::Hostname,
        Some(MatchKind::Target | MatchKind::Fallback) => AskedBy::Tcp,
    };
    // Export rules do not apply to a caller that a route, or the export to its peer, admits.
    let by_rules = !by_route && matched.peer.is_none();
    let AdmissionRequest { listener, source, identity, .. } = *request;
    let caller = Caller { listener: &listener.name, source, identity, is_ours: true };
    let granted = by_rules.then(|| grant(&port.rules, caller).ok()).flatten();
    let of_peer = || {
        let peer = snapshot.policy.peers.iter().find(|peer| Some(&peer.name) == matched.peer.as_ref())?;
        Some(service.offer_for(service.rule_for(peer)?))
    };
    let offer = granted.map(|granted| granted.offer).or_else(of_peer);
    of_port(snapshot, service, port, &target.subset.to_ascii_lowercase(), asked, offer.as_ref())
}

fn of_route(snapshot: &Snapshot, route: &RouteEntry) -> Vec<Omitted> {
    let mut count = Count::default();
    if let RouteTarget::Endpoints { endpoints, .. } = &route.route.to {
        for endpoint in endpoints {
            if places(endpoint, snapshot.resolved()).is_empty() {
                count.add_to(
                    OmissionReason::Unresolved,
                    &snapshot.policy.node.network,
                    None,
                    endpoint.host.name(),
                );
            }
        }
    }
    count.finish()
}

/// Counts the endpoints of a service port that cannot be chosen, by reason. `asked` is the kind of name by which the caller
/// asks for the service; `offer` is what rules offer to the caller, if any apply.
fn of_port(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &PortView,
    subset: &str,
    asked: AskedBy,
    offer: Option<&Offer>,
) -> Vec<Omitted> {
    let mut count = Count::default();
    let chosen = match offer {
        Some(offer) => port.offered(subset, asked, offer).candidates,
        None => port.candidates(subset, asked).cloned(),
    };
    let labels = service.subsets.get(subset).filter(|_| !subset.is_empty());
    // An endpoint at the address of a gateway of the node's own network is never a candidate. The choice of candidates applies
    // the same check.
    let is_gateway = |ip: IpAddr, found: &PortEndpoint<'_>| {
        let tunnel = (found.encapsulation() == Encapsulation::Hbone).then_some(HBONE_PORT);
        let mut ports = tunnel.into_iter().chain([found.port]);
        ports.any(|port| snapshot.networks.is_own_gateway(SocketAddr::new(ip, port)))
    };
    let all = || service.all_endpoints_of(port, snapshot.networks());
    let is_in_subset = |found: &PortEndpoint<'_>| labels.is_none_or(|labels| found.has(labels));
    let is_empty = !all().any(|(found, _)| is_in_subset(&found));
    for (found, serves) in all() {
        if !is_in_subset(&found) {
            // Endpoints of other subsets are no omissions, unless the subset has no endpoint at all.
            if is_empty {
                count.add(OmissionReason::NotInSubset, &found);
            }
            continue;
        }
        let found = found.in_subset(subset);
        let here = found.addresses(snapshot.resolved());
        let is_chosen = || {
            let mut all = chosen.iter().flat_map(|chosen| chosen.endpoints());
            all.any(|candidate| {
                here.contains(&candidate.key.address.ip()) && candidate.cluster == found.origin.cluster
            })
        };
        let reason = if !serves {
            OmissionReason::PortConflict
        } else if !on_own_network(&found, &snapshot.policy.node) {
            OmissionReason::OtherNetwork
        } else if addresses(&found.endpoint.host, snapshot.resolved()).is_empty() {
            OmissionReason::Unresolved
        } else if here.is_empty() {
            OmissionReason::AddressNotAllowed
        } else if here.iter().all(|ip| is_gateway(*ip, &found)) {
            OmissionReason::Gateway
        } else if offer.is_some_and(|offer| !is_among(&offer.clusters, &found.origin.cluster)) {
            OmissionReason::OtherCluster
        } else if offer.is_some_and(|offer| !offer.has(&found, asked)) {
            match found.mesh_tls_off.filter(|_| asked != AskedBy::Hostname) {
                Some(by) => OmissionReason::MeshTlsOff(by),
                None => OmissionReason::OutsideMesh,
            }
        } else if is_chosen() {
            continue;
        } else {
            match found.origin.standing {
                Standing::Expired => OmissionReason::Expired,
                Standing::Demoted => OmissionReason::Demoted,
                Standing::Live
                    if asked == AskedBy::Authority && found.encapsulation() == Encapsulation::None =>
                {
                    OmissionReason::NoTunnel
                }
                Standing::Live => OmissionReason::OtherTlsMode,
            }
        };
        count.add(reason, &found);
    }
    // The scope kept these endpoints out of the shard, so only their number is known.
    for _ in 0..service.denied_addresses {
        count.add_to(OmissionReason::AddressNotAllowed, &snapshot.policy.node.network, None, None);
    }
    for part in &service.parts {
        for (why, number) in &part.service.withheld {
            for _ in 0..*number {
                count.add_to(
                    OmissionReason::Withheld(*why),
                    &part.origin.network,
                    Some(&part.origin.cluster),
                    None,
                );
            }
        }
    }
    count.finish()
}

/// Describes the omissions of a name, each with a next step for the operator. If the name has candidates, only unresolved names
/// and missing networks are described.
pub fn warnings(snapshot: &Snapshot, omitted: &[Omitted], candidates: usize) -> Vec<String> {
    let own = &snapshot.policy.node.network;
    let mut texts = Vec::new();
    for Omitted { reason, network, count, clusters, names } in omitted {
        let clusters =
            clusters.iter().map(|cluster| format!("{:?}", cluster.as_str())).collect::<Vec<_>>().join(", ");
        let text = match reason {
            OmissionReason::Unresolved => {
                let names = names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                format!(
                    "name_unresolved: {names} does not resolve, so {count} of the endpoints have no address"
                )
            }
            OmissionReason::OtherNetwork if network.is_unknown() => format!(
                "{count} endpoints of cluster {clusters} have no network, but this gateway is on {own}; set \
                 `network` of the registry or of the endpoints"
            ),
            OmissionReason::OtherNetwork if own.is_unknown() => format!(
                "{count} endpoints are on {network}, but this gateway has no network; set `node.network`"
            ),
            _ if candidates > 0 => continue,
            OmissionReason::OtherNetwork => format!(
                "{count} endpoints are on {network}, but a gateway connects only to its own network ({own})"
            ),
            reason => format!("{count} endpoints are left out ({}): {}", reason.text(), reason.meaning()),
        };
        texts.push(text);
    }
    texts
}
