//! The endpoints of a service on this network as the candidates of this gateway.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::{HOSTNAME_PREFERENCE, MESH_NAME_PREFERENCE, Site, SubsetCandidates, TCP_PREFERENCE, WithoutOwn};
use crate::candidates::{Candidate, Candidates, EndpointKey};
use crate::port_endpoint::PortEndpoint;
use isthmus_model::address::Host;
use isthmus_model::endpoint::{Encapsulation, HBONE_PORT, Health, Labels, TlsMode};
use isthmus_model::place::Locality;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::tuning::Tuning;

pub(super) fn subset_candidates(
    here: &[PortEndpoint<'_>],
    (subset, labels): (&str, &Labels),
    group: &Arc<str>,
    tuning: &Arc<Tuning>,
    site: Site<'_>,
) -> SubsetCandidates {
    let lists = Lists { group, tuning, site };
    let chosen: Vec<PortEndpoint<'_>> =
        here.iter().filter(|here| here.has(labels)).map(|here| here.in_subset(subset)).collect();
    let chosen: Vec<&PortEndpoint<'_>> = chosen.iter().collect();
    let (mesh, own) = (mode_of(&chosen, MESH_NAME_PREFERENCE), mode_of(&chosen, HOSTNAME_PREFERENCE));
    let by_mesh_name = lists.of_mode(&chosen, mesh);
    let by_hostname = if mesh == own { by_mesh_name.clone() } else { lists.of_mode(&chosen, own) };
    let tcp = mode_of(&chosen, TCP_PREFERENCE);
    let by_tcp = tcp.map(|_| if tcp == own { by_hostname.clone() } else { lists.of_mode(&chosen, tcp) });
    let alike =
        chosen.iter().all(|here| Some(here.tls) == mesh && here.encapsulation() == Encapsulation::None);
    let by_authority = if alike { by_mesh_name.clone() } else { lists.by_authority(&chosen) };
    let without_own = WithoutOwn {
        by_mesh_name: lists.without_own(&chosen, AskedBy::MeshName, &by_mesh_name),
        by_hostname: lists.without_own(&chosen, AskedBy::Hostname, &by_hostname),
        by_authority: lists.without_own(&chosen, AskedBy::Authority, &by_authority),
    };
    SubsetCandidates { by_mesh_name, by_hostname, by_authority, by_tcp, without_own }
}

/// Makes the lists of candidates of a service port.
struct Lists<'a> {
    group: &'a Arc<str>,
    tuning: &'a Arc<Tuning>,
    site: Site<'a>,
}

