//! The gateways through which a viewer reaches the endpoints of other networks: which of them it can use, and how they share the
//! weight of the endpoints behind them.

use std::net::{IpAddr, SocketAddr};

use num_bigint::BigUint;
use num_rational::Ratio;

use super::{
    ClientKind, Entry, EntryKind, ExclusionReason, Horizon, Pass, RemoteEndpoints, Sum, Tunnel, Viewer,
};
use crate::weights::Share;
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Health, TlsMode};
use isthmus_model::place::{ClusterId, Network};
use isthmus_settings::peer::peer_of;
use isthmus_snapshot::candidates::Role;
use isthmus_snapshot::networks::GatewayEntry;
use isthmus_snapshot::service_view::{HOSTNAME_PREFERENCE, MESH_NAME_PREFERENCE};

impl Horizon<'_> {
    /// Adds the gateways that lead to the endpoints of a network.
    pub(super) fn pass_through_gateways(&mut self, network: &Network, behind: RemoteEndpoints) {
        let (preference, names_hosts) = match (self.viewer.tunnel, self.viewer.client) {
            (Tunnel::Hbone, _) | (Tunnel::Sni, ClientKind::Envoy) => (MESH_NAME_PREFERENCE, false),
            (Tunnel::Sni, ClientKind::Grpc) => (HOSTNAME_PREFERENCE, true),
        };
        // The gateway connects only to endpoints of one TLS mode: the first mode of `preference` that a ready endpoint on its
        // network has.
        let chosen = preference.into_iter().find(|mode| behind.modes.contains(mode));
        for (mode, clusters) in behind.exported {
            for (cluster, sum) in clusters {
                let passed = if names_hosts && !self.by_hostname {
                    Err(ExclusionReason::NoHostRoute)
                } else if !preference.contains(&mode) {
                    Err(ExclusionReason::NoTls)
                } else if Some(mode) != chosen {
                    Err(ExclusionReason::OtherTls)
                } else {
                    self.split(network, &cluster, mode, sum)
                };
                if let Err(reason) = passed {
                    self.exclude(network, &cluster, sum.weight, reason);
                }
            }
        }
    }

    /// Splits the weight of a cluster's ready endpoints among the gateways that lead to them.
    fn split(
        &mut self,
        network: &Network,
        cluster: &ClusterId,
        tls: TlsMode,
        sum: Sum,
    ) -> Result<(), ExclusionReason> {
        let snapshot = self.snapshot;
        let entrance = self.entrance(network);
        let all = snapshot.networks.get(entrance).map_or(&[][..], |network| &network.gateways);
        let mut usable: Vec<UsableGateway<'_>> =
            all.iter().filter_map(|entry| UsableGateway::new(entry, self.viewer)).collect();
        // A viewer to whom no gateway of the network answers keeps all of them, since the probes may be wrong.
        if usable.iter().any(UsableGateway::answers) {
            usable.iter_mut().for_each(UsableGateway::retain_answering);
            usable.retain(|usable| !usable.ips.is_empty());
        } else if !usable.is_empty() {
            self.silent.insert(network.clone());
        }
        if *entrance != *network && !snapshot.is_carried(self.service) {
            self.check_onward(network)?;
        }
        let (any, pass) = (!usable.is_empty(), self.pass);
        let left = |way: &UsableGateway<'_>| match pass {
            Pass::Regular => way.entry.left,
            Pass::Reserve => PARTS,
        };
        // The view lists an address with one TLS mode and one organisation only, since the client must know which mode to speak, and by
        // whose roots to verify. So an address is not used for a network if it is listed with another one already, for a neighbour or
        // for an earlier network.
        let mut taken = false;
        for usable in &mut usable {
            let port = usable.port;
            let known = |address| self.near.get(&address).or_else(|| self.gateways.get(&address));
            let is_free = |ip: &IpAddr| {
                known(SocketAddr::new(*ip, port)).is_none_or(|entry| {
                    let is_same = peer_of(&entry.network) == peer_of(network);
                    taken |= !is_same;
                    is_same && entry.tls == tls
                })
            };
            usable.ips.retain(is_free);
        }
        usable.retain(|usable| !usable.ips.is_empty());
        if any && usable.is_empty() {
            return Err(if taken { ExclusionReason::OtherOrganisation } else { ExclusionReason::OtherTls });
        }
        let own = |usable: &&UsableGateway<'_>| usable.entry.gateway.cluster == *cluster;
        let has_own = !cluster.as_str().is_empty() && usable.iter().any(|usable| own(&usable));
        let mut ways: Vec<&UsableGateway<'_>> =
            usable.iter().filter(|usable| !has_own || own(usable)).collect();
        // Gateways that drains have emptied are in reserve, and so is the cluster if it has no others.
        let count = ways.len();
        ways.retain(|way| left(way) > 0);
        self.has_drained |= ways.len() < count;
        if ways.is_empty() && count > 0 {
            return Ok(());
        }
        let weight =
            |way: &UsableGateway<'_>| u64::from(way.entry.gateway.weight.value()) * u64::from(left(way));
        let total: u64 = ways.iter().map(|way| weight(way)).sum();
        if total == 0 {
            return Err(ExclusionReason::NoUsableGateway);
        }
        // While a drain leaves all of one gateway, that one takes over what is taken of the others.
        let most_left = ways.iter().map(|way| left(way)).max().unwrap_or(PARTS);
        let (all_parts, left_parts) =
            (BigUint::from(sum.weight) * PARTS * PARTS, BigUint::from(sum.parts) * most_left);
        for way in ways {
            let of_all = |parts: &BigUint| {
                Ratio::new(parts * weight(way), BigUint::from(total) * way.ips.len() * PARTS * PARTS)
            };
            let share = of_all(&left_parts);
            let drained = (all_parts > left_parts).then(|| of_all(&(&all_parts - &left_parts)));
            for address in way.addresses() {
                let entry = self.gateways.entry(address).or_insert_with(|| Entry {
                    address,
                    others: Box::default(),
                    kind: EntryKind::Gateway,
                    network: network.clone(),
                    cluster: way.entry.gateway.cluster.clone(),
                    locality: way.entry.gateway.locality.clone(),
                    priority: 0,
                    weight: 1,
                    stands_for: Share::default(),
                    role: Role::Regular,
                    drained: None,
                    further: Vec::new(),
                    health: Health::Healthy,
                    tls,
                });
                entry.stands_for += &share;
                entry.add_drained(drained.as_ref());
                entry.add_further(network, &share, drained.as_ref());
            }
        }
        Ok(())
    }
}

