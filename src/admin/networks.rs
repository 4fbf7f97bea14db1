//! Networks and their gateways, and the metrics of the probes of gateways (`docs/split-horizon.md, "The rules"`).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::Sources;
use super::routes::Routes;
use super::scraped::Scraped;
use super::share_log::Shares;
use super::steering::distance_here;
use isthmus_aggregator::liveness::probed::State;
use isthmus_aggregator::liveness::{Distances, Liveness};
use isthmus_api as api;
use isthmus_api::requests;
use isthmus_model::endpoint::Health;
use isthmus_model::place::Network;
use isthmus_registry::shard::Standing;
use isthmus_settings::network::Access;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::networks::{GatewayEntry, NetworkEntry};
use isthmus_snapshot::port_endpoint::network_of;
use isthmus_telemetry::clock::rfc3339;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The results of the probes of gateways.
pub(crate) type States = BTreeMap<SocketAddr, State>;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .value(&requests::GATEWAYS, |sources| gateways(&sources.reader.latest(), &sources.liveness.states()))
        .value(&requests::NETWORKS, of)
}

/// Returns one object per gateway, in order of network, then in the order of the file.
pub(crate) fn gateways(snapshot: &Snapshot, states: &States) -> Vec<api::network::Gateway> {
    let networks = snapshot.networks().iter();
    let all = networks.flat_map(|(name, network)| {
        network.gateways.iter().map(move |entry| gateway(name, network, entry, states))
    });
    all.collect()
}

fn gateway(
    name: &Network,
    network: &NetworkEntry,
    entry: &GatewayEntry,
    states: &States,
) -> api::network::Gateway {
    let gateway = &entry.gateway;
    let state = entry.entrances().filter_map(|address| states.get(&address)).max();
    let why = why_unusable(network, entry, state);
    let probes: Vec<api::network::Probe> = entry
        .entrances()
        .filter_map(|address| {
            let state = states.get(&address)?;
            let (since, connect_us) = match state {
                State::NeverAnswered { .. } => (None, None),
                State::Answers { took } => (None, u64::try_from(took.as_micros()).ok()),
                State::Stopping { since } | State::Unreachable { since, .. } => (Some(rfc3339(*since)), None),
            };
            let state = state.text().to_owned();
            Some(api::network::Probe { address: address.to_string(), state, since, connect_us })
        })
        .collect();
    api::network::Gateway {
        network: name.to_string(),
        address: gateway.host.to_string(),
        addresses: entry.addresses.iter().map(ToString::to_string).collect(),
        sni_port: gateway.sni_port,
        hbone_port: gateway.hbone_port,
        cluster: gateway.cluster.to_string(),
        locality: gateway.locality.to_string(),
        weight: gateway.weight.value(),
        usable: why.is_none(),
        why: why.map(str::to_owned),
        state: state.map(|state| state.text().to_owned()).unwrap_or_default(),
        probes,
    }
}

/// Returns the reason why no viewer can use a gateway; `None` if some viewer can.
fn why_unusable(network: &NetworkEntry, entry: &GatewayEntry, state: Option<&State>) -> Option<&'static str> {
    if network.access == Access::Direct {
        Some("clients get the endpoints of its network by address (access: direct)")
    } else if entry.addresses.is_empty() {
        Some("the gateway's host name does not resolve")
    } else if entry.gateway.sni_port.is_none() && entry.gateway.hbone_port.is_none() {
        Some("the gateway has neither sniPort nor hbonePort")
    } else if !entry.answers() && network.gateways.iter().any(GatewayEntry::answers) {
        match state {
            Some(State::Stopping { .. }) => {
                Some("it has said that it stops, while another gateway of the network answers")
            }
            _ => Some("it has ceased to answer, while another gateway of the network answers"),
        }
    } else {
        None
    }
}

#[derive(Default)]
struct Count {
    endpoints: usize,
    ready_weight: u64,
}

/// Returns the networks of the newest snapshot.
pub(super) fn of(sources: &Sources) -> Vec<api::network::Network> {
    let (states, distances) = (sources.liveness.states(), sources.liveness.distances());
    let mut networks = networks(&sources.reader.latest(), &states, &distances, &sources.shares);
    for network in &mut networks {
        network.calls = sources.past.calls_from(&network.name);
    }
    networks
}

