//! The endpoints that a name has and that cannot be chosen on this network, counted by why: what `explain` and `validate`
//! say where a name leads to fewer endpoints than its registries have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use super::Snapshot;
use super::admit::{Match, Met, Question};
use super::exports::grant;
use super::policy::RouteTarget;
use super::routes::{RouteEntry, addresses};
use super::service_view::{AskedBy, PortEndpoint, PortView, ServiceView, on_own_network};
use super::shard::Standing;
use crate::model::endpoint::{Encapsulation, HBONE_PORT};
use crate::model::name::HostName;
use crate::model::place::{ClusterId, Network};

/// Why an endpoint cannot be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    OtherNetwork,
    Unresolved,
    AddressNotAllowed,
    Gateway,
    PortConflict,
    OtherTlsMode,
    NoTunnel,
    OtherCluster,
    Demoted,
    Expired,
}

impl Why {
    pub const ALL: [Self; 10] = [
        Self::OtherNetwork,
        Self::Unresolved,
        Self::AddressNotAllowed,
        Self::Gateway,
        Self::PortConflict,
        Self::OtherTlsMode,
        Self::NoTunnel,
        Self::OtherCluster,
        Self::Demoted,
        Self::Expired,
    ];

    pub fn text(self) -> &'static str {
        match self {
            Self::OtherNetwork => "other network",
            Self::Unresolved => "unresolved",
            Self::AddressNotAllowed => "address not allowed",
            Self::Gateway => "gateway",
            Self::PortConflict => "port conflict",
            Self::OtherTlsMode => "other TLS mode",
            Self::NoTunnel => "no tunnel",
            Self::OtherCluster => "other cluster",
            Self::Demoted => "registry demoted",
            Self::Expired => "registry expired",
        }
    }

    /// Its meaning: the table of `docs/reasons.md`.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::OtherNetwork => {
                "It is on another network, or on none: a gateway passes connections to its own network alone. \
                 Compare `node.network` with the `network` of the registry."
            }
            Self::Unresolved => "It is given by a host name that has no address.",
            Self::AddressNotAllowed => {
                "Its registry's `allow.addresses` keeps out its address, or those that its name resolves to; without such a \
                 key loopback and link-local addresses."
            }
            Self::Gateway => {
                "It is a gateway of this gateway's own network (`networks`): two that choose each other would pass a \
                 connection to and fro without end."
            }
            Self::PortConflict => {
                "Its registry has the port under another number or protocol than an earlier registry."
            }
            Self::OtherTlsMode => {
                "One TLS mode is chosen for a port, and `tls: none` never for callers by server name; this \
                 endpoint has another."
            }
            Self::NoTunnel => {
                "Other endpoints of the port take HBONE (`tunnel: hbone`); only those are chosen."
            }
            Self::OtherCluster => "The export rule that lets the caller in speaks of other `clusters`.",
            Self::Demoted => {
                "Its registry cannot be read, and another one has a ready endpoint for the port."
            }
            Self::Expired => "Its registry could not be read for `aggregator.expireAfter`.",
        }
    }
}

/// Endpoints left out for one reason on one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Omitted {
    pub why: Why,
    pub network: Network,
    pub count: usize,
    /// The clusters whose registries have them.
    pub clusters: BTreeSet<ClusterId>,
    /// The names that have no address, if that is why.
    pub names: BTreeSet<HostName>,
}

#[derive(Default)]
struct Count {
    all: BTreeMap<(Why, Network), Omitted>,
}

impl Count {
    fn add(&mut self, why: Why, found: &PortEndpoint<'_>) {
        let name = found.endpoint.host.name().filter(|_| why == Why::Unresolved);
        self.add_to(why, found.network, Some(&found.origin.cluster), name);
    }

    fn add_to(&mut self, why: Why, network: &Network, cluster: Option<&ClusterId>, name: Option<&HostName>) {
        let new = || Omitted {
            why,
            network: network.clone(),
            count: 0,
            clusters: BTreeSet::new(),
            names: BTreeSet::new(),
        };
        let omitted = self.all.entry((why, network.clone())).or_insert_with(new);
        omitted.count += 1;
        omitted.clusters.extend(cluster.cloned());
        omitted.names.extend(name.cloned());
    }

    fn finish(self) -> Vec<Omitted> {
        self.all.into_values().collect()
    }
}

/// Counts the endpoints that were left out for a name that met this.
pub fn omitted(snapshot: &Snapshot, question: &Question<'_>, met: &Met) -> Vec<Omitted> {
    let by_route = matches!(met.matched, Some(Match::ExactRoute | Match::WildcardRoute | Match::NoSniRoute));
    if by_route && met.service.is_none() {
        let route = met.rule.as_ref().and_then(|key| snapshot.routes.named(key));
        return route.map(|route| of_route(snapshot, route)).unwrap_or_default();
    }
    let Some(target) = &met.service else { return Vec::new() };
    let service = snapshot.service(&target.hostname);
    let found = service.and_then(|service| Some((service, service.port(target.port?)?)));
    let Some((service, port)) = found else { return Vec::new() };
    let asked = match met.matched {
        Some(Match::MeshName) => AskedBy::MeshName,
        Some(Match::Authority | Match::VirtualAddress) => AskedBy::Authority,
        // One endpoint is asked for by itself.
        Some(Match::EndpointAddress) => return Vec::new(),
        Some(Match::Hostname | Match::ExactRoute | Match::WildcardRoute | Match::NoSniRoute) | None => {
            AskedBy::Hostname
        }
    };
    // A route is a permission of its own, whatever the rules say.
    let granted = (!by_route)
        .then(|| grant(&port.rules, &question.listener.name, question.source, question.identity).ok())
        .flatten();
    let clusters = granted.and_then(|granted| granted.clusters);
    of_port(snapshot, service, port, &target.subset.to_ascii_lowercase(), asked, clusters.as_deref())
}

