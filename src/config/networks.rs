//! `networks`: their addresses, how they are reached, and their gateways.

use std::collections::HashMap;
use std::sync::Arc;

use ipnet::IpNet;

use isthmus_document::problem::{Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::tree::Node;
use isthmus_model::place::Network;
use isthmus_settings::network::{Egress, Gateway, NetworkPolicy};

use super::table::Root;
use super::table::mesh as keys;

/// Reads the networks in the order of the file.
pub(super) fn read(root: &Fields<'_>, problems: &mut Problems) -> Vec<NetworkPolicy> {
    let list = Path::Root.key(Root::NETWORKS.name());
    let mut places: HashMap<IpNet, Position> = HashMap::new();
    let mut networks = Vec::new();
    for (name, node) in root.entries(&Root::NETWORKS) {
        let (fields, path) = (Fields::of::<keys::Network>(Some(node)), list.key(&name.text));
        let list = path.key(keys::Network::GATEWAYS.name());
        let gateways = fields.maps(&keys::Network::GATEWAYS);
        networks.push(NetworkPolicy {
            name: Network::new(&name.text),
            access: fields.get(&keys::Network::ACCESS),
            egress: fields.get(&keys::Network::EGRESS),
            cidrs: cidrs(&fields, &path, &mut places, problems),
            gateways: gateways
                .filter_map(|(at, fields, node)| gateway(&fields, node, &list.index(at), problems))
                .collect(),
            probes: fields.get(&keys::Network::PROBE),
            distance: fields.get(&keys::Network::DISTANCE).unwrap_or_default(),
            cost: fields.get(&keys::Network::COST).unwrap_or_default(),
            visitors_percent: fields.get(&keys::Network::ROOM),
        });
    }
    networks
}

/// Warns if this gateway passes calls of its own network on, and knows no caller by SNI as one of that network.
pub(super) fn warn_of_unknown_clients(
    root: &Fields<'_>,
    own: &Network,
    networks: &[NetworkPolicy],
    problems: &mut Problems,
) {
    let leaves = |network: &&NetworkPolicy| network.name == *own && network.egress == Egress::Gateway;
    if !networks.iter().find(leaves).is_some_and(|network| network.cidrs.is_empty()) {
        return;
    }
    let list = Path::Root.key(Root::NETWORKS.name());
    for (name, node) in root.entries(&Root::NETWORKS) {
        let node = Fields::of::<keys::Network>(Some(node)).at(&keys::Network::EGRESS);
        if let Some(node) = node.filter(|_| *name.text == *own.as_str()) {
            let fault = "found gateway, but the network has no cidrs, so no caller by SNI is known as one of this network and passed on: \
                         only callers by HBONE with an identity of this mesh are";
            problems.warn(node.position, &list.key(&name.text).key(keys::Network::EGRESS.name()), fault);
        }
    }
}

/// Reads the addresses of a network. No two networks may have the same block, or an address would be on both.
fn cidrs(
    fields: &Fields<'_>,
    path: &Path<'_>,
    places: &mut HashMap<IpNet, Position>,
    problems: &mut Problems,
) -> Vec<IpNet> {
    let mut cidrs = Vec::new();
    for (at, cidr, node) in fields.values(&keys::Network::CIDRS) {
        match places.insert(cidr, node.position) {
            None => cidrs.push(cidr),
            Some(first) => {
                let fault = format!("{node} is listed twice; first at {}", problems.place(first));
                problems.error(node.position, &path.key(keys::Network::CIDRS.name()).index(at), fault);
            }
        }
    }
    cidrs
}

fn gateway(fields: &Fields<'_>, node: &Node, path: &Path<'_>, problems: &mut Problems) -> Option<Gateway> {
    let (sni_port, hbone_port) =
        (fields.get(&keys::Gateway::SNI_PORT), fields.get(&keys::Gateway::HBONE_PORT));
    let has_port =
        fields.at(&keys::Gateway::SNI_PORT).is_some() || fields.at(&keys::Gateway::HBONE_PORT).is_some();
    if !node.entries().is_empty() && !has_port {
        let fault = "found neither sniPort nor hbonePort; a gateway needs at least one of them";
        problems.error(node.position, path, fault);
    }
    Some(Gateway {
        host: fields.get(&keys::Gateway::ADDRESS)?,
        sni_port,
        hbone_port,
        cluster: fields.get(&keys::Gateway::CLUSTER).unwrap_or_default(),
        locality: fields.get(&keys::Gateway::LOCALITY).unwrap_or_default(),
        weight: fields.get(&keys::Gateway::WEIGHT),
        identity: fields.get(&keys::Gateway::IDENTITY),
        instances: Arc::default(),
        drained: 0,
    })
}
