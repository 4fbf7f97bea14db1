//! Networks and their gateways, in the form of the API.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::Sources;
use super::share_log::Shares;
use super::steering::distance_here;
use isthmus_aggregator::liveness::Distances;
use isthmus_aggregator::liveness::probed::State;
use isthmus_api as api;
use isthmus_model::endpoint::Health;
use isthmus_model::place::Network;
use isthmus_registry::shard::Standing;
use isthmus_settings::network::Access;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::networks::{GatewayEntry, NetworkEntry};
use isthmus_snapshot::port_endpoint::network_of;
use isthmus_telemetry::clock::rfc3339;

/// The results of the probes of gateways.
pub type States = BTreeMap<SocketAddr, State>;

/// Returns one object per gateway, in order of network, then in the order of the file.
pub fn gateways(snapshot: &Snapshot, states: &States) -> Vec<api::network::Gateway> {
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
    networks(&sources.reader.latest(), &states, &distances, &sources.shares)
}

/// Returns one object per network, in order of name, for networks of the config, networks with gateways, and networks of
/// endpoints. An endpoint of several services is counted once for each of them.
pub fn networks(
    snapshot: &Snapshot,
    states: &States,
    distances: &Distances,
    shares: &Shares,
) -> Vec<api::network::Network> {
    let mut counts: BTreeMap<&Network, Count> =
        snapshot.networks().iter().map(|(name, _)| (name, Count::default())).collect();
    for part in snapshot.services().into_iter().flat_map(|service| &service.parts) {
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