fn of_route(snapshot: &Snapshot, route: &RouteEntry) -> Vec<Omitted> {
    let mut count = Count::default();
    if let RouteTarget::Endpoints { endpoints, .. } = &route.route.to {
        for endpoint in endpoints {
            if addresses(&endpoint.host, &snapshot.resolved).is_empty() {
                count.add_to(Why::Unresolved, &snapshot.policy.node.network, None, endpoint.host.name());
            }
        }
    }
    count.finish()
}

/// Counts the endpoints of a service port that cannot be chosen for those who ask for it in this way.
pub fn of_port(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &PortView,
    subset: &str,
    asked: AskedBy,
    clusters: Option<&[ClusterId]>,
) -> Vec<Omitted> {
    let mut count = Count::default();
    let chosen = port.candidates(subset, asked);
    let labels = service.subsets.get(subset).filter(|_| !subset.is_empty());
    // As candidates are looked at.
    let is_gateway = |ip: IpAddr, found: &PortEndpoint<'_>| {
        let tunnel = (found.encapsulation() == Encapsulation::Hbone).then_some(HBONE_PORT);
        let mut ports = tunnel.into_iter().chain([found.port]);
        ports.any(|port| snapshot.networks.is_own_gateway(SocketAddr::new(ip, port)))
    };
    for (found, serves) in service.all_endpoints_of(port, snapshot.networks()) {
        if labels.is_some_and(|labels| !found.endpoint.template.has_labels(labels)) {
            continue;
        }
        let here = found.addresses(&snapshot.resolved);
        let is_chosen = || {
            let mut all = chosen.iter().flat_map(|chosen| chosen.endpoints());
            all.any(|candidate| {
                here.contains(&candidate.key.address.ip()) && candidate.cluster == found.origin.cluster
            })
        };
        let why = if !serves {
            Why::PortConflict
        } else if !on_own_network(&found, &snapshot.policy.node) {
            Why::OtherNetwork
        } else if addresses(&found.endpoint.host, &snapshot.resolved).is_empty() {
            Why::Unresolved
        } else if here.is_empty() {
            Why::AddressNotAllowed
        } else if here.iter().all(|ip| is_gateway(*ip, &found)) {
            Why::Gateway
        } else if clusters.is_some_and(|clusters| !clusters.contains(&found.origin.cluster)) {
            Why::OtherCluster
        } else if is_chosen() {
            continue;
        } else {
            match found.origin.standing {
                Standing::Expired => Why::Expired,
                Standing::Demoted => Why::Demoted,
                Standing::Live
                    if asked == AskedBy::Authority && found.encapsulation() == Encapsulation::None =>
                {
                    Why::NoTunnel
                }
                Standing::Live => Why::OtherTlsMode,
            }
        };
        count.add(why, &found);
    }
    // These were left out before they came into the world.
    for _ in 0..service.denied_addresses {
        count.add_to(Why::AddressNotAllowed, &snapshot.policy.node.network, None, None);
    }
    count.finish()
}

/// Says what is left out and what to do about it: of a name that has endpoints here, only what is surely a mistake.
pub fn warnings(snapshot: &Snapshot, omitted: &[Omitted], has_candidates: bool) -> Vec<String> {
    let own = &snapshot.policy.node.network;
    let mut texts = Vec::new();
    for Omitted { why, network, count, clusters, names } in omitted {
        let clusters =
            clusters.iter().map(|cluster| format!("{:?}", cluster.as_str())).collect::<Vec<_>>().join(", ");
        let text = match why {
            Why::Unresolved => {
                let names = names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                format!("name_unresolved: {names} does not resolve: {count} of the endpoints have no address")
            }
            Why::OtherNetwork if network.is_unknown() => format!(
                "{count} endpoints of cluster {clusters} are on no network, and this gateway is on {own}: say `network` in \
                 the registry or at the endpoints"
            ),
            Why::OtherNetwork if own.is_unknown() => format!(
                "{count} endpoints are on {network}, and this gateway is on no network: say `node.network`"
            ),
            _ if has_candidates => continue,
            Why::OtherNetwork => format!(
                "{count} endpoints are on {network}: a gateway passes connections to its own network ({own}) alone"
            ),
            why => format!("{count} endpoints are left out ({}): {}", why.text(), why.meaning()),
        };
        texts.push(text);
    }
    texts
}
