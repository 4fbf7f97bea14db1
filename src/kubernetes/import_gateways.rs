//! The addresses to which the host names of gateways resolve, as the EndpointSlices of derived Services have them
//! (`docs/kubernetes.md, "Pods outside the mesh"`). The name of a load balancer may have other addresses in each answer, and each
//! answer would otherwise be a write of every slice.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::time::Instant;

use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::networks::GatewayEntry;

/// The time for which an address is used after the last answer that had it.
const KEPT: Duration = Duration::from_secs(300);
/// The shortest time from one change of the addresses of a name to the next, as long as the ones before work.
const CHANGE_EVERY: Duration = Duration::from_secs(60);
/// The largest number of addresses of a name; further ones wait until others are forgotten.
const ADDRESSES_MAX: usize = 100;

/// A gateway that has a host name.
type Named = (Network, HostName);

/// The addresses of all gateways that have host names.
#[derive(Default)]
pub(super) struct GatewayAddresses {
    of: BTreeMap<Named, Answers>,
    /// The gateways of the addresses and ports in the last snapshot.
    at: BTreeMap<SocketAddr, Named>,
}

/// The addresses of one name.
struct Answers {
    /// When each address was in an answer last.
    last: BTreeMap<IpAddr, Instant>,
    used: BTreeSet<IpAddr>,
    /// When the used ones changed.
    changed: Instant,
}

impl GatewayAddresses {
    /// Takes the addresses of a snapshot. Returns the networks of gateways whose addresses change.
    pub(super) fn renew(&mut self, snapshot: &Snapshot, now: Instant) -> BTreeSet<Network> {
        let mut before = std::mem::take(self);
        let mut changed = BTreeSet::new();
        for (network, entry) in snapshot.networks().iter() {
            let mut by_name: BTreeMap<&HostName, Vec<&GatewayEntry>> = BTreeMap::new();
            for gateway in &entry.gateways {
                if let Some(name) = gateway.gateway.host.name() {
                    by_name.entry(name).or_default().push(gateway);
                }
            }
            for (name, entries) in by_name {
                let named = (network.clone(), name.clone());
                let entrances = entries.iter().flat_map(|gateway| gateway.entrances());
                self.at.extend(entrances.map(|address| (address, named.clone())));
                let known = before.of.remove(&named);
                let (answers, differ) = Answers::next(known, &entries, now);
                if differ {
                    changed.insert(network.clone());
                }
                self.of.insert(named, answers);
            }
        }
        changed
    }

    /// Returns these addresses, with the used ones of its name in place of each that is of a gateway with a host name.
    pub(super) fn used(&self, addresses: BTreeSet<SocketAddr>) -> BTreeSet<SocketAddr> {
        let of = |address: SocketAddr| {
            let answers = self.at.get(&address).and_then(|named| self.of.get(named));
            match answers.filter(|answers| !answers.used.is_empty()) {
                Some(Answers { used, .. }) => {
                    used.iter().map(|ip| SocketAddr::new(*ip, address.port())).collect()
                }
                None => vec![address],
            }
        };
        addresses.into_iter().flat_map(of).collect()
    }
}

