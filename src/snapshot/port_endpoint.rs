//! One endpoint as a service port has it: its network, listening port, TLS mode and addresses.

use std::borrow::Cow;
use std::net::IpAddr;

use super::networks::NetworkTable;
use super::routes::{Resolved, addresses};
use isthmus_model::address::Host;
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, Endpoint, Health, Labels, MeshTlsOff, TlsMode};
use isthmus_model::place::Network;
use isthmus_model::service::{Service, ServicePort};
use isthmus_registry::shard::{Origin, Standing};
use isthmus_settings::export::ExportRule;
use isthmus_settings::export_tls::{AskedBy, ExportTls, TlsSource};
use isthmus_settings::policy::Node;

/// An endpoint of one service port.
#[derive(Clone, Copy, Debug)]
pub struct PortEndpoint<'a> {
    /// The endpoint as its registry lists it.
    pub endpoint: &'a Endpoint,
    /// The network of the endpoint.
    pub network: &'a Network,
    /// The registry of the endpoint.
    pub origin: &'a Origin,
    /// The port on which the endpoint listens.
    pub port: u16,
    /// The TLS mode of the endpoint.
    pub tls: TlsMode,
    /// The port as the registry of the endpoint defines it.
    own: &'a ServicePort,
    /// The kind of object that turns the mesh's mutual TLS off on the port of the endpoint, if one does.
    pub mesh_tls_off: Option<MeshTlsOff>,
    /// The parts of [`PARTS`] of the endpoint's weight that planned drains leave; 0: the endpoint is in reserve.
    pub left: u16,
}

impl<'a> PortEndpoint<'a> {
    /// Returns the endpoints of one registry's service for one of that service's ports. `left` are the parts of [`PARTS`] that
    /// drains leave of each endpoint of the service; `None`: all.
    pub(super) fn of(
        origin: &'a Origin,
        service: &'a Service,
        left: Option<&'a [u16]>,
        own: &'a ServicePort,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = PortEndpoint<'a>> {
        service.endpoints.iter().enumerate().filter_map(move |(at, endpoint)| {
            Some(PortEndpoint {
                endpoint,
                network: network_of(endpoint, origin, networks),
                origin,
                port: endpoint.template.port_for(own)?,
                tls: endpoint.template.tls_on(own, ""),
                mesh_tls_off: endpoint.template.mesh_tls_off(own, ""),
                own,
                left: left.and_then(|left| left.get(at).copied()).unwrap_or(PARTS),
            })
        })
    }

    /// Returns the endpoint as callers have it that ask for a subset, which may have its own rule for the mesh's mutual TLS.
    pub fn in_subset(self, subset: &str) -> Self {
        let template = &self.endpoint.template;
        match template.mesh_tls {
            None => self,
            Some(_) => Self {
                tls: template.tls_on(self.own, subset),
                mesh_tls_off: template.mesh_tls_off(self.own, subset),
                ..self
            },
        }
    }

    /// Returns true if the endpoint is known to refuse connections without the mesh's mutual TLS.
    pub fn is_strict(&self) -> bool {
        self.endpoint.template.is_strict(self.own)
    }

    /// Returns true if a rule leads the callers that it admits to the endpoint by this kind of name.
    pub fn is_offered_by(&self, rule: &ExportRule, asked: AskedBy) -> bool {
        rule.has_cluster(&self.origin.cluster) && (rule.tls() == ExportTls::Own || !self.needs_own(asked))
    }

    /// Returns true if the registry is live and reports the endpoint as healthy, and the endpoint has an address. An endpoint
    /// that is reached only through gateways needs no address.
    pub(super) fn is_live_and_ready(&self, resolved: &Resolved) -> bool {
        self.origin.standing == Standing::Live
            && self.endpoint.health == Health::Healthy
            && (!self.addresses(resolved).is_empty() || matches!(self.endpoint.host, Host::Ips(_)))
    }

    /// Returns true if the endpoint has the labels that a subset selects.
    pub fn has(&self, wanted: &Labels) -> bool {
        has_labels(self.endpoint, self.network, self.origin, wanted)
    }

    /// Returns true if only rules with `tls: own` offer the endpoint to callers by this kind of name: nobody has written its TLS
    /// mode, and it is outside the mesh, or the name is a plain host name. No other function decides this.
    pub fn needs_own(&self, asked: AskedBy) -> bool {
        if self.origin.tls == TlsSource::Written {
            return false;
        }
        match asked {
            AskedBy::MeshName => self.tls != TlsMode::Mesh,
            AskedBy::Hostname => true,
            // The TLS of a tunnel is that of the mesh, whatever the stream carries.
            // Nor do rules for the mesh's mutual TLS apply to it: a workload in the mesh stays in the mesh.
            AskedBy::Authority => {
                let is_meshed = self.tls == TlsMode::Mesh || self.mesh_tls_off.is_some();
                !is_meshed && self.encapsulation() == Encapsulation::None
            }
            // Such callers come by routes, to which no export rule applies.
            AskedBy::Tcp => false,
        }
    }

    /// Returns the encapsulation that the endpoint accepts.
    pub fn encapsulation(&self) -> Encapsulation {
        self.endpoint.template.encapsulation
    }

    /// Returns the addresses of the endpoint; none if its host name has not been resolved.
    pub fn addresses<'r>(&self, resolved: &'r Resolved) -> Cow<'r, [IpAddr]>
    where
        'a: 'r,
    {
        let all = addresses(&self.endpoint.host, resolved);
        let allowed = |ip: &IpAddr| self.origin.addresses.allows(*ip);
        // The scope was applied to literal addresses when they entered the shard, so only addresses of host names are checked
        // here.
        if !matches!(self.endpoint.host, Host::Name(_)) || all.iter().all(allowed) {
            return Cow::Borrowed(all);
        }
        all.iter().copied().filter(allowed).collect()
    }
}