impl Horizon<'_> {
    /// Returns an error if the gateways of the viewer's network cannot pass calls on to a network. Notes a network of which no gateway
    /// answers.
    fn check_onward(&mut self, network: &Network) -> Result<(), ExclusionReason> {
        let caller = Viewer { tunnel: self.viewer.tunnel, ..Viewer::default() };
        let entry = self.snapshot.networks.get(network);
        let all = entry.into_iter().flat_map(|entry| &entry.gateways);
        let mut usable = all.filter_map(|gateway| UsableGateway::new(gateway, &caller)).peekable();
        if usable.peek().is_none() {
            return Err(ExclusionReason::NoUsableGateway);
        }
        if !usable.any(|gateway| gateway.answers()) {
            self.silent.insert(network.clone());
        }
        Ok(())
    }
}

/// A gateway that the viewer can connect to.
pub(super) struct UsableGateway<'a> {
    entry: &'a GatewayEntry,
    port: u16,
    ips: Vec<IpAddr>,
}

impl<'a> UsableGateway<'a> {
    /// Returns the gateway with the addresses to which the viewer can connect, if there are any.
    pub(super) fn new(entry: &'a GatewayEntry, viewer: &Viewer) -> Option<Self> {
        let port = match viewer.tunnel {
            Tunnel::Sni => entry.gateway.sni_port?,
            Tunnel::Hbone => entry.gateway.hbone_port?,
        };
        let usable = entry.addresses.iter().copied().filter(|ip| viewer.families.has(*ip));
        let ips: Vec<IpAddr> = usable.collect();
        (!ips.is_empty()).then_some(Self { entry, port, ips })
    }

    /// Returns true if one of the addresses answers, or was never judged.
    fn answers(&self) -> bool {
        self.addresses().any(|address| !self.entry.unreachable.contains(&address))
    }

    fn retain_answering(&mut self) {
        let (unreachable, port) = (&self.entry.unreachable, self.port);
        self.ips.retain(|ip| !unreachable.contains(&SocketAddr::new(*ip, port)));
    }

    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.ips.iter().map(|ip| SocketAddr::new(*ip, self.port))
    }
}