impl Lists<'_> {
    /// Returns the endpoints of this TLS mode.
    fn of_mode(&self, chosen: &[&PortEndpoint<'_>], mode: Option<TlsMode>) -> Arc<Candidates> {
        let list = chosen.iter().filter(|here| Some(here.tls) == mode);
        self.list(list.flat_map(|here| candidates_of(here, self.group, self.site)).collect())
    }

    /// Returns the endpoints for callers by authority, which are those that accept HBONE if any of them does.
    fn by_authority(&self, chosen: &[&PortEndpoint<'_>]) -> Arc<Candidates> {
        let encapsulation = encapsulation_of(chosen);
        let list = chosen.iter().filter(|here| here.encapsulation() == encapsulation);
        let list = list.flat_map(|here| {
            let mut candidates = candidates_of(here, self.group, self.site);
            if encapsulation == Encapsulation::Hbone {
                candidates.iter_mut().for_each(|candidate| candidate.key.address.set_port(HBONE_PORT));
            }
            candidates
        });
        self.list(list.collect())
    }

    /// Returns the endpoints where no rule with `tls: own` applies, if there are any; `all` are those where one does.
    fn without_own(
        &self,
        chosen: &[&PortEndpoint<'_>],
        asked: AskedBy,
        all: &Arc<Candidates>,
    ) -> Option<Arc<Candidates>> {
        let offered: Vec<&PortEndpoint<'_>> =
            chosen.iter().copied().filter(|here| !here.needs_own(asked)).collect();
        let list = if offered.len() == chosen.len() {
            all.clone()
        } else {
            match asked {
                _ if offered.is_empty() => return None,
                AskedBy::MeshName => self.of_mode(&offered, mode_of(&offered, MESH_NAME_PREFERENCE)),
                AskedBy::Hostname => self.of_mode(&offered, mode_of(&offered, HOSTNAME_PREFERENCE)),
                AskedBy::Authority => self.by_authority(&offered),
                // Such callers come by routes, to which no export rule applies.
                AskedBy::Tcp => return None,
            }
        };
        // Equal lists are one list.
        let list = if list.endpoints() == all.endpoints() { all.clone() } else { list };
        (!list.is_empty()).then_some(list)
    }

    fn list(&self, list: Vec<Candidate>) -> Arc<Candidates> {
        Arc::new(Candidates::new(self.group.clone(), self.tuning.clone(), list))
    }
}

/// Returns HBONE if a ready endpoint accepts it, or if no endpoint works without it; else no encapsulation
/// (`docs/hbone-and-identity.md, "Listen"`). If the result is HBONE, only endpoints that accept HBONE are chosen.
fn encapsulation_of(here: &[&PortEndpoint<'_>]) -> Encapsulation {
    let has = |encapsulation, ready: bool| {
        here.iter().any(|here| {
            here.encapsulation() == encapsulation && (!ready || here.endpoint.health == Health::Healthy)
        })
    };
    if has(Encapsulation::Hbone, true) || !has(Encapsulation::None, false) {
        Encapsulation::Hbone
    } else {
        Encapsulation::None
    }
}

/// Returns the first mode of `preference` that a ready endpoint has, else the first mode that any endpoint has.
fn mode_of(here: &[&PortEndpoint<'_>], preference: [TlsMode; 2]) -> Option<TlsMode> {
    let has = |mode, ready: bool| {
        here.iter().any(|here| here.tls == mode && (!ready || here.endpoint.health == Health::Healthy))
    };
    let find = |ready| preference.into_iter().find(|mode| has(*mode, ready));
    find(true).or_else(|| find(false))
}

fn candidates_of(here: &PortEndpoint<'_>, group: &Arc<str>, site: Site<'_>) -> Vec<Candidate> {
    let own = &site.inputs.policy.node.locality;
    let addresses = here.addresses(site.inputs.resolved);
    let addresses = addresses.iter().map(|ip| SocketAddr::new(*ip, here.port));
    let mut addresses = addresses.filter(|address| {
        let tunnel =
            (here.encapsulation() == Encapsulation::Hbone).then(|| SocketAddr::new(address.ip(), HBONE_PORT));
        !tunnel.into_iter().chain([*address]).any(|address| site.networks.is_own_gateway(address))
    });
    if matches!(here.endpoint.host, Host::Ips(_)) {
        // An endpoint with several addresses in its list is one candidate.
        let Some(first) = addresses.next() else { return Vec::new() };
        let others: Arc<[IpAddr]> = addresses.map(|address| address.ip()).collect();
        let others = Some(others).filter(|others| !others.is_empty());
        return vec![Candidate { others, ..candidate(here, first, group, own) }];
    }
    addresses.map(|address| candidate(here, address, group, own)).collect()
}

pub(super) fn candidate(
    endpoint: &PortEndpoint<'_>,
    address: SocketAddr,
    group: &Arc<str>,
    own: &Locality,
) -> Candidate {
    Candidate {
        key: EndpointKey { group: group.clone(), address },
        others: None,
        weight: endpoint.endpoint.weight,
        health: endpoint.endpoint.health,
        left: endpoint.left,
        is_backup: false,
        connections_max: None,
        cluster: endpoint.origin.cluster.clone(),
        locality: endpoint.endpoint.locality.clone(),
        distance: own.distance(&endpoint.endpoint.locality),
        encapsulation: endpoint.encapsulation(),
    }
}