/// Returns true if an endpoint has the labels that a subset selects. As istiod does, the labels of an endpoint's place are made
/// from its registry: they outweigh labels of the same name that the endpoint declares.
pub(super) fn has_labels(endpoint: &Endpoint, network: &Network, origin: &Origin, wanted: &Labels) -> bool {
    wanted.iter().all(|(name, value)| {
        let of_place = match &**name {
            "topology.istio.io/cluster" => origin.cluster.as_str(),
            "topology.istio.io/network" => network.as_str(),
            "topology.kubernetes.io/region" => endpoint.locality.region(),
            "topology.kubernetes.io/zone" => endpoint.locality.zone(),
            "topology.istio.io/subzone" => endpoint.locality.subzone(),
            _ => "",
        };
        match of_place {
            "" => endpoint.template.labels.get(name) == Some(value),
            place => *place == **value,
        }
    })
}

/// Returns true if this gateway can reach the endpoint directly. Endpoints of the unknown network can be reached from the
/// unknown network, and from their own cluster (`docs/split-horizon.md, "The rules"`).
pub fn on_own_network(found: &PortEndpoint<'_>, node: &Node) -> bool {
    is_own_network(found.network, found.origin, node)
}

pub(super) fn is_own_network(network: &Network, origin: &Origin, node: &Node) -> bool {
    *network == node.network || (network.is_unknown() && origin.cluster == node.cluster)
}

/// Returns the network of an endpoint: the network that the endpoint names, else that of its registry, else that of the longest
/// CIDR that contains its address, else the unknown network.
pub fn network_of<'a>(endpoint: &'a Endpoint, origin: &'a Origin, networks: &'a NetworkTable) -> &'a Network {
    if let Some(network) = &endpoint.template.network {
        return network;
    }
    if !origin.network.is_unknown() {
        return &origin.network;
    }
    match &endpoint.host {
        Host::Ip(ip) => networks.network_of_address(*ip).unwrap_or(&origin.network),
        Host::Ips(ips) => {
            ips.iter().find_map(|ip| networks.network_of_address(*ip)).unwrap_or(&origin.network)
        }
        Host::Name(_) => &origin.network,
    }
}