/// Returns one object per network, in order of name, for networks of the config, networks with gateways, and networks of
/// endpoints. An endpoint of several services is counted once for each of them.
pub(crate) fn networks(
    snapshot: &Snapshot,
    states: &States,
    distances: &Distances,
    shares: &Shares,
) -> Vec<api::network::Network> {
    let mut counts: BTreeMap<&Network, Count> =
        snapshot.networks().iter().map(|(name, _)| (name, Count::default())).collect();
    for part in snapshot.services().into_iter().flat_map(|service| service.all_parts()) {
        for endpoint in part.service.endpoints.iter() {
            let network = network_of(endpoint, &part.origin, snapshot.networks());
            let count = counts.entry(network).or_default();
            count.endpoints += 1;
            if endpoint.health == Health::Healthy && part.origin.standing != Standing::Expired {
                count.ready_weight += u64::from(endpoint.weight.value());
            }
        }
    }
    let shares = shares.means();
    let network = |(name, count): (&Network, Count)| {
        let up = |entry: &&GatewayEntry| {
            let state = entry.entrances().filter_map(|address| states.get(&address)).max();
            matches!(state, Some(State::Answers { .. }))
        };
        let gateways = snapshot.networks().get(name).map_or(&[][..], |entry| &entry.gateways);
        api::network::Network {
            gateways_up: gateways.iter().filter(up).count(),
            distance: distance_here(snapshot, name, distances),
            share: shares.as_ref().map(|shares| shares.get(name).copied().unwrap_or_default()),
            ..network(snapshot, name, &count)
        }
    };
    counts.into_iter().map(network).collect()
}

fn network(snapshot: &Snapshot, name: &Network, count: &Count) -> api::network::Network {
    let policy = snapshot.policy.networks.iter().find(|network| network.name == *name);
    let access = match policy.map(|policy| policy.access).unwrap_or_default() {
        Access::Gateway => "gateway",
        Access::Direct => "direct",
    };
    let cidrs = policy.map_or(&[][..], |policy| &policy.cidrs);
    api::network::Network {
        name: name.to_string(),
        access: access.to_owned(),
        cidrs: cidrs.iter().map(ToString::to_string).collect(),
        gateways: snapshot.networks().get(name).map_or(0, |network| network.gateways.len()),
        endpoints: count.endpoints,
        ready_weight: count.ready_weight,
        ..api::network::Network::default()
    }
}

/// The metrics of gateways, each with its `# HELP` text.
const DESCRIPTIONS: [(&str, &str); 2] = [
    (
        "isthmus_gateway_up",
        "1 for an address of a gateway that answers probes, 0 for one that has ceased to answer; absent if it has never answered or is \
         not probed.",
    ),
    (
        "isthmus_gateway_rtt_seconds",
        "Smallest time in which an address of a gateway accepted a connection in the last minute; absent if none did.",
    ),
];
/// The results of the probes of gateways.
pub(super) const METRICS: Scraped = Scraped {
    descriptions: &DESCRIPTIONS,
    expose: |sources, exposition| expose(&sources.reader.latest(), &sources.liveness, exposition),
};

fn expose(snapshot: &Snapshot, liveness: &Liveness, exposition: &mut Exposition) {
    let [up, round_trip] = DESCRIPTIONS;
    let states = liveness.states();
    let family = exposition.family(up.0, Kind::Gauge, up.1);
    for (network, entry) in snapshot.networks().iter() {
        for address in entry.gateways.iter().flat_map(GatewayEntry::entrances) {
            let is_up = match states.get(&address) {
                Some(State::Answers { .. } | State::Stopping { .. }) => 1_u8,
                Some(State::Unreachable { .. }) => 0,
                Some(State::NeverAnswered { .. }) | None => continue,
            };
            family.add([("network", network.as_str()), ("gateway", &address.to_string())], is_up);
        }
    }
    let family = exposition.family(round_trip.0, Kind::Gauge, round_trip.1);
    let round_trips = liveness.round_trips();
    for (network, entry) in snapshot.networks().iter() {
        for address in entry.gateways.iter().flat_map(GatewayEntry::entrances) {
            let Some(time) = round_trips.get(&address) else { continue };
            let labels = [("network", network.as_str()), ("gateway", &address.to_string())];
            family.add(labels, time.as_secs_f64());
        }
    }
}
