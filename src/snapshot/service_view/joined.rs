//! The services of peers that are joined with a name of another organisation (`docs/federation.md, "Join a name"`). They add
//! endpoints behind the peers' gateways to ports that the owner of the name has, and nothing else: no port, subset, address,
//! waypoint, identity or export. Each client that takes them asks for them, and verifies them by their own organisation.

use std::sync::Arc;

use super::{Conflict, Part, PortView, ServiceView};
use crate::networks::NetworkTable;
use crate::port_endpoint::PortEndpoint;
use isthmus_model::import::Import;
use isthmus_model::service::{PortProtocol, ServicePort};

impl ServiceView {
    /// Returns the import of the peer whose services are the name's `parts` or joined with them.
    pub fn import_from(&self, peer: &str) -> Option<&Arc<Import>> {
        let mut all = self.import.iter().chain(self.joined_imports());
        all.find(|import| *import.peer == *peer)
    }

    /// Returns the imports of the joined services, in order of registry.
    pub fn joined_imports(&self) -> impl Iterator<Item = &Arc<Import>> {
        self.joined.iter().filter_map(|part| part.service.import.as_ref())
    }

    /// Returns the endpoints of the joined services for a port, each with the import of its service. Endpoints of a registry that
    /// was lost are left out where a live registry of any organisation has a ready one.
    pub fn joined_endpoints_of<'a>(
        &'a self,
        port: &'a PortView,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = (PortEndpoint<'a>, &'a Arc<Import>)> {
        let counting = self.joined.iter().filter(|part| part.origin.standing <= port.lowest_joined);
        counting.flat_map(move |part| {
            let own = part.joining_port(port);
            let found = own.into_iter().flat_map(move |own| part.endpoints(own, networks));
            found.filter_map(move |found| Some((found, part.service.import.as_ref()?)))
        })
    }

    /// Returns the parts of all organisations.
    pub fn all_parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().chain(&self.joined)
    }

    /// Returns true if the addresses of the service are virtual addresses that this gateway gives.
    pub fn has_virtual_addresses(&self) -> bool {
        has_virtual_addresses(&self.parts, &self.joined)
    }
}

impl Part {
    /// Returns the port of a joined service that serves a port of the owner.
    pub(super) fn joining_port(&self, port: &PortView) -> Option<&ServicePort> {
        self.joining(port.port, port.protocol)
    }

    /// Returns the endpoints of a joined service for a port of the owner.
    pub(super) fn joining_endpoints<'a>(
        &'a self,
        port: &ServicePort,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = PortEndpoint<'a>> {
        let own = self.joining(port.port, port.protocol).into_iter();
        own.flat_map(move |own| self.endpoints(own, networks))
    }

    /// Returns the port of this number and protocol. A peer says TCP for a TLS port that no plain host name leads to.
    fn joining(&self, number: u16, protocol: PortProtocol) -> Option<&ServicePort> {
        let fits = |own: &&ServicePort| {
            own.port == number
                && (own.protocol == protocol || own.protocol == PortProtocol::Tcp && protocol.is_tls())
        };
        self.service.ports.iter().find(fits)
    }
}

/// Returns true if this gateway gives a service its addresses: a peer's, or one that is joined and has none.
pub(super) fn has_virtual_addresses(parts: &[Part], joined: &[Part]) -> bool {
    let mut own = parts.iter().filter(|part| part.service.import.is_none());
    let has_none = |part: &Part| part.service.addresses.is_empty();
    match own.next() {
        None => !parts.is_empty(),
        Some(first) => !joined.is_empty() && has_none(first) && own.all(has_none),
    }
}

