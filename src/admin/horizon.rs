//! `horizon`: the endpoints of a service as a viewer gets them, computed by the same function as the responses to xDS clients.

use std::collections::BTreeSet;

use num_bigint::BigUint;
use serde_json::Number;

use super::steering;
use isthmus_aggregator::liveness::Distances;
use isthmus_api as api;
use isthmus_decisions::near::near;
use isthmus_decisions::view::{
    Assignment, ClientKind, Entry, EntryKind, Excluded, Families, Tunnel, Viewer, view,
};
use isthmus_decisions::weights::Share;
use isthmus_document::nearest::nearest;
use isthmus_model::endpoint::Health;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::{PortView, ServiceView};

const PARAMETERS: &str = "network, cluster, zone, service, port, subset, tunnel, families, client, sees";
/// The precision of fractions: they are rounded to multiples of 1 / `FRACTION`.
const FRACTION: u32 = 1_000_000_000;

/// The parameters of `horizon`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HorizonRequest {
    /// The client whose view is computed.
    pub viewer: Viewer,
    /// The service; `None`: all services.
    pub service: Option<HostName>,
    /// The port; `None`: the service's only port, or all ports of all services.
    pub port: Option<u16>,
    /// The subset in lower case, as in a mesh name; `""`: all endpoints.
    pub subset: String,
}

/// The reason why `horizon` gives no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HorizonError {
    /// The parameters are wrong.
    Invalid(String),
    /// The parameters name a network, service, port or subset that does not exist.
    Unknown(String),
}

impl HorizonRequest {
    /// Parses the parameters of a query. An absent or empty parameter has its default.
    pub fn from_parameters(parameters: impl IntoIterator<Item = (String, String)>) -> Result<Self, String> {
        let mut inquiry = Self::default();
        for (key, value) in parameters {
            if value.is_empty() && PARAMETERS.split(", ").any(|known| known == key) {
                continue;
            }
            match key.as_str() {
                "network" => inquiry.viewer.network = Network::new(&value),
                "cluster" => inquiry.viewer.cluster = ClusterId::new(&value),
                "zone" => inquiry.viewer.zone = zone(&value)?,
                "families" => inquiry.viewer.families = families(&value)?,
                "client" => inquiry.viewer.client = client(&value)?,
                "sees" => inquiry.viewer.sees = networks(&value),
                "tunnel" => inquiry.viewer.tunnel = tunnel(&value)?,
                "service" => {
                    let name =
                        HostName::parse(&value).map_err(|error| format!("service: {value:?}: {error}"))?;
                    inquiry.service = Some(name);
                }
                "port" => {
                    let port = value.parse().ok().filter(|port| *port != 0);
                    inquiry.port =
                        Some(port.ok_or_else(|| format!("port: {value:?} is not a number from 1 to 65535"))?);
                }
                "subset" => inquiry.subset = value.to_ascii_lowercase(),
                other => return Err(format!("unknown parameter {other:?}; expected one of {PARAMETERS}")),
            }
        }
        Ok(inquiry)
    }
}

fn families(text: &str) -> Result<Families, String> {
    match text {
        "4" => Ok(Families::V4),
        "6" => Ok(Families::V6),
        "4,6" | "6,4" => Ok(Families::Both),
        other => Err(format!("families: {other:?} is not 4, 6 or 4,6")),
    }
}

fn zone(text: &str) -> Result<Locality, String> {
    let zone = Locality::parse(text).filter(|locality| locality.subzone().is_empty());
    zone.ok_or_else(|| format!("zone: {text:?} is not REGION/ZONE"))
}

fn client(text: &str) -> Result<ClientKind, String> {
    match text {
        "envoy" => Ok(ClientKind::Envoy),
        "grpc" => Ok(ClientKind::Grpc),
        other => Err(format!("client: {other:?} is neither envoy nor grpc")),
    }
}

fn tunnel(text: &str) -> Result<Tunnel, String> {
    let found = Tunnel::ALL.into_iter().find(|tunnel| tunnel.text() == text);
    found.ok_or_else(|| format!("tunnel: {text:?} is neither sni nor hbone"))
}

fn networks(text: &str) -> std::sync::Arc<[Network]> {
    let mut networks: Vec<Network> = text.split(',').map(|name| Network::new(name.trim())).collect();
    networks.sort();
    networks.dedup();
    networks.into()
}

/// The entries that a viewer gets for one service port, or for all service ports.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// One service port.
    One(Box<api::horizon::Horizon>),
    /// Every service port that has the requested subset.
    All(Vec<api::horizon::Horizon>),
}

