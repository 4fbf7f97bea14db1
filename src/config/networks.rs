//! `networks`: their addresses, how they are reached, and their gateways.

use std::collections::HashMap;
use std::sync::Arc;

use ipnet::IpNet;

use crate::document::problem::{Path, Position, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::document::tree::Node;
use crate::model::endpoint::Weight;
use crate::model::place::{ClusterId, Network};
use crate::snapshot::policy::{Access, Gateway, NetworkPolicy};

use super::table::mesh::{GATEWAY, NETWORK};

/// Reads the networks in the order of the file.
pub(super) fn read(root: &Fields<'_>, problems: &mut Problems) -> Vec<NetworkPolicy> {
    let list = Path::Root.key("networks");
    let mut places: HashMap<IpNet, Position> = HashMap::new();
    let mut networks = Vec::new();
    for (name, node) in root.entries("networks") {
        let (fields, path) = (Fields::new(Some(node), &NETWORK), list.key(&name.text));
        let access = |access| match access {
            Access::Gateway => "gateway",
            Access::Direct => "direct",
        };
        let gateways = fields.items("gateways").iter().enumerate();
        networks.push(NetworkPolicy {
            name: Network::new(&name.text),
            access: fields.choice("access", &[Access::Gateway, Access::Direct], access).unwrap_or_default(),
            cidrs: cidrs(&fields, &path, &mut places, problems),
            gateways: gateways
                .filter_map(|(at, node)| gateway(node, &path.key("gateways").index(at), problems))
                .collect(),
        });
    }
    networks
}

/// Reads the addresses of a network. No two networks may have the same block, or an address would be on both.
fn cidrs(
    fields: &Fields<'_>,
    path: &Path<'_>,
    places: &mut HashMap<IpNet, Position>,
    problems: &mut Problems,
) -> Vec<IpNet> {
    let mut cidrs = Vec::new();
    for (at, node) in fields.items("cidrs").iter().enumerate() {
        let Some(Ok(cidr)) = node.text().map(scalar::cidr) else { continue };
        match places.insert(cidr, node.position) {
            None => cidrs.push(cidr),
            Some(first) => {
                let fault = format!("{node} is listed twice; first at {}", problems.place(first));
                problems.error(node.position, &path.key("cidrs").index(at), fault);
            }
        }
    }
    cidrs
}

fn gateway(node: &Node, path: &Path<'_>, problems: &mut Problems) -> Option<Gateway> {
    let fields = Fields::new(Some(node), &GATEWAY);
    if !node.entries().is_empty() && fields.node("sniPort").is_none() && fields.node("hbonePort").is_none() {
        let fault = "found neither sniPort nor hbonePort; a gateway needs at least one of them";
        problems.error(node.position, path, fault);
    }
    Some(Gateway {
        host: fields.read("address", scalar::host)?,
        sni_port: fields.number("sniPort"),
        hbone_port: fields.number("hbonePort"),
        cluster: fields.read("cluster", scalar::text).map(ClusterId::new).unwrap_or_default(),
        locality: fields.read("locality", scalar::locality).unwrap_or_default(),
        weight: fields.number("weight").and_then(Weight::new).unwrap_or(Weight::ONE),
        identity: fields.read("identity", scalar::identity),
        instances: Arc::default(),
    })
}