/// Adds the ports of a joined service that the owner of the name does not have to `conflicts`.
pub(super) fn check_joined_ports(ports: &[ServicePort], part: &Part, conflicts: &mut Vec<Conflict>) {
    let is_joined = |own: &ServicePort| {
        let serves = |port: &ServicePort| part.joining(port.port, port.protocol);
        ports.iter().any(|port| serves(port).is_some_and(|found| found.port == own.port))
    };
    for own in part.service.ports.iter().filter(|own| !is_joined(own)) {
        let cluster = part.origin.cluster.clone();
        let text = format!(
            "cluster {:?} defines port {} as {}, which the owner of the name does not have, so the port is not joined",
            cluster.as_str(),
            own.port,
            own.protocol.text()
        );
        conflicts.push(Conflict { cluster, text, left_out: None });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Mesh, endpoint, host_name, importing, of_peer, port, service, shard};
    use crate::virtual_addresses::{Ranges, VirtualAddresses, import_of};
    use isthmus_model::endpoint::{Endpoint, Health};
    use isthmus_model::service::Service;
    use isthmus_registry::shard::{Shard, Standing};
    use isthmus_settings::policy::Policy;

    const NAME: &str = "fees.global";

    fn fees(ports: &[(u16, PortProtocol)], endpoints: Vec<Endpoint>) -> Service {
        service(NAME, ports.iter().map(|(number, protocol)| port(*number, *protocol)).collect(), endpoints)
    }

    /// Returns a mesh of this service of its own and one of each peer, whose rules say whether it is joined.
    fn mesh(own: Option<Service>, peers: &[(&str, bool, Service)]) -> Mesh {
        let of_peers = peers
            .iter()
            .map(|(peer, _, service)| of_peer(peer, &format!("fees.{peer}.global"), service.clone()));
        let own = own.map(|own| shard("a", "n1", vec![own]));
        let mut mesh = Mesh::new(Vec::new(), own.into_iter().chain(of_peers).collect());
        let peers = peers.iter().map(|(peer, merge, _)| Arc::new(importing(peer, *merge)));
        mesh.policy = Policy { peers: peers.collect(), ..(*mesh.policy).clone() }.into();
        mesh
    }

    fn view(mesh: &Mesh) -> Arc<ServiceView> {
        mesh.snapshot().service(NAME).expect("there").clone()
    }

    /// Returns the peers whose services are joined, and the texts of the conflicts.
    fn joined(view: &ServiceView) -> (Vec<String>, String) {
        let peers = view.joined_imports().map(|import| import.peer.to_string()).collect();
        (peers, view.conflicts.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    }

    fn one(protocol: PortProtocol) -> Service {
        fees(&[(443, protocol)], vec![endpoint("10.0.0.1", 1)])
    }

    #[test]
    fn a_name_is_joined_by_the_consent_of_each_peer_alone() {
        let (own, of_peer) = (|| Some(one(PortProtocol::Tcp)), || one(PortProtocol::Tcp));
        let of = |own, west, north| {
            let view = view(&mesh(own, &[("west", west, of_peer()), ("north", north, of_peer())]));
            let owner = view.import.as_ref().map(|import| import.peer.to_string());
            (owner, joined(&view).0, view.conflicts.len())
        };
        let names = |all: &[&str]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(of(own(), true, true), (None, names(&["west", "north"]), 0));
        assert_eq!(of(own(), true, false), (None, names(&["west"]), 1));
        assert_eq!(of(own(), false, false), (None, names(&[]), 2));
        assert_eq!(of(None, true, true), (Some("west".to_owned()), names(&["north"]), 0));
        assert_eq!(
            of(None, false, true),
            (Some("west".to_owned()), names(&[]), 1),
            "the owner does not consent"
        );
        assert_eq!(of(None, true, false), (Some("west".to_owned()), names(&[]), 1));
        let view = view(&mesh(own(), &[("west", false, of_peer())]));
        let left_out = view.conflicts[0].left_out.as_ref().and_then(|service| service.import.clone());
        assert_eq!(
            left_out.map(|import| import.exported_name.to_string()),
            Some("fees.west.global".to_owned())
        );
    }

    #[test]
    fn a_joined_service_adds_endpoints_and_changes_nothing_else() {
        let own = one(PortProtocol::Tls);
        let alone = view(&mesh(Some(own.clone()), &[]));
        let theirs = || vec![endpoint("10.0.0.9", 5)];
        // A port of TLS that no plain name leads to is TCP for this side.
        let of_peer = fees(&[(443, PortProtocol::Tcp), (8443, PortProtocol::Tls)], theirs());
        let mesh = mesh(Some(own), &[("west", true, of_peer)]);
        let (snapshot, view) = (mesh.snapshot(), view(&mesh));
        let seen = |view: &ServiceView| {
            let [port] = &view.ports[..] else { panic!("one port: {:?}", view.ports) };
            let candidates =
                format!("{:?}", port.candidates("", isthmus_settings::export_tls::AskedBy::MeshName));
            let identities = view.identities().count();
            (port.port, port.rules.len(), candidates, identities, view.hostname_port("sni").is_some())
        };
        assert_eq!(seen(&view), seen(&alone));
        let port = &view.ports[0];
        assert_eq!(view.endpoints_of(port, "", snapshot.networks()).expect("all").count(), 1);
        let joined_weight = view.joined_endpoints_of(port, snapshot.networks());
        assert_eq!(joined_weight.map(|(found, _)| found.endpoint.weight.value()).sum::<u32>(), 5);
        let (_, conflicts) = joined(&view);
        assert!(
            conflicts.contains("port 8443 as TLS, which the owner of the name does not have"),
            "{conflicts}"
        );
        let networks: Vec<&str> = view.networks.iter().map(|network| network.as_str()).collect();
        assert_eq!(networks, ["n1", "peer/west/n"]);
    }

    #[test]
    fn a_port_of_another_protocol_is_not_joined() {
        let view = view(&mesh(Some(one(PortProtocol::Http)), &[("west", true, one(PortProtocol::Grpc))]));
        let networks = NetworkTable::default();
        assert_eq!(view.joined_endpoints_of(&view.ports[0], &networks).count(), 0);
        let left_out: Vec<_> = view.endpoints_left_out(&view.ports[0], "", &networks).collect();
        assert!(matches!(left_out[..], [(_, _, 1, None)]), "a conflict of ports: {left_out:?}");
        assert!(joined(&view).1.contains("defines port 443 as GRPC"), "{:?}", view.conflicts);
    }

    #[test]
    fn a_lost_peer_counts_where_nobody_else_is_ready_and_never_stands_in_for_a_lost_registry() {
        let of = |own: Standing, own_health: Health, west: Standing| {
            let own_endpoint = Endpoint { health: own_health, ..endpoint("10.0.0.1", 1) };
            let own_service = fees(&[(443, PortProtocol::Tcp)], vec![own_endpoint]);
            let mut mesh = mesh(Some(own_service), &[("west", true, one(PortProtocol::Tcp))]);
            for (shard, standing) in mesh.shards.iter_mut().zip([own, west]) {
                *shard = Arc::new(Shard::clone(shard).with_standing(standing));
            }
            let (snapshot, view) = (mesh.snapshot(), view(&mesh));
            let port = &view.ports[0];
            let own = view.endpoints_of(port, "", snapshot.networks()).expect("all").count();
            (own, view.joined_endpoints_of(port, snapshot.networks()).count())
        };
        use Standing::{Demoted, Expired, Live};
        assert_eq!(of(Live, Health::Healthy, Live), (1, 1));
        assert_eq!(of(Live, Health::Healthy, Demoted), (1, 0));
        assert_eq!(of(Live, Health::Unhealthy, Demoted), (1, 1));
        assert_eq!(of(Demoted, Health::Healthy, Live), (1, 1), "a peer is no reason to leave own endpoints");
        assert_eq!(of(Demoted, Health::Healthy, Demoted), (1, 1));
        assert_eq!(of(Live, Health::Unhealthy, Expired), (1, 0));
    }

    #[test]
    fn a_joined_name_has_the_addresses_of_this_mesh_or_else_virtual_ones() {
        let of = |own: Option<&[&str]>| {
            let addresses = |all: &[&str]| all.iter().map(|ip| ip.parse().expect("legal")).collect();
            let own = own.map(|all| Service { addresses: addresses(all), ..one(PortProtocol::Tcp) });
            let mesh =
                mesh(own, &[("west", true, one(PortProtocol::Tcp)), ("north", true, one(PortProtocol::Tcp))]);
            let mut all = VirtualAddresses::new(Ranges::default());
            all.renew(&host_name(NAME), import_of(NAME, &mesh.shards).map(|import| &**import), 0);
            let inputs = crate::inputs::Inputs { virtual_addresses: Some(&all), ..mesh.world() };
            let view = crate::build::all(inputs, 1).service(NAME).expect("there").clone();
            (
                view.has_virtual_addresses(),
                view.addresses.len(),
                view.addresses.first().map(ToString::to_string),
            )
        };
        assert_eq!(of(Some(&["10.96.0.1"])), (false, 1, Some("10.96.0.1".to_owned())));
        let (is_virtual, count, address) = of(Some(&[]));
        assert_eq!((is_virtual, count), (true, 2));
        assert_eq!(of(None), (true, 2, address), "the same without a service of this mesh");
    }

    #[test]
    fn another_service_of_a_peer_of_the_name_is_left_out() {
        let mut mesh = mesh(Some(one(PortProtocol::Tcp)), &[("west", true, one(PortProtocol::Tcp))]);
        let mut listing = of_peer("west", "other.west.global", one(PortProtocol::Tcp));
        let (mut key, known) = listing.services.pop_first().expect("one");
        key.namespace = "west/zoo".into();
        let other = Service { key, ..(*known).clone() };
        let shard = Arc::make_mut(&mut mesh.shards[1]);
        shard.put(isthmus_registry::change::Item::Service(other.into()), &mut Default::default());
        let (peers, conflicts) = joined(&view(&mesh));
        assert_eq!((peers.len(), conflicts.lines().count()), (1, 1), "{conflicts}");
    }
}