impl Answers {
    /// Returns the addresses after an answer, and whether the used ones change. An address that does not answer probes is not used
    /// before another answer has it.
    fn next(before: Option<Self>, gateways: &[&GatewayEntry], now: Instant) -> (Self, bool) {
        let first = Self { last: BTreeMap::new(), used: BTreeSet::new(), changed: now };
        let is_first = before.is_none();
        let mut next = before.unwrap_or(first);
        let mut has_failed = false;
        for gateway in gateways {
            let is_unreachable = |ip: IpAddr| {
                let port = gateway.gateway.sni_port;
                port.is_some_and(|port| gateway.unreachable.contains(&SocketAddr::new(ip, port)))
            };
            for ip in gateway.addresses.iter() {
                if is_unreachable(*ip) {
                    next.last.remove(ip);
                    has_failed |= next.used.contains(ip);
                } else if next.last.len() < ADDRESSES_MAX || next.last.contains_key(ip) {
                    next.last.insert(*ip, now);
                }
            }
        }
        next.last.retain(|_, at| now - *at < KEPT);
        let works = next.used.iter().any(|ip| next.last.contains_key(ip));
        let is_due = is_first || has_failed || !works || now - next.changed >= CHANGE_EVERY;
        if next.last.keys().eq(&next.used) || !is_due {
            return (next, false);
        }
        next.used = next.last.keys().copied().collect();
        next.changed = now;
        (next, true)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use isthmus_snapshot::testing::{Mesh, gateway, host_name, network};

    const NAME: &str = "lb.example.com";

    /// A network whose gateway has a name.
    struct Run {
        mesh: Mesh,
        addresses: GatewayAddresses,
        begun: Instant,
    }

    impl Run {
        fn new() -> Self {
            let mesh = Mesh::new(vec![network("n2", vec![gateway(NAME, 1)])], Vec::new());
            Self { mesh, addresses: GatewayAddresses::default(), begun: Instant::now() }
        }

        /// Takes an answer with these addresses, some seconds after the start. Returns true if the used ones change.
        fn answer(&mut self, second: u64, hosts: impl IntoIterator<Item = u8>) -> bool {
            let ips: Vec<IpAddr> = hosts.into_iter().map(ip).collect();
            self.mesh.resolved.insert(host_name(NAME), ips.into());
            let now = self.begun + Duration::from_secs(second);
            !self.addresses.renew(&self.mesh.snapshot(), now).is_empty()
        }

        /// Returns the addresses that are used in place of this one.
        fn used(&self, host: u8) -> Vec<u8> {
            let used = self.addresses.used([SocketAddr::new(ip(host), 15_443)].into());
            let host = |address: &SocketAddr| match address.ip() {
                IpAddr::V4(ip) => ip.octets()[3],
                IpAddr::V6(_) => unreachable!("all are IPv4"),
            };
            used.iter().map(host).collect()
        }

        fn fail(&mut self, hosts: &[u8]) {
            let unreachable = hosts.iter().map(|host| SocketAddr::new(ip(*host), 15_443)).collect();
            let probes = (*self.mesh.probes).clone();
            self.mesh.probes = Arc::new(isthmus_snapshot::inputs::Probes { unreachable, ..probes });
        }
    }

    fn ip(host: u8) -> IpAddr {
        [10, 0, 0, host].into()
    }

    #[test]
    fn a_load_balancer_that_rotates_its_answers_changes_nothing_after_a_while() {
        let mut run = Run::new();
        // Eight of twenty addresses each minute.
        let hosts =
            |minute: u64| (0..8).map(move |at| 1 + u8::try_from((minute * 8 + at) % 20).expect("small"));
        let changed: Vec<u64> = (0..60).filter(|minute| run.answer(minute * 60, hosts(*minute))).collect();
        assert_eq!(changed, [0, 1, 2]);
        assert_eq!(run.used(20), (1..=20).collect::<Vec<_>>());
    }

    #[test]
    fn an_address_is_used_for_five_minutes_after_its_last_answer_and_a_new_one_within_one() {
        let mut run = Run::new();
        assert!(run.answer(0, [1, 2]));
        assert!(run.answer(60, [1, 2, 3]), "nothing has changed for a minute");
        assert!(!run.answer(70, [1, 4]) && !run.answer(119, [1, 4]));
        assert!(run.answer(120, [1, 4]));
        assert_eq!(run.used(1), [1, 2, 3, 4]);
        assert!(!run.answer(359, [1, 4]));
        assert!(run.answer(360, [1, 4]));
        assert_eq!(run.used(1), [1, 4]);
        assert!(!run.answer(365, [1, 5]));
        run.fail(&[1, 4]);
        assert!(run.answer(366, [1, 4, 6]), "those in use have failed");
        assert_eq!(run.used(6), [5, 6]);
    }

    #[test]
    fn an_address_that_does_not_answer_is_not_used_and_only_gateways_with_names_are_concerned() {
        let mut run = Run::new();
        run.answer(0, [1, 2]);
        run.fail(&[2]);
        assert!(run.answer(1, [1, 2]));
        assert_eq!(run.used(1), [1]);
        run.fail(&[]);
        assert!(!run.answer(2, [1]), "the probes know nothing of it any more");
        assert!(!run.answer(60, [1, 2]) && run.answer(61, [1, 2]));
        // Without an address that answers, the view has all of them.
        run.fail(&[1, 2]);
        assert!(run.answer(62, [1, 2]));
        assert_eq!((run.used(1), run.used(9)), (vec![1], vec![9]));
    }

    #[test]
    fn the_addresses_of_a_name_are_bounded() {
        let mut run = Run::new();
        for second in 0..200 {
            run.answer(second, [u8::try_from(second).expect("small")]);
        }
        let answers = run.addresses.of.values().next().expect("one");
        assert_eq!(answers.last.len(), ADDRESSES_MAX);
        let now = run.begun + Duration::from_secs(1_000);
        run.mesh.policy = Mesh::new(Vec::new(), Vec::new()).policy;
        run.addresses.renew(&run.mesh.snapshot(), now);
        assert!(run.addresses.of.is_empty() && run.addresses.at.is_empty());
    }
}