/// Returns the answer for one service and port, or a list of answers. `distances` are what this replica has measured.
pub fn horizon(
    snapshot: &Snapshot,
    distances: &Distances,
    inquiry: &HorizonRequest,
) -> Result<Answer, HorizonError> {
    // A viewer that limits the networks that it sees may itself be on any network, so its network is not checked.
    if inquiry.viewer.sees.is_empty() {
        check_network(snapshot, &inquiry.viewer.network)?;
    }
    let Some(name) = &inquiry.service else {
        return Ok(Answer::All(everything(snapshot, distances, inquiry)));
    };
    let service = snapshot.service(name.as_str()).ok_or_else(|| no_service(snapshot, name))?;
    let port = port_of(service, inquiry.port)?;
    let found = view(snapshot, service, port, &inquiry.subset, &inquiry.viewer);
    let found = found.ok_or_else(|| no_subset(service, &inquiry.subset))?;
    let mut answer = answer(snapshot, inquiry, service, port, &found);
    answer.groups = steering::groups(snapshot, &inquiry.viewer.network, &found.groups, distances);
    Ok(Answer::One(Box::new(answer)))
}

/// Returns an answer for every service and port that has the requested subset.
fn everything(
    snapshot: &Snapshot,
    distances: &Distances,
    inquiry: &HorizonRequest,
) -> Vec<api::horizon::Horizon> {
    let mut answers = Vec::new();
    for service in snapshot.services() {
        for port in service.ports.iter().filter(|port| inquiry.port.is_none_or(|asked| asked == port.port)) {
            let found = view(snapshot, service, port, &inquiry.subset, &inquiry.viewer);
            answers.extend(found.map(|found| api::horizon::Horizon {
                groups: steering::groups(snapshot, &inquiry.viewer.network, &found.groups, distances),
                ..answer(snapshot, inquiry, service, port, &found)
            }));
        }
    }
    answers
}

/// Returns an error for a network that neither the config nor any endpoint names. Such a name is probably misspelled. Without
/// the error, the viewer would be treated as one on a network without endpoints.
fn check_network(snapshot: &Snapshot, network: &Network) -> Result<(), HorizonError> {
    let node = &snapshot.policy.node.network;
    if network.is_unknown() || network == node || snapshot.networks().get(network).is_some() {
        return Ok(());
    }
    let services = snapshot.services();
    let parts = || services.iter().flat_map(|service| service.all_parts());
    let told = parts().flat_map(|part| {
        let own = part.service.endpoints.iter().filter_map(|endpoint| endpoint.template.network.as_ref());
        own.chain([&part.origin.network])
    });
    let declared = snapshot.networks().iter().map(|(name, _)| name);
    let known: BTreeSet<&Network> =
        told.chain(declared).chain([node]).filter(|name| !name.is_unknown()).collect();
    if known.contains(network) {
        return Ok(());
    }
    let names: Vec<&str> = known.iter().map(|name| name.as_str()).collect();
    let meant = match nearest(network.as_str(), names.iter().copied()) {
        Some(name) => format!("; did you mean {name:?}?"),
        None if names.is_empty() => String::new(),
        None => format!("; expected one of {}", names.join(", ")),
    };
    let text = format!(
        "network {:?} is unknown: neither the config nor an endpoint names it{meant}",
        network.as_str()
    );
    Err(HorizonError::Unknown(text))
}

fn no_service(snapshot: &Snapshot, name: &HostName) -> HorizonError {
    let mut near = near(snapshot, name.as_str());
    near.retain(|name| snapshot.service(name).is_some());
    if near.is_empty() {
        // The edit distance between a full name and its short form is large, so the first labels are compared too.
        let short = name.as_str().split('.').next().unwrap_or_default();
        let services = snapshot.services();
        let hosts = services.iter().map(|service| &*service.name);
        near =
            hosts.filter(|host| host.split('.').next() == Some(short)).take(3).map(str::to_owned).collect();
    }
    if near.is_empty() {
        let services = snapshot.services();
        near.extend(nearest(name.as_str(), services.iter().map(|service| &*service.name)).map(str::to_owned));
    }
    let meant = if near.is_empty() { String::new() } else { format!("; similar names: {}", near.join(", ")) };
    HorizonError::Unknown(format!("no service {:?} is known{meant}", name.as_str()))
}

fn no_subset(service: &ServiceView, subset: &str) -> HorizonError {
    let known: Vec<&str> = service.subsets.keys().map(|name| &**name).collect();
    let known =
        if known.is_empty() { "it has none".to_owned() } else { format!("it has: {}", known.join(", ")) };
    HorizonError::Unknown(format!("service {} has no subset {subset:?}; {known}", service.name))
}

fn port_of(service: &ServiceView, asked: Option<u16>) -> Result<&PortView, HorizonError> {
    let known = || service.ports.iter().map(|port| port.port.to_string()).collect::<Vec<_>>().join(", ");
    match (asked, service.ports.as_slice()) {
        (None, [only]) => Ok(only),
        (_, []) => Err(HorizonError::Unknown(format!("service {} has no ports", service.name))),
        (None, _) => Err(HorizonError::Invalid(format!(
            "service {} has several ports ({}); name one of them",
            service.name,
            known()
        ))),
        (Some(port), _) => service.port(port).ok_or_else(|| {
            HorizonError::Unknown(format!("service {} has no port {port}; it has: {}", service.name, known()))
        }),
    }
}

fn answer(
    snapshot: &Snapshot,
    inquiry: &HorizonRequest,
    service: &ServiceView,
    port: &PortView,
    found: &Assignment,
) -> api::horizon::Horizon {
    let carrier_of = service.import.as_ref().filter(|_| snapshot.is_carried(service));
    let carrier_of = carrier_of.map(|import| &*import.peer);
    let leaves = snapshot.networks().leaves_by_gateway(&inquiry.viewer.network);
    api::horizon::Horizon {
        viewer: viewer(&inquiry.viewer),
        service: service.name.to_string(),
        port: port.port,
        subset: inquiry.subset.clone(),
        entries: found.entries.iter().map(|one| entry(one, carrier_of, leaves)).collect(),
        missing: found.excluded.iter().map(excluded).collect(),
        groups: Vec::new(),
    }
}

/// Returns the viewer in the form of the API, without values that are the default.
fn viewer(viewer: &Viewer) -> api::horizon::Viewer {
    let sees = || viewer.sees.iter().map(ToString::to_string).collect();
    api::horizon::Viewer {
        network: viewer.network.to_string(),
        cluster: viewer.cluster.to_string(),
        tunnel: viewer.tunnel.text().to_owned(),
        families: viewer.families.numbers().to_vec(),
        zone: Some(viewer.zone.to_string()).filter(|zone| !zone.is_empty()),
        client: (viewer.client == ClientKind::Grpc).then(|| "grpc".to_owned()),
        sees: (!viewer.sees.is_empty()).then(sees),
    }
}

fn entry(entry: &Entry, carrier_of: Option<&str>, leaves: bool) -> api::horizon::Entry {
    let kind = match entry.kind {
        EntryKind::Endpoint => "endpoint",
        EntryKind::Gateway => "gateway",
    };
    api::horizon::Entry {
        address: entry.address.to_string(),
        additional_addresses: entry.others.iter().map(ToString::to_string).collect(),
        kind: kind.to_owned(),
        carrier_of: carrier_of.filter(|_| entry.kind == EntryKind::Gateway).map(str::to_owned),
        passes_on: entry.kind == EntryKind::Gateway && carrier_of.is_none() && leaves,
        network: entry.network.to_string(),
        cluster: entry.cluster.to_string(),
        locality: entry.locality.to_string(),
        priority: (entry.priority > 0).then_some(entry.priority),
        weight: entry.weight,
        stands_for: number(&entry.stands_for),
        health: (entry.health != Health::Healthy).then(|| entry.health.text().to_owned()),
    }
}

fn excluded(excluded: &Excluded) -> api::horizon::Missing {
    api::horizon::Missing {
        network: excluded.network.to_string(),
        cluster: excluded.cluster.to_string(),
        weight: excluded.weight,
        why: excluded.reason.text().to_owned(),
    }
}

/// Returns a share as a JSON number: an integer if the share is whole, otherwise rounded to billionths.
fn number(share: &Share) -> Number {
    if let Some(whole) = share.is_integer().then(|| u64::try_from(share.numer()).ok()).flatten() {
        return whole.into();
    }
    let parts = (share * BigUint::from(FRACTION)).round().to_integer();
    // Even the share of 2^32 endpoints of weight 2^32 fits into 128 bits, in billionths.
    let parts = u128::try_from(parts).unwrap_or(u128::MAX);
    // The quotient is finite, so it is a legal JSON number.
    Number::from_f64(parts as f64 / f64::from(FRACTION)).unwrap_or_else(|| 0.into())
}

#[cfg(test)]
mod tests;
